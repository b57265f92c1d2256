"""Checks of a plan from a file before it is used: its tables are consistent and follow the rules of
planning.

`read_rows` has checked types and ranges of single fields. This module checks that numbers refer to
existing objects, that settings and classes of devices are those that planning would choose for the
graph and layout, and that memory lies in the arena. Then it runs the checks of new plans
(`ir.validate`). The native program checks signals and deadlocks when it is assembled. Every failure
is reported in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewise.core.errors import TilewiseError
from tilewise.core.mesh import MICRO, DeviceMesh
from tilewise.core.tree import MAX_COUNT
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable
from tilewise.ir.batch import cut_batch
from tilewise.ir.file import require, require_graph
from tilewise.ir.graph import Graph
from tilewise.ir.kinds import Kind
from tilewise.ir.layout import BATCH_SPLITS, GROUPS, K_SPLITS, GraphLayout
from tilewise.ir.program import upper
from tilewise.ir.validate import validate_graph
from tilewise.plan.classes import classes_of
from tilewise.plan.file.fit_kernels import require_kernels
from tilewise.plan.file.fit_program import require_program
from tilewise.plan.memory import OFFLOADED
from tilewise.plan.prove import prove_plan
from tilewise.plan.settings import MAX_WORKERS, settings_for
from tilewise.plan.shapes import LocalShapes, symbols_of
from tilewise.plan.tables import CATEGORIES, REGIONS, PlanTables

__all__ = ["require_fit"]

_COMBINES = ("sum", "max", "or")
_MAX_BYTES = 1 << 62
_MAX_COUNT = 1 << 40


def require_fit(plan: PlanTables) -> None:
    """Reject a plan whose parts are inconsistent.

    Raises:
        Unreadable: says what is inconsistent.
    """
    try:
        _require_counts(plan)
        require_graph(plan.graph)
        _require_layout(plan.graph, plan.layout, plan.mesh, {})
        validate_graph(plan.graph)
        _require_choices(plan)
        require_program(plan)
        require_kernels(plan)
        _require_outside(plan)
        prove_plan(plan)
        _require_optimizer(plan)
    except Unreadable:
        raise
    except TilewiseError as error:
        words = str(error).rpartition(";")[0] or str(error)
        raise Unreadable(f"it breaks a rule: {words}") from None
    except Exception as error:  # a file may break what the stages guarantee
        raise Unreadable(f"its tables do not fit each other: {type(error).__name__} {shown(error)}") from None


def _require_counts(plan: PlanTables) -> None:
    s = plan.settings
    require(1 <= s.workers_per_device <= MAX_WORKERS, "it asks for {} workers", s.workers_per_device)
    require(
        all(1 <= n <= MAX_COUNT for n in (s.accumulation, s.batch_splits, plan.graph.k_splits)),
        f"k splits, batch splits and microbatches must lie in [1, {MAX_COUNT}]",
    )
    rows = s.seq if isinstance(s.seq, int) else s.seq.multiple
    counts = (s.batch, rows, s.padded_bound, plan.num_signals, plan.num_handles, plan.scratch_bytes)
    require(
        all(0 <= n <= _MAX_COUNT for n in counts), "counts must lie in [0, {}]; got {}", _MAX_COUNT, counts
    )
    require(tuple(plan.regions) == REGIONS, "the arena must have the regions {}", ", ".join(REGIONS))
    require(
        set(plan.overhead) <= set(CATEGORIES),
        "overhead must have known categories; got {}",
        ", ".join(plan.overhead),
    )
    sizes = [*plan.regions.values(), *plan.overhead.values()]
    require(min(sizes) >= 0 and sum(sizes) <= _MAX_BYTES, "a device's memory has {} bytes", sum(sizes))
    for buffer in plan.buffers:
        require(
            buffer.category in CATEGORIES and buffer.bytes >= 0 and buffer.offset >= 0,
            "{} is an invalid buffer",
            buffer,
        )
        is_in_file = buffer.category == OFFLOADED
        begin = plan.file_begin if is_in_file else 0
        end = plan.file_begin + plan.file_bytes if is_in_file else plan.arena_bytes
        require(
            begin <= buffer.offset and buffer.offset + buffer.bytes <= end,
            "{} lies outside of {}",
            buffer,
            "the file" if is_in_file else "the arena",
        )


# ---- layouts ------------------------------------------------------------------------------------------------------


def _require_layout(
    graph: Graph, layout: GraphLayout, mesh: DeviceMesh, seen: dict[tuple[int, int], bool]
) -> None:
    """A layout has an entry for every tensor and call of its graph, on axes of the mesh."""
    if seen.setdefault((id(graph), id(layout)), False):
        return
    seen[id(graph), id(layout)] = True
    axes_known = {*mesh.names, MICRO}
    require(layout.mesh == mesh, "{!r} is laid out on {}, the plan on {}", graph.name, layout.mesh, mesh)
    require(not layout.reshards, "{!r} has changes of layout that are not ops", graph.name)
    shards = layout.storage_axes
    require(
        set(shards) <= {*mesh.names} and len(set(shards)) == len(shards),
        "{!r} has storage shards along {}",
        graph.name,
        shards,
    )
    for of in (layout.storage, layout.compute):
        require(
            len(of) == len(graph.tensors),
            "{!r} has {} tensors, its layout {}",
            graph.name,
            len(graph.tensors),
            len(of),
        )
        for tensor, dims in zip(graph.tensors, of):
            axes = [axis for dim in dims for axis in dim]
            is_left = tensor.kind == "result" and tensor.producer is None
            require(
                (len(dims) == len(tensor.shape) or (is_left and not dims))
                and set(axes) <= axes_known
                and len(set(axes)) == len(axes),
                "tensor {} of {!r} has the layout {}",
                tensor.id,
                graph.name,
                dims,
            )
    require(
        all(0 <= t < len(graph.tensors) for t in layout.files) and len({*layout.files}) == len(layout.files),
        "{!r} has {} in files",
        graph.name,
        layout.files,
    )
    calls = {op.id: op for op in graph.ops if op.op == "call"}
    require(
        layout.calls.keys() == calls.keys(),
        "the calls of {!r} must have layouts, and nothing else",
        graph.name,
    )
    for number, op in calls.items():
        _require_layout(graph.templates[op.attrs["template"]].graph, layout.calls[number], mesh, seen)
    for (number, partial), pending_reductions in layout.pending_reductions.items():
        require(
            0 <= number < len(graph.ops), "a pending reduction refers to op {} of {}", number, len(graph.ops)
        )
        for pending in pending_reductions:
            fits = (pending.op, pending.partial) == (number, partial) and set(pending.axes) <= axes_known
            fits = fits and all(0 <= o < len(graph.ops[number].outputs) for o in pending.outputs)
            fits = fits and pending.combine in _COMBINES and pending.tree in (K_SPLITS, GROUPS, BATCH_SPLITS)
            require(fits and 1 <= pending.count <= _MAX_COUNT, "{} is an invalid pending reduction", pending)


def _require_choices(plan: PlanTables) -> None:
    """Settings and classes of devices are those that planning chooses for this graph and layout."""
    s = plan.settings
    batch = cut_batch(plan.graph, s.accumulation, s.batch_splits if s.batch else None)
    # a plan for one of the lengths that the user's graph may have
    if batch.length is None and s.padded_bound:
        require(batch.rows <= s.padded_bound, "{} rows are padded to {}", batch.rows, s.padded_bound)
        batch = replace(batch, bound=s.padded_bound)
    symbols = symbols_of(plan.graph)
    rows = upper(s.row_tile, tuple(symbol.max for symbol in symbols)) if s.batch else None
    chosen = settings_for(plan.graph, plan.layout, batch, s.workers_per_device, s.is_checkpointed, rows)
    require(chosen == s, "planning would choose {}; it has {}", chosen, s)
    shapes = LocalShapes(plan.mesh, s, plan.graph.k_splits, symbols)
    classes = classes_of(plan.graph, plan.layout, shapes)
    class_of = {device: c for c, devices in enumerate(classes) for device in devices}
    require(
        plan.kinds == tuple(devices[0] for devices in classes),
        "its classes must be represented by the devices {}",
        plan.kinds,
    )
    require(
        [d.class_id for d in plan.program.devices] == [class_of[d] for d in range(plan.mesh.num_devices)],
        "its devices must be in the classes that planning chooses",
    )


def _require_outside(plan: PlanTables) -> None:
    """Every tensor that users read or write has an entry per part, as large as its part on every
    class of devices.
    """
    outputs = set(plan.graph.outputs.values())
    wanted = {t.id for t in plan.graph.tensors if t.kind != "result" or t.id in outputs}
    require(plan.outside.keys() == wanted, "tensors from outside, and no others, must have entries")
    fit: set[tuple[object, ...]] = set()
    files = frozenset(plan.layout.files)
    for tensor, entries in plan.outside.items():
        node = plan.graph.tensors[tensor]
        layout = plan.layout.compute[tensor]
        require(
            len(entries) in (1, plan.settings.accumulation),
            "{!r} has {} parts",
            node.spec.name,
            len(entries),
        )
        for of, device in zip(plan.program.classes, plan.kinds):
            for number in entries:
                require(0 <= number < len(of.entries), "{!r} has no entry {}", node.spec.name, number)
                e = of.entries[number]
                require(
                    (e.offset >= plan.file_begin) == (tensor in files),
                    "the entry of {!r} must be in memory or in the file, as its layout says",
                    node.spec.name,
                )
                key = device, node.spec.form, layout, e.extent, e.cols, e.stride, e.dtype
                if key in fit:
                    continue
                shapes = plan.shapes.on(device)
                is_vector = node.spec.storage == "vector"
                rows = 1 if is_vector else _rows(shapes.extent(node.spec, layout), plan.symbol_bounds)
                cols = shapes.cols(node.spec, layout)
                actual = _rows(e.extent, plan.symbol_bounds), e.cols, e.stride, e.dtype
                expected = rows, cols, shapes.stride(node.spec, cols), node.spec.dtype.name
                require(
                    actual == expected, "{!r} must be {}; its entry is {}", node.spec.name, expected, actual
                )
                fit.add(key)


def _rows(extent: object, bounds: Sequence[int]) -> int:
    return extent.upper(tuple(bounds))  # type: ignore[attr-defined, no-any-return]


def _require_optimizer(plan: PlanTables) -> None:
    if plan.optimizer is None:
        return
    require(isinstance(plan.optimizer, Kind), "{} is no optimizer", plan.optimizer)
    assert isinstance(plan.optimizer, Kind)
    for problem in plan.optimizer.problems_in(plan.graph)[:1]:
        raise Unreadable(f"{type(plan.optimizer).__name__} does not fit its graph: {problem}")
