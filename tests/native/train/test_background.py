"""Checkpoints are written while training continues: they have the state of their step, one copy at
a time, and errors are raised.
"""

import io
import signal
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import tilewise.checkpoint.training as writing
import tilewise.plan.tables as planning
from native.train.small_run import is_same, make_config, silent
from tilewise.checkpoint import (
    CheckpointWriter,
    DamagedCheckpoint,
    TrainingState,
    checkpoint_paths,
    load_checkpoint,
    lock_directory,
    open_checkpoint,
)
from tilewise.core import ConfigError, ResourceError
from tilewise.core.sizes import format_bytes
from tilewise.train import Trainer, make_plan, plan_run, run_training


@contextmanager
def training(texts, out, data, mesh=None, **changes):
    """A trainer and the directory of its checkpoints."""
    config = make_config(texts, out, mesh, **changes)
    with Trainer(config, data, *make_plan(config)) as trainer:
        yield trainer, out / "checkpoints"


class BlockedDisk:
    """A disk that writes nothing until it is released."""

    def __init__(self, monkeypatch):
        self.begun, self.released = threading.Event(), threading.Event()
        replace = writing.replace_directory

        def wait(path, write):
            self.begun.set()
            assert self.released.wait(60)
            replace(path, write)

        monkeypatch.setattr(writing, "replace_directory", wait)


@pytest.fixture
def blocked(monkeypatch):
    disk = BlockedDisk(monkeypatch)
    yield disk
    disk.released.set()


def _steps_while_the_writer_is_blocked(trainer, checkpoints, blocked):
    """The state after two steps, and its checkpoint, written only after two more steps."""
    for number in (0, 1):
        trainer.step(number)
    before = trainer.instance.state_dict()
    path = trainer.save(checkpoints, 2)
    assert blocked.begun.wait(60)
    for number in (2, 3):
        trainer.step(number)
    assert not checkpoint_paths(checkpoints)  # the steps are done, and nothing is written yet
    blocked.released.set()
    trainer.finish_saving(silent())
    return before, load_checkpoint(path, trainer.what_must_match()).tensors


@pytest.mark.parametrize("mesh", [None, {"dp": 2}], ids=str)
def test_steps_continue_while_a_checkpoint_is_written(texts, data, tmp_path, blocked, mesh):
    """With a blocked disk, steps continue; the checkpoint has the saved state, to the bit."""
    with training(texts, tmp_path, data, mesh) as (trainer, checkpoints):
        before, saved = _steps_while_the_writer_is_blocked(trainer, checkpoints, blocked)
        assert is_same(before, dict(saved)) and np.asarray(saved["optimizer.step"]).tolist() == [2]
        now = trainer.instance.state_dict()
        assert not is_same(before, now) and np.asarray(now["optimizer.step"]).tolist() == [4]


def test_a_state_without_a_copy_is_detected(texts, data, tmp_path, blocked, monkeypatch):
    """The twin: a writer that reads the current weights writes another state."""
    with training(texts, tmp_path, data) as (trainer, checkpoints):
        read = trainer.instance.copy_state

        def alive():
            state = read()
            step = trainer.instance.step

            def step_in_place(*args, **named):
                result = step(*args, **named)
                for name, tensor in read().items():
                    if name != "optimizer.step":
                        for part, now in zip(state[name].parts, tensor.parts):
                            part.values[...] = now.values
                return result

            trainer.instance.step = step_in_place
            return state

        for number in (0, 1):
            trainer.step(number)
        before = trainer.instance.state_dict()
        monkeypatch.setattr(trainer.instance, "copy_state", alive)
        path = trainer.save(checkpoints, 2)
        assert blocked.begun.wait(60)
        trainer.step(2)
        blocked.released.set()
        with pytest.raises((AssertionError, DamagedCheckpoint)):
            trainer.finish_saving(silent())
            assert is_same(before, dict(load_checkpoint(path, trainer.what_must_match()).tensors))


def test_the_next_save_waits_for_the_previous_one(texts, data, tmp_path, blocked):
    """No second copy is made while the first is written; then both exist, and older ones are removed."""
    with training(texts, tmp_path, data, output={"keep_checkpoints": 2}) as (trainer, checkpoints):
        trainer.step(0)
        trainer.save(checkpoints, 1)
        assert blocked.begun.wait(60)
        copies, read = [], trainer.instance.copy_state

        def copied():
            copies.append(blocked.released.is_set())
            return read()

        trainer.instance.copy_state = copied
        threading.Timer(0.05, blocked.released.set).start()
        for number in (1, 2):
            trainer.step(number)
            trainer.save(checkpoints, number + 1)
        trainer.finish_saving(silent())
        assert copies == [True, True]
        assert [path.name for path in checkpoint_paths(checkpoints)] == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("where", ["step", "save", "end", "close"])
def test_write_errors_are_raised(texts, data, tmp_path, where, monkeypatch):
    """A full disk is an error at the next step, the next save, the end or the close; older checkpoints are kept."""
    replace = writing.replace_directory

    def full(path, write):
        def fail(temporary):
            write(temporary)
            raise OSError(28, "No space left on device")

        replace(path, fail)

    with pytest.raises(ResourceError, match=r"step-00000002.*No space left"):  # noqa: SIM117
        with training(texts, tmp_path, data) as (trainer, checkpoints):
            trainer.step(0)
            good = trainer.save(checkpoints, 1)
            trainer.step(1)
            trainer.finish_saving(silent())
            monkeypatch.setattr(writing, "replace_directory", full)
            trainer.save(checkpoints, 2)
            if where == "step":
                trainer._writer._thread.join()
                trainer.step(2)
            elif where == "save":
                trainer.save(checkpoints, 3)
            elif where == "end":
                trainer.finish_saving(silent())
    assert open_checkpoint(good).step == 1
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000001"]


def test_an_exception_in_progress_is_not_hidden(texts, data, tmp_path, blocked):
    """The exception that ended the run is raised, not the writer's."""
    with pytest.raises(ZeroDivisionError), training(texts, tmp_path, data) as (trainer, checkpoints):
        trainer.save(checkpoints, 0)
        trainer._writer._error = ResourceError("the disk is full")
        blocked.released.set()
        raise ZeroDivisionError


def test_a_second_interrupt_leaves_nothing_incomplete(texts, data, tmp_path, blocked):
    """The checkpoint in progress is abandoned; the previous one exists, and no hidden files."""
    with pytest.raises(KeyboardInterrupt), training(texts, tmp_path, data) as (trainer, checkpoints):
        trainer.step(0)
        blocked.released.set()
        trainer.save(checkpoints, 1)
        trainer.finish_saving(silent())
        blocked.begun.clear(), blocked.released.clear()
        trainer.step(1)
        trainer.save(checkpoints, 2)
        assert blocked.begun.wait(60)
        threading.Timer(0.05, blocked.released.set).start()  # the disk answers while it is being given up
        raise KeyboardInterrupt
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000001"]


def test_giving_up_after_an_interrupted_wait(tmp_path, blocked):
    """After Ctrl-C while waiting for the last checkpoint, `give_up` returns when nothing is written any more."""
    writer = CheckpointWriter()
    writer.write(tmp_path, TrainingState(1, {"w": np.ones(3)}), {}, 1)
    assert blocked.begun.wait(60)
    interrupt = partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.05, interrupt).start()
        writer.wait()
    assert writer.is_busy
    threading.Timer(0.05, blocked.released.set).start()
    writer.give_up()
    assert blocked.released.is_set() and not writer.is_busy and not list(tmp_path.iterdir())


def test_without_a_thread_a_checkpoint_is_written_at_once(tmp_path, monkeypatch):
    """If the system provides no thread."""

    def invalid(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", invalid)
    writer = CheckpointWriter()
    path = writer.write(tmp_path, TrainingState(1, {"w": np.ones(3)}), {}, 1)
    assert not writer.is_busy and open_checkpoint(path).step == 1
    writer.wait()


def test_a_thread_that_never_starts_is_not_joined(tmp_path, monkeypatch):
    """If its start raises another error."""

    def invalid(thread):
        raise MemoryError

    writer = CheckpointWriter()
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(threading.Thread, "start", invalid)
        writer.write(tmp_path, TrainingState(1, {"w": np.ones(3)}), {}, 1)
    writer.wait()
    path = writer.write(tmp_path, TrainingState(2, {"w": np.ones(3)}), {}, 1)
    writer.wait()
    assert open_checkpoint(path).step == 2


def test_a_directory_stays_locked_while_it_is_written_to(texts, tmp_path, blocked):
    """The end of a run waits for the last checkpoint and says so; meanwhile a second run is rejected."""
    planned, rejected = plan_run(make_config(texts, tmp_path / "out", steps=2), resume=False), []

    class Output(io.StringIO):
        def write(self, text):
            if "waiting for the last checkpoint to be written" in text:
                with pytest.raises(ConfigError, match="one run at a time"), lock_directory(tmp_path / "out"):
                    pass
                rejected.append(text)
                blocked.released.set()
            return super().write(text)

    run_training(planned, Console(file=Output(), width=120))
    assert rejected
    assert [path.name for path in checkpoint_paths(tmp_path / "out" / "checkpoints")] == ["step-00000002"]


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [(None, "f32"), ({"dp": 2, "tp": 2}, "bf16"), ({"dp": 2, "fsdp": 2}, "f32")],
    ids=str,
)
def test_the_plan_counts_the_copy(texts, data, tmp_path, mesh, dtype):
    """Its bytes are those of the state, each device's those of its parts, and part of the total;
    `explain` shows the largest.
    """
    with training(texts, tmp_path, data, mesh, dtype=dtype) as (trainer, _):
        plan = trainer.instance.plan
        whole = sum(t.nbytes for name, t in trainer.instance.state_dict().items() if name != "optimizer.step")
        each = [0] * plan.mesh.num_devices
        for name, tensor in trainer.instance.copy_state().items():
            for part in tensor.parts if name != "optimizer.step" else ():
                each[part.device] += part.values.nbytes
        assert tuple(each) == plan.checkpoint_bytes and sum(each) == whole
        planned = plan.estimate_memory_usage()
        assert trainer.instance.memory_usage() == planned
        alone = plan.total_bytes // plan.mesh.num_devices
        for copy, usage in zip(each, planned, strict=True):
            assert usage["checkpoints"] == copy and usage["total"] == alone + copy
            assert sum(v for k, v in usage.items() if k != "total") == usage["total"]
        assert f"checkpoints  {max(each) / 2**20:10.2f} MiB" in plan.explain()


def test_a_run_whose_copy_does_not_fit_is_rejected(texts, tmp_path, monkeypatch):
    """Memory for the devices alone is not enough; one byte more than both is."""
    config = make_config(texts, tmp_path / "out", {"tp": 2})
    _, plan = make_plan(config)
    need = plan.total_bytes + sum(plan.checkpoint_bytes)
    monkeypatch.setattr(planning, "available_memory", lambda: need - 1)
    with pytest.raises(
        ResourceError, match=f"including {format_bytes(sum(plan.checkpoint_bytes))} for checkpoints"
    ):
        plan_run(config, resume=False)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(planning, "available_memory", lambda: need)
    plan_run(config, resume=False)


def test_a_writer_reports_progress(tmp_path, blocked):
    """Progress rises to all bytes, each read and written once."""
    writer, reported = CheckpointWriter(), []
    tensors = {f"w{i}": np.full((100,), i, np.float32) for i in range(5)}
    path = writer.write(tmp_path, TrainingState(3, tensors), {}, 1)
    assert writer.is_busy and path == Path(tmp_path / "step-00000003")
    blocked.released.set()
    writer.wait(lambda done, total: reported.append((done, total)))
    assert reported[-1] == (4000, 4000) and reported == sorted(reported) and not writer.is_busy
    assert open_checkpoint(path).step == 3
