"""Checks that each call of a tile program is bound to the tensors that the graph's ops name, not to
other tensors of the same shape.

A template's slots refer to tensors of the graph that the template was lowered from. A call binds
them to entries, whose keys say which tensors they hold (ir/program.py). Arguments and results of a
layer are compared, in order, with those of the op that calls it. This finds bindings that are
exchanged within a call, or between layers, microbatches or devices. It does not show that entries
with different keys have different memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tilewise.core.errors import InternalError
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.program import Call, LoweredTemplate, TileProgram, memory_kind

__all__ = ["Work", "validate_bindings"]

_Key = tuple[object, ...]


class Work(NamedTuple):
    """What a call does: it runs the template of this name, for the op that calls a layer (None: for
    ops of the root graph).

    Attributes:
        rings: the template whose rings it uses.
        places: the call's places in these rings: the place of this use, of the use before, and so
            on.
    """

    template: str
    layer: OpNode | None = None
    microbatch: int = 0
    rings: int = -1
    places: tuple[int, ...] = ()


def validate_bindings(
    program: TileProgram,
    graph: Graph,
    work: Sequence[Mapping[str, Sequence[Work]]],
    roots: Mapping[int, int],
    part: Callable[[int, int], int],
) -> None:
    """Check that every slot of every call is bound to the tensor that the slot refers to.

    Args:
        work: per class, what each call of each list does.
        roots: tensor of the root graph -> the tensor whose memory it shares.
        part: returns which part of a tensor of the root graph a microbatch uses.

    Raises:
        InternalError: names the call, what its slot refers to, and what it is bound to.
    """
    key_lists: list[list[_Key]] = []  # the distinct key lists of classes
    seen: set[tuple[int, int, int]] = set()  # lists and classes share calls
    meanings: dict[object, _Meaning] = {}
    for of, of_lists in zip(program.classes, work):
        keys = [entry.key for entry in of.entries]
        if keys not in key_lists:
            key_lists.append(keys)
        form = key_lists.index(keys)
        for name, calls in of.calls.items():
            works = of_lists[name]
            if len(calls) != len(works):
                _invalid("a list must have a call per segment", f"{len(calls)} of {len(works)} in {name!r}")
            for call, own in zip(calls, works):
                mark = id(call), id(own), form
                if mark not in seen:
                    seen.add(mark)
                    template = of.templates[call.template]
                    layer = own.layer
                    sort = (
                        id(template),
                        None if layer is None else (layer.attrs["template"], layer.attrs["saved"]),
                    )
                    if sort not in meanings:
                        meanings[sort] = _Meaning(graph, roots, part, template, layer)
                    _validate_call(template, call, own, keys, meanings[sort], name)


class _Meaning:
    """The tensors that the slots of a template refer to, in calls for layers that save the same
    tensors.
    """

    def __init__(
        self,
        graph: Graph,
        roots: Mapping[int, int],
        part: Callable[[int, int], int],
        template: LoweredTemplate,
        layer: OpNode | None,
    ) -> None:
        self.roots, self.part = roots, part
        place: dict[int, int] | None = None  # of a layer's tensors among the operands and results of its call
        if layer is not None:
            inside = graph.templates[layer.attrs["template"]]
            outside = (*inside.arguments, *inside.results, *layer.attrs["saved"])
            place = {t: i for i, t in enumerate(outside)}
        self.places = [s.id if place is None else place.get(s.id, -1) for s in template.slots]
        self.slots = template.slots

    def keys_of(self, work: Work, number: int) -> list[_Key]:
        """The keys of the entries that a call of template `number` must be bound to, slot by slot."""
        layer, roots, microbatch = work.layer, self.roots, work.microbatch
        bound = None if layer is None else (*layer.inputs, *layer.outputs)
        keys: list[_Key] = []
        for slot, place in zip(self.slots, self.places):
            kind = slot.kind
            tensor = place if bound is None else None if place < 0 else bound[place]
            if kind == "tensor" or kind == "flat":
                if tensor is None:
                    keys.append(("inner_flat" if kind == "flat" else "inner", number, slot.id))
                else:
                    root = roots.get(tensor, tensor)
                    of = max(microbatch - slot.level, 0)  # level 1: of the microbatch before
                    keys.append((kind, root, self.part(root, of)))
            elif kind in ("temp", "temp_flat"):
                keys.append((kind, number, slot.id))
            elif memory_kind(kind) == "ring":
                keys.append((kind, work.rings, slot.id, work.places[slot.level]))
            elif tensor is None and layer is not None:
                keys.append((kind, layer.id, slot.id, slot.level))
            else:
                keys.append((kind, None, tensor, slot.level))
        return keys


def _validate_call(
    template: LoweredTemplate, call: Call, work: Work, keys: Sequence[_Key], meaning: _Meaning, name: str
) -> None:
    if template.name != work.template or len(call.binding) != len(template.slots):
        _invalid(
            "a call must use its segment's template",
            f"{template.name!r} for {work.template!r} in {name!r}",
        )
    for entry, key in zip(call.binding, meaning.keys_of(work, call.template)):
        if keys[entry] != key:
            _invalid(
                "a slot must be bound to the tensor that it refers to",
                f"{keys[entry]} for {key} in a call of {template.name!r} in {name!r}",
            )


def _invalid(rule: str, got: str) -> None:
    raise InternalError(f"[ir.validate] {rule}; got {got}; please report the plan")
