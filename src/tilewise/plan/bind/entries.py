"""The tensor table of every class of devices: one entry for each way in which a program views a
buffer, and its handles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilewise.ir.lowering import Ref
from tilewise.ir.program import Number, NumberLike, TensorEntry, tiles_across, upper
from tilewise.plan.bind.reuse import LiveInterval, find_conflicts
from tilewise.plan.memory import Buffer, shared_bytes

__all__ = ["Cut", "EntryTable"]

Key = tuple[object, ...]
_new_entry = tuple.__new__  # faster than the constructor of the class
_NO_ROWS = Number(0)


@dataclass(frozen=True)
class Cut:
    """A view of a buffer: per class rows, columns, stride, dtype, rows per tile and columns per
    tile.

    Attributes:
        number: equal for equal views.
        num_handles: number of tiles on the device with most.
    """

    number: int
    num_handles: int
    views: tuple[tuple[Number, int, int, str, NumberLike, int], ...]


class _Handles:
    """The handles of a stage's devices, and which entries have them.

    Entries of one buffer share its handles. So do buffers at the same address that are divided
    alike in all classes: the order of their uses then follows from the handles, and they need not
    be listed as aliases.
    """

    def __init__(self) -> None:
        self.count = 0
        # first handle per part, or per place and cut where several may have it
        self._first: dict[object, int] = {}
        self._place_of: dict[object, tuple[int, int]] = {}  # per part
        self.by_buffer: defaultdict[Key, list[int]] = defaultdict(list)  # of those that may share bytes

    def first(self, buffer: Buffer, shift: int, offset: int, cut: Cut, number: int) -> int:
        """The first handle of entry `number`, the part of `buffer` from byte `shift` on."""
        owner = buffer.key
        # plain tensor numbers are dense, so a dict of a million of them stays in the CPU cache
        place: object = owner[1] if owner[0] == "tensor" and not shift else (owner, shift)
        if buffer.first >= 0:
            self.by_buffer[owner].append(number)
            part, place = place, self._place_of.get(place)
            if place is None:
                place = self._place_of[part] = offset, cut.number
        first = self._first.get(place)
        if first is None:
            first = self._first[place] = self.count
            self.count += cut.num_handles
        return first


class EntryTable:
    """A table of entries under construction. An entry has the same number in all classes. Classes of
    stages that do not have its buffer have an entry of no rows.

    Args:
        stages: per class, the stage of its devices.
        bounds: the upper bound of every symbol.
    """

    def __init__(self, stages: Sequence[int], bounds: tuple[int, ...]) -> None:
        self.tables: list[list[TensorEntry]] = [[] for _ in stages]
        self.numbers: dict[Key, int] = {}
        self._bounds = bounds
        self._cuts: dict[Key, Cut] = {}
        self._handles = [_Handles() for _ in range(max(stages) + 1)]
        # per stage, its tables with the numbers of their classes
        self._of_stage: list[list[tuple[list[TensorEntry], int]]] = [[] for _ in self._handles]
        for number, stage in enumerate(stages):
            self._of_stage[stage].append((self.tables[number], number))

    @property
    def num_handles(self) -> int:
        """The handles that a device needs."""
        return max(handles.count for handles in self._handles)

    def cut(self, views: Sequence[Ref], strides: Sequence[int]) -> Cut:
        """A view and a stride per class, for `add`."""
        seen = tuple((v.extent, v.cols, s, v.dtype, v.tile_rows, v.tile_cols) for v, s in zip(views, strides))
        if seen not in self._cuts:
            tiles = max(
                max(1, -(-v.extent.upper(self._bounds) // upper(v.tile_rows, self._bounds)))
                * tiles_across(v.cols, v.tile_cols)
                for v in views
            )
            self._cuts[seen] = Cut(len(self._cuts), tiles, seen)
        return self._cuts[seen]

    def add(self, key: Key, buffers: Sequence[Buffer | None], cut: Cut) -> int:
        """The number of the entry for `key`: per stage, all of a buffer, with the view `cut`."""
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = self.append(key, buffers, cut)
        return number

    def append(self, key: Key, buffers: Sequence[Buffer | None], cut: Cut, shift: int = 0) -> int:
        """Like `add`, for a key that has no entry yet, and for the part of the buffers from byte
        `shift` on.
        """
        number = len(self.tables[0])
        for stage, buffer in enumerate(buffers):
            if buffer is None:
                for table, c in self._of_stage[stage]:
                    _, *rest, tile_cols = cut.views[c]
                    table.append(_new_entry(TensorEntry, (key, 0, _NO_ROWS, *rest, 0, tile_cols)))
                continue
            # shares the int object, because there are many
            offset = buffer.offset + shift if shift else buffer.offset
            first = self._handles[stage].first(buffer, shift, offset, cut, number)
            entry, before = None, None
            for table, c in self._of_stage[stage]:
                view = cut.views[c]
                if entry is None or view != before:
                    *rest, tile_cols = view
                    entry, before = _new_entry(TensorEntry, (key, offset, *rest, first, tile_cols)), view
                table.append(entry)
        return number

    def aliases(
        self, stage: int, results: Sequence[Buffer], runs: Iterable[Iterable[Sequence[LiveInterval]]]
    ) -> Mapping[int, tuple[int, ...]]:
        """Per entry of a stage, the entries that share its memory but not its handles, one for each
        set of handles.

        Args:
            stage: the stage.
            results: buffers that are live from one segment to another; all that share bytes are
                listed.
            runs: for each order in which a run uses templates, the temporaries of each use;
                `plan.bind.reuse` finds their conflicts.
        """
        table, by_buffer = self._of_stage[stage][0][0], self._handles[stage].by_buffer
        aliases_of: dict[int, tuple[int, ...]] = {}
        for i, others in shared_bytes(results).items():
            entries = by_buffer.get(results[i].key, ())
            if not entries:
                continue
            own = {table[e].first_handle for e in entries}
            by_handle: dict[int, int] = {}
            for j in others:
                for other in by_buffer.get(results[j].key, ()):
                    by_handle.setdefault(table[other].first_handle, other)
            targets = tuple(other for handle, other in by_handle.items() if handle not in own)
            aliases_of.update(dict.fromkeys(entries, targets) if targets else {})
        of_temporaries: dict[tuple[int, ...], set[int]] = {}
        for uses in runs:
            for own_entries, conflicting in find_conflicts(uses).items():
                of_temporaries.setdefault(own_entries, set()).update(conflicting)
        for own_entries, conflicting in of_temporaries.items():
            aliases_of.update(dict.fromkeys(own_entries, tuple(sorted(conflicting))))
        return aliases_of
