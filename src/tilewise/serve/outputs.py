"""What the engine says: deltas as they come, and what callers get, with vLLM's names."""

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
    """What each output of a stream holds."""

    CUMULATIVE = 0
    """All of the text so far."""
    DELTA = 1
    """What is new."""
    FINAL_ONLY = 2
    """All of the text, once, at its end."""


@dataclass(frozen=True)
class Delta:
    """What one step added to one text.

    Attributes:
        sequence: index of the prompt.
        choice: index among the prompt's texts.
        token: the new token; None where a text ended without one.
        text: whole characters that can be shown now; may be empty.
        finish_reason: `stop` (an end token or a stop string), `length` (max_tokens or the context), `abort`, or None
            while it goes on.
        stop_reason: the stop string or the stop token of the request that ended it.
        logprobs: of the token, where they were asked for.
        prompt_logprobs: of the whole prompt, with the first delta of the first text.
        num_cached_tokens: of the prompt, that were found in the cache.
        vector: of the prompt, where that is what was asked for; its only delta.
        text_offset: characters of the text before the token's own, counted before stop strings cut it;
            0 without `logprobs`. A token that continues a character has the offset of that character.
        begun_s: when the text was first part of a step, of `time.monotonic`; with its first delta.
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
    begun_s: float | None = field(default=None, compare=False)  # two runs that write the same differ in time


@dataclass
class CompletionOutput:
    """One text of a request.

    Attributes:
        index: among the request's texts.
        text: of it.
        token_ids: of it, the end token included.
        cumulative_logprob: of all its tokens, where logprobs were asked for.
        logprobs: of each token, where they were asked for.
        finish_reason: `stop`, `length`, `abort`, or None while it goes on.
        stop_reason: the stop string or stop token that ended it.
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
        """A delta of this text came."""
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
        request_id: the caller's name for it.
        prompt: its text, where it was given as one.
        prompt_token_ids: its tokens.
        outputs: its texts, in order of their index.
        finished: whether all of them have ended.
        prompt_logprobs: of each token of the prompt, None for the first, where they were asked for.
        num_cached_tokens: of the prompt, that were found in the cache.
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
    """What a prompt is turned into.

    Attributes:
        data: the vector of its last token before the model's head, `[D]`.
    """

    data: NDArray[np.float32]


@dataclass(frozen=True)
class PoolingRequestOutput:
    """A prompt and its vector.

    Attributes:
        request_id: the engine's name for it.
        outputs: the vector.
        prompt_token_ids: its tokens.
        finished: always.
        num_cached_tokens: of the prompt, that were found in the cache.
    """

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


class StepTimes(NamedTuple):
    """One call of the model.

    Attributes:
        begin_s: of `time.monotonic`.
        seconds: that it took.
        num_read: tokens that were read and brought no new one: of prompts, mostly.
        num_written: tokens whose next one was asked for.
    """

    begin_s: float
    seconds: float
    num_read: int
    num_written: int


@dataclass(frozen=True)
class EngineStats:
    """What an engine has to do at a moment, over all copies of the model.

    Attributes:
        num_running: texts that have blocks.
        num_waiting: texts that have none.
        num_blocks: of the caches.
        num_free_blocks: that no text holds.
        num_preemptions: times that a text gave up its blocks, since the engine was made.
        num_steps: calls of the model, since the engine was made.
        steps: the last ones, oldest first.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_steps: int
    steps: tuple[StepTimes, ...] = ()
