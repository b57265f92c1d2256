"""What a process and one that it started say to each other: frames of JSON behind their length, through a pair of
sockets.

JSON and not pickles: parts of a message may come from clients, and the other side must be able to read it without
trusting it. What a message may hold is checked by the side that reads it.
"""

from __future__ import annotations

import json
import struct
from typing import Any

__all__ = ["HEAD", "MOST_BYTES", "pack", "unpack"]

HEAD = struct.Struct(">I")
MOST_BYTES = 1 << 28
"""Of a frame; a longer one is a defect of the other side."""


def pack(message: Any) -> bytes:
    """A message as it is sent, its length before it."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEAD.pack(len(body)) + body


def unpack(body: bytes | bytearray) -> Any:
    """A message of its bytes behind the length.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
