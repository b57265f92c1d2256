"""Which tensors a call of a tile program means: those that the graph's ops name, and no others of their shapes.

The slots of a template name tensors of the graph that it was lowered from; a call binds them to entries, and the key of
an entry says what lies there. Arguments and results of a layer are taken from the op that calls it, one after the
other. So bindings that are exchanged, within a call or between layers, microbatches or devices, are found.

Not shown: that entries with different keys lie apart (`validate_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.core.errors import InternalError
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.program import Call, LoweredTemplate, TileProgram, memory_kind

__all__ = ["Work", "validate_bindings"]

_Key = tuple[object, ...]
_Ints = npt.NDArray[np.int64]
_TENSORS = ("tensor", "flat")  # kinds of slots and of entries that see a tensor
_NO_TENSOR = (-1, -1, -1)


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
    for of in program.classes:
        own = [entry.key for entry in of.entries]
        keys = next((k for k in known if k.keys == own), None)
        if keys is None:
            keys = _Keys(own)
            known.append(keys)
        for name, calls in of.calls.items():
            if len(calls) != len(work[name]):
                _refuse("a list has a call per segment", f"{len(calls)} of {len(work[name])} in {name!r}")
            alike: dict[object, list[tuple[Call, Work]]] = {}
            for call, does in zip(calls, work[name]):
                mark = id(call), id(does), id(keys)
                if mark not in seen:
                    seen.add(mark)
                    layer = does.layer
                    attrs = None if layer is None else (layer.attrs["template"], layer.attrs["saved"])
                    alike.setdefault((call.template, does.template, attrs), []).append((call, does))
            for group in alike.values():
                template = of.templates[group[0][0].template]
                _Meaning(graph, roots, num_parts, template, group, name).validate(keys)


class _Keys:
    """The keys of all entries, and what those of tensors say as columns: kind, root tensor, part."""

    def __init__(self, keys: list[_Key]) -> None:
        self.keys = keys
        columns = [
            (_TENSORS.index(k[0]), k[1], k[2]) if k[0] in _TENSORS and len(k) == 3 else _NO_TENSOR
            for k in keys
        ]
        self.kind, self.root, self.part = np.array(columns or [_NO_TENSOR], np.int64).T


class _Meaning:
    """What the slots of a template stand for, in calls of one list for layers that save the same."""

    def __init__(
        self,
        graph: Graph,
        roots: Mapping[int, int],
        num_parts: Callable[[int], int],
        template: LoweredTemplate,
        group: Sequence[tuple[Call, Work]],
        name: str,
    ) -> None:
        self.roots, self.num_parts, self.template, self.group, self.name = (
            roots,
            num_parts,
            template,
            group,
            name,
        )
        self.num_tensors = len(graph.tensors)
        place: dict[int, int] | None = None  # of a layer's tensors among the operands and results of its call
        layer = group[0][1].layer
        if layer is not None:
            inside = graph.templates[layer.attrs["template"]]
            outside = (*inside.arguments, *inside.results, *layer.attrs["saved"])
            place = {t: i for i, t in enumerate(outside)}
        self.is_layer = layer is not None
        self.places = [s.id if place is None else place.get(s.id, -1) for s in template.slots]

    def validate(self, keys: _Keys) -> None:
        """Hold all calls to it: those of tensors that callers see together, slot by slot what is left."""
        slots = self.template.slots
        for call, work in self.group:
            if self.template.name != work.template or len(call.binding) != len(slots):
                _refuse(
                    "a call uses its segment's template",
                    f"{self.template.name!r} for {work.template!r} in {self.name!r}",
                )
        seen = [i for i, s in enumerate(slots) if s.kind in _TENSORS and self.places[i] >= 0]
        given = self._given([self.places[i] for i in seen])
        bound = np.array([call.binding for call, _ in self.group], np.int64)
        entries, kinds = bound[:, seen], [_TENSORS.index(slots[i].kind) for i in seen]
        root = _column(self.roots, self.num_tensors)[given]
        fits = (given >= 0) & (keys.kind[entries] == kinds) & (keys.root[entries] == root)
        fits &= keys.part[entries] == self._parts(root)
        odd = [(int(n), seen[i]) for n, i in zip(*np.nonzero(~fits))]
        left = sorted({*range(len(slots))} - {*seen})
        for n, position in (*odd, *((n, i) for i in left for n in range(len(self.group)))):
            call, work = self.group[n]
            self._require(call, work, position, keys.keys)

    def _given(self, places: Sequence[int]) -> _Ints:
        """The tensors of the root graph that each call has in some places; -1 for none."""
        if not self.is_layer:
            return np.array([places], np.int64)
        layers = [work.layer for _, work in self.group if work.layer is not None]
        every = [
            [-1 if t is None else t for t in (*layer.inputs, *layer.outputs)]
            if None in layer.inputs
            else (*layer.inputs, *layer.outputs)
            for layer in layers
        ]
        return np.array(every, np.int64).reshape(len(layers), -1)[:, [*places]]

    def _parts(self, root: _Ints) -> _Ints:
        """Which part of each tensor is meant."""
        microbatch = np.array([[work.microbatch] for _, work in self.group], np.int64)
        if not microbatch.any():
            return microbatch
        several = {int(t): self.num_parts(int(t)) > 1 for t in np.unique(root) if t >= 0}
        has_parts = np.zeros(self.num_tensors + 1, np.int64)
        has_parts[[t for t, is_several in several.items() if is_several]] = 1
        return np.asarray(microbatch * has_parts[root], np.int64)

    def _require(self, call: Call, work: Work, position: int, keys: Sequence[_Key]) -> None:
        key, entry = self._key_of(work, call.template, position), call.binding[position]
        if keys[entry] != key:
            _refuse(
                "a slot is bound to the tensor that it stands for",
                f"{keys[entry]} for {key} in a call of {self.template.name!r} in {self.name!r}",
            )

    def _key_of(self, work: Work, number: int, position: int) -> _Key:
        """The key of the entry that a call of template `number` must have in a slot."""
        slot, place, layer = self.template.slots[position], self.places[position], work.layer
        kind, tensor = slot.kind, None if place < 0 else place
        if layer is not None and place >= 0:
            tensor = (*layer.inputs, *layer.outputs)[place]
        if kind in _TENSORS:
            if tensor is None:
                return "inner_flat" if kind == "flat" else "inner", number, slot.id
            root = self.roots.get(tensor, tensor)
            return kind, root, work.microbatch if work.microbatch and self.num_parts(root) > 1 else 0
        if kind in ("temp", "temp_flat"):
            return kind, number, slot.id
        if memory_kind(kind) == "ring":
            return kind, work.rings, slot.id, work.places[slot.level]
        if tensor is None and layer is not None:
            return kind, layer.id, slot.id, slot.level
        return kind, None, tensor, slot.level


def _column(roots: Mapping[int, int], count: int) -> _Ints:
    """Of every tensor the one whose memory it has; the last is for none."""
    column = np.arange(count + 1)
    column[[*roots]] = [*roots.values()]
    column[-1] = -1
    return column


def _refuse(rule: str, got: str) -> None:
    raise InternalError(f"[ir.validate] {rule}; got {got}; please report the plan")
