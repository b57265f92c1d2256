"""Pages of the KV cache: which blocks of 64 positions belong to which sequence.

Pure bookkeeping: a sequence takes a block when it grows into it and gives all back when it ends. Refuses to
hand out what is not there.
"""

from __future__ import annotations

from tilewise.core import Border, ResourceError
from tilewise.models import BLOCK_SIZE

__all__ = ["BlockTable", "num_blocks_for"]

_MOST = 1 << 31
_border = Border("generate")


def num_blocks_for(num_positions: int) -> int:
    """Blocks that hold so many positions."""
    return -(-num_positions // BLOCK_SIZE)


class BlockTable:
    """Blocks of several sequences out of one pool.

    Args:
        num_blocks: in the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        count = _border.integer("blocks", "num_blocks", num_blocks, 1, _MOST)
        self._free = list(range(count))[::-1]
        self._owned: dict[int, list[int]] = {}

    def grow(self, sequence: int, num_positions: int) -> list[int]:
        """The blocks of a sequence, enough for `num_positions`.

        Raises:
            ResourceError: the pool is empty.
        """
        owned = self._owned.setdefault(sequence, [])
        missing = num_blocks_for(num_positions) - len(owned)
        if missing > len(self._free):
            raise ResourceError(
                f"[generate.blocks] the KV cache must hold every sequence; got {missing} blocks wanted and "
                f"{len(self._free)} free; use fewer prompts or a shorter context"
            )
        for _ in range(missing):
            owned.append(self._free.pop())
        return owned

    def release(self, sequence: int) -> None:
        """Give all blocks of a sequence back."""
        self._free += self._owned.pop(sequence, [])[::-1]
