"""Which tensors a call of a tile program means: those that the graph's ops name, and no others of their shapes.

The slots of a template name tensors of the graph that it was lowered from; a call binds them to entries, and the key of
an entry says what lies there. Arguments and results of a layer are taken from the op that calls it, one after the
other. So bindings that are exchanged, within a call or between layers, microbatches or devices, are found.

Not shown: that entries with different keys lie apart (`validate_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.core.errors import InternalError
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.program import Call, LoweredTemplate, TileProgram, memory_kind

__all__ = ["Work", "validate_bindings"]

_Key = tuple[object, ...]
_Ints = npt.NDArray[np.int64]
_KINDS = (
    "tensor",
    "flat",
    "inner",
    "inner_flat",
    "temp",
    "temp_flat",
)  # of entries: the same two after the other
_INNER, _TEMP = 2, 4
_KIND_INSIDE = {
    "tensor": 2,
    "flat": 3,
    "temp": 4,
    "temp_flat": 5,
}  # by the kind of a slot that sees no outer tensor
_OTHER = (-1, -1, -1)


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
    known: list[_Keys] = []  # of entries, where classes differ in them
    seen: set[tuple[int, int, int]] = set()  # lists and classes share calls
    meanings = _Meanings(graph, roots, num_parts)
    for of in program.classes:
        own = [entry.key for entry in of.entries]
        keys = next((k for k in known if k.keys == own), None)
        if keys is None:
            keys = _Keys(own)
            known.append(keys)
        uses = []
        for name, calls in of.calls.items():
            if len(calls) != len(work[name]):
                _refuse("a list has a call per segment", f"{len(calls)} of {len(work[name])} in {name!r}")
            for call, does in zip(calls, work[name]):
                mark = id(call), id(does), id(keys)
                if mark not in seen:
                    seen.add(mark)
                    uses.append(_Use(call, does, name, meanings.of(of.templates[call.template], does)))
        _validate_uses(uses, keys, meanings)


class _Keys:
    """The keys of all entries, and as columns what those of tensors and temporaries say."""

    def __init__(self, keys: list[_Key]) -> None:
        self.keys = keys
        code = {kind: i for i, kind in enumerate(_KINDS)}
        columns = [(code[k[0]], k[1], k[2]) if k[0] in code and len(k) == 3 else _OTHER for k in keys]
        self.columns = np.array(columns or [_OTHER], np.int64)


class _Meaning(NamedTuple):
    """What the slots of a template stand for, in calls for layers that save the same.

    Attributes:
        kinds: of entries that slots are bound to where the caller does not see them, among `_KINDS`; -1 for any other.
        places: of tensors among the operands and results of a layer's call, or in the root graph; -1 for others.
        ids: of slots.
    """

    template: LoweredTemplate
    kinds: _Ints
    places: _Ints
    ids: _Ints


class _Use(NamedTuple):
    """A call, what it does, the list that it stands in, what its slots mean."""

    call: Call
    work: Work
    name: str
    meaning: _Meaning


class _Meanings:
    """Those of all templates, and what entries must be for them."""

    def __init__(self, graph: Graph, roots: Mapping[int, int], num_parts: Callable[[int], int]) -> None:
        self.graph, self.roots, self.num_parts = graph, roots, num_parts
        self._known: dict[object, _Meaning] = {}
        self.root = np.arange(
            len(graph.tensors) + 1
        )  # of every tensor the one whose memory it has; -1 for none
        self.root[[*roots]] = [*roots.values()]
        self.root[-1] = -1

    def of(self, template: LoweredTemplate, work: Work) -> _Meaning:
        """That of a template for a layer."""
        layer = work.layer
        sort = id(template), None if layer is None else (layer.attrs["template"], layer.attrs["saved"])
        known = self._known.get(sort)
        if known is None:
            known = self._known[sort] = self._meaning(template, layer)
        return known

    def _meaning(self, template: LoweredTemplate, layer: OpNode | None) -> _Meaning:
        places = [slot.id for slot in template.slots]
        if layer is not None:
            inside = self.graph.templates[layer.attrs["template"]]
            outside = (*inside.arguments, *inside.results, *layer.attrs["saved"])
            place = {t: i for i, t in enumerate(outside)}
            places = [place.get(i, -1) for i in places]
        kinds = [_KIND_INSIDE.get(slot.kind, -1) for slot in template.slots]
        ids = [slot.id for slot in template.slots]
        return _Meaning(template, *(np.array(column, np.int64) for column in (kinds, places, ids)))

    def parts(self, root: _Ints, microbatch: _Ints) -> _Ints:
        """Which part of each root tensor is meant."""
        if not microbatch.any():
            return microbatch
        has_parts = np.zeros(len(self.root), np.int64)
        has_parts[[t for t in np.unique(root[root >= 0]).tolist() if self.num_parts(t) > 1]] = 1
        return np.asarray(microbatch * has_parts[root], np.int64)

    def key_of(self, use: _Use, position: int) -> _Key:
        """The key of the entry that a call must have in a slot."""
        work, layer, slot = use.work, use.work.layer, use.meaning.template.slots[position]
        kind, place, tensor = slot.kind, int(use.meaning.places[position]), None
        if place >= 0:
            tensor = place if layer is None else (*layer.inputs, *layer.outputs)[place]
        if kind in ("tensor", "flat"):
            if tensor is None:
                return "inner_flat" if kind == "flat" else "inner", use.call.template, slot.id
            root = self.roots.get(tensor, tensor)
            return kind, root, work.microbatch if work.microbatch and self.num_parts(root) > 1 else 0
        if kind in ("temp", "temp_flat"):
            return kind, use.call.template, slot.id
        if memory_kind(kind) == "ring":
            return kind, work.rings, slot.id, work.places[slot.level]
        if tensor is None and layer is not None:
            return kind, layer.id, slot.id, slot.level
        return kind, None, tensor, slot.level


def _validate_uses(uses: Sequence[_Use], keys: _Keys, meanings: _Meanings) -> None:
    """Hold calls to what they mean: all slots of all calls together, then one by one those that need it."""
    if not uses:
        return
    for call, work, name, meaning in uses:
        if meaning.template.name != work.template or len(call.binding) != len(meaning.template.slots):
            _refuse(
                "a call uses its segment's template",
                f"{meaning.template.name!r} for {work.template!r} in {name!r}",
            )
    counts = [len(use.call.binding) for use in uses]
    bound = np.fromiter(chain.from_iterable(use.call.binding for use in uses), np.int64, sum(counts))
    kinds, places, ids = (np.concatenate([use.meaning[i] for use in uses]) for i in (1, 2, 3))
    number, microbatch = (
        np.repeat(np.array(of, np.int64), counts)
        for of in ([use.call.template for use in uses], [use.work.microbatch for use in uses])
    )
    tensor = _tensors_of(uses, counts, places, len(meanings.graph.tensors))
    is_inside = (tensor < 0) | (kinds >= _TEMP)
    root = meanings.root[tensor]
    wanted = np.stack(
        [
            np.where(is_inside, kinds, kinds - _INNER),
            np.where(is_inside, number, root),
            np.where(is_inside, ids, meanings.parts(root, microbatch)),
        ],
        axis=1,
    )
    fits = (kinds >= 0) & (keys.columns[bound] == wanted).all(axis=1)
    begins = np.cumsum(counts)
    for at in np.flatnonzero(~fits).tolist():
        which = int(np.searchsorted(begins, at, "right"))
        use, position = uses[which], at - int(begins[which]) + counts[which]
        key, entry = meanings.key_of(use, position), use.call.binding[position]
        if keys.keys[entry] != key:
            _refuse(
                "a slot is bound to the tensor that it stands for",
                f"{keys.keys[entry]} for {key} in a call of {use.meaning.template.name!r} in {use.name!r}",
            )


def _tensors_of(uses: Sequence[_Use], counts: Sequence[int], places: _Ints, num_tensors: int) -> _Ints:
    """The tensor of the root graph that each slot of each call sees; -1 for none."""
    outside: list[tuple[int | None, ...]] = []  # of each layer's call, behind one another
    first, begin = [], num_tensors
    for use in uses:
        layer = use.work.layer
        first.append(0 if layer is None else begin)
        if layer is not None:
            outside += [layer.inputs, layer.outputs]
            begin += len(layer.inputs) + len(layer.outputs)
    every = [-1 if t is None else t for t in chain.from_iterable(outside)]
    table = np.concatenate([np.arange(num_tensors), np.array(every, np.int64)])
    return np.where(
        places < 0, -1, table[np.repeat(np.array(first, np.int64), counts) + np.maximum(places, 0)]
    )


def _refuse(rule: str, got: str) -> None:
    raise InternalError(f"[ir.validate] {rule}; got {got}; please report the plan")
