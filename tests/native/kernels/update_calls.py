"""Calls of the `update` kernel: one optimizer step on one parameter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilewise.kernels import UPDATE_STEPS
from tilewise.kernels.isa import run
from tilewise.optim import AdamW, Optimizer
from tilewise.optim.rule import Program, record_update

ADAMW = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def program_of(optimizer: Optimizer) -> Program:
    return record_update(optimizer.update, optimizer.states, optimizer.per_step)


def ints_of(program: Program, states: int, *, packed: bool = False) -> list[int]:
    return [int(packed), states, len(program.steps) // 4, *program.steps, *program.left]


def step_by_step(program: Program) -> Program:
    """The program with a step without effect, so that it matches no known shape and runs block by block."""
    unread = (list(UPDATE_STEPS).index("negate"), 0, 0, 0)
    return replace(program, steps=(*program.steps, *unread))


def hyper_of(optimizer: Optimizer, step: int = 3, lr: float = 3e-4) -> np.ndarray:
    """The values that change from step to step."""
    return np.array([optimizer.values(step, lr)], np.float32)


def run_update(
    optimizer, copy, arrays, clip, dtype="f32", *, program=None, step=3, lr=3e-4, packed=False, **how
):
    """One step in place: `arrays` are weight, states and gradient; `program` replaces the optimizer's."""
    program = program or program_of(optimizer)
    operands = [copy, *arrays, hyper_of(optimizer, step, lr), clip]
    ints = ints_of(program, len(optimizer.states), packed=packed)
    run(f"update_{dtype}", operands, ints, list(program.constants), **how)
