"""A file that is open while one of its tensors is in use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tilewise.core import CheckpointError

__all__ = ["OpenFile"]


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
