"""What of an update's tensors in files is brought whole, while the backward pass frees memory.

An update needs the gradients' norm, so it begins behind the backward pass, and what lies in files would all be read
there. But the backward pass frees what the forward pass has left, and the arena is as large as before: so as many
tensors as it has room for are brought meanwhile. The arena does not grow by a byte; the rest goes block by block
(`plan.lower.blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.plan.accumulation import find_batch_sums
from tilewise.plan.buffers import RootTensors, align_for_files, apart, result_buffers
from tilewise.plan.lower import alias_roots
from tilewise.plan.memory import FILE_PAGE, Buffer, place_buffers
from tilewise.plan.segments import Segment, cut_segments
from tilewise.plan.shapes import LocalShapes, PlanSettings, round_up, symbols_of

__all__ = ["choose_held"]


def choose_held(graph: Graph, layout: GraphLayout, settings: PlanSettings) -> Mapping[int, int]:
    """Tensors in files that an update works on, each with the op that it is to be brought before.

    Those that are needed first are chosen first; each comes as early as there is room for it until its update.
    """
    shapes = LocalShapes(layout.mesh, settings, graph.reduction_chunks, symbols_of(graph))
    roots = alias_roots(graph, graph.ops, frozenset(graph.outputs.values()))
    tensors = RootTensors(graph, layout, shapes, find_batch_sums(graph), roots)
    segments = cut_segments(graph)
    results, _ = apart(result_buffers(tensors, segments))
    align_for_files(results)
    for buffer in results:  # with room between segments, for calls that bring and put back
        buffer.first, buffer.last = 2 * buffer.first, 2 * buffer.last
    end = place_buffers(results, 0)
    found = _with_room(tensors, segments, results, end)
    low, high = 0, len(found)
    while low < high:  # gaps may be too small: so many as fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(results, found[:middle], end) else (low, middle - 1)
    return {int(str(b.key[1])): segments[(b.first + 1) // 2].ops[0].id for b in found[:low]}


def _with_room(
    tensors: RootTensors, segments: Sequence[Segment], results: Sequence[Buffer], end: int
) -> list[Buffer]:
    """Tensors that would fit beside the results if memory had no gaps."""
    room = [end - held for held in _held_at(results, 2 * len(segments))]
    first = next((s.index for s in segments if s.phase == "backward"), len(segments))
    updates = [s for s in segments if s.phase == "update"]
    found: list[Buffer] = []
    for segment in updates:
        for t in dict.fromkeys(t for op in segment.ops for t in op.given if t in tensors.files):
            size, until = round_up(tensors.bytes(t), FILE_PAGE), 2 * segment.index + 1
            before = updates[0].index  # the segment that it is brought before
            if room[2 * before - 1] < size or min(room[2 * before : until + 1]) < size:
                continue
            while before > first and min(room[2 * before - 3 : 2 * before - 1]) >= size:
                before -= 1
            for position in range(2 * before - 1, until + 1):
                room[position] -= size
            found.append(Buffer(("tensor", t), size, "gathered", 2 * before - 1, until))
    return found


def _held_at(buffers: Sequence[Buffer], count: int) -> list[int]:
    """Bytes that live at each position."""
    changes = [0] * (count + 1)
    for buffer in buffers:
        changes[buffer.first] += buffer.bytes
        changes[buffer.last + 1] -= buffer.bytes
    return list(accumulate(changes))


def _fits(results: Sequence[Buffer], held: Sequence[Buffer], end: int) -> bool:
    return place_buffers([replace(b) for b in (*results, *held)], 0) <= end
