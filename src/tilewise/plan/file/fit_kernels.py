"""Checks the instructions of a plan from a file against the kernel table, as planning checks its
own.

Operands, integers and floats are read back from an instruction by the table's names and emitted
again over the tensors that its calls bind. The result must be the same instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod

from tilewise.files.reading import Unreadable
from tilewise.ir.file import require
from tilewise.ir.graph import Graph
from tilewise.ir.lowering import Ref
from tilewise.ir.program import (
    Access,
    DeviceClass,
    Instruction,
    LoweredTemplate,
    NumberLike,
    Operand,
    Slot,
    TensorEntry,
    constant_part,
    upper,
)
from tilewise.kernels import KERNELS, KernelSpec, find_update_problem, kernel_spec
from tilewise.kernels.scratch import scratch_bytes
from tilewise.plan.emission import make_instruction
from tilewise.plan.tables import PlanTables

__all__ = ["require_kernels"]

_FLAT = ("flat", "temp_flat", "carry_flat", "ring_flat", "stack")


def require_kernels(plan: PlanTables) -> None:
    """Reject instructions that no op could have emitted.

    Raises:
        Unreadable: names the instruction.
        InternalError: the same, with the message of planning.
    """
    seen: set[tuple[int, ...]] = set()
    for of in plan.program.classes:
        bound = _bound(of)
        for number, template in enumerate(of.templates):
            if number not in bound:  # no device calls it
                continue
            refs = _refs(plan.graph, template, bound[number])
            for instruction in template.instructions:
                if not instruction.kernel:
                    continue
                entries = (bound[number][o.slot] for o in instruction.operands if not o.null)
                key = (id(instruction), *map(id, entries))
                if key not in seen:
                    seen.add(key)
                    _require_emitted(template.name, instruction, refs)
                    _require_scratch(plan, instruction, refs)
                    if kernel_spec(instruction.kernel).base == "update":
                        _require_update(plan.graph, template, instruction, refs)


def _bound(of: DeviceClass) -> dict[int, list[TensorEntry]]:
    """Per called template, the entry of each slot. All calls must bind entries that are divided alike."""
    bound: dict[int, list[TensorEntry]] = {}
    for calls in of.calls.values():
        for call in calls:
            entries = [of.entries[e] for e in call.binding]
            first = bound.setdefault(call.template, entries)
            alike = first is entries or all(map(_are_alike, first, entries))
            require(alike, "calls of {!r} bind tensors of other shapes", of.templates[call.template].name)
    return bound


def _are_alike(first: TensorEntry, other: TensorEntry) -> bool:
    return first is other or (
        (first.extent, first.cols, first.stride, first.dtype, first.tile_rows, first.tile_cols)
        == (other.extent, other.cols, other.stride, other.dtype, other.tile_rows, other.tile_cols)
    )


def _refs(root: Graph, template: LoweredTemplate, entries: Sequence[TensorEntry]) -> list[Ref]:
    """The view that an op has of each slot."""
    graph = _graph_of(root, template)
    return [
        Ref(i, e.extent, e.cols, e.dtype, e.tile_rows, _is_packed(graph, template, slot), e.tile_cols)
        for i, (slot, e) in enumerate(zip(template.slots, entries))
    ]


def _graph_of(root: Graph, template: LoweredTemplate) -> Graph:
    """The graph that a template lowers: a layer's, or the root graph."""
    layer = root.templates.get(template.name)
    return root if layer is None else layer.graph


def _is_packed(graph: Graph, template: LoweredTemplate, slot: Slot) -> bool:
    if slot.kind in _FLAT:
        return False
    if slot.kind == "temp":
        return template.temps[slot.id].packed
    return graph.spec(slot.id).storage == "packed"


def _require_emitted(maker: str, instruction: Instruction, refs: Sequence[Ref]) -> None:
    spec = kernel_spec(instruction.kernel)
    suffix = instruction.kernel.removeprefix(spec.base).removeprefix("_")
    emitted = make_instruction(
        spec.base,
        maker=f"template {maker!r}",
        label=instruction.label,
        extent=instruction.extent,
        step=instruction.step,
        tiles=dict(_operands(spec, instruction)),
        ref_of=refs.__getitem__,
        dtype=suffix or None,
        ints=dict(_integers(spec, instruction)),
        floats=dict(_floats(spec, instruction)),
        priority=instruction.priority,
    ).instruction
    for name in ("kernel", "operands", "ints", "floats"):
        if getattr(emitted, name) != getattr(instruction, name):
            raise Unreadable(f"{instruction.label!r} has other {name} than its kernel's table says")


def _require_scratch(plan: PlanTables, instruction: Instruction, refs: Sequence[Ref]) -> None:
    """Kernels use their worker's scratch memory without checking its size."""
    bounds = plan.symbol_bounds
    shapes = [
        (0, 0) if o.null else (refs[o.slot].extent.upper(bounds), refs[o.slot].cols)
        for o in instruction.operands
    ]
    need = scratch_bytes(instruction.kernel, [constant_part(i, bounds) for i in instruction.ints], shapes)
    require(
        need <= plan.scratch_bytes,
        "{!r} needs {} bytes of scratch memory, more than the plan has",
        instruction.label,
        need,
    )


def _require_update(
    root: Graph, template: LoweredTemplate, instruction: Instruction, refs: Sequence[Ref]
) -> None:
    """An update's integers are a program, and say whether its tensors are stored in panels. The
    kernel checks neither.
    """
    ints = dict(_integers(KERNELS["update"], instruction))
    arrays, hyper = instruction.operands[1:-2], instruction.operands[-2]
    num_values = len(arrays) + refs[hyper.slot].cols + len(instruction.floats)
    steps, left = ints["step"], ints["left"]
    assert isinstance(steps, list) and isinstance(left, list)
    require(
        type(ints["num_steps"]) is int, "the number of steps of {!r} must be an integer", instruction.label
    )
    problem = find_update_problem(num_values, len(arrays) - 1, steps, left)
    require(not problem, "the steps of {!r} are no valid update: {}", instruction.label, problem)
    graph = _graph_of(root, template)
    slots = [template.slots[o.slot] for o in instruction.operands[:-2] if not o.null]
    storages = {graph.spec(slot.id).storage for slot in slots if slot.memory[0] != "temp"}
    require(
        ints["packed"] == 0 or (ints["packed"] == 1 and storages <= {"packed"}),
        "{!r} treats tensors as packed that are not",
        instruction.label,
    )


def _operands(
    spec: KernelSpec, instruction: Instruction
) -> Iterator[tuple[str, Operand | list[Operand] | None]]:
    """Operands by name. Lists alternate within one run between single operands."""
    operands = [
        None if o.null else o._replace(access=Access.NONE, role=Access.NONE) for o in instruction.operands
    ]
    num_single = sum(not o.is_list for o in spec.operands)
    for is_list, group in groupby(spec.operands, key=lambda o: o.is_list):
        names = [o.name for o in group]
        count = len(instruction.operands) - num_single if is_list else len(names)
        taken, operands = operands[:count], operands[count:]
        for i, name in enumerate(names):
            members = [o for o in taken[i :: len(names)] if o is not None]
            yield name, members if is_list else taken[i]


def _integers(
    spec: KernelSpec, instruction: Instruction
) -> Iterator[tuple[str, NumberLike | list[NumberLike]]]:
    by_name: dict[str, NumberLike] = {}
    ints = list(instruction.ints)
    for i in spec.ints:
        if not i.is_list:
            by_name[i.name] = ints.pop(0)
            if i.source is None:
                yield i.name, by_name[i.name]
            continue
        length = (
            prod(int(f) if f.isdigit() else upper(by_name[f]) for f in i.length) if i.length else len(ints)
        )
        yield i.name, ints[: max(length, 0)]
        ints = ints[max(length, 0) :]
    require(not ints, "{!r} has {} surplus integers", instruction.label, len(ints))


def _floats(spec: KernelSpec, instruction: Instruction) -> Iterator[tuple[str, float | list[float]]]:
    floats = list(instruction.floats)
    for name in spec.floats:
        if name.endswith("..."):
            yield name.removesuffix("..."), floats
            return
        yield name, floats.pop(0)
    require(not floats, "{!r} has {} surplus floats", instruction.label, len(floats))
