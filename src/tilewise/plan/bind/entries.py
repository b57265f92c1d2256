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


class EntryTable:
    """A table of entries under construction. An entry has the same number in all classes.

    Entries of one buffer share its handles. So do buffers at the same address that are divided
    alike in all classes: the order of their uses then follows from the handles, and they need not
    be listed as aliases.

    Args:
        num_classes: number of tables to fill.
        bounds: the upper bound of every symbol.
    """

    def __init__(self, num_classes: int, bounds: tuple[int, ...]) -> None:
        self.tables: list[list[TensorEntry]] = [[] for _ in range(num_classes)]
        self.numbers: dict[Key, int] = {}
        self.num_handles = 0
        self._bounds = bounds
        self._cuts: dict[Key, Cut] = {}
        # first handle per part, or per place and cut where several may have it
        self._handles: dict[object, int] = {}
        self._place_of: dict[object, tuple[int, int]] = {}  # per part
        self._by_buffer: defaultdict[Key, list[int]] = defaultdict(list)  # of those that may share bytes

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

    def add(self, key: Key, buffer: Buffer, cut: Cut) -> int:
        """The number of the entry for `key`: all of `buffer`, with the view `cut`."""
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = self.append(key, buffer, cut)
        return number

    def append(self, key: Key, buffer: Buffer, cut: Cut, shift: int = 0) -> int:
        """Like `add`, for a key that has no entry yet, and for the part of `buffer` from byte
        `shift` on.
        """
        # shares the int object, because there are many
        offset = buffer.offset + shift if shift else buffer.offset
        number, owner = len(self.tables[0]), buffer.key
        # plain tensor numbers are dense, so a dict of a million of them stays in the CPU cache
        place: object = owner[1] if owner[0] == "tensor" and not shift else (owner, shift)
        if buffer.first >= 0:
            self._by_buffer[owner].append(number)
            part, place = place, self._place_of.get(place)
            if place is None:
                place = self._place_of[part] = offset, cut.number
        first = self._handles.get(place)
        if first is None:
            first = self._handles[place] = self.num_handles
            self.num_handles += cut.num_handles
        entry, before = None, None
        for table, view in zip(self.tables, cut.views):
            if entry is None or view != before:
                *rest, tile_cols = view
                entry, before = _new_entry(TensorEntry, (key, offset, *rest, first, tile_cols)), view
            table.append(entry)
        return number

    def aliases(
        self, results: Sequence[Buffer], runs: Iterable[Iterable[Sequence[LiveInterval]]]
    ) -> Mapping[int, tuple[int, ...]]:
        """Per entry, the entries that share its memory but not its handles, one for each set of
        handles.

        Args:
            results: buffers that are live from one segment to another; all that share bytes are
                listed.
            runs: for each order in which a run uses templates, the temporaries of each use;
                `plan.bind.reuse` finds their conflicts.
        """
        table = self.tables[0]
        aliases_of: dict[int, tuple[int, ...]] = {}
        for i, others in shared_bytes(results).items():
            entries = self._by_buffer.get(results[i].key, ())
            if not entries:
                continue
            own = {table[e].first_handle for e in entries}
            by_handle: dict[int, int] = {}
            for j in others:
                for other in self._by_buffer.get(results[j].key, ())[:1]:
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
