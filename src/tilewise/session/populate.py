"""Memory that was never written, had from the system by a thread beside whatever else is done.

Takes devices' memory as `Executor.buffer` gives it, which outlives its executor: so closing a model does not wait for
the thread, and neither does the end of the process. Changes no byte.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilewise.runtime import populate

__all__ = ["populate_beside"]

_PIECE_BYTES = 4 << 20


def populate_beside(memory: Sequence[NDArray[np.uint8]]) -> threading.Thread | None:
    """A piece of each in turn, from their beginnings on: what is filled together is there together.

    Args:
        memory: bytes of devices, which may be in use meanwhile.

    Returns:
        The thread; None where the system has no more, and the memory comes as it is written.
    """
    thread = threading.Thread(target=_populate, args=(memory,), name="populate", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _populate(memory: Sequence[NDArray[np.uint8]]) -> None:
    longest = max((len(part) for part in memory), default=0)
    for begin in range(0, longest, _PIECE_BYTES):
        for part in memory:
            if begin < len(part):
                populate(part[begin : begin + _PIECE_BYTES])
