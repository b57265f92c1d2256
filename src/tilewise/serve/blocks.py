"""Blocks of the KV cache: who holds them, which of them can be found again by what they hold.

Pure bookkeeping over numbers of blocks. A block is held by as many sequences as its count says; one that no sequence
holds is free, and stays findable by its key until it is taken for something else, least recently used first. Refuses to
hand out what is not there and to take back what is not out: that would be a defect of the scheduler, never a user's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tilewise.core import Border, InternalError

__all__ = ["BlockPool"]

_MOST = 1 << 31
_border = Border("serve")


class BlockPool:
    """The blocks of one KV cache. One thread at a time.

    Args:
        num_blocks: in the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = _border.integer("blocks", "num_blocks", num_blocks, 1, _MOST)
        self._num_holders = [0] * self.num_blocks
        self._keys: list[bytes | None] = [None] * self.num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))  # next to go first

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, also those that can still be found."""
        return len(self._free)

    @property
    def num_found(self) -> int:
        """Blocks that can be found by their key."""
        return len(self._by_key)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning of a chain of keys that is all there; nothing is taken yet."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_beside(self, blocks: Sequence[int]) -> int:
        """Free blocks that would be left when these were held."""
        return len(self._free) - sum(block in self._free for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """One more sequence holds these, which `find` has found."""
        for block in blocks:
            self._num_holders[block] += 1
            self._free.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Blocks for something new; what they held can no longer be found.

        Raises:
            InternalError: so many are not free.
        """
        if count > len(self._free):
            raise InternalError(
                f"[serve.blocks] only free blocks can be taken; got {count} wanted of {len(self._free)}; report it"
            )
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._num_holders[block] = 1
            taken.append(block)
        return taken

    def name(self, block: int, key: bytes) -> None:
        """A held block is complete and can be found by its key; where another one has the key, that one stays."""
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def give_back(self, blocks: Sequence[int]) -> None:
        """A sequence holds these no more, in their order in the sequence: the last ones are taken first, so that no
        block outlives the one before it, without which it cannot be found.

        Raises:
            InternalError: a block is held by no sequence.
        """
        for block in reversed(blocks):
            if self._num_holders[block] == 0:
                raise InternalError(
                    f"[serve.blocks] only a held block can be given back; got block {block}, which is free; report it"
                )
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:  # nothing worth keeping
                    self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """No block can be found any more."""
        for block in range(self.num_blocks):
            self._forget(block)

    def holders(self) -> list[int]:
        """How many sequences hold each block."""
        return list(self._num_holders)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._by_key[key]
