"""Pieces of texts as rows of plain values, and back again: what frames between the two processes carry."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.serve import Logprob, Piece
from tilewise.serve.logprobs import TokenLogprobs

__all__ = ["piece_of", "row_of"]


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
        piece.text_offset,
        piece.begun_s,
    ]


def piece_of(row: list[Any]) -> Piece:
    """The piece again."""
    sequence, choice, token, text, finish, stop, logprobs, prompt, num_cached, vector, offset, begun = row
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
        None if vector is None else _vector(vector),
        offset,
        begun,
    )


def _vector(text: str) -> NDArray[np.float32]:
    """Numbers of their base64, little-endian."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def _figures(found: TokenLogprobs) -> list[list[Any]]:
    return [[token, figure.logprob, figure.rank, figure.decoded_token] for token, figure in found.items()]


def _token_logprobs(rows: list[list[Any]]) -> TokenLogprobs:
    return {token: Logprob(logprob, rank, text) for token, logprob, rank, text in rows}
