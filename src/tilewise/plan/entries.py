"""The tensor table of every class of devices: an entry per way in which a program sees a buffer, and its handles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.ir.lowering import Ref
from tilewise.ir.program import TensorEntry
from tilewise.plan.memory import Buffer, shared_bytes

__all__ = ["EntryTable"]

Key = tuple[object, ...]


class EntryTable:
    """Entries under construction. An entry has one number in all classes.

    Entries of one buffer share its handles. So do buffers that lie at one place and are cut alike in all classes: then
    the order of their uses follows from the handles, and they need not know each other as aliases.

    Args:
        num_classes: tables to fill.
        bounds: the upper bound of every symbol.
    """

    def __init__(self, num_classes: int, bounds: tuple[int, ...]) -> None:
        self.tables: list[list[TensorEntry]] = [[] for _ in range(num_classes)]
        self.numbers: dict[Key, int] = {}
        self.num_handles = 0
        self._bounds = bounds
        self._handles: dict[Key, int] = {}  # first handle per place and cut
        self._place_of: dict[Key, Key] = {}  # per buffer and part
        self._by_buffer: dict[Key, list[int]] = {}

    def add(
        self, key: Key, buffer: Buffer, views: Sequence[Ref], strides: Sequence[int], shift: int = 0
    ) -> int:
        """The number of the entry for `key`: the part of `buffer` from byte `shift` on, seen as `views` per class."""
        if key in self.numbers:
            return self.numbers[key]
        part = (*buffer.key, shift)
        if part not in self._place_of:
            cut = tuple((v.extent, v.cols, s, v.dtype, v.tile_rows) for v, s in zip(views, strides))
            self._place_of[part] = (buffer.offset + shift, cut)
        place = self._place_of[part]
        if place not in self._handles:
            self._handles[place] = self.num_handles
            self.num_handles += max(max(1, -(-v.extent.upper(self._bounds) // v.tile_rows)) for v in views)
        first = self._handles[place]
        number = self.numbers[key] = len(self.tables[0])
        for table, view, stride in zip(self.tables, views, strides):
            table.append(
                TensorEntry(
                    key,
                    buffer.offset + shift,
                    view.extent,
                    view.cols,
                    stride,
                    view.dtype,
                    view.tile_rows,
                    first,
                )
            )
        self._by_buffer.setdefault(buffer.key, []).append(number)
        return number

    def aliases(self, buffers: Sequence[Buffer]) -> Mapping[int, tuple[int, ...]]:
        """Per entry, entries that share memory with it without sharing its handles, one for each set of handles."""
        table = self.tables[0]
        found: dict[int, tuple[int, ...]] = {}
        for i, others in shared_bytes(buffers).items():
            entries = self._by_buffer.get(buffers[i].key, ())
            if not entries:
                continue
            own = {table[e].first_handle for e in entries}
            by_handle: dict[int, int] = {}
            for j in others:
                for other in self._by_buffer.get(buffers[j].key, ())[:1]:
                    by_handle.setdefault(table[other].first_handle, other)
            targets = tuple(other for handle, other in by_handle.items() if handle not in own)
            found.update(dict.fromkeys(entries, targets) if targets else {})
        return found
