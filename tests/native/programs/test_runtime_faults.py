"""A task that throws, a worker that stops, Ctrl-C: one clear error, no hang, and a correct next run."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time

import numpy as np
import pytest

from native.programs.sample_programs import COLS, ROWS, all_reduce_program, program_of, tensor_entry, view
from tilewise.core.errors import CommTimeout, PlanError, TaskFailed
from tilewise.ir.program import Instruction
from tilewise.runtime import Access, Mode, Operand, Program


def expect_right(executor, program, epochs: int) -> None:
    """One run from zeroed memory gives the sum."""
    for d in range(2):
        executor.buffer(d, 0, program.needs(d)[0])[:] = 0
        view(executor, d, 0)[:] = d + 1
    executor.run(program, [])
    for d in range(2):
        np.testing.assert_array_equal(view(executor, d, 2), np.full((ROWS, COLS), 3.0 * epochs))


@pytest.mark.parametrize("label", ["produce", "reduce", "gather", "share read"])
def test_a_task_that_throws(make_executor, label):
    """One TaskFailed names op, tile, worker and device; the next run is correct."""
    program = all_reduce_program(5)
    executor = make_executor(program, 2, workers=2)
    executor.inject("throw", 1, label, 8)
    with pytest.raises(TaskFailed, match=r"injected failure") as caught:
        executor.run(program, [])
    assert (caught.value.op, caught.value.tile, caught.value.device) == (label, 2, 1)
    assert caught.value.worker in (0, 1)
    assert f"'{label}'[2] on device 1" in str(caught.value)
    expect_right(executor, program, 5)


def test_a_worker_that_stops(make_executor):
    """CommTimeout names wait, signal, values, the late device and its work; the executor is unusable then."""
    program = all_reduce_program(5)
    executor = make_executor(program, 2, deadline_s=0.3)
    executor.inject("stall", 1, "produce", 3)
    start = time.monotonic()
    with pytest.raises(CommTimeout) as caught:
        executor.run(program, [])
    assert time.monotonic() - start < 30
    message = str(caught.value)
    assert "device 0 waits in 'reduce'[3] for signal 3 to reach 1 (seen 0)" in message
    assert "device 1 (worker 0 has stopped at 'produce'[3]" in message
    with pytest.raises(PlanError, match="cannot be used after a deadline"):
        executor.run(program, [])


def long_program(num_tasks: int) -> Program:
    """Additions of a million elements each on one device: about a millisecond per task."""
    program = program_of(1)
    tensor = program.add_tensor(0, tensor_entry(0, 1024, 1024, 1024))
    template = program.add_template(0, "long")
    operands = [Operand(0, Mode.WHOLE, Access.INOUT), Operand(0), Operand(0)]
    program.add_instr(0, template, Instruction("add_f32", "long", num_tasks, 1, operands))
    program.add_call(0, template, [tensor])
    program.finish([])
    return program


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c(make_executor):
    """SIGINT during a run raises KeyboardInterrupt quickly; the executor stays usable."""
    program = long_program(200_000)
    executor = make_executor(program, 1)
    short = long_program(10)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        executor.run(program, [])
    assert time.monotonic() - start < 30  # the program takes minutes
    timer.join()
    executor.run(short, [])


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_while_a_worker_is_stopped(make_executor):
    """A stopped worker does not delay Ctrl-C, and counters are consistent afterwards."""
    program = all_reduce_program(5)
    executor = make_executor(program, 2)
    executor.inject("stall", 0, "produce", 0)
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        executor.run(program, [])
    timer.join()
    expect_right(executor, program, 5)


@pytest.mark.usefixtures("no_collection")
def test_the_gil_is_free_during_a_run(make_executor):
    """Another Python thread runs during a program; a second run is rejected."""
    program = all_reduce_program(5)
    executor = make_executor(program, 2)
    executor.inject("stall", 0, "produce", 0)
    refused: list[str] = []

    def meanwhile() -> None:
        time.sleep(0.1)
        try:
            executor.run(program, [])
        except PlanError as error:
            refused.append(str(error))
        _thread.interrupt_main()

    other = threading.Thread(target=meanwhile)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        executor.run(program, [])
    other.join()
    assert "one run at a time" in refused[0]


def test_unknown_fault_kinds_are_rejected(make_executor):
    """inject() accepts only 'throw', 'stall' and 'delay'."""
    executor = make_executor(long_program(1), 1)
    with pytest.raises(PlanError, match="'throw', 'stall' or 'delay'; got 'melt'"):
        executor.inject("melt", 0, "long", 0)
