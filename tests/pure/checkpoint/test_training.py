"""Training checkpoints: whole or absent, whatever happens to the writer."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tilewise.checkpoint import (
    TrainingState,
    check_writable,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tilewise.core import CheckpointError, ConfigError

WRITER = """
import sys, numpy as np
from tilewise.checkpoint import TrainingState, save_checkpoint
print("ready", flush=True)
for step in range(int(sys.argv[2]), 10**9):
    tensors = {f"w{i}": np.full(20_000, step, np.float32) for i in range(8)}
    save_checkpoint(sys.argv[1], TrainingState(step, tensors), {"layers": 6})
"""
CONFIG = {"layers": 6, "optimizer": {"lr": 0.1, "eps": 1e-8}}


def _state(step):
    return TrainingState(step, {"w": np.full((3, 2), step, np.float32)})


def test_round_trip(tmp_path):
    """Step and tensors come back."""
    path = save_checkpoint(tmp_path, _state(7), CONFIG)
    assert latest_checkpoint(tmp_path) == path
    state = load_checkpoint(path, CONFIG)
    assert state.step == 7
    np.testing.assert_array_equal(state.tensors["w"], _state(7).tensors["w"])


def test_only_the_last_ones_are_kept(tmp_path):
    """Older checkpoints go when newer ones are whole."""
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, _state(step), CONFIG, keep_last=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000010"]


def test_other_configuration_is_refused(tmp_path):
    """A checkpoint of another configuration is an error, not a start."""
    path = save_checkpoint(tmp_path, _state(1), CONFIG)
    with pytest.raises(CheckpointError, match="got layers = 7 instead of 6 in"):
        load_checkpoint(path, {**CONFIG, "layers": 7})


def test_every_difference_is_named(tmp_path):
    """Changed, new and absent settings are named with both values; the order of keys is no difference."""
    path = save_checkpoint(tmp_path, _state(1), CONFIG)
    load_checkpoint(path, {"optimizer": {"eps": 1e-8, "lr": 0.1}, "layers": 6})
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, {"layers": 6, "optimizer": {"lr": 0.2, "beta1": 0.9}})
    for words in (
        "optimizer.lr = 0.2 instead of 0.1",
        "optimizer.beta1 = 0.9 instead of nothing",
        "optimizer.eps = nothing instead of 1e-08",
    ):
        assert words in str(caught.value)
    assert "layers" not in str(caught.value)


def test_directory_that_cannot_be_written_is_refused(tmp_path):
    """A file in the way is an error before any work; a directory to be is fine and is not made yet."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper", tmp_path / ("long" * 100)):
        with pytest.raises(ConfigError, match="can be written to"):
            check_writable(place)
    check_writable(tmp_path / "new" / "deeper")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_damaged_latest_falls_back(tmp_path):
    """A truncated newest checkpoint is passed over for the one before, and refused when asked for by name."""
    older = save_checkpoint(tmp_path, _state(1), CONFIG)
    newer = save_checkpoint(tmp_path, _state(2), CONFIG)
    file = newer / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert latest_checkpoint(tmp_path) == older
    with pytest.raises(CheckpointError, match="must be whole"):
        load_checkpoint(newer, CONFIG)


def test_no_checkpoint(tmp_path):
    """An empty or absent directory has no latest checkpoint."""
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None


def test_killed_writer_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL at random moments of writing always leaves a checkpoint that loads, and steps never go back."""
    rng = random.Random(0)
    save_checkpoint(tmp_path, _state(0), {"layers": 6})
    reached = 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(reached + 1)],
            stdout=subprocess.PIPE,
            env=dict(os.environ),
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.0, 0.06))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        path = latest_checkpoint(tmp_path)
        assert path is not None
        state = load_checkpoint(path, {"layers": 6})
        assert state.step >= reached
        assert all(np.all(np.asarray(t) == state.step) for t in state.tensors.values())
        reached = state.step
    assert reached > 0
    save_checkpoint(tmp_path, _state(reached + 1), {"layers": 6})
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
