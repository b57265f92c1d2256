"""Runs on pairs of a chosen and a rejected sequence: losses, the reference, meshes, resuming."""

import math

import numpy as np
import pytest

from native.train.small_pairs import dpo_config, write_base_model, write_pairs
from native.train.small_run import is_same, silent, weights
from tilewise.checkpoint import checkpoint_paths, open_checkpoint
from tilewise.core import ConfigError
from tilewise.core.mesh import DeviceMesh
from tilewise.train import (
    Trainer,
    compare_strategy,
    make_plan,
    plan_run,
    prepare_data,
    read_metrics,
    run_training,
)

PAIRS = 24


@pytest.fixture(scope="module")
def base(tmp_path_factory, texts):
    """A small model of random weights, and pairs of ids."""
    directory = write_base_model(tmp_path_factory.mktemp("base"), texts)
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(PAIRS):
        prompt, chosen, rejected = (rng.integers(1, 300, rng.integers(2, 9)).tolist() for _ in range(3))
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    write_pairs(directory, pairs)
    return directory


def run(config, resume=False):
    return run_training(plan_run(config, resume), silent())


def losses(directory):
    return [line["loss"] for line in read_metrics(directory / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    run(dpo_config(base, directory, evaluate_every=3))
    return directory


def test_a_run_on_pairs_learns_them(whole):
    """The first loss is log 2, because model and reference are equal; then the margin of rewards grows."""
    lines = read_metrics(whole / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert lines[0]["reward_margin"] == 0.0 and lines[-1]["reward_margin"] > 0
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [n for n, line in enumerate(lines) if "held_out_reward_margin" in line] == [2, 5]
    assert "held_out_perplexity" not in lines[2]
    assert (whole / "model" / "config.json").is_file() and (whole / "reference_log_probs.json").is_file()


@pytest.mark.parametrize(
    "dpo", [{}, {"loss_type": "hinge"}, {"loss_type": "ipo"}, {"label_smoothing": 0.1}], ids=str
)
def test_figures_agree_with_the_loss_of_the_graph(base, tmp_path, dpo):
    """The mean of the losses computed from log-probabilities is the loss of the graph, in any step."""
    config = dpo_config(base, tmp_path, dpo=dpo)
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        with pytest.raises(ConfigError, match="call prepare_reference first"):
            trainer.step(0)
        trainer.prepare_reference(tmp_path / "reference.json", silent(), may_read=False)
        for number in range(3):
            loss = trainer.step(number).loss
            figures = trainer._pair_figures(trainer.data.batches.at(number))
            assert figures["loss"].mean() == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "train"),
    [
        ({"dp": 2}, {}),
        ({"tp": 2}, {"accumulation": 2}),
        ({"fsdp": 2}, {"recompute": "full"}),
        ({"pp": 2, "dp": 2}, {}),
    ],
    ids=str,
)
def test_every_mesh_has_the_same_bits(base, whole, tmp_path, mesh, train):
    """Losses, reference and weights; also in several microbatches."""
    run(dpo_config(base, tmp_path, mesh, evaluate_every=3, **train))
    assert losses(tmp_path) == losses(whole)
    assert is_same(weights(tmp_path), weights(whole))
    name = "reference_log_probs.json"
    assert (tmp_path / name).read_text() == (whole / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_random_pairs_verify_a_mesh(base, tmp_path, loss_type):
    """`tilewise verify` and `tilewise tune` compute random batches with all inputs of pairs."""
    config = dpo_config(base, tmp_path, dpo={"loss_type": loss_type})
    report = compare_strategy(config, DeviceMesh({"dp": 2}), 2, lambda text: None)
    assert report.equal, report.text


@pytest.mark.slow
@pytest.mark.parametrize("damage", [None, "", "{}", '{"data": "0", "train": [], "held_out": []}', "[1e999]"])
def test_a_resumed_run_has_the_same_bits(base, whole, tmp_path, caplog, damage):
    """The reference is that of the initial weights, also if its file is missing or damaged; a new run reads none."""
    (tmp_path / "reference_log_probs.json").write_text((whole / "reference_log_probs.json").read_text()[:50])
    short = dpo_config(base, tmp_path)
    with Trainer(short, prepare_data(short, silent()), *make_plan(short)) as trainer:
        trainer.prepare_reference(tmp_path / "reference_log_probs.json", silent(), may_read=False)
        trainer.run(0, lambda number, result: number < 2)
        trainer.save(tmp_path / "checkpoints", 3)
    if damage is None:
        assert "computed again" not in caplog.text
    elif damage:
        (tmp_path / "reference_log_probs.json").write_text(damage)
    else:
        (tmp_path / "reference_log_probs.json").unlink()
    run(short, resume=True)
    assert losses(tmp_path) == losses(whole)[3:]
    assert is_same(weights(tmp_path), weights(whole))
    assert ("computed again" in caplog.text) == (damage is not None)


@pytest.mark.slow
def test_adapters_learn_pairs_against_their_base(base, tmp_path):
    """The reference is the base without adapters; base weights stay, and the best adapter is the finished one."""
    config = dpo_config(base, tmp_path, evaluate_every=1, load_best_model_at_end=True)
    lora = {"r": 4, "alpha": 16.0, "target_modules": "all-linear"}
    config = type(config).model_validate({**dict(config), "lora": lora})
    assert run(config).model_dir == tmp_path / "adapter"
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert lines[-1]["loss"] < lines[0]["loss"]
    best = min(range(6), key=lambda n: lines[n]["held_out_loss"])
    adapter = "adapter_model.safetensors"
    stored = (tmp_path / "best" / f"step-{best + 1:08d}" / adapter).read_bytes()
    assert (tmp_path / "adapter" / adapter).read_bytes() == stored
    alone = dpo_config(base, tmp_path / "alone", evaluate_every=1)
    run(alone)
    name = "reference_log_probs.json"
    assert (tmp_path / name).read_text() == (tmp_path / "alone" / name).read_text()
    saved = open_checkpoint(checkpoint_paths(tmp_path / "checkpoints")[-1]).tensors
    assert saved and all("lora" in name for name in saved if not name.startswith("optimizer."))
