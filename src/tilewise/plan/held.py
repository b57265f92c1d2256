"""What of an optimizer's states in files is brought whole, while the backward pass frees memory.

An update needs the gradients' norm, so it begins behind the backward pass, and what lies in files would all be read
there. But the backward pass frees what the forward pass has left, and the arena is as large as before: so as many
states as it has room for are brought meanwhile. The arena does not grow by a byte; the rest goes block by block
(`plan.lower.blocks`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.reshards import brings_weights
from tilewise.plan.accumulation import find_batch_sums
from tilewise.plan.buffers import RootTensors, align_for_files, apart, result_buffers
from tilewise.plan.lower import alias_roots
from tilewise.plan.memory import FILE_PAGE, Buffer, gap_for, place_buffers
from tilewise.plan.segments import cut_segments
from tilewise.plan.shapes import LocalShapes, PlanSettings, round_up, symbols_of

__all__ = ["choose_held", "held_apart", "place_held"]


def choose_held(graph: Graph, layout: GraphLayout, settings: PlanSettings) -> Mapping[int, int]:
    """States in files that an update works on, each with the op that it is to be brought before.

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
    first = next((s.index for s in segments if s.phase == "backward"), len(segments))
    updates = [s for s in segments if s.phase == "update"]
    states = tensors.files.intersection(t.id for t in graph.of_kind("state"))
    found: dict[int, int] = {}
    for segment in updates:
        for t in dict.fromkeys(t for op in segment.ops for t in op.given if t in states):
            held = Buffer(("tensor", t), round_up(tensors.bytes(t), FILE_PAGE), "activations")
            before = _earliest(held, results, end, range(first, updates[0].index + 1), segment.index)
            if before is not None:
                found[t] = segments[before].ops[0].id
                results.append(held)
    return found


def _earliest(held: Buffer, placed: Sequence[Buffer], end: int, range_: range, update: int) -> int | None:
    """The first of some segments that a buffer may be brought before, where it gets its offset; None: there is no room
    for it until its update."""

    def fits(before: int) -> bool:
        held.first, held.last = 2 * before - 1, 2 * update + 1
        held.offset = gap_for(held, placed, 0)
        return held.end <= end

    if not fits(range_[-1]):
        return None
    before = range_[bisect_left(range_, True, key=fits)]  # what fits once fits later
    fits(before)
    return before


def held_apart(graph: Graph, results: Sequence[Buffer]) -> tuple[list[Buffer], list[Buffer]]:
    """Other results, and those that are held, in the order in which they were chosen: that of their updates."""
    updates = [op for op in graph.ops if op.phase == "update"]
    brought = {o for op in updates if brings_weights(graph, op, ("fetch",)) for o in op.outputs}
    order = dict.fromkeys(t for op in updates for t in op.given if t in brought)
    by_tensor = {b.key[1]: b for b in results}
    return [b for b in results if b.key[1] not in brought], [by_tensor[t] for t in order]


def place_held(held: Sequence[Buffer], placed: Sequence[Buffer], base: int) -> None:
    """Offsets of what is held, in the order in which it was chosen, among buffers that have theirs."""
    everything = [*placed]
    for buffer in held:
        buffer.offset = gap_for(buffer, everything, base)
        everything.append(buffer)
