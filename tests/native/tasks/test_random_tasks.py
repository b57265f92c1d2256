"""Random programs of tasks give the bytes of a sequential run, and a failure affects exactly its successors."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from native.tasks.random_programs import (
    INOUT,
    INPUT,
    Access,
    Program,
    Step,
    programs,
    run_in_order,
    run_program,
)


def _oracle_kernel(kernels):
    mix = ctypes.CDLL(str(kernels)).mix
    mix.argtypes, mix.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return mix


def _differences(program, kernels, drops_order=False):
    memory, failed = run_program(program, kernels, drops_order)
    expected, strange = run_in_order(program, _oracle_kernel(kernels), failed)
    return strange + [
        f"{name} differs" for name in memory if not np.array_equal(memory[name], expected[name])
    ]


COMMON = {"database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=300, **COMMON)
@given(program=programs())
@pytest.mark.slow
def test_random_programs(kernels, program):
    """300 programs: modes, boxes, scopes, outputs, submitters, nested tasks, windows, workers, delays, failures."""
    assert _differences(program, kernels) == []


@pytest.mark.soak
@settings(max_examples=10_000, **COMMON)
@given(program=programs())
def test_many_random_programs(kernels, program):
    """10,000 programs, different ones each time."""
    assert _differences(program, kernels) == []


def _slow_chain():
    """Each task reads the result of the previous one, and every other task is slow."""
    names = ["a", "b"]
    steps = [
        Step(
            "task",
            [Access(names[n % 2], INPUT), Access(names[1 - n % 2], INOUT)],
            seed=n,
            delay_us=5000 * (n % 2 == 0),
        )
        for n in range(8)
    ]
    return Program([steps], 64, 4)


def test_comparison_finds_dropped_edges(kernels):
    """The twin: if the runtime does not see the inputs, the comparison fails."""
    assert _differences(_slow_chain(), kernels) == []
    assert any(_differences(_slow_chain(), kernels, drops_order=True) for _ in range(5))


def test_comparison_finds_another_order(kernels):
    """The twin: an oracle that swaps two dependent tasks disagrees."""
    program = _slow_chain()
    memory, failed = run_program(program, kernels)
    program.submitters[0][3], program.submitters[0][4] = program.submitters[0][4], program.submitters[0][3]
    expected, _ = run_in_order(program, _oracle_kernel(kernels), failed)
    assert any(not np.array_equal(memory[name], expected[name]) for name in memory)
