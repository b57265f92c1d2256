"""Runs over several sources: equal to the bit on every mesh and after a stop, and blind to masked labels."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from native.train.small_run import is_same, run, silent, weights, write_texts
from support.chat_model import conversation, write_chat_model, write_lines
from tilewise.cli.main import _run
from tilewise.data import IGNORED
from tilewise.train import TrainConfig, Trainer, make_plan, plan_run, prepare_data, read_metrics, run_training

STEPS = 7  # more than an epoch of the pairs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A chat model, conversations, pairs and texts."""
    root = tmp_path_factory.mktemp("inputs")
    write_chat_model(root / "model")
    write_lines(root / "chat.jsonl", [{"messages": conversation(n)} for n in range(30)])
    write_lines(root / "pairs.jsonl", [{"prompt": f"one {n}", "completion": f" two {n}"} for n in range(9)])
    write_texts(root / "texts", 4)
    return root


def make_config(inputs, directory, mesh=None, **train):
    """A mixture of three sources."""
    axes = {(): "single", ("dp",): "ddp", ("tp",): "tensor_parallel"}
    return TrainConfig.model_validate(
        {
            "model": {"path": str(inputs / "model")},
            "data": [
                {"type": "chat", "path": str(inputs / "chat.jsonl"), "weight": 2.0},
                {"type": "prompt_completion", "path": str(inputs / "pairs.jsonl"), "weight": 1.0},
                {"path": str(inputs / "texts"), "weight": 0.5, "held_out_percent": 0},
            ],
            "sequences": {"context": 48, "documents": train.pop("documents", "padded")},
            "train": {"steps": STEPS, "batch": 8, "batch_splits": 4, "dtype": "f32", **train},
            "distribution": {"strategy": axes[tuple(mesh or {})], "mesh": mesh or {}},
            "optimizer": {"lr": 1e-2, "warmup_steps": 1},
            "output": {"directory": str(directory), "checkpoint_every": 3},
        }
    )


@pytest.mark.parametrize("documents", ["padded", pytest.param("packed", marks=pytest.mark.slow)])
def test_a_mixture_is_equal_on_any_mesh_and_after_a_stop(inputs, tmp_path, documents):
    """Stopped inside an epoch and resumed on other meshes: the weights of a run without a stop, to the bit."""
    output = io.StringIO()
    whole = make_config(inputs, tmp_path / "whole", documents=documents)
    run_training(plan_run(whole, False), Console(file=output, width=1000))
    assert "chat.jsonl: 30 examples" in output.getvalue() and "labels counted" in output.getvalue()
    assert ("attention reaches" in output.getvalue()) == (documents == "packed")
    lines = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"]
    config = make_config(inputs, tmp_path / "parts", {"dp": 2}, documents=documents, accumulation=2)
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        trainer.run(0, lambda number, result: number < 2)
        trainer.save(tmp_path / "parts" / "checkpoints", 3)
    run(make_config(inputs, tmp_path / "parts", {"tp": 2}, documents=documents), resume=True)
    assert is_same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_other_weights_are_another_run(inputs, tmp_path):
    """The twin: the order of a mixture is compared when a run resumes."""
    config = make_config(inputs, tmp_path)
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        trainer.run(0, lambda number, result: False)
        trainer.save(tmp_path / "checkpoints", 1)
    sources = (config.data.sources[0].model_copy(update={"weight": 3.0}), *config.data.sources[1:])
    other = config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})
    with pytest.raises(ValueError, match=r"data.weight"):
        run(other, resume=True)


@pytest.mark.parametrize("mesh", [None, {"dp": 2}], ids=["one device", "dp"])
def test_the_loss_is_the_mean_over_counted_labels_of_the_step(inputs, tmp_path, mesh):
    """Over all microbatches and devices, however unevenly the labels are spread. What follows the last
    counted label of a sequence, and what would be the label of a masked token, changes nothing.
    """
    config = make_config(inputs, tmp_path, mesh, accumulation=2)
    data = prepare_data(config, silent())
    batch = data.batches.at(0)
    counted = batch["labels"] != IGNORED
    assert len(set(counted.sum(1))) > 3  # sequences differ
    with Trainer(config, data, *make_plan(config)) as trainer:
        model = trainer.instance
        start = model.state_dict()
        sums = []
        for row in range(8):  # each sequence alone, in a batch of copies
            model.forward(**{name: value[row : row + 1].repeat(8, 0) for name, value in batch.items()})
            sums.append(float(model.get_tensor("loss")[0]) * counted[row].sum())
        loss = model.step(batch, lr=1e-2).loss
        assert loss == pytest.approx(sum(sums) / counted.sum(), rel=1e-5)
        assert loss != pytest.approx(
            np.mean(np.array(sums) / counted.sum(1)), rel=5e-5
        )  # not a mean of means
        after = {name: np.array(value) for name, value in model.parameters().items()}
        tokens = batch["tokens"].copy()
        for row in range(8):
            behind = np.flatnonzero(counted[row])[-1] + 1
            tokens[row, behind:] = (tokens[row, behind:] + 7) % 300
        assert (tokens != batch["tokens"]).any()
        for labels, is_equal in ((batch["labels"], True), (np.where(counted, batch["labels"], 5), False)):
            model.load_state_dict(start)
            again = model.step({"tokens": tokens, "labels": labels.astype(np.int32)}, lr=1e-2).loss
            assert (again == loss) == is_equal
            assert is_same(after, {n: np.array(v) for n, v in model.parameters().items()}) == is_equal


def test_preview_shows_what_is_learned(inputs, tmp_path, capsys):
    """Counted tokens between brackets where there are no colours; figures per source; nothing is written."""
    lines = [
        f'[model]\npath = "{inputs / "model"}"',
        f'[[data]]\ntype = "chat"\npath = "{inputs / "chat.jsonl"}"',
        f'[[data]]\ntype = "prompt_completion"\npath = "{inputs / "pairs.jsonl"}"',
        "[sequences]\ncontext = 24\n[train]\nbatch = 8",
    ]
    (tmp_path / "train.toml").write_text("\n".join(lines))
    assert _run(["data", "preview", str(tmp_path / "train.toml"), "--examples", "30"]) == 0
    out = capsys.readouterr().out
    assert "[user]After 4?[end][assistant]⟪5.[end]⟫" in out and "one 4⟪ two 4[end]⟫" in out
    assert out.count("sequence ") == 30 and "steps per epoch" in out
    assert [p.name for p in tmp_path.iterdir()] == ["train.toml"]
    write_lines(tmp_path / "bad.jsonl", [{"messages": conversation(1)}, {"text": "x"}])
    (tmp_path / "train.toml").write_text(
        lines[0] + f'\n[data]\ntype = "chat"\npath = {json.dumps("bad.jsonl")}\n'
    )
    assert _run(["data", "preview", str(tmp_path / "train.toml")]) == 2
    assert "bad.jsonl:2; got 'text'" in capsys.readouterr().err
