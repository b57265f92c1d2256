"""Executors for a program, closed after each test."""

from __future__ import annotations

import pytest

from tilewise.runtime import Executor, Program


@pytest.fixture
def make_executor():
    """Makes executors for a program and closes them after the test."""
    made: list[Executor] = []

    def make(program: Program, num_devices: int, *, workers=1, window=512, deadline_s=20.0) -> Executor:
        needs = [program.needs(d) for d in range(num_devices)]
        executor = Executor(
            num_devices=num_devices,
            workers_per_device=workers,
            arena_bytes=[n[0] for n in needs],
            num_handles=max(n[1] for n in needs),
            num_signals=max(n[2] for n in needs),
            window=window,
            deadline_s=deadline_s,
        )
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()
