"""Makes a plan of a laid-out graph: segments and schedule, lowering, memory, tables, programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilewise.core.errors import PlanError
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.program import DeviceClass, TileProgram
from tilewise.ir.schedule import Schedule
from tilewise.ir.validate import Work, validate_bindings
from tilewise.plan.accumulation import find_batch_sums, require_whole_batch
from tilewise.plan.buffers import (
    OFFLOADED,
    RootTensors,
    carry_and_ring_buffers,
    lasting_buffers,
    result_buffers,
)
from tilewise.plan.calls import Calls
from tilewise.plan.classes import DeviceNumbers, classes_of
from tilewise.plan.lower import alias_roots
from tilewise.plan.memory import Buffer
from tilewise.plan.outputs import gather_outputs
from tilewise.plan.plan import Plan
from tilewise.plan.rings import RING_DEPTH, place_of_use
from tilewise.plan.segments import cut_segments
from tilewise.plan.shapes import LocalShapes, PlanSettings, symbols_of
from tilewise.plan.validate import validate_plan
from tilewise.plan.variants import Use, Variants, lower_variants
from tilewise.processes.workers import WorkerPool

__all__ = ["make_plan"]

Overhead = Callable[[int, int, int, int], Mapping[str, int]]
MakeSchedule = Callable[[Sequence[str], int], Schedule]


def _no_overhead(workers: int, signals: int, handles: int, scratch: int) -> Mapping[str, int]:
    return {}


def make_plan(
    graph: Graph,
    layout: GraphLayout,
    settings: PlanSettings,
    schedule: MakeSchedule,
    optimizer: object = None,
    overhead: Overhead = _no_overhead,
    pool: WorkerPool | None = None,
    definition: str = "",
) -> Plan:
    """Lower, place and order a laid-out graph.

    Args:
        schedule: returns the order of a step, from the phases of all segments and the number of microbatches.
        overhead: returns the bytes by category that a device needs besides its arena, from its numbers of workers,
            signals and handles and from the scratch bytes per worker.
        pool: worker processes that lower templates, if there are many.
        definition: the digest of the graph as its author defined it.

    Raises:
        LayoutError: a device would get no part of a tensor, or sizes do not divide as the strategy needs.
        PlanError: the graph has no op.
    """
    graph, layout = gather_outputs(graph, layout)
    if not graph.ops:
        raise PlanError(f"[plan.make_plan] a graph must contain an op; got none in {graph.name!r}; add one")
    shapes = LocalShapes(layout.mesh, settings, graph.k_splits, symbols_of(graph))
    classes = classes_of(graph, layout, shapes)
    shapes = replace(shapes, kinds=tuple(devices[0] for devices in classes))
    sums = find_batch_sums(graph)
    if settings.accumulation > 1:
        require_whole_batch(graph, sums)
    roots = alias_roots(graph, graph.ops, frozenset(graph.outputs.values()))
    tensors = RootTensors(graph, layout, shapes, sums, roots)
    segments = cut_segments(graph)
    order = schedule([s.phase for s in segments], settings.accumulation)
    numbers = DeviceNumbers(shapes)
    variants = lower_variants(graph, layout, shapes, segments, order, sums, roots, numbers, pool)
    lasting = [*carry_and_ring_buffers(tensors, variants), *lasting_buffers(tensors)]
    calls = Calls(graph, tensors, lasting, result_buffers(tensors, segments))
    calls.take_all(variants)
    binder, outside = calls.binder, calls.outside
    buffers, regions = calls.placed()
    program = _program(calls, variants, numbers, classes, buffers)
    _validate_bindings(program, variants, tensors)
    needs = (
        settings.workers_per_device,
        variants.num_signals,
        binder.table.num_handles,
        variants.scratch_bytes,
    )
    plan = Plan(
        graph,
        layout,
        settings,
        shapes.kinds,
        program,
        outside,
        tuple(buffers),
        regions,
        *needs[1:],
        tuple(variant.layout for variant in variants.variants),
        optimizer,
        overhead(*needs),
        definition,
    )
    validate_plan(plan, {v.number: v.values for v in variants.variants if v.values is not None})
    return plan


def _work_of(graph: Graph, variants: Variants, use: Use) -> Work:
    segment, rings = use.segment, variants.variants[use.variant].rings
    places = tuple(place_of_use(use.ring_use, age) for age in range(RING_DEPTH))
    return Work(segment.name(graph), segment.call, use.microbatch, rings, places)


def _validate_bindings(program: TileProgram, variants: Variants, tensors: RootTensors) -> None:
    """Check the calls against the graph's ops."""
    graph = tensors.graph
    bound = [(u, _work_of(graph, variants, u)) for u in variants.uses]
    work = {
        name: tuple(w for use, w in bound if use.segment.phase in included)
        for name, included in _lists(variants, tensors.shapes).items()
    }
    work["broadcast"] = (Work("broadcast"),)
    validate_bindings(program, graph, work, tensors.roots, tensors.num_parts)


def _lists(variants: Variants, shapes: LocalShapes) -> Mapping[str, tuple[str, ...]]:
    """The programs of a graph, and the phases that each runs: `forward`, and with a loss `backward`
    and `step`.

    With several microbatches, a separate backward pass would have only the activations of the last
    one, so there is no program `backward`.
    """
    wanted: dict[str, tuple[str, ...]] = {"forward": ("forward",)}
    if any(use.segment.phase == "backward" for use in variants.uses):
        if shapes.settings.accumulation == 1:
            wanted["backward"] = ("backward",)
        wanted["step"] = ("forward", "backward", "update")
    return wanted


def _program(
    bound: Calls,
    variants: Variants,
    numbers: DeviceNumbers,
    classes: Sequence[Sequence[int]],
    buffers: Sequence[Buffer],
) -> TileProgram:
    """The lists of calls; on several devices also `broadcast`."""
    binder, shapes = bound.binder, bound.binder.tensors.shapes
    calls = {
        name: tuple(call for phase, call in bound.calls if phase in included)
        for name, included in _lists(variants, shapes).items()
    }
    runs = [variants.uses]
    # all microbatches' forward passes in a row, an order that no step has
    if shapes.settings.accumulation > 1:
        runs.append(variants.uses_alone("forward"))
        calls["forward"] = tuple(
            call if call.numbers == use.numbers else replace(call, numbers=use.numbers)
            for call, use in zip(calls["forward"], runs[1])
        )
    templates = [[v.templates[c] for v in variants.variants] for c in range(len(classes))]
    if shapes.mesh.num_devices > 1:
        copies, call = binder.broadcast(numbers)
        calls["broadcast"] = (call,)
        templates = [[*of, copy] for of, copy in zip(templates, copies)]
    aliases = binder.table.aliases(
        [b for b in buffers if b.category in ("gradients", "gathered", "activations", OFFLOADED)],
        [[bound.live_intervals[use.variant] for use in uses] for uses in runs],
    )
    class_of = {device: c for c, devices in enumerate(classes) for device in devices}
    return TileProgram(
        tuple(
            DeviceClass(tuple(of), tuple(entries), aliases, calls)
            for of, entries in zip(templates, binder.table.tables)
        ),
        numbers.bindings(class_of),
    )
