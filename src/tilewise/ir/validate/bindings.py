"""Which tensors a call of a tile program means: those that the graph's ops name, and no others of their shapes.

The slots of a template name tensors of the graph that it was lowered from; a call binds them to entries, and the key of
an entry says what lies there. Arguments and results of a layer are taken from the op that calls it, one after the
other. So bindings that are exchanged, within a call or between layers, microbatches or devices, are found.

Not shown: that entries with different keys lie apart (`validate_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tilewise.core.errors import InternalError
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.program import Call, LoweredTemplate, Slot, TileProgram, memory_kind

__all__ = ["Work", "validate_bindings"]

_Key = tuple[object, ...]


class Work(NamedTuple):
    """What a call of a list does: the template of that name, for a layer's op (None: for ops of the root graph).

    Attributes:
        rings: the template whose rings it uses.
        places: in them, of this use, of the one before, and so on.
    """

    template: str
    layer: OpNode | None = None
    microbatch: int = 0
    rings: int = -1
    places: tuple[int, ...] = ()


def validate_bindings(
    program: TileProgram,
    graph: Graph,
    work: Mapping[str, Sequence[Work]],
    roots: Mapping[int, int],
    num_parts: Callable[[int], int],
) -> None:
    """Every slot of every call is bound to what it stands for.

    Args:
        work: of each list, call by call.
        roots: tensor of the root graph -> tensor whose memory it shares.
        num_parts: of a tensor of the root graph, one per microbatch.

    Raises:
        InternalError: names the call, and what its slot means and is bound to.
    """
    known: list[list[_Key]] = []  # the keys of entries, where classes differ in them
    seen: set[tuple[int, int, int]] = set()  # lists and classes share calls
    for of in program.classes:
        keys = [entry.key for entry in of.entries]
        if keys not in known:
            known.append(keys)
        form = known.index(keys)
        for name, calls in of.calls.items():
            if len(calls) != len(work[name]):
                _refuse("a list has a call per segment", f"{len(calls)} of {len(work[name])} in {name!r}")
            for call, own in zip(calls, work[name]):
                mark = id(call), id(own), form
                if mark not in seen:
                    seen.add(mark)
                    meant = _Meaning(graph, roots, num_parts, own, call)
                    _validate_call(of.templates[call.template], call, keys, meant, name)


class _Meaning:
    """What the slots of one call stand for."""

    def __init__(
        self,
        graph: Graph,
        roots: Mapping[int, int],
        num_parts: Callable[[int], int],
        work: Work,
        call: Call,
    ) -> None:
        self.roots, self.num_parts, self.work, self.number = roots, num_parts, work, call.template
        self.actual: dict[int, int] | None = None
        if work.layer is not None:
            op = work.layer
            template = graph.templates[op.attrs["template"]]
            outside = (*template.arguments, *template.results, *op.attrs["saved"])
            self.actual = {t: o for t, o in zip(outside, (*op.inputs, *op.outputs)) if o is not None}

    def key_of(self, slot: Slot) -> _Key:
        """The key of the entry that it must be bound to."""
        if slot.kind in ("temp", "temp_flat"):
            return slot.kind, self.number, slot.id
        kind = memory_kind(slot.kind)
        if kind == "ring":
            return slot.kind, self.work.rings, slot.id, self.work.places[slot.level]
        tensor = slot.id if self.actual is None else self.actual.get(slot.id)
        if kind in ("carry", "stack"):
            if tensor is None and self.work.layer is not None:
                return slot.kind, self.work.layer.id, slot.id, slot.level
            return slot.kind, None, tensor, slot.level
        if tensor is None:
            return "inner_flat" if slot.kind == "flat" else "inner", self.number, slot.id
        root = self.roots.get(tensor, tensor)
        microbatch = self.work.microbatch
        return slot.kind, root, microbatch if microbatch and self.num_parts(root) > 1 else 0


def _validate_call(
    template: LoweredTemplate, call: Call, keys: Sequence[_Key], meant: _Meaning, name: str
) -> None:
    if template.name != meant.work.template or len(call.binding) != len(template.slots):
        _refuse(
            "a call uses its segment's template",
            f"{template.name!r} for {meant.work.template!r} in {name!r}",
        )
    for slot, entry in zip(template.slots, call.binding):
        key = meant.key_of(slot)
        if keys[entry] != key:
            _refuse(
                "a slot is bound to the tensor that it stands for",
                f"{keys[entry]} for {key} in a call of {template.name!r} in {name!r}",
            )


def _refuse(rule: str, got: str) -> None:
    raise InternalError(f"[ir.validate] {rule}; got {got}; please report the plan")
