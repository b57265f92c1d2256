"""Finds accesses of a tile program that nothing orders, before it runs.

The tasks come from the instruction issuer that also runs them (`Program.tasks`): the bytes that each
task reads and writes, the tiles and signals that it waits for, and what it posts. Tasks are ordered
if one must complete before the other starts: by tiles of their own device, and by signals. Two tasks
that use the same bytes, at least one of which writes, are a race if neither order is certain and the
runtime does not order them by tiles.

A wait for a value is certain to follow a post if fewer other posts than this value can precede it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from tilewise.core.errors import PlanError
from tilewise.ir.program import Access, TileProgram
from tilewise.runtime import Program
from tilewise.tiles.emit import Emitted
from tilewise.tiles.trace import Line

__all__ = ["Race", "check_program", "find_race"]

_MOST_TASKS = 20_000
_READS, _WRITES = int(Access.IN), int(Access.OUT)


@dataclass(frozen=True)
class Use:
    """A task's use of bytes.

    Attributes:
        device: the device that runs the task.
        label: label of its instruction.
        tile: iteration of the instruction.
        is_write: whether it writes.
    """

    device: int
    label: str
    tile: int
    is_write: bool


@dataclass(frozen=True)
class Race:
    """Two uses of the same bytes that nothing orders.

    Attributes:
        owner: the device whose memory it is.
        first, second: the uses, in the order in which an execution without overlap has them.
    """

    owner: int
    first: Use
    second: Use


def check_program(name: str, native: Program, emitted: Emitted) -> None:
    """Reject a program with a race, or with a signal that is posted more often than the program waits
    for.

    Raises:
        PlanError: names both lines, tasks, tiles and devices.
    """
    race = find_race(native, emitted.program, "run")
    if race is not None:
        _report(name, race, emitted.lines)
    for device, signal, count, line in emitted.surplus:
        raise PlanError(
            f"[tiles.{name}] a signal must be posted as often as the program waits for; got {count} posts too many "
            f"of {signal} of device {device}, the last one at {line}; wait for them, or do not post them"
        )


def find_race(native: Program, program: TileProgram, list_name: str) -> Race | None:
    """The first race of one list of calls; None if it has no race.

    Args:
        native: a finished program without symbols.
        program: the same as data.
        list_name: name of the list.

    Raises:
        PlanError: the list has too many tasks.
    """
    return _Tasks(native, program, list_name).race()


def _report(name: str, race: Race, lines: Mapping[str, Line]) -> NoReturn:
    def shown(use: Use) -> str:
        line = lines.get(use.label)
        verb = "writes" if use.is_write else "reads"
        return f"{use.label!r} ({line}), tile {use.tile}, on device {use.device}, which {verb} it"

    first, second = race.first, race.second
    if first.is_write and not second.is_write:
        rule = "a tile that another device writes must be read after a wait for its signal"
        advice = (
            "wait for the signal that follows the write, and pass the token to consume_token with the tensor"
        )
    elif not first.is_write:
        rule = "a tile must not be overwritten before its readers have acknowledged"
        advice = "let the reader notify, and the writer wait for it"
    else:
        rule = "two writes of a tile must be ordered"
        advice = "let the second writer wait for a signal that follows the first write"
    raise PlanError(
        f"[tiles.{name}] {rule}; got a tile of device {race.owner} without an order between {shown(first)}, and "
        f"{shown(second)}; {advice}"
    )


class _Tasks:
    """All tasks of one run, numbered in an order in which they can run one by one."""

    def __init__(self, native: Program, program: TileProgram, list_name: str) -> None:
        self.program = program
        self.tables = [native.tasks(device, [], list_name) for device in range(len(program.devices))]
        counts = [len(t["tasks"]) for t in self.tables]
        self.begins = np.concatenate([[0], np.cumsum(counts)])
        if self.begins[-1] > _MOST_TASKS:
            raise PlanError(
                f"[tiles.checker] a program may have {_MOST_TASKS:,} tasks to be checked; got {self.begins[-1]:,}; "
                "check it with smaller tensors, or pass check=False"
            )
        self.labels = native.labels()
        self.before: list[set[int]] = [set() for _ in range(int(self.begins[-1]))]

    def race(self) -> Race | None:
        """The first race."""
        for device in range(len(self.tables)):
            self._order_by_tiles(device)
        self._order_by_signals()
        place, ancestors = self._ancestors()
        return self._find(place, ancestors)

    def _order_by_tiles(self, device: int) -> None:
        """Edges between tasks of one device that use the same tile, as the runtime makes them."""
        writer: dict[int, int] = {}
        readers: defaultdict[int, list[int]] = defaultdict(list)
        begin = int(self.begins[device])
        for number, handle, use in self.tables[device]["accesses"].tolist():
            task = begin + number
            if handle in writer and writer[handle] != task:
                self.before[task].add(writer[handle])
            if use == 0:
                readers[handle].append(task)
                continue
            self.before[task].update(r for r in readers[handle] if r != task)
            if use == 1:
                writer[handle] = task
                readers[handle] = []
            else:
                readers[handle].append(task)

    def _order_by_signals(self) -> None:
        """Edges from posts to the waits that follow them in every execution."""
        posts: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for device, table in enumerate(self.tables):
            for number, target, signal in table["posts"].tolist():
                if target != device:
                    posts[target, signal].append(int(self.begins[device]) + number)
        for device, table in enumerate(self.tables):
            for number, signal, threshold, _ in table["waits"].tolist():
                of_signal = posts[device, signal]
                # per device, posts at or after the current one
                later: defaultdict[int, int] = defaultdict(int)
                for post in reversed(of_signal):
                    poster = self._device(post)
                    later[poster] += 1
                    if len(of_signal) - later[poster] < threshold:
                        self.before[int(self.begins[device]) + number].add(post)

    def _device(self, task: int) -> int:
        return int(np.searchsorted(self.begins, task, "right")) - 1

    def _ancestors(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """The place of each task in a serial order, and per task a bit for each task before it."""
        count = len(self.before)
        after: list[list[int]] = [[] for _ in range(count)]
        missing = [len(b) for b in self.before]
        for task, before in enumerate(self.before):
            for b in before:
                after[b].append(task)
        ready = [task for task in range(count) if not missing[task]]
        place = np.full(count, -1, np.int64)
        bits = np.zeros((count, -(-count // 64)), np.uint64)
        done = 0
        while ready:
            task = ready.pop()
            place[task] = done
            done += 1
            for b in self.before[task]:
                bits[task] |= bits[b]
                bits[task, b >> 6] |= np.uint64(1 << (b & 63))
            for a in after[task]:
                missing[a] -= 1
                if not missing[a]:
                    ready.append(a)
        return place, bits

    def _find(self, place: NDArray[np.int64], bits: NDArray[np.uint64]) -> Race | None:
        """The first pair of uses of the same bytes without an order."""
        views = self._views()
        for owner, of_owner in views.items():
            of_owner.sort()
            active: list[tuple[int, ...]] = []
            for view in of_owner:
                begin, _, task, role, is_local = view[:5]
                active = [a for a in active if a[1] > begin]
                for other in active:
                    if not (role | other[3]) & _WRITES or other[2] == task:
                        continue
                    if is_local and other[4] and self._device(other[2]) == self._device(task):
                        continue  # ordered by tiles
                    if (
                        not _overlap(view, other)
                        or _is_before(bits, task, other[2])
                        or _is_before(bits, other[2], task)
                    ):
                        continue
                    pair = sorted((view, other), key=lambda v: (self._step(v[2]), place[v[2]]))
                    return Race(owner, self._use(pair[0]), self._use(pair[1]))
                active.append(view)
        return None

    def _step(self, task: int) -> tuple[int, int]:
        """The call and the instruction of a task, to name races in the program's order."""
        device = self._device(task)
        call, _, instruction, _, _ = self.tables[device]["tasks"][task - int(self.begins[device])].tolist()
        return call, instruction

    def _views(self) -> dict[int, list[tuple[int, ...]]]:
        """Per owner: begin, end, task, role, whether it is local, bytes between rows, bytes of a row."""
        views: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for device, table in enumerate(self.tables):
            templates = self.program.classes[self.program.devices[device].class_id].templates
            tasks = table["tasks"].tolist()
            for number, _, owner, begin, end, rows, stride, role in table["views"].tolist():
                width = end - begin - (rows - 1) * stride
                task = int(self.begins[device]) + number
                _, template, instruction, _, _ = tasks[number]
                if templates[template].instructions[instruction].kernel:  # others only order tasks
                    views[owner].append(
                        (begin, end, task, role or _READS, int(owner == device), stride, width)
                    )
        return views

    def _use(self, view: Sequence[int]) -> Use:
        task, role = view[2], view[3]
        device = self._device(task)
        _, _, _, tile, label = self.tables[device]["tasks"][task - int(self.begins[device])].tolist()
        return Use(device, self.labels[label], tile, bool(role & _WRITES))


def _is_before(bits: NDArray[np.uint64], first: int, second: int) -> bool:
    """Whether `first` completes before `second` starts."""
    return bool(bits[second, first >> 6] >> np.uint64(first & 63) & np.uint64(1))


def _overlap(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two rectangles of bytes with overlapping ranges may have a byte in common. Rectangles with
    different distances between rows are not compared by rows.
    """
    (begin, stride, width), (other_begin, other_stride, other_width) = ((v[0], v[5], v[6]) for v in (a, b))
    if stride != other_stride:
        return True
    shift = (other_begin - begin) % stride
    return shift < width or shift + other_width > stride
