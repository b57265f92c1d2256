"""Interleaved 1F1B: every stage has several chunks of layers, so a microbatch passes each stage
several times, and each wait at the beginning and the end of a step is shorter (arXiv:2104.04473).

    stage 0   virtual stages 0, 2      F0.0 F0.1 F2.0 F2.1 ...     (virtual stage, microbatch)
    stage 1   virtual stages 1, 3           F1.0 F1.1 F3.0 F3.1 ...

A stage takes p microbatches through its first chunk, then through the next, and so on. With v chunks,
it is idle for (p - 1)/(v m + p - 1) of a step: about a v-th of 1F1B's share. It sends v times as
many tensors, and stores a little more.
"""

from __future__ import annotations

from tilewise.strategy.schedules.actions import Action

__all__ = ["interleaved"]


def interleaved(stages: int, chunks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The order of each stage. The microbatches are a multiple of the stages."""
    total = chunks * microbatches
    orders = []
    for stage in range(stages):
        forward = [_pass("F", stage, i, stages, chunks) for i in range(total)]
        backward = [_pass("B", stage, i, stages, chunks) for i in range(total)]
        warm_up = total
        if microbatches > stages or chunks == 1:
            warm_up = min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)
        order = forward[:warm_up]
        for i in range(total):
            order += [*forward[warm_up + i : warm_up + i + 1], backward[i]]
        orders.append(tuple(order))
    return tuple(orders)


def _pass(kind: str, stage: int, number: int, stages: int, chunks: int) -> Action:
    """The pass with this number among the forward or the backward passes of a stage."""
    group, within = divmod(number, stages * chunks)
    chunk, microbatch = divmod(within, stages)
    chunk = chunk if kind == "F" else chunks - 1 - chunk
    return Action(kind, chunk * stages + stage, group * stages + microbatch)  # type: ignore[arg-type]
