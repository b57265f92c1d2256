"""Blocks of the KV cache: reference counts, and the index that finds a block by the key of its content.

This module stores numbers of blocks only, no tensors. A block whose reference count is 0 is free.
It can still be found by its key until it is taken for new content. The least recently used free
block is taken first. Taking more blocks than are free, or returning a free block, is a defect of
the scheduler and raises InternalError.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from tilewise.core import InternalError, Validator

__all__ = ["BlockPool", "Scope", "block_key"]

_MOST = 1 << 31
_validate = Validator("serve")


Scope = tuple[tuple[bytes, bytes], ...]
"""Tags and values that all blocks of a request share: model, adapter, salt."""


def block_key(scope: Scope, parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a complete block: SHA-256 of everything that decides its content.

    Every field is hashed with its tag and length, so that no two different lists of fields have the same bytes. Keys
    cannot be guessed from other keys, and equal keys mean equal blocks.

    Args:
        scope: scope of the request; blocks are shared only within a scope.
        parent: key of the block before this one; empty for the first block.
        tokens: all tokens of the block.
    """
    digest = hashlib.sha256()
    for tag, value in (*scope, (b"parent", parent), (b"tokens", array("Q", tokens).tobytes())):
        digest.update(len(tag).to_bytes(8, "little") + tag + len(value).to_bytes(8, "little") + value)
    return digest.digest()


class BlockPool:
    """The blocks of one KV cache. Not thread-safe.

    Args:
        num_blocks: number of blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = _validate.integer("blocks", "num_blocks", num_blocks, 1, _MOST)
        self._ref_counts = [0] * self.num_blocks
        self._keys: list[bytes | None] = [None] * self.num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            range(self.num_blocks)
        )  # next to be taken first

    @property
    def num_free(self) -> int:
        """Number of blocks without a reference, including those that can still be found."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of blocks that can be found by their key."""
        return len(self._by_key)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a chain of keys. Does not change reference counts."""
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """Number of free blocks that would be left if `blocks` were referenced."""
        return len(self._free) - sum(block in self._free for block in blocks)

    def add_references(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks that `find` returned."""
        for block in blocks:
            self._ref_counts[block] += 1
            self._free.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Take free blocks for new content; their old content can no longer be found.

        Raises:
            InternalError: fewer blocks are free.
        """
        if count > len(self._free):
            raise InternalError(
                f"[serve.blocks] only free blocks can be taken; got {count} of {len(self._free)} free; report it"
            )
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, key: bytes) -> None:
        """Make it possible to find a complete block by its key. If another block has the key, that
        block keeps it.
        """
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a sequence's references, in the order of the sequence.

        The last blocks are taken for new content first, because a block cannot be found without the one before it.

        Raises:
            InternalError: a block has no reference.
        """
        for block in reversed(blocks):
            if self._ref_counts[block] == 0:
                raise InternalError(
                    f"[serve.blocks] only a referenced block can be released; got free block {block}; report it"
                )
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:  # cannot be found, so take it first
                    self._free.move_to_end(block, last=False)

    def ref_counts(self) -> list[int]:
        """Reference count of each block."""
        return list(self._ref_counts)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._by_key[key]
