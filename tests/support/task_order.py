"""Oracle for tile programs: every two accesses to the same bytes, one of them a write, are ordered.

Works on the expanded tasks of a small mesh, from the tables of `Program.tasks` of all devices. Two tasks are ordered
on a device by the engine's rule over handles in the order of submission (native/tasks/order/dependencies.h), and
between devices by the post that brings a signal to a wait's threshold. One device posts all posts of a signal, and its
engine orders them.

Bytes belong to an arena, whether a task of that device or of another one uses them. The arena is cut wherever a view
begins or ends, and pieces under the same views are checked once. In an order that fits all edges, the accesses to a
piece must form a chain: each read comes after the last write, and each write after the last write and the reads since
then. Then all pairs are ordered.

Not checked: that a read sees the right write (`validate_reductions`), and sizes other than the expanded ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.core.errors import InternalError
from tilewise.ir.program import Access

__all__ = ["Before", "happens_before", "validate_order"]

Table = NDArray[np.int64]
Tables = Mapping[str, Table]  # of one device: tasks, accesses, views, waits, posts
Labels = Sequence[str]

_READ, _WRITE, _AFTER_ALL = 0, 1, 2
_BEGIN, _END, _ROWS, _STRIDE, _ROLE = 3, 4, 5, 6, 7


@dataclass(frozen=True)
class Before:
    """What happens before what, over the tasks of all devices, numbered device by device.

    Attributes:
        first: number of each device's first task, and the number of all.
        order: tasks in an order that fits all edges.
        place: of each task in that order.
        masks: per place, the places that come before it, as bits.
    """

    first: tuple[int, ...]
    order: tuple[int, ...]
    place: tuple[int, ...]
    masks: tuple[int, ...]


def validate_order(devices: Sequence[Tables], labels: Labels = ()) -> None:
    """Show that every conflicting pair is ordered; InternalError names two tasks, the arena and the bytes."""
    before = happens_before(devices)
    for arena in range(len(devices)):
        for begin, end, users in pieces(devices, before.first, arena):
            pair = _unordered(before, users)
            if pair:
                one, other = (_name(devices, before.first, labels, task) for task in pair)
                raise InternalError(
                    "[support.task_order] two uses of the same bytes, one of them a write, are ordered; got "
                    f"{one} and {other} over bytes [{begin}, {end}) of device {arena}; please report the plan"
                )


def happens_before(devices: Sequence[Tables]) -> Before:
    """The relation that handles and signals make; InternalError for a cycle or a wait that no post ends."""
    first = [0]
    for tables in devices:
        first.append(first[-1] + len(tables["tasks"]))
    edges: list[set[int]] = [set() for _ in range(first[-1])]
    for base, tables in zip(first, devices):
        _by_handles(tables["accesses"], base, edges)
    _by_signals(devices, first, edges)
    order = _sorted(edges)
    place = [0] * len(order)
    for i, task in enumerate(order):
        place[task] = i
    masks: list[int] = []
    for task in order:
        mask = 0
        for earlier in edges[task]:
            mask |= masks[place[earlier]] | 1 << place[earlier]
        masks.append(mask)
    return Before(tuple(first), tuple(order), tuple(place), tuple(masks))


def _by_handles(accesses: Table, base: int, edges: list[set[int]]) -> None:
    """Reads wait for the last write; writes for it and the reads since."""
    writer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    by_task: dict[int, list[tuple[int, int]]] = {}
    for task, handle, use in accesses.tolist():
        by_task.setdefault(task, []).append((handle, use))
    for number, used in by_task.items():
        task, mine = number + base, edges[number + base]
        for handle, use in used:
            if handle in writer:
                mine.add(writer[handle])
            if use != _READ:
                mine |= readers.get(handle, set())
        mine.discard(task)
        for handle, use in used:
            if use == _WRITE:
                writer[handle] = task
                readers[handle] = set()
        for handle, use in used:
            if use == _READ and writer.get(handle) != task:
                readers.setdefault(handle, set()).add(task)


def _by_signals(devices: Sequence[Tables], first: Sequence[int], edges: list[set[int]]) -> None:
    posters: dict[tuple[int, int], list[int]] = {}
    for device, tables in enumerate(devices):
        for task, target, signal in tables["posts"].tolist():
            earlier = posters.setdefault((target, signal), [])
            if earlier and earlier[-1] < first[device]:
                raise InternalError(
                    "[support.task_order] one device posts a signal; got two for "
                    f"signal {signal} of device {target}, one of them {device}; please report the plan"
                )
            earlier.append(task + first[device])
    for device, tables in enumerate(devices):
        for task, signal, threshold, _ in tables["waits"].tolist():
            if threshold == 0:
                continue
            earlier = posters.get((device, signal), [])
            if len(earlier) < threshold:
                raise InternalError(
                    f"[support.task_order] a wait has its post; got {len(earlier)} of signal {signal} of device "
                    f"{device}, where task {task} waits for {threshold}; please report the plan"
                )
            edges[task + first[device]].add(earlier[threshold - 1])


def _sorted(edges: Sequence[set[int]]) -> list[int]:
    """Tasks in an order that fits the edges."""
    followers: list[list[int]] = [[] for _ in edges]
    missing = [len(earlier) for earlier in edges]
    for task, earlier in enumerate(edges):
        for other in earlier:
            followers[other].append(task)
    order = [task for task, count in enumerate(missing) if count == 0]
    for task in order:
        for follower in followers[task]:
            missing[follower] -= 1
            if missing[follower] == 0:
                order.append(follower)
    if len(order) < len(edges):
        raise InternalError(
            f"[support.task_order] no task waits for itself; got {len(edges) - len(order)} tasks that do, through "
            "others; please report the plan"
        )
    return order


def pieces(
    devices: Sequence[Tables], first: Sequence[int], arena: int
) -> Iterator[tuple[int, int, list[tuple[int, bool, bool]]]]:
    """Pieces of an arena with who uses them: first byte, end, and per use the task, whether it reads, whether it
    writes. Of pieces with the same users, one stands for all."""
    views_of = [t["views"][t["views"][:, 2] == arena] for t in devices]
    views = np.concatenate(views_of)
    tasks = np.concatenate([v[:, 0] + base for v, base in zip(views_of, first)])
    if not len(views):
        return
    shapes, which = np.unique(views[:, _BEGIN : _STRIDE + 1], axis=0, return_inverse=True)
    which = which.reshape(-1)
    begins, ends, owners = _runs(shapes)
    cuts = np.unique(np.concatenate([begins, ends]))
    marks = np.random.default_rng(0).integers(
        1, 1 << 62, len(shapes)
    )  # a piece is known by the sum of its views'
    sums = np.zeros(len(cuts), np.int64)
    np.add.at(sums, np.searchsorted(cuts, begins), marks[owners])
    np.add.at(sums, np.searchsorted(cuts, ends), -marks[owners])
    starts, at = np.unique(np.cumsum(sums), return_index=True)
    by_shape: list[list[int]] = [[] for _ in shapes]
    for use, shape in enumerate(which.tolist()):
        by_shape[shape].append(use)
    role = views[:, _ROLE]
    widths = _widths(shapes)
    for mark, i in zip(starts.tolist(), at.tolist()):
        if mark == 0:
            continue
        offset = cuts[i] - shapes[:, 0]
        strides = np.maximum(shapes[:, 3], 1)
        inside = (offset >= 0) & (cuts[i] < shapes[:, 1])
        inside &= (shapes[:, 2] <= 1) | (offset % strides < widths)
        users = [
            (int(tasks[use]), bool(role[use] & Access.IN), bool(role[use] & Access.OUT))
            for shape in np.flatnonzero(inside).tolist()
            for use in by_shape[shape]
        ]
        yield int(cuts[i]), int(cuts[i + 1]), users


def _widths(shapes: Table) -> Table:
    begins, ends, rows, strides = shapes.T
    return np.asarray(ends - begins - (rows - 1) * strides, np.int64)


def _runs(shapes: Table) -> tuple[Table, Table, Table]:
    """Runs of bytes that views are made of: begin, end, view."""
    widths = _widths(shapes)
    rows = np.where(widths >= shapes[:, 3], 1, shapes[:, 2])
    owners = np.repeat(np.arange(len(shapes)), rows)
    row = np.arange(len(owners)) - np.repeat(np.cumsum(rows) - rows, rows)
    begins = shapes[owners, 0] + row * shapes[owners, 3]
    ends = np.where(rows[owners] == 1, shapes[owners, 1], begins + widths[owners])
    return begins, ends, owners


def _unordered(before: Before, users: Sequence[tuple[int, bool, bool]]) -> tuple[int, int] | None:
    """A pair that nothing orders; None if all pairs are ordered."""
    writes: dict[int, bool] = {}
    for task, _, is_write in users:
        writes[task] = writes.get(task, False) or is_write
    place, masks = before.place, before.masks
    last, since = -1, 0
    for at in sorted(place[task] for task in writes):
        task = before.order[at]
        needed = (1 << last if last >= 0 else 0) | (since if writes[task] else 0)
        missing = needed & ~masks[at]
        if missing:
            return before.order[missing.bit_length() - 1], task
        if writes[task]:
            last, since = at, 0
        else:
            since |= 1 << at
    return None


def _name(devices: Sequence[Tables], first: Sequence[int], labels: Labels, task: int) -> str:
    device = next(d for d in range(len(devices)) if task < first[d + 1])
    call, _, instruction, index, label = devices[device]["tasks"][task - first[device]].tolist()
    label_text = labels[label] if label < len(labels) else f"instruction {instruction}"
    return f"{label_text!r}[{index}] of call {call} on device {device}"
