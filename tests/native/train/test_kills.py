"""Training that is killed around its checkpoints and its model's files continues as if it had not been."""

from __future__ import annotations

import random

import pytest

from native.train.kills import (
    LEFTOVERS_KEPT,
    NON_ATOMIC_WRITER,
    REMOVED_IN_PLACE,
    KilledRun,
    is_equal,
)
from native.train.small_run import make_config, run, write_texts, write_toml
from tilewise.core import CheckpointError

NUM_KILLS = 200


def _runs(folder, steps, fault="", mesh=None):
    """An uninterrupted, finished run, and one to be killed."""
    texts = write_texts(folder / "texts")
    settings = {"steps": steps, "output": {"checkpoint_every": 1}}
    run(make_config(texts, folder / "alone", mesh, **settings))
    file = write_toml(make_config(texts, folder / "killed", mesh, **settings), folder / "train.toml")
    return folder / "alone", KilledRun(file, folder / "killed", fault)


@pytest.mark.soak
def test_200_kills_change_no_bit(tmp_path):
    """SIGKILL 200 times on two devices with a file each: before single file operations, from
    outside while a checkpoint is written, and around the finished model. After each, everything
    with a final name is complete; at the end weights, state, metrics and names equal an
    uninterrupted run.
    """
    rng = random.Random(7)
    alone, killed = _runs(tmp_path, 1000, mesh={"fsdp": 2})
    while killed.num_kills < 100:
        assert killed.kill_at(rng.randint(1, 60))
    while killed.num_kills < 170:
        assert killed.kill_while_writing(rng)
    assert 0 < killed.newest < 1000, "the run has ended too early to be killed as often"
    assert killed.num_in_writing > 60
    while killed.num_kills < NUM_KILLS:
        killed.kill_at(
            rng.randint(1, 16), rng.choice(("", ".tilewise-tmp-model", "loss.png", ".tilewise-tmp-loss"))
        )
    killed.finish()
    assert is_equal(killed.out, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "operations"),
    [(None, (2, 3, 4, 5, 10, 11)), ({"fsdp": 2}, (2, 3, 4, 5, 7, 13, 14))],
    ids=["one device", "two devices"],
)
def test_kills_at_every_kind_of_operation_change_no_bit(tmp_path, mesh, operations):
    """A device's file begun, one of two begun, no metadata yet, before and after the rename, an
    older checkpoint half removed, half a model.
    """
    alone, killed = _runs(tmp_path, 16, mesh=mesh)
    for operation in operations:
        assert killed.kill_at(operation, "checkpoints/.tilewise-tmp-step-0000000")
    assert killed.kill_at(2, "a tree") and killed.kill_at(3, ".tilewise-tmp-model")
    assert killed.num_in_writing >= 4
    killed.finish()
    assert is_equal(killed.out, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "place", "what"),
    [
        (NON_ATOMIC_WRITER, (4, "checkpoints/step-00000001"), "a checkpoint must be complete"),
        (REMOVED_IN_PLACE, (2, "a tree"), "a checkpoint must be complete"),
        (LEFTOVERS_KEPT, (4, "checkpoints/.tilewise-tmp-step"), "tilewise-tmp-step"),
    ],
    ids=["non-atomic writer", "removed in place", "leftovers kept"],
)
def test_a_planted_fault_is_detected_after_a_kill(tmp_path, fault, place, what):
    """The twin: writers that leave an incomplete checkpoint under its name, and leftovers that stay, fail."""
    _, killed = _runs(tmp_path, 16, fault)
    with pytest.raises((AssertionError, CheckpointError), match=what):
        for _ in range(2):
            killed.kill_at(*place)
