"""What the two processes of a server say to each other: frames of JSON behind their length, through a pair of sockets.

JSON and not pickles: part of every message comes from clients, and the other side must be able to read it without
trusting it. What a message may hold is checked by the side that reads it.
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.serve import Logprob, Piece
from tilewise.serve.logprobs import TokenLogprobs

__all__ = ["HEAD", "MOST_BYTES", "pack", "piece_of", "row_of", "unpack", "vector_of"]

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
    return json.loads(body)


def row_of(piece: Piece) -> list[Any]:
    """A piece as plain values."""
    vector = None if piece.vector is None else base64.b64encode(piece.vector.astype("<f4").tobytes()).decode()
    prompt = piece.prompt_logprobs
    return [
        piece.sequence,
        piece.choice,
        piece.token,
        piece.text,
        piece.finish_reason,
        piece.stop_reason,
        None if piece.logprobs is None else _figures(piece.logprobs),
        None if prompt is None else [None if found is None else _figures(found) for found in prompt],
        piece.num_cached_tokens,
        vector,
    ]


def piece_of(row: list[Any]) -> Piece:
    """The piece again."""
    sequence, choice, token, text, finish, stop, logprobs, prompt, num_cached, vector = row
    return Piece(
        sequence,
        choice,
        token,
        text,
        finish,
        stop,
        None if logprobs is None else _token_logprobs(logprobs),
        None if prompt is None else [None if found is None else _token_logprobs(found) for found in prompt],
        num_cached,
        None if vector is None else vector_of(vector),
    )


def vector_of(text: str) -> NDArray[np.float32]:
    """Numbers of their base64, little-endian."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def _figures(found: TokenLogprobs) -> list[list[Any]]:
    return [[token, figure.logprob, figure.rank, figure.decoded_token] for token, figure in found.items()]


def _token_logprobs(rows: list[list[Any]]) -> TokenLogprobs:
    return {token: Logprob(logprob, rank, text) for token, logprob, rank, text in rows}
