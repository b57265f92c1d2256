"""One text of a request as the scheduler sees it: tokens, positions and blocks, no tensors.

    waiting -> running -> finished
                  | ^
                  v |
               preempted

A preempted sequence has lost its blocks and reads its tokens again later. Its tokens stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tilewise.generate import History
from tilewise.models import BLOCK_SIZE
from tilewise.serve.blocks import block_key
from tilewise.serve.request import Request

__all__ = ["Drafter", "Sequence", "Status"]


class Drafter(Protocol):
    """Makes the draft tokens of a sequence."""

    def draft(self, most: int) -> list[int]:
        """At most `most` draft tokens."""
        ...


class Status(Enum):
    """State of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One text of a request.

    Attributes:
        request: the request.
        choice: index among the request's texts.
        history: tokens of prompt and text so far.
        leader: the first text of the request, whose blocks of the prompt the other texts share;
            None for the first text.
        drafter: makes the draft tokens of this text; None without speculative decoding.
        status: state of the sequence.
        turn: sort key among all sequences, set when it arrives; lower runs first.
        done: number of positions in the KV cache.
        blocks: blocks of these positions.
        num_prompt_rows: number of prompt positions whose log probabilities have been computed.
        has_read_prompt: whether the whole prompt was in the cache once.
        num_cached: number of positions that were found in the cache when the sequence first ran;
            None before.
        finish_reason: `stop`, `length`, `abort` or `error` when finished; None before.
    """

    request: Request
    choice: int
    history: History
    leader: Sequence | None = None
    drafter: Drafter | None = None
    status: Status = Status.WAITING
    turn: tuple[int, int] = (0, 0)
    done: int = 0
    blocks: list[int] = field(default_factory=list)
    num_prompt_rows: int = 0
    has_read_prompt: bool = False
    num_cached: int | None = None
    finish_reason: str | None = None
    _keys: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.history)

    @property
    def num_uncached(self) -> int:
        """Number of tokens that are not in the cache."""
        return len(self.history) - self.done

    @property
    def is_live(self) -> bool:
        """Whether the sequence is not finished."""
        return self.status is not Status.FINISHED

    @property
    def first_row(self) -> int:
        """The first position whose logits are needed. The logits of all later positions are needed,
        too.
        """
        wants_prompt = self.choice == 0 and self.request.output_options.prompt_logprobs is not None
        if wants_prompt and self.num_prompt_rows < self.history.num_prompt - 1:
            return self.num_prompt_rows
        return len(self.history) - 1

    @property
    def must_wait(self) -> bool:
        """Whether this text must wait because the request's first text still reads their common prompt."""
        leader = self.leader
        return leader is not None and leader.is_live and not leader.has_read_prompt

    def keys(self, count: int) -> list[bytes]:
        """Keys of the first `count` complete blocks."""
        ids, scope = self.history.ids, self.request.scope
        while len(self._keys) < count:
            parent, first = self._keys[-1] if self._keys else b"", len(self._keys) * BLOCK_SIZE
            self._keys.append(block_key(scope, parent, ids[first : first + BLOCK_SIZE]))
        return self._keys[:count]
