"""Chooses which optimizer states in files are prefetched whole into memory that the backward pass frees.

An update needs the gradients' norm, so it starts after the backward pass. Without prefetching, all states in files
would be read then. Instead, as many states as fit are read during the backward pass into the memory of freed
activations; the arena does not grow. The other states are read block by block (`plan.lower.blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.ir.graph import Graph
from tilewise.ir.reshards import is_prefetch
from tilewise.plan.memory import FILE_PAGE, Buffer, align_for_files, apart, gap_for, place_buffers
from tilewise.plan.schedule.root_tensors import result_buffers
from tilewise.plan.schedule.scheduled import Scheduled
from tilewise.plan.shapes import round_up

__all__ = ["choose_prefetched", "prefetched_apart"]


def choose_prefetched(scheduled: Scheduled) -> Mapping[int, int]:
    """The states in files to prefetch, each with the op before which its prefetch call is inserted.

    Each state is prefetched at the first segment of the backward pass from which on a gap of its
    size stays free until its update. If several states fit, those that are needed first come first.
    """
    tensors, segments = scheduled.tensors, scheduled.segments
    results, _ = apart(result_buffers(tensors))
    # leaves positions between segments for prefetch and put-back calls
    results = [b._replace(first=2 * b.first, last=2 * b.last) for b in align_for_files(results)]
    placed, end = place_buffers(results, 0)
    states = tensors.files.intersection(t.id for t in scheduled.graph.of_kind("state"))
    waiting = {
        t: Buffer(("tensor", t), round_up(tensors.bytes(t), FILE_PAGE), "activations", last=2 * s.index + 1)
        for s in segments
        if s.phase == "update"
        for op in s.ops
        for t in op.given
        if t in states
    }
    first = next((s.index for s in segments if s.phase == "backward"), len(segments))
    update = next((s.index for s in segments if s.phase == "update"), -1)
    first_ops: dict[int, int] = {}
    for before in segments[first : update + 1]:
        for t, buffer in _that_fit(waiting, placed, end, 2 * before.index - 1).items():
            first_ops[t] = before.ops[0].id
            placed.append(buffer)
            del waiting[t]
    return first_ops


def _that_fit(
    waiting: Mapping[int, Buffer], placed: Sequence[Buffer], end: int, first: int
) -> dict[int, Buffer]:
    """States for which there is room from a position on until their update, with their offsets."""
    everything, fitting = [*placed], dict[int, Buffer]()
    least = end + 1  # a later state of this size does not fit either, because it would have to stay longer
    for t, buffer in waiting.items():
        if buffer.bytes >= least:
            continue
        live = buffer._replace(first=first)
        live = live._replace(offset=gap_for(live, everything, 0))
        if live.end <= end:
            everything.append(live)
            fitting[t] = live
        else:
            least = buffer.bytes
    return fitting


def prefetched_apart(graph: Graph, results: Sequence[Buffer]) -> tuple[list[Buffer], list[Buffer]]:
    """Other results, and prefetched states in the order of their calls, in which they were chosen."""
    updates = (op for op in graph.ops if op.phase == "update" and is_prefetch(graph, op, ("fetch",)))
    prefetched = dict.fromkeys(o for op in updates for o in op.outputs)
    by_tensor = {b.key[1]: b for b in results}
    return [b for b in results if b.key[1] not in prefetched], [by_tensor[t] for t in prefetched]
