"""Pieces of texts as rows of plain values, and back again: what frames between the two processes carry."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.serve import Delta, Logprob
from tilewise.serve.logprobs import TokenLogprobs

__all__ = ["delta_of", "row_of"]


def row_of(delta: Delta) -> list[Any]:
    """A delta as plain values."""
    vector = None if delta.vector is None else base64.b64encode(delta.vector.astype("<f4").tobytes()).decode()
    prompt = delta.prompt_logprobs
    return [
        delta.sequence,
        delta.choice,
        delta.token,
        delta.text,
        delta.finish_reason,
        delta.stop_reason,
        None if delta.logprobs is None else _figures(delta.logprobs),
        None if prompt is None else [None if found is None else _figures(found) for found in prompt],
        delta.num_cached_tokens,
        vector,
        delta.text_offset,
        delta.begun_s,
    ]


def delta_of(row: list[Any]) -> Delta:
    """The delta again."""
    sequence, choice, token, text, finish, stop, logprobs, prompt, num_cached, vector, offset, begun = row
    return Delta(
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
