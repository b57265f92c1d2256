"""A file that is open while one of its tensors is in use, and what such tensors have in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tilewise.core import CheckpointError

__all__ = ["OpenFile", "RowsOfFile"]


@dataclass(frozen=True)
class OpenFile:
    """A file that is open for reading while one of its tensors is in use.

    Attributes:
        path: path of the file when it was opened.
        stream: keeps the file open. Its position is not used.
    """

    path: Path
    stream: BinaryIO

    @property
    def descriptor(self) -> int:
        """The file descriptor."""
        return self.stream.fileno()

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill a buffer with the bytes from `begin` on.

        Raises:
            CheckpointError: the file ends earlier, or cannot be read.
        """
        filled = 0
        while filled < len(buffer):
            try:
                got = os.preadv(self.descriptor, [buffer[filled:]], begin + filled)
            except OSError as error:
                raise self.unreadable(error.strerror or str(error)) from None
            if got == 0:
                raise self.unreadable("it has become shorter")
            filled += got

    def unreadable(self, reason: str) -> CheckpointError:
        """The error about a file that was complete when it was opened."""
        return CheckpointError(
            f"[checkpoint.read] a file of weights must stay as it is while it is read; got {str(self.path)!r}: "
            f"{reason}; load it again when it is complete"
        )


class RowsOfFile(ABC):
    """What tensors of files have in common: they are read when they are indexed or converted to an array."""

    shape: tuple[int, ...]

    @abstractmethod
    def rows(self, first: int, count: int) -> RowsOfFile:
        """A range of rows. (The rows of a vector are its elements.)"""

    @abstractmethod
    def read(self) -> NDArray[Any]:
        """All elements, as a new array."""

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dims has no length")
        return self.shape[0]

    def __getitem__(self, key: Any) -> NDArray[Any]:
        if isinstance(key, slice) and self.shape:
            first, end, step = key.indices(self.shape[0])
            if step == 1:
                return self.rows(first, max(0, end - first)).read()
        return np.asarray(self.read()[key])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a tensor in a file cannot be an array without being read")
        array = self.read()
        return array if dtype is None else array.astype(dtype, copy=False)
