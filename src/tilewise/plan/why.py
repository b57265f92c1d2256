"""Why a tensor, a layer or an op is where it is, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tilewise.core.errors import PlanError
from tilewise.core.mesh import Axes
from tilewise.core.validation import Validator, nearest
from tilewise.ir.graph import TensorNode
from tilewise.ir.layout import in_space, show_axes
from tilewise.ir.program import Access, Source, TensorEntry, upper
from tilewise.plan.calls import planned_calls
from tilewise.plan.explain import name_runs, short_name
from tilewise.plan.passes import first_devices
from tilewise.plan.policy import PolicyRules, layer_of, names_of_op

if TYPE_CHECKING:
    from tilewise.plan.tables import PlanTables

__all__ = ["explain_why"]

_MOST = 4  # distinct lines about ops
_validate = Validator("plan", PlanError)


def explain_why(plan: PlanTables, name: str) -> str:
    """Why a named tensor has its layout, tiles and devices, and which workers use it; or where a
    layer or an op runs, and why.

    Raises:
        PlanError: there is nothing of that name.
    """
    tensor = next((t for t in plan.graph.tensors if t.spec.name == name), None)
    if tensor is None and name in plan.graph.outputs:
        tensor = plan.graph.tensors[plan.graph.outputs[name]]
    if tensor is not None:
        return _why_tensor(plan, tensor, name)
    uses = [*_uses_of(plan, name)]
    if uses:
        return " ".join(uses)
    names = [*plan.graph.outputs, *(t.spec.name for t in plan.graph.tensors if t.spec.name)]
    closest = nearest(name, [*names, *(op.label for op in plan.graph.ops)]) if isinstance(name, str) else None
    _validate.invalid(
        "why",
        "a name must be that of a tensor, a layer or an op of the graph",
        repr(name),
        f"did you mean {closest!r}?" if closest else "see the names in print(plan.graph)",
    )


# ---- tensors -----------------------------------------------------------------------------------------------


def _why_tensor(plan: PlanTables, tensor: TensorNode, name: str) -> str:
    spec, layout = tensor.spec, plan.layout.compute[tensor.id]
    shards = [
        f"dim {d} ({s.name if s else 'unlabelled'}) on {show_axes(a)}"
        for d, (a, s) in enumerate(zip(layout, spec.labels))
        if a
    ]
    where = "; ".join(shards) if shards else "replicated: no axis of the mesh shards its labels"
    where += "; in the device's file" if tensor.id in plan.layout.files else ""
    device = first_devices(plan)[plan.layout.stages_of(tensor.id)[0]]
    if tensor.id not in plan.outside:
        return f"{name} {spec}: {where}. It exists only inside the devices."
    entry = plan.entry(device, tensor.id)
    if entry.extent.upper(plan.symbol_bounds) == 0:
        return (
            f"{name} {spec}: {where}. Device {device} holds nothing of it: it has fewer panels than storage "
            "shards."
        )
    return " ".join(
        (
            f"{name} {spec}: {where}.",
            *_origin(plan, tensor),
            _tiles(plan, device, entry, spec.storage),
            _rows(plan, tensor),
            _devices(plan, tensor),
            *_users(plan, device, tensor.id),
        )
    )


def _origin(plan: PlanTables, tensor: TensorNode) -> Iterator[str]:
    """Where the layout comes from."""
    axes: Axes = tuple(a for of in plan.layout.compute[tensor.id] for a in in_space(of))
    if tensor.spec.dist_hint is not None:
        yield "Its declaration asks for this layout."
    elif axes:
        stored = [a for a in axes if a in plan.settings.storage_axes]
        labelled = [a for a in axes if a not in stored]
        if labelled:
            yield f"The strategy shards these labels by {', '.join(labelled)}."
        if stored:
            yield f"The strategy shards stored state by {', '.join(stored)}."


def _tiles(plan: PlanTables, device: int, entry: TensorEntry, storage: str) -> str:
    rows = entry.extent.upper(plan.symbol_bounds)
    bound = "up to " if entry.extent.source == Source.SYMBOL else ""
    tile = upper(entry.tile_rows, plan.symbol_bounds)
    up_to = "" if isinstance(entry.tile_rows, int) else "up to "
    across = f" x {entry.tile_cols} columns" if entry.tile_cols else ""
    return (
        f"Device {device} holds {bound}{rows} rows x {entry.cols} columns in tiles of {up_to}{tile} rows{across} "
        f"({storage} storage)."
    )


def _rows(plan: PlanTables, tensor: TensorNode) -> str:
    """Why its tiles have that many rows."""
    spec = tensor.spec
    if spec.tile_hint:
        return "Its tile_hint states the rows."
    if spec.is_packed:
        return "Weights have tiles of whole panels, up to 512 rows, or all of at most 1024."
    if spec.storage == "vector" or tensor.kind in ("state", "constant"):
        return "Vectors, states and constants are one tile."
    if not plan.settings.batch:
        return "Without a batch, a tile has the rows of whole sequences of attention, or 128."
    return (
        f"A tile has whole sequences of one batch split, at most {plan.settings.most_rows} rows if one fits."
    )


def _devices(plan: PlanTables, tensor: TensorNode) -> str:
    """Which devices have parts, and which have copies."""
    having = [d for d in range(plan.mesh.num_devices) if plan.has(d, tensor.id)]
    holders = sorted({plan.holder(tensor.id, d) for d in having})
    if len(having) == 1:
        return f"Device {having[0]} has all of it."
    if len(holders) == len(having):
        return f"Devices {name_runs(having)} have a part each."
    copies = "all of it" if len(holders) == 1 else f"{len(holders)} parts, with copies"
    return f"Devices {name_runs(having)} have {copies}."


def _users(plan: PlanTables, device: int, tensor: int) -> Iterator[str]:
    """The ops that write it and those that read it, and their workers."""
    program = "step" if "step" in plan.programs else plan.programs[0]
    of = plan.class_of(device)
    rules = PolicyRules(plan.settings.policy, plan.settings.workers_per_device)
    users: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for call, segment, _ in planned_calls(plan, device, program):
        slots = {n for n, entry in enumerate(call.binding) if of.entries[entry].key[:2] in _keys(tensor)}
        layer = None if segment.call is None else (segment.call.label, segment.call.attrs["template"])
        for instruction in of.templates[call.template].instructions if slots else ():
            for operand in instruction.operands:
                if operand.slot in slots and not operand.null:
                    is_written = bool((operand.role or operand.access) & Access.OUT)
                    inside = "" if layer is None else f" in {layer[0]}"
                    worker = rules.source_of(instruction.label, layer)
                    users[is_written][f"{names_of_op(instruction.label)[1]}{inside}: {worker}"] = None
    for is_written, words in users.items():
        lines = [*words]
        more = f"; and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
        if lines:
            yield f"{'Written' if is_written else 'Read'} by {'; '.join(lines[:_MOST])}{more}."


def _keys(tensor: int) -> tuple[tuple[object, ...], ...]:
    return ("tensor", tensor), ("flat", tensor)


# ---- layers and ops ----------------------------------------------------------------------------------------


def _uses_of(plan: PlanTables, name: str) -> Iterator[str]:
    """A sentence per kind of use of a layer or an op; nothing if there is no such name."""
    rules = PolicyRules(plan.settings.policy, plan.settings.workers_per_device)
    program = "step" if "step" in plan.programs else plan.programs[0]
    sentences: dict[str, list[int]] = {}
    for device in first_devices(plan):
        of = plan.class_of(device)
        for call, segment, _ in planned_calls(plan, device, program):
            op = segment.call
            layer = None if op is None else (op.label, op.attrs["template"])
            if layer is not None and name in (layer[0], layer_of(layer[0])):
                text = f"{layer[0]} is a {segment.phase} call of {short_name(layer[1])}"
                sentences.setdefault(f"{text}, by {rules.source_of('', layer)}", []).append(device)
                continue
            for instruction in of.templates[call.template].instructions:
                if name in names_of_op(instruction.label):
                    inside = "" if layer is None else f" in {layer[0]}"
                    text = f"{name}{inside} is run by {rules.source_of(instruction.label, layer)}"
                    sentences.setdefault(text, []).append(device)
    devices = {d: plan.layout.stage_of(d) for d in range(plan.mesh.num_devices)}
    for text, firsts in sentences.items():
        stages = {plan.layout.stage_of(first) for first in firsts}
        own = [d for d, stage in devices.items() if stage in stages]
        yield f"{text}, on device {name_runs(own)}."
