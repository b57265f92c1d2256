"""Training runs: their output, and resuming to the bit."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from native.train.small_run import (
    MODEL,
    STEPS,
    command,
    is_same,
    make_config,
    run,
    silent,
    weights,
    write_texts,
    write_toml,
)
from tilewise.checkpoint import (
    TrainingState,
    latest_checkpoint,
    load_checkpoint,
    lock_directory,
    open_checkpoint,
    save_checkpoint,
    write_weights,
)
from tilewise.cli.main import _run
from tilewise.core import CheckpointError, ConfigError, DeviceMesh, NotFinite, PlanError, ResourceError
from tilewise.core.sizes import format_bytes
from tilewise.data import IGNORED
from tilewise.train import (
    Trainer,
    compare_strategy,
    evaluate_model,
    load_config,
    make_plan,
    plan_run,
    prepare_data,
    read_metrics,
    run_training,
    train_steps,
)


@pytest.fixture(scope="module")
def whole_run(texts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    result = run(make_config(texts, directory))
    assert result.num_steps == STEPS and not result.interrupted
    return directory


def test_a_run_writes_its_output(whole_run):
    """Checkpoints, metrics, picture and a model directory."""
    names = {path.name for path in whole_run.iterdir()}
    assert names == {"checkpoints", "metrics.jsonl", "loss.png", "model"}
    lines = read_metrics(whole_run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 for line in lines)
    seconds = [0.0, *(line["seconds"] for line in lines)]  # since the first step began
    assert all(a < b for a, b in pairwise(seconds)) and seconds[-1] < 600
    config = json.loads((whole_run / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (whole_run / "model" / "tokenizer.json").is_file()


def _stop_after_three(config):
    """The beginning of a run: three steps and a checkpoint; returns its path."""
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        done = trainer.run(0, lambda number, result: number < 2)
        assert done == 3
        return trainer.save(_checkpoints(config), done)


def _checkpoints(config):
    """The checkpoint directory of a run."""
    return Path(config.output.directory) / "checkpoints"


ONE, DP, TP, BOTH = None, {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}
FSDP = {"fsdp": 2}


def test_stopped_and_resumed_equals_never_stopped(texts, whole_run, tmp_path):
    """Weights and losses after a stop are equal to the bit on another mesh; test_any_mesh.py has all meshes."""
    _stop_after_three(make_config(texts, tmp_path, FSDP))
    run(make_config(texts, tmp_path, TP), resume=True)
    assert is_same(weights(tmp_path), weights(whole_run))
    whole = [line["loss"] for line in read_metrics(whole_run / "metrics.jsonl")]
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == whole[3:]


def test_settings_that_change_no_bit_may_change_on_resume(texts, whole_run, tmp_path):
    """Optimizer states in a file, two microbatches and recomputed layers; then only weights and
    activations in another file. No file remains.
    """
    changes = {"offload": "optimizer", "recompute": "full", "accumulation": 2}
    _stop_after_three(make_config(texts, tmp_path, FSDP, **changes))
    elsewhere = tmp_path / "elsewhere"
    changes = {"offload": ("parameters", "activations"), "output": {"offload_directory": str(elsewhere)}}
    run(make_config(texts, tmp_path, **changes), resume=True)
    assert is_same(weights(tmp_path), weights(whole_run))
    assert elsewhere.is_dir() and not list(elsewhere.iterdir())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tilewise-")]


def test_recompute_patterns_must_match(texts, tmp_path):
    """`tilewise verify` compares recomputation with saving; a pattern without a match is an error."""
    config = make_config(texts, tmp_path, recompute=["layers.1", "layers.*/silu_gate"])
    assert compare_strategy(config, DeviceMesh({"tp": 2}), 2, lambda text: None).equal
    with pytest.raises(PlanError, match=r"got 'blocks\.\*'; choose from layers.1, layers.0"):
        plan_run(make_config(texts, tmp_path, recompute=["blocks.*"]), False)
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Texts of many lengths."""
    root = tmp_path_factory.mktemp("documents")
    for i in range(30):
        (root / f"module_{i}.py").write_text(f"x_{i} = {i} * {i + 1}\n" * (1 + i * 7 % 11))
    return root


def test_padded_documents_are_equal_on_any_mesh(documents, tmp_path):
    """A document per sequence, steps of many widths: equal to the bit over meshes, and after a stop."""
    padded = {"context": 128, "documents": "padded"}
    whole = make_config(documents, tmp_path / "whole", data=padded, accumulation=2)
    run(whole)
    _stop_after_three(make_config(documents, tmp_path / "parts", TP, data=padded))
    run(make_config(documents, tmp_path / "parts", DP, data=padded), resume=True)
    assert is_same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    data = prepare_data(whole, silent())
    widths = {data.batches.at(step)["tokens"].shape[1] for step in range(STEPS)}
    assert len(widths) > 2 and max(widths) <= 128
    with pytest.raises(CheckpointError, match="documents"):
        run(make_config(documents, tmp_path / "parts", data={"context": 128}), resume=True)


def test_verify_offloads_to_the_directory_of_a_run(texts, tmp_path):
    """`tilewise verify` writes the devices' files where `tilewise train` does, because other disks
    may be too small.
    """

    def compare(where):
        output = {"directory": str(tmp_path / "run"), "offload_directory": str(where)}
        config = make_config(texts, tmp_path, offload=["optimizer"], output=output)
        return compare_strategy(config, DeviceMesh({"dp": 2}), 1, lambda text: None)

    assert compare(tmp_path / "files").equal
    assert [p.name for p in tmp_path.iterdir()] == ["files"]
    (tmp_path / "one").write_text("")
    with pytest.raises(ResourceError, match="Not a directory"):
        compare(tmp_path / "one" / "files")


def test_speed_counts_tokens_without_padding(documents, tmp_path):
    """Padding does not make a run look faster."""
    config = make_config(documents, tmp_path, data={"context": 128, "documents": "padded"})
    data = prepare_data(config, silent())
    with Trainer(config, data, *make_plan(config)) as trainer:
        trainer.step(0)
        batch = data.batches.at(0)
        assert trainer.num_tokens == (batch["labels"] >= 0).sum() < batch["tokens"].size


def test_a_flipped_bit_in_a_checkpoint_is_detected(texts, whole_run, tmp_path):
    """The twin of the comparison above: one flipped bit of a moment gives other weights."""
    config = make_config(texts, tmp_path, DP)
    path = _stop_after_three(config)
    settings = json.loads((path / "checkpoint.json").read_text())["config"]
    tensors = {name: np.array(tensor) for name, tensor in load_checkpoint(path, settings).tensors.items()}
    moment = tensors["optimizer.exp_avg.layers.1.mlp.up_proj.weight"]
    moment.reshape(-1).view(np.uint32)[np.argmax(np.abs(moment))] ^= 1 << 20
    save_checkpoint(path.parent, TrainingState(3, tensors), settings)  # whole again, but for that bit
    run(config, resume=True)
    assert not is_same(weights(tmp_path), weights(whole_run))


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(texts, whole_run, tmp_path):
    """`--resume` names the damaged checkpoint and resumes from the older one; the final weights
    equal an uninterrupted run's.
    """
    config = make_config(texts, tmp_path / "out", output={"checkpoint_every": 2})
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        trainer.run(0, lambda number, result: number < 1)
        trainer.save(_checkpoints(config), 2)
        trainer.run(2, lambda number, result: number < 3)
        state = trainer.save(_checkpoints(config), 4) / "device-00000.safetensors"
    content = bytearray(state.read_bytes())
    content[-3] ^= 16
    state.write_bytes(content)
    run_training(plan_run(config, resume=True), Console(file=(output := io.StringIO()), width=1000))
    text = output.getvalue()
    assert re.search(r"checkpoint step-00000004 is damaged \(tensor .* has a wrong checksum\)", text)
    assert "resuming from step-00000002 instead" in text and "resuming after step 2" in text
    assert is_same(weights(tmp_path / "out"), weights(whole_run))


def test_auto_resume_starts_or_resumes(texts, tmp_path):
    """`--auto-resume`: the same command twice; if only a damaged checkpoint exists, nothing is overwritten."""
    config = make_config(texts, tmp_path / "out", output={"checkpoint_every": 2})
    assert plan_run(config, None).resume is False
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        trainer.run(0, lambda number, result: number < 1)
        saved = trainer.save(_checkpoints(config), 2)
    assert plan_run(config, None).resume is True
    (saved / "checkpoint.json").unlink()
    with pytest.raises(ConfigError, match="without checkpoints"):
        plan_run(config, None)


def test_held_out_files_are_evaluated_with_the_saved_model(texts, whole_run, tmp_path):
    """With zero weights all tokens are equally likely; the trained model needs fewer bits."""
    config = make_config(texts, tmp_path)
    data = prepare_data(config, silent())
    shutil.copytree(whole_run / "model", tmp_path / "zero")
    write_weights(tmp_path / "zero", [(name, np.zeros_like(w)) for name, w in weights(whole_run).items()])
    tokens = sum(len(data.tokenizer.encode(file.text).ids) + 1 for file in data.corpus.held_out)
    num_bytes = sum(file.num_bytes for file in data.corpus.held_out)
    guessed = evaluate_model(config, data, tmp_path / "zero", silent())
    assert guessed == pytest.approx(tokens * math.log2(MODEL["vocab_size"]) / num_bytes, rel=1e-5)
    assert 0 < evaluate_model(config, data, whole_run / "model", silent()) < 0.99 * guessed


@pytest.mark.parametrize(("devices", "microbatches", "batch_splits"), [(3, 1, 12), (2, 3, 6)], ids=str)
def test_held_out_files_are_evaluated_on_any_mesh(texts, tmp_path, devices, microbatches, batch_splits):
    """Also if the batch's default splits do not fit the devices, or any splits without microbatches."""
    counts = {"batch": 12, "batch_splits": batch_splits, "accumulation": microbatches, "steps": 1}
    config = make_config(texts, tmp_path, {"dp": devices}, **counts)
    run(config)
    data = prepare_data(config, silent())
    alone = make_config(texts, tmp_path, **counts)
    bits = [evaluate_model(c, data, tmp_path / "model", silent()) for c in (config, alone)]
    assert bits[0] == bits[1]


def test_a_directory_in_use_is_rejected(texts, tmp_path):
    """While another run has locked the output directory, planning rejects it, and so does a run planned before."""
    config = make_config(texts, tmp_path / "out")
    planned = plan_run(config, resume=False)
    with lock_directory(tmp_path / "out"):
        with pytest.raises(ConfigError, match="one run at a time"):
            plan_run(config, resume=False)
        with pytest.raises(ConfigError, match="one run at a time"):
            run_training(planned, silent())
    assert not (tmp_path / "out").exists()


LIMITED = """
import resource, sys
from tilewise.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
main(sys.argv[2:])
"""


@pytest.mark.slow
def test_metrics_on_a_full_disk_end_a_run_in_one_line(texts, tmp_path):
    """Exit code 1 and nothing incomplete; the writers' own tests have checkpoints and weights."""
    config = make_config(texts, tmp_path / "out", steps=100, output={"checkpoint_every": 1000})
    file = write_toml(config, tmp_path / "train.toml")
    limited = [sys.executable, "-c", LIMITED, "4096", "train", str(file)]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert last.startswith("tilewise: [files.writing]") and "metrics.jsonl" in last, last
    assert not list((tmp_path / "out").rglob(".*")) and not (tmp_path / "out" / "model").exists()


def test_a_measured_length_is_used(texts, tmp_path):
    """The time budget changes the run's length and its learning rates while it runs; the last step
    has the lowest rate.
    """

    class Budget:
        def step_done(self, seconds):
            durations.append(seconds)
            return {1: 9, 2: 5}.get(len(durations))

    durations, rates = [], []
    config = make_config(texts, tmp_path, steps=3, optimizer={"warmup_steps": 0})
    (tmp_path / "out").mkdir()
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        step = trainer.instance.step
        trainer.instance.step = lambda batch, lr, **options: rates.append(lr) or step(batch, lr, **options)
        assert train_steps(trainer, 0, tmp_path / "out", silent(), Budget()) == 5
        assert latest_checkpoint(tmp_path / "out" / "checkpoints").name == "step-00000005"
    top, least = config.optimizer.lr, config.optimizer.lr * config.optimizer.min_lr_ratio
    assert rates[0] == top and rates[-1] == pytest.approx(least) and len(durations) == len(rates) == 5


def test_a_finished_run_is_unchanged(texts, whole_run, tmp_path, capsys):
    """`--resume` reports it with exit code 0 and writes nothing, not even over a changed model; a
    missing model is written from the last checkpoint.
    """
    shutil.copytree(whole_run, tmp_path / "out")
    (tmp_path / "out" / "model" / "README.md").write_text("of the user\n")

    def state():
        paths = sorted(path for path in (tmp_path / "out").rglob("*"))
        return [(path, path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in paths]

    config = make_config(texts, tmp_path / "out")
    file, before = write_toml(config, tmp_path / "train.toml"), state()
    for flag in ("--resume", "--auto-resume"):
        assert _run(["train", str(file), flag]) == 0
        output = capsys.readouterr()
        assert output.out == f"{tmp_path / 'out' / 'model'}\n"
        assert f"all {STEPS} steps are done" in output.err and state() == before
    shutil.rmtree(tmp_path / "out" / "model")
    assert run(config, resume=True).model_dir == tmp_path / "out" / "model"
    assert is_same(weights(tmp_path / "out"), weights(whole_run))


def test_checkpoints_are_not_mixed(texts, whole_run, tmp_path):
    """A new run does not overwrite checkpoints; a resumed one needs a checkpoint of its configuration
    and of its texts, whose tokens the message names.
    """
    with pytest.raises(ConfigError, match="--resume"):
        run(make_config(texts, whole_run))
    with pytest.raises(CheckpointError, match=r"got train\.seed = 1 instead of 0 in"):
        run(make_config(texts, whole_run, seed=1), resume=True)
    other = write_texts(tmp_path / "texts", num_files=40)
    with pytest.raises(CheckpointError, match=r"got data\.tokens = \w+… instead of \w+… in"):
        run(make_config(other, whole_run), resume=True)
    with pytest.raises(CheckpointError, match="needs a complete checkpoint"):
        run(make_config(texts, tmp_path), resume=True)


def test_interrupt_writes_a_checkpoint(texts, tmp_path):
    """Ctrl-C ends a run with exit code 130 and a checkpoint that can be resumed."""
    config = write_toml(make_config(texts, tmp_path / "out", steps=100_000), tmp_path / "train.toml")
    process = subprocess.Popen(
        command("train", config),
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("step 1/"):
        assert line, "the run ended before its first step"
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in rest and "--resume" in rest
    assert rest.endswith("tilewise: interrupted\n")
    latest = latest_checkpoint(tmp_path / "out" / "checkpoints")
    assert latest is not None and int(latest.name.removeprefix("step-")) >= 1


def test_a_run_in_another_thread(texts, whole_run, tmp_path):
    """Only the main thread gets signals; a run in another thread has the same result."""
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(run, make_config(texts, tmp_path)).result()
    assert not result.interrupted and is_same(weights(tmp_path), weights(whole_run))


def test_diverging_run_stops_and_keeps_the_last_good_checkpoint(texts, tmp_path, capsys):
    """A loss that is not finite ends a run in one line; metrics and checkpoints have only finite numbers."""
    config = make_config(
        texts, tmp_path / "out", steps=20, dtype="f32", optimizer={"lr": 1e30}, output={"checkpoint_every": 1}
    )
    assert _run(["train", str(write_toml(config, tmp_path / "train.toml"))]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("tilewise: [") and "step" in last and "learning rate" in last
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert text and "NaN" not in text and "Infinity" not in text
    tensors = open_checkpoint(latest_checkpoint(tmp_path / "out" / "checkpoints")).tensors
    assert tensors and all(np.isfinite(tensor).all() for tensor in tensors.values())


def test_weights_that_are_not_finite_are_not_saved(texts, tmp_path):
    """`save` rejects them; the previous checkpoint stays the latest."""
    config = make_config(texts, tmp_path)
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        trainer.step(0)
        good = trainer.save(tmp_path / "checkpoints", 1)
        name = "layers.0.mlp.up_proj.weight"
        bad = trainer.instance.get_tensor(name).copy()
        bad[0, 0] = np.inf
        trainer.instance.set_tensor(name, bad)
        with pytest.raises(NotFinite, match="after step 2"):
            trainer.save(tmp_path / "checkpoints", 2)
        bad[0, 0] = np.nan
        trainer.instance.set_tensor(name, bad)
        with pytest.raises(NotFinite, match=f"in step 2, first in the weight '{name}'"):
            trainer.step(1)
    assert latest_checkpoint(tmp_path / "checkpoints") == good


def test_steps_that_are_not_finite_can_be_skipped(texts, tmp_path):
    """With `skip` such a step changes no weight and is recorded; ten in a row stop the run."""
    config = make_config(texts, tmp_path, steps=20, on_nonfinite="skip", output={"checkpoint_every": 99})
    name = "layers.0.mlp.up_proj.weight"
    (tmp_path / "out").mkdir()
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        trainer.step(0)
        good = trainer.instance.get_tensor(name)
        bad = good.copy()
        bad[0, 0] = np.inf
        trainer.instance.set_tensor(name, bad)
        assert trainer.step(1).is_skipped
        trainer.instance.set_tensor(name, good)
        assert not trainer.step(2).is_skipped and trainer.instance.step_count == 3
        trainer.instance.set_tensor(name, bad)
        with pytest.raises(NotFinite, match="in step 13"):
            train_steps(trainer, 3, tmp_path / "out", silent())
        assert trainer.instance.step_count == 12
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["loss"] is None] == list(range(3, 12))


def test_a_model_of_others_is_not_replaced(texts, whole_run, tmp_path):
    """Neither a user's `model` directory nor, also through links, the initial model."""
    config = make_config(texts, tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").touch()
    with pytest.raises(ConfigError, match="without a model"):
        plan_run(config, False)
    with pytest.raises(ConfigError, match="without a model"):
        plan_run(config, None)
    (tmp_path / "link").symlink_to(whole_run)
    own = make_config(texts, tmp_path / "link", {})
    own = own.model_copy(update={"model": own.model.model_validate({"path": str(whole_run / "model")})})
    for resume in (False, True):
        with pytest.raises(ConfigError, match="must not replace the initial model"):
            plan_run(own, resume)


def test_the_offload_directory_is_checked_before_any_work(texts, tmp_path):
    """A file in its place is rejected like one in the place of the output."""
    (tmp_path / "file").touch()
    changes = {"output": {"offload_directory": str(tmp_path / "file" / "deeper")}}
    with pytest.raises(ConfigError, match=r"can be written to; got .*deeper"):
        plan_run(make_config(texts, tmp_path / "out", offload=["optimizer"], **changes), False)


@pytest.mark.slow
def test_a_run_can_be_made_longer(texts, tmp_path, capsys):
    """With a constant rate it equals, to the bit, a run of that length; the checkpoint records the
    change, and a file with the same setting resumes without the option.
    """
    constant = {"optimizer": {"schedule": "constant"}}
    whole = make_config(texts, tmp_path / "whole", **constant)
    run(whole)
    short = make_config(texts, tmp_path / "out", steps=3, **constant)
    file, out = write_toml(short, tmp_path / "train.toml"), tmp_path / "out"

    def command_line(*arguments):
        capsys.readouterr()
        code = _run([*map(str, arguments)])
        return (code, *capsys.readouterr())

    assert command_line("train", file)[0] == 0
    text = file.read_text()
    file.write_text(text.replace("steps = 3\n", "steps = 4\n"))
    code, _, err = command_line("train", file, "--resume")
    assert code == 2 and "train.steps = 4 instead of 3" in err and err.count("\n") == 1
    assert "put train.steps = 3 into the file, or pass --set train.steps=3; to change the rest" in err
    assert "pass --set train.steps=4" in err
    code, _, err = command_line("train", file, "--resume", "--set", "train.steps=4")
    assert code == 0 and "changed settings: train.steps = 4 instead of 3" in err
    file.write_text(text.replace("steps = 3\n", f"steps = {STEPS}\n"))
    run_training(plan_run(load_config(file), True, may_change=["train.steps"]), silent())
    assert is_same(weights(out), weights(tmp_path / "whole"))
    assert run(load_config(file), resume=True).num_steps == STEPS  # as the checkpoint records
    opened = open_checkpoint(out / "checkpoints" / f"step-{STEPS:08d}")
    assert [(c.step, c.key, c.old, c.new) for c in opened.changes] == [
        (3, "train.steps", 3, 4),
        (4, "train.steps", 4, STEPS),
    ]
    assert "train.steps = 4 instead of 3" in command_line("checkpoint", "inspect", out)[1]
    file.write_text(text.replace("steps = 3\n", "steps = 2\n"))
    _, _, err = command_line("train", file, "--resume")
    assert f"put train.steps = {STEPS} into the file, or pass --set train.steps={STEPS}\n" in err
    with pytest.raises(
        ConfigError, match=f"must not be below the steps that are done; got 2 after {STEPS} steps"
    ):
        run_training(
            plan_run(load_config(file, ["train.steps=2"]), True, may_change=["train.steps"]), silent()
        )


def test_settings_can_change_on_resume(texts, tmp_path):
    """Rate, schedule and decay change from the checkpoint on, as if the trainer had them from
    there; settings of the data's order or the state are rejected.
    """
    config = make_config(texts, tmp_path)
    _stop_after_three(config)
    changes = {"lr": 1e-3, "schedule": "linear", "weight_decay": 0.0}
    other = make_config(texts, tmp_path, steps=8, optimizer=changes)
    with Trainer(config, data := prepare_data(config, silent()), *make_plan(config)) as trainer:
        trainer.run(0, lambda number, result: number < 2)
        state = trainer.instance.state_dict()
    with Trainer(other, data, *make_plan(other)) as trainer:
        trainer.instance.load_state_dict(state)
        assert trainer.run(3, lambda number, result: True) == 8
        expected = {f"model.{name}": np.array(value) for name, value in trainer.instance.parameters().items()}
    names = [f"optimizer.{key}" for key in changes] + ["train.steps"]
    run_training(plan_run(other, True, may_change=names), silent())
    assert is_same(weights(tmp_path), expected)
    opened = open_checkpoint(latest_checkpoint(tmp_path / "checkpoints"))
    assert {(c.key, c.old, c.new) for c in opened.changes} == {
        ("train.steps", STEPS, 8),
        ("optimizer.lr", 3e-3, 1e-3),
        ("optimizer.schedule", "cosine", "linear"),
        ("optimizer.weight_decay", 0.1, 0.0),
    }
    for key, section in (
        ("train.batch", {"batch": 8}),
        ("optimizer.name", {"optimizer": {"name": "lion", "lr": 1e-3}}),
        ("data.context", {"data": {"context": 16}}),
    ):
        changed = make_config(texts, tmp_path, **section)
        with pytest.raises(CheckpointError, match=rf"restore .*{key}.*cannot change"):
            run_training(plan_run(changed, True, may_change=[key]), silent())


@pytest.mark.slow
def test_optimizers_of_the_file_train(texts, tmp_path):
    """SGD and Lion lower the loss and resume to the bit on another mesh."""
    for optimizer in (
        {"name": "sgd", "lr": 0.3, "nesterov": True, "schedule": "linear"},
        {"name": "lion", "lr": 1e-3, "weight_decay": 0.1, "schedule": "constant"},
    ):
        out = tmp_path / str(optimizer["name"])
        run(make_config(texts, out / "whole", optimizer=optimizer))
        losses = [line["loss"] for line in read_metrics(out / "whole" / "metrics.jsonl")]
        assert losses[-1] < losses[0]
        _stop_after_three(make_config(texts, out / "parts", optimizer=optimizer))
        run(make_config(texts, out / "parts", DP, optimizer=optimizer), resume=True)
        assert is_same(weights(out / "parts"), weights(out / "whole"))


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [(BOTH, {"accumulation": 2}), (ONE, {"data": {"documents": "padded"}})],
    ids=str,
)
def test_held_out_text_is_evaluated_while_training(texts, whole_run, tmp_path, mesh, changes):
    """Every token once, with the current weights: equal figures on any mesh, and no bit of the run changes."""
    config = make_config(texts, tmp_path, mesh, evaluate_every=2, **changes)
    console = Console(file=(output := io.StringIO()), width=1000)
    run_training(plan_run(config, False), console)
    padded = "data" in changes
    if not padded:
        assert is_same(weights(tmp_path), weights(whole_run))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "held_out_loss" in line] == [1, 3, 5]
    assert "held-out loss" in output.getvalue()
    # over several devices, a step says what communication cost; an evaluation does not take its place
    assert ("step 3: transfers took" in output.getvalue()) == (mesh is BOTH)
    data = prepare_data(config, silent())
    with Trainer(config, data, *make_plan(config)) as trainer:
        trainer.instance.load_parameters(tmp_path / "model")
        model, held_out = trainer.instance, data.held_out
        nats, count = 0.0, 0
        for window in range(held_out.num_windows):  # each alone, in a batch of copies
            single = replace(held_out, batch=1).at(window)
            labels = single["labels"]
            model.forward(tokens=single["tokens"].repeat(4, 0), labels=labels.repeat(4, 0))
            counted = int((labels != IGNORED).sum())
            nats, count = nats + float(model.get_tensor("loss")[0]) * counted, count + counted
        rest = (
            held_out.sources[0].stream[held_out.num_windows * 32 :] if not padded else []
        )  # fills no window
        if len(rest) > 1:
            tokens, labels = np.zeros((4, 32), np.int32), np.full((4, 32), IGNORED, np.int32)
            tokens[0, : len(rest) - 1], labels[0, : len(rest) - 1] = rest[:-1], rest[1:]
            model.forward(tokens=tokens, labels=labels)
            nats += float(model.get_tensor("loss")[0]) * (len(rest) - 1)
            count += len(rest) - 1
        assert trainer.evaluate() == pytest.approx(nats / count, rel=1e-5)
        assert lines[-1]["held_out_loss"] == pytest.approx(nats / count, rel=1e-5)
        assert lines[-1]["held_out_perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
        assert count == len(held_out.sources[0].stream) - (0 if padded else 1)


def test_too_little_held_out_text_is_rejected(tmp_path):
    """Evaluation during training needs a complete window."""
    texts = write_texts(tmp_path / "texts", num_files=2)
    with pytest.raises(
        ConfigError, match=r"evaluate_every needs at least 33 tokens of held-out text, .* got fewer in 0"
    ):
        prepare_data(
            make_config(texts, tmp_path, evaluate_every=1, data={"held_out_percent": 1e-9}), silent()
        )


def test_a_checkpoint_without_a_copy_is_equal(texts, whole_run, tmp_path):
    """Files of all devices equal those of one written in the background; the plan counts no copy,
    and no thread writes.
    """
    for mesh in (ONE, {"fsdp": 2}):
        plain = make_config(texts, tmp_path / f"{mesh}0", mesh)
        config = make_config(texts, tmp_path / f"{mesh}1", mesh, output={"checkpoint_in_background": False})
        data = prepare_data(config, silent())
        saved = []
        for one in (plain, config):
            graph, plan = make_plan(one)
            assert any(plan.checkpoint_bytes) == one.output.checkpoint_in_background
            with Trainer(one, data, graph, plan) as trainer:
                trainer.step(0)
                path = trainer.save(_checkpoints(one), 1)
                assert one is plain or (path / "checkpoint.json").is_file()
                trainer.finish_saving(silent())
                files = (file for file in path.rglob("*") if file.is_file())
                saved.append({str(file.relative_to(path)): file.read_bytes() for file in files})
        assert saved[0] == saved[1]


def test_describe_has_four_lines(texts, tmp_path, capsys, monkeypatch):
    """Parameters, mesh, memory and what is available, tokens; the whole plan only with --explain."""
    monkeypatch.setattr("tilewise.train.run.available_memory", lambda: 3 << 30)  # the same at each call
    config = make_config(texts, tmp_path / "out", DP, steps=1)
    file = write_toml(config, tmp_path / "train.toml")
    planned = plan_run(config, False)
    lines = planned.describe().splitlines()
    assert len(lines) == 4 and "28,192 (llama)" in lines[0].replace("  ", " ")
    assert "dp=2 (2 devices, 1 worker each), strategy ddp" in lines[1]
    assert "3.00 GiB available on this machine" in lines[2]
    assert (
        f"{format_bytes(max(usage['total'] for usage in planned.plan.estimate_memory_usage()))} per device"
        in lines[2]
    )
    assert "128 per step (4 x 32), 1 step" in lines[3]
    assert _run(["train", str(file)]) == 0
    err = capsys.readouterr().err
    assert err.startswith(planned.describe()) and "tiles of" not in err
    assert _run(["train", str(file), "--explain", "--set", f"output.directory={tmp_path / 'b'}"]) == 0
    assert planned.plan.explain() in capsys.readouterr().err
