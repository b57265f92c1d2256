"""The name of a complete block of the KV cache: what decides every bit in it.

SHA-256 over tagged fields, each with its length, so that no two different lists of fields make the same bytes: the
model, the adapter, the salt that keeps users apart, the key of the block before, the tokens of this one. Keys are not
guessable from other keys, and equal keys mean equal blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

__all__ = ["Scope", "block_key"]

Scope = tuple[tuple[bytes, bytes], ...]
"""What all blocks of a request have in common, tag and value: model, adapter, salt."""


def block_key(scope: Scope, parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block.

    Args:
        scope: of the request.
        parent: key of the block before it; empty for the first.
        tokens: all of its tokens.
    """
    found = hashlib.sha256()
    for tag, value in (*scope, (b"parent", parent), (b"tokens", array("Q", tokens).tobytes())):
        found.update(len(tag).to_bytes(8, "little") + tag + len(value).to_bytes(8, "little") + value)
    return found.digest()
