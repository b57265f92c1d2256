"""A training run as a user starts it: leaves what it promises, and goes on to the bit after being stopped."""

import json
import os
import random
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from native.train.small_run import (
    STEPS,
    command,
    is_same,
    make_config,
    run,
    silent,
    tilewise,
    weights,
    write_texts,
    write_toml,
)
from tilewise.checkpoint import latest_checkpoint
from tilewise.core import CheckpointError, ConfigError, NotFinite
from tilewise.train import Trainer, make_plan, prepare_data, read_metrics, train_steps


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def whole_run(texts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    result = run(make_config(texts, directory))
    assert result.num_steps == STEPS and not result.interrupted
    return directory


def test_run_leaves_what_it_promises(whole_run):
    """Checkpoints, metrics, picture and a model directory stand in the output."""
    names = {path.name for path in whole_run.iterdir()}
    assert names == {"checkpoints", "metrics.jsonl", "loss.png", "model"}
    assert [line["step"] for line in read_metrics(whole_run / "metrics.jsonl")] == list(range(STEPS))
    config = json.loads((whole_run / "model" / "config.json").read_text())
    assert (
        config["architectures"] == ["LlamaForCausalLM"] and (whole_run / "model" / "tokenizer.json").is_file()
    )


def _stop_after_three(config):
    """The beginning of a run: three steps and a checkpoint; returns its path."""
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        done = trainer.run(0, lambda number, result: number < 2)
        assert done == 3
        return trainer.save(_checkpoints(config), done)


def _checkpoints(config):
    """Where a run keeps its checkpoints."""
    return Path(config.output.directory) / "checkpoints"


@pytest.mark.parametrize("mesh", [None, {"dp": 2}, {"tp": 2}], ids=["one device", "dp=2", "tp=2"])
def test_stopped_and_resumed_equals_never_stopped(texts, whole_run, tmp_path, mesh):
    """Weights and losses after a stop are equal to the bit, also when going on over other devices."""
    _stop_after_three(make_config(texts, tmp_path))
    run(make_config(texts, tmp_path, mesh), resume=True)
    assert is_same(weights(tmp_path), weights(whole_run))
    whole = [line["loss"] for line in read_metrics(whole_run / "metrics.jsonl")]
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == whole[3:]


def test_one_wrong_bit_in_a_checkpoint_shows(texts, whole_run, tmp_path):
    """The comparison above can fail: one flipped bit of one moment in the checkpoint gives other weights."""
    config = make_config(texts, tmp_path)
    state = _stop_after_three(config) / "state.safetensors"
    tensors = load_file(state)
    moment = tensors["optimizer.exp_avg.layers.1.mlp.up_proj.weight"]
    bits = moment.reshape(-1).view(np.uint32)
    bits[np.argmax(np.abs(moment))] ^= 1 << 20
    size = state.stat().st_size
    save_file(tensors, state)
    assert state.stat().st_size == size
    run(config, resume=True)
    assert not is_same(weights(tmp_path), weights(whole_run))


def test_other_seed_is_another_run(texts, whole_run, tmp_path):
    """Another seed gives other weights."""
    run(make_config(texts, tmp_path, seed=1))
    assert not is_same(weights(tmp_path), weights(whole_run))


def test_measuring_changes_nothing(texts, whole_run, tmp_path):
    """Timing some steps beforehand leaves the model as it was."""
    config = make_config(texts, tmp_path)
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        assert trainer.measure_step_s(2) > 0
        losses = []
        trainer.run(0, lambda number, result: losses.append(result.loss) is None)
    assert losses == [line["loss"] for line in read_metrics(whole_run / "metrics.jsonl")]


def test_checkpoints_are_not_mixed(texts, whole_run, tmp_path):
    """A new run does not write over checkpoints; a resumed one needs a checkpoint of its configuration."""
    with pytest.raises(ConfigError, match="--resume"):
        run(make_config(texts, whole_run))
    with pytest.raises(CheckpointError, match=r"got train\.seed = 1 instead of 0 in"):
        run(make_config(texts, whole_run, seed=1), resume=True)
    with pytest.raises(CheckpointError, match="needs a whole checkpoint"):
        run(make_config(texts, tmp_path), resume=True)


def test_interrupt_writes_a_checkpoint(texts, tmp_path):
    """Ctrl-C ends a run with exit code 130 and a checkpoint that goes on."""
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
    found = latest_checkpoint(tmp_path / "out" / "checkpoints")
    assert found is not None and int(found.name.removeprefix("step-")) >= 1


def test_other_texts_are_another_run(texts, whole_run, tmp_path):
    """The same path with other content is refused, and the tokens are named as what differs."""
    other = write_texts(tmp_path / "texts", num_files=40)
    with pytest.raises(CheckpointError, match=r"got data\.tokens = \w+ instead of \w+ in"):
        run(make_config(other, whole_run), resume=True)


def test_resume_from_another_directory(texts, whole_run, tmp_path):
    """Paths in a file start where it lies, so a run goes on from wherever the command is given."""
    (tmp_path / "job").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write_texts(tmp_path / "job" / "texts")
    config = make_config("texts", "out", steps=STEPS, output={"checkpoint_every": 1})
    file = write_toml(config, tmp_path / "job" / "train.toml")
    first = tilewise("train", "train.toml", cwd=file.parent)
    assert first.returncode == 0, first.stderr
    out = tmp_path / "job" / "out"
    (out / "checkpoints" / f"step-{STEPS:08d}" / "checkpoint.json").unlink()
    again = tilewise("train", "../job/train.toml", "--resume", cwd=tmp_path / "elsewhere")
    assert again.returncode == 0 and f"going on after step {STEPS - 1}" in again.stderr, again.stderr
    assert not list((tmp_path / "elsewhere").iterdir())
    assert is_same(weights(out), weights(whole_run))


def test_diverging_run_stops_and_keeps_the_last_good_checkpoint(texts, tmp_path):
    """A loss that is no number ends a run in one line; metrics and checkpoints hold finite numbers only."""
    config = make_config(
        texts, tmp_path / "out", steps=20, dtype="f32", optimizer={"lr": 1e30}, output={"checkpoint_every": 1}
    )
    done = tilewise("train", write_toml(config, tmp_path / "train.toml"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tilewise: [") and "step" in last and "learning rate" in last
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert text and "NaN" not in text and "Infinity" not in text
    kept = load_file(latest_checkpoint(tmp_path / "out" / "checkpoints") / "state.safetensors")
    assert all(np.isfinite(tensor).all() for tensor in kept.values())


def test_nothing_is_saved_that_is_not_finite(texts, tmp_path):
    """Weights that are not finite are refused by `save`; the checkpoint before stays the latest."""
    config = make_config(texts, tmp_path)
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        trainer.step(0)
        good = trainer.save(tmp_path / "checkpoints", 1)
        name = "layers.0.mlp.up_proj.weight"
        spoilt = trainer.instance.get_tensor(name).copy()
        spoilt[0, 0] = np.inf
        trainer.instance.set_tensor(name, spoilt)
        with pytest.raises(NotFinite, match="after step 2"):
            trainer.save(tmp_path / "checkpoints", 2)
        spoilt[0, 0] = np.nan
        trainer.instance.set_tensor(name, spoilt)
        with pytest.raises(NotFinite, match=f"in step 2, first in the weight '{name}'"):
            trainer.step(1)
    assert latest_checkpoint(tmp_path / "checkpoints") == good


def test_steps_that_are_not_finite_can_be_skipped(texts, tmp_path):
    """With `skip` such a step changes no weight and is written down as one; ten in a row stop the run."""
    config = make_config(texts, tmp_path, steps=20, on_nonfinite="skip", output={"checkpoint_every": 99})
    name = "layers.0.mlp.up_proj.weight"
    (tmp_path / "out").mkdir()
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        trainer.step(0)
        good = trainer.instance.get_tensor(name)
        spoilt = good.copy()
        spoilt[0, 0] = np.inf
        trainer.instance.set_tensor(name, spoilt)
        assert trainer.step(1).is_skipped
        trainer.instance.set_tensor(name, good)
        assert not trainer.step(2).is_skipped and trainer.instance.step_count == 3
        trainer.instance.set_tensor(name, spoilt)
        with pytest.raises(NotFinite, match="in step 13"):
            train_steps(trainer, 3, tmp_path / "out", silent())
        assert trainer.instance.step_count == 12
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("skipped")] == list(range(3, 12))


def _train_and_kill(file, checkpoints, delay_s):
    """Start or resume training and kill it some time after its first checkpoint; False when it ended before."""
    before = latest_checkpoint(checkpoints)
    arguments = ["train", file, *([] if before is None else ["--resume"])]
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and latest_checkpoint(checkpoints) == before:
        time.sleep(0.002)
    time.sleep(delay_s)
    process.kill()
    return process.wait() == -signal.SIGKILL


def test_killed_and_resumed_equals_never_stopped(texts, tmp_path):
    """SIGKILL at random moments, several times: the weights in the end are those of a run left alone, and the
    metrics tell of every step once."""
    steps, rng = 400, random.Random(5)
    settings = {"steps": steps, "output": {"checkpoint_every": 2}}
    alone = make_config(texts, tmp_path / "alone", **settings)
    run(alone)
    out = tmp_path / "killed"
    file = write_toml(make_config(texts, out, **settings), tmp_path / "train.toml")
    reached = [0]
    while len(reached) < 6 and _train_and_kill(file, out / "checkpoints", rng.uniform(0.0, 0.1)):
        reached.append(int(latest_checkpoint(out / "checkpoints").name.removeprefix("step-")))
    assert all(a < b for a, b in pairwise(reached)) and sum(0 < step < steps for step in reached) >= 2
    done = tilewise("train", file, "--resume")
    assert done.returncode == 0, done.stderr
    assert is_same(weights(out), weights(tmp_path / "alone"))
    lines, whole = (read_metrics(path / "metrics.jsonl") for path in (out, tmp_path / "alone"))
    assert [(line["step"], line["loss"]) for line in lines] == [
        (line["step"], line["loss"]) for line in whole
    ]
