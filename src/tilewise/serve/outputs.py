"""The engine's reports: deltas, and the outputs that callers get, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.serve.logprobs import TokenLogprobs

__all__ = [
    "CompletionOutput",
    "Delta",
    "EngineStats",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "StepTimes",
]


class RequestOutputKind(Enum):
    """The content of each output of a stream."""

    CUMULATIVE = 0
    """The whole text so far."""
    DELTA = 1
    """The part since the last output."""
    FINAL_ONLY = 2
    """The whole text, once, when it has ended."""


@dataclass(frozen=True)
class Delta:
    """The text and token that one step added to one text.

    Attributes:
        sequence: index of the prompt in the call.
        choice: index among the prompt's texts.
        token: the new token; None if the text ended without one.
        text: complete characters that are new; may be empty.
        finish_reason: `stop` (an end token or a stop string), `length` (max_tokens or the context), `abort`, or None
            while the text is not finished.
        stop_reason: the stop string, or the token of `stop_token_ids`, that ended the text.
        logprobs: log probabilities at the token, if requested.
        prompt_logprobs: log probabilities of the whole prompt, if requested; only in the first
            delta of the first text.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
        vector: the prompt's vector, for pooling requests, which have only this delta.
        text_offset: number of characters of the text before those of the token, counted before stop
            strings cut the text; 0 without `logprobs`. A token that continues a character has the
            offset of that character.
        begun_s: when the text was first part of a step, in seconds of `time.monotonic`; only in its
            first delta.
    """

    sequence: int
    choice: int
    token: int | None
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    vector: NDArray[np.float32] | None = None
    text_offset: int = 0
    begun_s: float | None = field(
        default=None, compare=False
    )  # not compared: equal texts of two runs differ in time


@dataclass
class CompletionOutput:
    """One text of a request.

    Attributes:
        index: index among the request's texts.
        text: the text.
        token_ids: its tokens, the end token included.
        cumulative_logprob: sum of the log probabilities of its tokens, if requested.
        logprobs: log probabilities at each token, if requested.
        finish_reason: `stop`, `length`, `abort`, or None while the text is not finished.
        stop_reason: the stop string or stop token that ended the text, or None.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def finished(self) -> bool:
        """Whether the text has ended."""
        return self.finish_reason is not None

    def extend(self, delta: Delta) -> None:
        """Append a delta of this text."""
        self.text += delta.text
        if delta.token is not None:
            self.token_ids.append(delta.token)
        if delta.logprobs is not None and delta.token is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs.append(delta.logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + delta.logprobs[delta.token].logprob
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class RequestOutput:
    """A request and its texts.

    Attributes:
        request_id: name of the request.
        prompt: text of the prompt, if it was given as text.
        prompt_token_ids: tokens of the prompt.
        outputs: its texts, in order of their index.
        finished: whether all texts have ended.
        prompt_logprobs: log probabilities of each token of the prompt, None for the first, if requested.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class PoolingOutput:
    """Vector of a prompt.

    Attributes:
        data: `[D]`, fp32. For a decoder, the final hidden state of the last token; for an encoder,
            the pooled vectors of all tokens.
    """

    data: NDArray[np.float32]


@dataclass(frozen=True)
class PoolingRequestOutput:
    """A prompt and its vector.

    Attributes:
        request_id: name of the request.
        outputs: the vector.
        prompt_token_ids: tokens of the prompt.
        finished: always True.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
    """

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


class StepTimes(NamedTuple):
    """One call of the model.

    Attributes:
        begin_s: start, in seconds of `time.monotonic`.
        seconds: duration.
        num_read: tokens without logits, mostly of prompts.
        num_written: tokens whose logits were computed.
    """

    begin_s: float
    seconds: float
    num_read: int
    num_written: int


@dataclass(frozen=True)
class EngineStats:
    """Load of an engine at one moment, over all copies of the model.

    Attributes:
        num_running: texts that have blocks.
        num_waiting: texts that wait for blocks.
        num_blocks: blocks of the KV caches.
        num_free_blocks: blocks that no text uses.
        num_preemptions: preemptions since the engine was made.
        num_steps: model calls since the engine was made.
        steps: times of the last model calls, oldest first.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_steps: int
    steps: tuple[StepTimes, ...] = ()
