"""Checks that the devices of a device group read the parts of all members, in order, each once.

A template is a block of instructions that a whole class of devices runs. It names the members of a
device group and their shares of rows by numbers that differ per device. This module inserts the
numbers of every device, and checks that the rows or columns of a device group are adjacent and
complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, NoReturn, Protocol

from tilewise.core.errors import InternalError
from tilewise.core.mesh import Axes, DeviceMesh
from tilewise.core.tree import Interval, fold_intervals
from tilewise.ir.graph import PANEL_ROWS
from tilewise.ir.program import LoweredTemplate, Number, NumberLike, TileProgram, value_on

__all__ = [
    "Collected",
    "Columns",
    "Exchange",
    "Flow",
    "Peer",
    "StorageShard",
    "confirm_columns",
    "confirm_exchanges",
    "confirm_shards",
    "invalid",
]

Peer = tuple[int, NumberLike]  # device group and member


class Columns(NamedTuple):
    """The columns of a slot's value that a device takes. The fields are the device group's axes,
    the first column and the number of columns.
    """

    axes: Axes
    source: int
    first: NumberLike
    width: NumberLike


class StorageShard(NamedTuple):
    """The rows of a slot that are added for a device's storage shard. The fields are the axes of
    storage shards, the axes along which devices have the same shard, the first row, the number of
    rows, and the share that is added here.
    """

    cut: Axes
    alike: Axes
    source: int
    first: NumberLike
    rows: Number
    share: NumberLike
    shares: NumberLike


class Collected(NamedTuple):
    """A slot that is assembled from storage shards, or from the rows of a batch. The fields are the
    axes that divide the parts, the slot that has a part, the number of the device group, the rows
    of each part so far, and whether the parts are padded to whole panels.
    """

    axes: Axes
    source: int
    group: int
    rows: list[int]
    in_panels: bool


class Exchange(NamedTuple):
    """The devices whose memory an instruction reads, in order. It is checked for every device of a
    class.

    Attributes:
        axes: axes of the device group.
        leaf_ranges: per device group of a pending reduction, the batch splits of each member; empty
            for copies.
        batch_splits: number of leaves of the tree.
        mine: the share of the rows that this device combines; -1 if the device combines columns of
            all rows.
        peers: the devices whose memory is read. For a copy, each comes with its share.
        shares: number of members that share the rows.
    """

    axes: Axes
    leaf_ranges: tuple[tuple[Interval, ...], ...]
    batch_splits: int
    mine: NumberLike
    peers: tuple[Peer, ...]
    parts: tuple[NumberLike, ...]
    shares: int


class Flow(Protocol):
    """What one template of one class reads and writes, as found by `validate_reductions`.

    Attributes:
        template: the template.
        columns: per slot, the columns into which its value is divided.
        shards: per slot, the storage shards whose rows are added to compute its value.
        collected: slots that are assembled from the storage shards of a device group, or from its
            parts of a batch.
    """

    template: LoweredTemplate
    columns: dict[int, Columns]
    shards: dict[int, StorageShard]
    collected: dict[int, Collected]


def confirm_exchanges(
    program: TileProgram, class_id: int, exchanges: Mapping[Exchange, str], mesh: DeviceMesh
) -> None:
    """Check, on every device of a class, that the peers are the members of the device group, in
    order, each with a share.
    """
    for device, own in enumerate(program.devices):
        if own.class_id != class_id:
            continue
        for exchange, label in exchanges.items():
            group = mesh.group(device, *exchange.axes)
            size = len(group) // max(len(exchange.leaf_ranges), 1)
            first = group.index(device) // size * size
            run = group[first : first + size]
            read = [device if t < 0 else own.groups[t][value_on(m, own)] for t, m in exchange.peers]
            if exchange.parts:  # a copy of shares
                copied = sorted((value_on(p, own), other) for p, other in zip(exchange.parts, read))
                good = copied == [(i, other) for i, other in enumerate(run) if other != device]
            elif exchange.leaf_ranges:
                leaf_ranges = dict(zip(run, _per_device(exchange.leaf_ranges[first // size], size)))
                good = read == run
                good = good and (exchange.mine == -1 or value_on(exchange.mine, own) == run.index(device))
                good = good and not _fold(tuple(leaf_ranges[d] for d in read), exchange.batch_splits)
            else:
                good = read == run
            if not good or exchange.shares != size:
                invalid(
                    "devices must complete a value with their device group, a share each, in the tree's order",
                    f"devices {read} read by {label!r} on device {device} of device group {run}",
                )


def confirm_columns(program: TileProgram, flows: Sequence[Sequence[Flow]], mesh: DeviceMesh) -> None:
    """Check that the columns of a device group's members are adjacent, from the first column of the
    value to the last. Members that have one KV head have the same columns.
    """
    cuts: dict[tuple[int, int], dict[int, Columns]] = {}  # per template and slot, by class
    for class_id, of in enumerate(flows):
        for number, flow in enumerate(of):
            for slot, cut in flow.columns.items():
                cuts.setdefault((number, slot), {})[class_id] = cut
    for (number, slot), by_class in cuts.items():
        ranges, axes = [], next(iter(by_class.values())).axes
        for own in program.devices:
            mine = by_class.get(own.class_id)
            begin = -1 if mine is None else value_on(mine.first, own)
            ranges.append((begin, -1 if mine is None else begin + value_on(mine.width, own)))
        for first in {mesh.first(device, *axes) for device in range(len(program.devices))}:
            leaf_ranges = [ranges[d] for d in mesh.group(first, *axes)]
            joined = all(b == (a[1], b[1]) or b == a for a, b in pairwise(leaf_ranges))
            there = by_class.get(program.devices[first].class_id)
            size = there and _columns_of(program, program.devices[first].class_id, number, there.source)
            if not joined or leaf_ranges[0][0] != 0 or (size is not None and leaf_ranges[-1][1] != size):
                name = flows[program.devices[first].class_id][number].template.name
                invalid(
                    "columns that a device group divides must be complete and adjacent",
                    f"{leaf_ranges} of {size} for slot {slot} of template {name!r} on the device group of device "
                    f"{first}",
                )


def confirm_shards(program: TileProgram, flows: Sequence[Sequence[Flow]], mesh: DeviceMesh) -> None:
    """Check that the rows that are added for storage shards, or copied from storage shards, are
    complete: each device's rows follow those of the devices before it.
    """
    for device, own in enumerate(program.devices):
        for number, flow in enumerate(flows[own.class_id]):
            for slot, shard in flow.shards.items():
                group = mesh.group(device, *shard.cut)
                rows = [_entry_rows(program, other, number, slot) for other in group]
                place = group.index(device)
                expected = (
                    sum(rows[:place]),
                    rows[place],
                    mesh.coordinate(device, *shard.alike) if shard.alike else 0,
                    mesh.size(*shard.alike),
                )
                problems = (
                    value_on(shard.first, own),
                    shard.rows.constant,
                    value_on(shard.share, own),
                    value_on(shard.shares, own),
                )
                whole = _entry_rows(program, device, number, shard.source)
                if problems != expected or sum(rows) != whole:
                    _invalid_shards(
                        flow, device, f"first row, rows and share {problems} of {rows} in {whole}"
                    )
            for slot, of in flow.collected.items():
                group = mesh.group(device, *of.axes)
                unit = PANEL_ROWS if of.in_panels else 1
                rows = [_entry_rows(program, other, number, of.source, unit) for other in group]
                if (
                    own.groups[of.group] != tuple(group)
                    or of.rows != rows
                    or sum(rows) != _entry_rows(program, device, number, slot, unit)
                ):
                    _invalid_shards(flow, device, f"rows {of.rows} of {rows}")


def _invalid_shards(flow: Flow, device: int, got: str) -> NoReturn:
    invalid(
        "storage shards and rows of a batch must be complete and in the order of their device group",
        f"{got} in template {flow.template.name!r} on device {device}",
    )


def _entry_rows(program: TileProgram, device: int, number: int, slot: int, unit: int = PANEL_ROWS) -> int:
    """Rows in memory of the entry that a template's slot is bound to on a device, padded to whole
    panels; 0 if no call uses the template.
    """
    of = program.classes[program.devices[device].class_id]
    call = next((c for calls in of.calls.values() for c in calls if c.template == number), None)
    if call is None:
        return 0
    rows = of.entries[call.binding[slot]].extent.constant
    return -(-rows // unit) * unit


def _columns_of(program: TileProgram, class_id: int, number: int, slot: int) -> int | None:
    """Columns of the entry that a template's slot is bound to; None if no call uses the template."""
    of = program.classes[class_id]
    calls = (call for calls in of.calls.values() for call in calls if call.template == number)
    call = next(calls, None)
    return None if call is None else of.entries[call.binding[slot]].cols


@lru_cache(maxsize=256)
def _fold(leaf_ranges: tuple[Interval, ...], count: int) -> str:
    """Cached `fold_intervals`; all device groups along the same axes have the same arguments."""
    return fold_intervals(leaf_ranges, count)


def _per_device(leaf_ranges: Sequence[Interval], devices: int) -> list[Interval]:
    """The batch splits of every device: those of its microbatches together, which are adjacent."""
    width = len(leaf_ranges) // devices
    return [(leaf_ranges[i * width][0], leaf_ranges[(i + 1) * width - 1][1]) for i in range(devices)]


def invalid(rule: str, got: str) -> NoReturn:
    """Report the rule that a plan violates.

    Raises:
        InternalError: always.
    """
    raise InternalError(f"[ir.validate] {rule}; got {got}; please report the plan")
