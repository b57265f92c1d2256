"""Classes of devices, and the numbers in which devices of one class differ.

Devices of a class run the same instructions with other numbers.

Devices are in one class if they may differ only in numbers. Equal must be the sizes of their parts
of tensors, how these parts are divided further (counted from the part's first element), their stage
of a pipeline, and whether a device is the first on an axis. (The first device gathers outputs, and
has the values that others copy.) The numbers are, for example, a coordinate, a first row, or a
peer's place in a device group. An instruction refers to such a number by its index in
`DeviceBinding.numbers`. `DeviceNumbers` assigns the indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

from tilewise.core.dims import DimLabel
from tilewise.core.mesh import Axes
from tilewise.ir.graph import Graph, TensorSpec
from tilewise.ir.layout import GraphLayout, TensorLayout, in_space
from tilewise.ir.program import DeviceBinding, Number, NumberLike
from tilewise.plan.shapes import LocalShapes

__all__ = ["DeviceNumbers", "NumberTable", "PeerGroup", "classes_of"]

_Cut = tuple[int, DimLabel | None, Axes]


def classes_of(graph: Graph, layout: GraphLayout, shapes: LocalShapes) -> tuple[tuple[int, ...], ...]:
    """The devices of every class, ordered by their first device."""
    if shapes.mesh.num_devices == 1:
        return ((0,),)
    cuts = sorted(set(_cuts(graph, layout)), key=repr)
    relative_parts: dict[tuple[_Cut, int], object] = {}
    devices_by_key: dict[tuple[object, ...], list[int]] = {}
    for device in range(shapes.mesh.num_devices):
        key: list[object] = [shapes.mesh.coordinate(device, axis) == 0 for axis in shapes.mesh.names]
        key.append(shapes.on(device).stage)
        for cut in cuts:
            place = cut, shapes.mesh.coordinate(device, *cut[2])
            if place not in relative_parts:
                relative_parts[place] = _relative(cut, shapes.on(device))
            key.append(relative_parts[place])
        devices_by_key.setdefault(tuple(key), []).append(device)
    return _in_lockstep([tuple(devices) for devices in devices_by_key.values()], cuts, shapes)


def _in_lockstep(
    classes: Sequence[tuple[int, ...]], cuts: Sequence[_Cut], shapes: LocalShapes
) -> tuple[tuple[int, ...], ...]:
    """Refine classes so that, if devices of a class share their part with other devices, these
    other devices have equal classes too. The reason: devices that have the same KV head wait for
    each other. So if one of them is first on an axis, or its part is cut differently, the class of
    the others must differ as well.
    """
    sharing = [groups for cut in cuts if (groups := _holders(cut, shapes))]
    while True:
        class_of = {device: c for c, devices in enumerate(classes) for device in devices}
        finer: dict[tuple[object, ...], list[int]] = {}
        for device in range(shapes.mesh.num_devices):
            neighbours = [tuple(class_of[d] for d in groups[device]) for groups in sharing]
            finer.setdefault((class_of[device], *neighbours), []).append(device)
        if len(finer) == len(classes):
            return tuple(classes)
        classes = [tuple(devices) for devices in finer.values()]


def _holders(cut: _Cut, shapes: LocalShapes) -> dict[int, list[int]]:
    """Per device, the devices that have the same part of a dim, if any part has several holders. An
    empty part has no holders.
    """
    axes, mesh = cut[2], shapes.mesh
    places: dict[tuple[int, ...], list[int]] = {}
    for place, device in enumerate(mesh.group(0, *axes)):
        begin, end = shapes.on(device).part(*cut)
        places.setdefault((begin, end) if begin < end else (place,), []).append(place)
    if len(places) == mesh.size(*axes):
        return {}
    neighbours = {place: alike for alike in places.values() for place in alike}
    holders = {}
    for device in range(mesh.num_devices):
        group = mesh.group(device, *axes)
        holders[device] = [group[i] for i in neighbours[mesh.coordinate(device, *axes)]]
    return holders


def _cuts(graph: Graph, layout: GraphLayout) -> Iterator[_Cut]:
    """Every dim that devices share, with its size, its label and the axes."""
    seen: set[int] = set()
    for inside, of in _graphs(graph, layout):
        if id(of) in seen:
            continue
        seen.add(id(of))
        for t in inside.tensors:
            for size, label, axes in zip(t.spec.shape, t.spec.labels, of.compute[t.id]):
                if (
                    in_space(axes)
                    and isinstance(size, int)
                    and not (label and label.is_summed_by_batch_splits)
                ):
                    yield size, label, in_space(axes)


def _graphs(graph: Graph, layout: GraphLayout) -> Iterator[tuple[Graph, GraphLayout]]:
    yield graph, layout
    for op in graph.ops:
        if op.op == "call":
            yield graph.templates[op.attrs["template"]].graph, layout.calls[op.id]


def _relative(cut: _Cut, shapes: LocalShapes) -> object:
    """A device's part of a dim relative to its first element, and whether an earlier device has the
    same part.
    """
    axes, (begin, end) = cut[2], shapes.part(*cut)
    before = shapes.mesh.group(shapes.device, *axes)[: shapes.mesh.coordinate(shapes.device, *axes)]
    is_copy = begin < end and any(shapes.on(other).part(*cut) == (begin, end) for other in before)
    return end - begin, tuple(shapes.k_split_ranges(*cut)), is_copy


@dataclass(frozen=True)
class PeerGroup:
    """Devices that communicate, as one of them sees it.

    Attributes:
        axes: the axes along which the devices of the entry differ.
        number: number of the entry in the table of device groups.
        size: how many devices communicate: all devices of the table's entry, or a run of them.
        members: places of the communicating devices in the entry, in order.
        me: place of this device among the members.
        peers: places of all other devices among the members, in order. `peer_members` are their
            places in the entry.
    """

    axes: Axes
    number: int
    size: int
    members: tuple[NumberLike, ...]
    me: Number
    peers: tuple[Number, ...]
    peer_members: tuple[Number, ...]


class NumberTable(NamedTuple):
    """Numbers and device groups as data: the meaning of each number, its value on every device, and
    the axes of each device group.
    """

    keys: tuple[object, ...]
    values: tuple[Sequence[int], ...]
    groups: tuple[Axes, ...]


class DeviceNumbers:
    """Assigns indices to numbers and device groups, for a plan's devices or for one variant.

    Args:
        shapes: local sizes on all devices.
        cached: values on every device that are known already, by the meaning of the number.
    """

    def __init__(self, shapes: LocalShapes, cached: Mapping[object, Sequence[int]] | None = None) -> None:
        self.shapes = shapes
        self.values_by_key: dict[object, Sequence[int]] = {}  # on every device, by meaning of the number
        self._cached = {} if cached is None else cached
        self._places: dict[object, int] = {}
        self._values: list[Sequence[int]] = []  # per place, of every device
        self._groups: dict[Axes, int] = {}
        self._peer_groups: dict[tuple[Axes, int], PeerGroup] = {}

    def place(self, key: object, value: Callable[[int], int]) -> Number:
        """The number whose value on each device is what `value` returns. Equal keys share one
        number.
        """
        if key not in self._places:
            values = self._cached.get(key)
            if values is None:
                values = [value(d) for d in range(self.shapes.mesh.num_devices)]
            self._add(key, values)
        return Number.of_device(self._places[key])

    def _add(self, key: object, values: Sequence[int]) -> None:
        self._places[key] = len(self._values)
        self._values.append(values)
        self.values_by_key[key] = values

    def table(self) -> NumberTable:
        """All numbers and device groups as data."""
        return NumberTable((*self._places,), (*self._values,), (*self._groups,))

    def take(self, table: NumberTable) -> tuple[list[int], list[int]]:
        """Add all entries of a table. Returns the new index of each number and of each device
        group.
        """
        for key, values in zip(table.keys, table.values):
            if key not in self._places:
                self._add(key, values)
        return [self._places[key] for key in table.keys], [
            self.number_of_group(axes) for axes in table.groups
        ]

    def first(self, spec: TensorSpec, layout: TensorLayout, dim: int) -> NumberLike:
        """The first global element of a dim on the device."""
        axes = in_space(layout[dim])
        if not axes:
            return 0
        key = "first", spec.shape[dim], spec.labels[dim], axes
        return self.place(key, lambda device: self.shapes.on(device).range(spec, layout, dim)[0])

    def group(self, axes: Axes, size: int = 0) -> PeerGroup:
        """The devices along some axes. If `size` is not 0, only the aligned run of `size` devices
        that contains this device.
        """
        mesh = self.shapes.mesh
        whole = mesh.size(*axes)
        size = size or whole
        if (axes, size) not in self._peer_groups:
            coordinates = [mesh.coordinate(device, *axes) for device in range(mesh.num_devices)]
            me = [c % size for c in coordinates]
            run = [c - m for c, m in zip(coordinates, me)]

            def peer(i: int, device: int) -> int:
                return i + (i >= me[device])

            def member(i: int, device: int) -> int:
                return run[device] + peer(i, device)

            first = self.place(("run", axes, size), run.__getitem__) if size < whole else Number(0)
            places = [self.place(("peer", axes, size, i), partial(peer, i)) for i in range(size - 1)]
            members = [
                self.place(("member", axes, size, i), partial(member, i)) if size < whole else place
                for i, place in enumerate(places)
            ]
            self._peer_groups[axes, size] = PeerGroup(
                axes,
                self.number_of_group(axes),
                size,
                tuple(first._replace(constant=i) if size < whole else i for i in range(size)),
                self.place(("me", axes, size), me.__getitem__),
                tuple(places),
                tuple(members),
            )
        return self._peer_groups[axes, size]

    def number_of_group(self, axes: Axes) -> int:
        """The index of a device group in the tables."""
        return self._groups.setdefault(axes, len(self._groups))

    def bindings(self, class_of: Mapping[int, int]) -> tuple[DeviceBinding, ...]:
        """The numbers and device groups of every device."""
        mesh, devices = self.shapes.mesh, range(self.shapes.mesh.num_devices)
        numbers = zip(*self._values) if self._values else repeat(())
        columns = []
        for axes in self._groups:
            tables: dict[int, tuple[int, ...]] = {}  # by the first member
            firsts = [mesh.first(device, *axes) for device in devices]
            columns.append(
                [tables.get(f) or tables.setdefault(f, tuple(mesh.group(f, *axes))) for f in firsts]
            )
        groups = zip(*columns) if columns else repeat(())
        return tuple(DeviceBinding(class_of[d], n, t) for d, n, t in zip(devices, numbers, groups))
