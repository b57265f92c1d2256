"""One text of a request on its way through the engine, as the scheduler sees it: tokens, positions, blocks; no tensors.

    waiting -> running -> finished
                  | ^
                  v |
               preempted

A preempted sequence has lost its blocks and reads its tokens again; what it has written stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tilewise.generate import History
from tilewise.models import BLOCK_SIZE
from tilewise.serve.block_key import block_key
from tilewise.serve.request import Request

__all__ = ["Drafter", "Sequence", "Status"]


class Drafter(Protocol):
    """Guesses how a text goes on."""

    def draft(self, most: int) -> list[int]:
        """At most so many tokens."""
        ...


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One text.

    Attributes:
        request: what it is written for.
        choice: index among the request's texts.
        history: prompt and text so far.
        leader: the first text of the request, whose blocks of the prompt the others share; None for itself.
        drafter: guesses its next tokens; None where none are guessed.
        status: where it stands.
        turn: its place in the order of all sequences, given when it arrived; lower goes first.
        done: positions in the KV cache.
        blocks: that hold them.
        num_prompt_rows: positions of the prompt whose log probabilities are computed already.
        has_read_prompt: the prompt was in the cache once.
        num_cached: positions that were found when it was first admitted.
        finish_reason: `stop`, `length`, `abort` or `error` when finished.
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
    def left(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.history) - self.done

    @property
    def is_live(self) -> bool:
        """Whether it is not finished."""
        return self.status is not Status.FINISHED

    @property
    def first_row(self) -> int:
        """The first position whose logits are wanted; those of all later ones are, too."""
        wants_prompt = self.choice == 0 and self.request.output_options.prompt_logprobs is not None
        if wants_prompt and self.num_prompt_rows < self.history.num_prompt - 1:
            return self.num_prompt_rows
        return len(self.history) - 1

    @property
    def must_wait(self) -> bool:
        """Whether another text of the request still reads the prompt that they share."""
        leader = self.leader
        return leader is not None and leader.is_live and not leader.has_read_prompt

    def keys(self, count: int) -> list[bytes]:
        """Keys of the first complete blocks."""
        ids, scope = self.history.ids, self.request.scope
        while len(self._keys) < count:
            parent, first = self._keys[-1] if self._keys else b"", len(self._keys) * BLOCK_SIZE
            self._keys.append(block_key(scope, parent, ids[first : first + BLOCK_SIZE]))
        return self._keys[:count]
