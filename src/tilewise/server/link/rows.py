"""Converts deltas to rows of plain values and back, for the frames between the two processes."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.serve import Delta, Logprob
from tilewise.serve.logprobs import TokenLogprobs

__all__ = ["delta_of", "row_of"]


def row_of(delta: Delta) -> list[Any]:
    """A delta as a row of plain values."""
    vector = None if delta.vector is None else base64.b64encode(delta.vector.astype("<f4").tobytes()).decode()
    prompt = delta.prompt_logprobs
    return [
        delta.sequence,
        delta.choice,
        delta.token,
        delta.text,
        delta.finish_reason,
        delta.stop_reason,
        None if delta.logprobs is None else _logprob_rows(delta.logprobs),
        None if prompt is None else [None if one is None else _logprob_rows(one) for one in prompt],
        delta.num_cached_tokens,
        vector,
        delta.text_offset,
        delta.begun_s,
    ]


def delta_of(row: list[Any]) -> Delta:
    """The delta of a row."""
    sequence, choice, token, text, finish, stop, logprobs, prompt, num_cached, vector, offset, begun = row
    return Delta(
        sequence,
        choice,
        token,
        text,
        finish,
        stop,
        None if logprobs is None else _token_logprobs(logprobs),
        None if prompt is None else [None if one is None else _token_logprobs(one) for one in prompt],
        num_cached,
        None if vector is None else _vector(vector),
        offset,
        begun,
    )


def _vector(text: str) -> NDArray[np.float32]:
    """A vector from base64 of little-endian fp32."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def _logprob_rows(logprobs: TokenLogprobs) -> list[list[Any]]:
    return [[token, figure.logprob, figure.rank, figure.decoded_token] for token, figure in logprobs.items()]


def _token_logprobs(rows: list[list[Any]]) -> TokenLogprobs:
    return {token: Logprob(logprob, rank, text) for token, logprob, rank, text in rows}
