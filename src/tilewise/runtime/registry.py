"""Registered memory: the arrays that a runtime's tasks work on, and their address ranges.

The registry keeps each registered array alive. Memory that is already registered is rejected,
because tasks on two handles of the same memory would not be ordered. `Runtime` uses the registry
while it holds the GIL.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from numpy.typing import NDArray

from tilewise._native.tasks import OpenRuntime
from tilewise.core.validation import Validator
from tilewise.runtime.buffers import Buffer, array_of

__all__ = ["Registry"]

_validate = Validator("runtime")


class Registry:
    """The registered arrays of one runtime."""

    def __init__(self, native: OpenRuntime) -> None:
        self._native = native
        self._owners: dict[int, tuple[object, NDArray[Any]]] = {}  # by handle; keeps the memory alive
        self._ranges: list[tuple[int, int]] = []  # first and last byte of registered memory, ascending

    def add(self, source: object) -> Buffer:
        """Register an array. A read-only array becomes a frozen buffer."""
        array = array_of(source)
        address = array.__array_interface__["data"][0]
        at = bisect_left(self._ranges, (address, address))
        is_taken = any(
            first < address + array.nbytes and address < end
            for first, end in self._ranges[max(0, at - 1) : at + 1]
        )
        if is_taken:
            _validate.invalid(
                "register",
                "memory must be registered once",
                "an array that shares bytes with a registered one",
                "use that buffer, and regions of it",
            )
        handle = self._native.register(address, array.nbytes)
        self._owners[handle] = (source, array)
        insort(self._ranges, (address, address + array.nbytes))
        if not array.flags.writeable:
            self._native.freeze(handle, True)
        return Buffer(self._native, handle, array)

    def remove(self, buffer: Buffer, timeout: float | None) -> None:
        """Wait for the buffer's tasks, then unregister it and release its memory."""
        if buffer._array is None:
            _validate.invalid(
                "unregister",
                "a buffer must have been registered",
                "one of the runtime's own",
                "it ends with its scope",
            )
        self._native.unregister(buffer.handle, timeout)
        self._owners.pop(buffer.handle)
        address = buffer.array.__array_interface__["data"][0]
        self._ranges.remove((address, address + buffer.num_bytes))
