"""Chooses the tokens of the next model call, and the blocks of the KV cache that they use.

The scheduler is a state machine without tensors, threads or clocks. `schedule` decides what the
next call computes, `complete` records that the call was made, and `finish` ends a sequence. A step
is filled in this order:

1. Sequences in decode get one token each.
2. Prompts are read in chunks, oldest first: as much as fits the step, or as much as `free_tokens` allows while other
   sequences are in decode and `paces_prompts` is set.
3. Draft tokens of speculative decoding use what is left.

When blocks run out, the youngest running sequence is preempted: it loses its blocks and reads its
tokens again later. A sequence's turn, its sort key, is fixed when the sequence arrives: it is the
number of the step, plus a waiting time that depends on the priority. So the oldest running sequence
always makes progress, and every sequence runs eventually.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilewise.core import InternalError, Validator
from tilewise.models import BLOCK_SIZE
from tilewise.serve.blocks import BlockPool
from tilewise.serve.prefill_budget import USUAL_FREE_TOKENS
from tilewise.serve.sequence import Sequence, Status

__all__ = ["Limits", "Scheduled", "Scheduler", "num_blocks_for"]

PRIORITY_STEPS = 1024
"""Steps of waiting time that one unit of priority is worth."""
_MAX = 1 << 31
_validate = Validator("serve")


def num_blocks_for(num_positions: int) -> int:
    """Number of blocks that store this many positions."""
    return -(-num_positions // BLOCK_SIZE)


@dataclass(frozen=True)
class Limits:
    """Sizes of a step and of the cache.

    Args:
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens of a step.
        max_rows: positions of a step whose logits are computed.
        num_blocks: blocks of the cache.
        max_context: positions of a sequence.
        paces_prompts: while sequences are in decode, read only `free_tokens` of prompts in a step.

    Raises:
        ConfigError: a size is out of range, or one sequence of full length does not fit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_rows: int
    num_blocks: int
    max_context: int
    paces_prompts: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_rows", "num_blocks", "max_context"):
            _validate.integer("limits", name, getattr(self, name), 1, _MAX)
        for name in ("max_num_batched_tokens", "max_rows"):
            if getattr(self, name) < self.max_num_seqs:
                got = f"{getattr(self, name)} and {self.max_num_seqs}"
                rule = f"{name} must not be below max_num_seqs: each sequence generates a token per step"
                _validate.invalid("limits", rule, got, "correct one of them")
        if self.num_blocks < num_blocks_for(self.max_context):
            got = f"{self.num_blocks} blocks of {BLOCK_SIZE} positions for {self.max_context}"
            advice = "give the cache more memory (kv_cache_memory_bytes), or choose a shorter context"
            _validate.invalid("limits", "the KV cache must hold one sequence of full length", got, advice)


class Scheduled(NamedTuple):
    """A sequence's part of a step: the positions `[start, end)`, of which those from `first_row` on
    need logits.

    Attributes:
        sequence: the sequence.
        start: first position. The positions before it are in the cache.
        end: one after the last position, including draft tokens.
        first_row: first position whose logits are needed; `end` if no logits are needed.
        blocks: blocks of the sequence, enough for `end` positions.
        drafts: draft tokens, at the last positions.
    """

    sequence: Sequence
    start: int
    end: int
    first_row: int
    blocks: tuple[int, ...]
    drafts: tuple[int, ...] = ()

    @property
    def confirmed_end(self) -> int:
        """One after the last position that is not a draft token."""
        return self.end - len(self.drafts)


@dataclass
class _Step:
    """A step that is being scheduled, and the numbers of tokens, rows and prompt tokens that it can
    still take.
    """

    tokens: int
    rows: int
    prefill_tokens: int
    parts: dict[Sequence, Scheduled] = field(default_factory=dict)

    def add(self, part: Scheduled) -> None:
        self.parts[part.sequence] = part
        self.tokens -= part.end - part.start
        self.rows -= part.end - part.first_row
        self.prefill_tokens -= _num_read(part)

    def remove(self, sequence: Sequence) -> None:
        part = self.parts.pop(sequence, None)
        if part is not None:
            self.tokens += part.end - part.start
            self.rows += part.end - part.first_row
            self.prefill_tokens += _num_read(part)


class Scheduler:
    """The sequences of one engine.

    Args:
        limits: sizes of a step and of the cache.

    Attributes:
        free_tokens: prompt tokens that a step may read while texts are generated, from `PrefillBudget`. If
            more texts than that are generated, as many prompt tokens as texts.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.free_tokens = USUAL_FREE_TOKENS
        self.pool = BlockPool(limits.num_blocks)
        self.num_steps = 0
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []  # both sorted by turn

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that do not run, including preempted ones."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of sequences that have blocks."""
        return len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that have blocks, sorted by turn."""
        return tuple(self._running)

    def live(self) -> list[Sequence]:
        """All sequences that are not finished."""
        return [*self._running, *self._waiting]

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences. The sequences of one request must be in the order of their choices."""
        for sequence in sequences:
            sequence.turn = (
                self.num_steps + sequence.request.priority * PRIORITY_STEPS,
                self._num_arrivals,
            )
            self._num_arrivals += 1
            _insert(self._waiting, sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence in any state and release its blocks. No effect on a sequence that has
        ended.
        """
        if sequence.status is Status.FINISHED:
            return
        (self._running if sequence.status is Status.RUNNING else self._waiting).remove(sequence)
        self._release_blocks(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def schedule(self) -> list[Scheduled]:
        """Decide what the next call computes. Empty if there is nothing to do."""
        self.num_steps += 1
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running:
            (decoding if len(sequence.history.ids) - sequence.done == 1 else prefilling).append(sequence)
        tokens = self.limits.max_num_batched_tokens
        paces = decoding and self.limits.paces_prompts
        reading_budget = max(self.free_tokens, len(decoding)) if paces else tokens
        step = _Step(tokens, self.limits.max_rows, reading_budget)
        for sequence in decoding:
            start = sequence.done
            if sequence.status is not Status.RUNNING:  # preempted for an older one in this loop
                continue
            if start < len(sequence.blocks) * BLOCK_SIZE and step.tokens > 0 and step.rows > 0:
                step.parts[sequence] = Scheduled(sequence, start, start + 1, start, tuple(sequence.blocks))
                step.tokens -= 1
                step.rows -= 1
            else:
                self._extend(step, sequence)
        for sequence in prefilling:
            if sequence.status is Status.RUNNING:
                self._extend(step, sequence)
        self._admit(step)
        self._add_drafts(step)
        if self.has_work and not step.parts:
            raise InternalError(
                f"[serve.scheduler] every step must advance a sequence; got none of {len(self._running)} running and "
                f"{len(self._waiting)} waiting sequences with {self.pool.num_free} free blocks; report it"
            )
        return list(step.parts.values())

    def preview(self, parts: PySequence[Scheduled]) -> list[Scheduled] | None:
        """The result of the next `schedule` if each part of the current step adds one token and nothing else happens.

        None if the result is not known yet. Blocks that the next step needs are taken at once.

        Args:
            parts: parts of the current step.
        """
        is_full = len(self._running) >= self.limits.max_num_seqs
        if len(parts) != len(self._running) or (self._waiting and not is_full):
            return None
        decoding: list[Sequence] = []
        missing: list[Sequence] = []
        for part in parts:
            sequence, end = part.sequence, part.end
            if end != len(sequence.history.ids) or part.first_row != end - 1 or sequence.drafter is not None:
                return None
            if end >= self.limits.max_context:
                return None
            decoding.append(sequence)
            if end == len(sequence.blocks) * BLOCK_SIZE:
                missing.append(sequence)
        if decoding != self._running or len(missing) > self.pool.num_free:
            return None
        for sequence in missing:
            sequence.blocks += self.pool.take(1)
        return [
            Scheduled(sequence, part.end, part.end + 1, part.end, tuple(sequence.blocks))
            for sequence, part in zip(decoding, parts)
        ]

    def use_preview(self) -> None:
        """Record that the current step is now the one that `preview` returned."""
        self.num_steps += 1

    def complete(self, parts: Iterable[Scheduled]) -> None:
        """Record that a call was made: its positions are in the cache, and full blocks can be found.

        Draft tokens are not recorded here. `accept` records each confirmed draft token.
        """
        for part in parts:
            sequence, confirmed_end = part.sequence, part.confirmed_end
            if sequence.status is Status.FINISHED:  # it ended during the call
                continue
            if confirmed_end // BLOCK_SIZE == sequence.done // BLOCK_SIZE:
                sequence.done = confirmed_end
            else:
                self._advance(sequence, confirmed_end)
            if confirmed_end >= sequence.history.num_prompt:
                sequence.has_read_prompt = True

    def accept(self, sequence: Sequence) -> None:
        """Record a confirmed draft token. The token has been added to the text, and the last call
        computed its position.
        """
        self._advance(sequence, len(sequence))

    def _advance(self, sequence: Sequence, done: int) -> None:
        """Set the number of positions in the cache, and register blocks that became full."""
        full = done // BLOCK_SIZE
        keys = sequence.keys(full)
        for index in range(sequence.done // BLOCK_SIZE, full):
            self.pool.register(sequence.blocks[index], keys[index])
        sequence.done = done

    def _add_drafts(self, step: _Step) -> None:
        """Add draft tokens to sequences in decode, as many as the step and the cache can still
        take.
        """
        for sequence, part in list(step.parts.items()):
            if sequence.drafter is None or part.end < len(sequence):
                continue
            request = sequence.request
            limit = min(
                step.tokens,
                step.rows,
                request.sampling.max_tokens - sequence.history.num_new - 1,
                min(self.limits.max_context, request.max_model_len) - part.end - 1,
                (len(sequence.blocks) + self.pool.num_free) * BLOCK_SIZE - part.end,
            )
            drafts = sequence.drafter.draft(limit) if limit > 0 else []
            if drafts:
                end = part.end + len(drafts)
                missing = num_blocks_for(end) - len(sequence.blocks)
                sequence.blocks += self.pool.take(max(0, missing))
                step.remove(sequence)
                step.add(part._replace(end=end, blocks=tuple(sequence.blocks), drafts=tuple(drafts)))

    def _extend(self, step: _Step, sequence: Sequence) -> None:
        """Add a part for a running sequence. Preempt younger sequences if blocks are missing."""
        while True:
            end, first_row = self._reach(step, sequence, sequence.done)
            missing = num_blocks_for(end) - len(sequence.blocks)
            if end == sequence.done:
                return
            if missing <= self.pool.num_free:
                break
            youngest = self._running[-1]
            step.remove(youngest)
            self._preempt(youngest)
            if youngest is sequence:
                return
        sequence.blocks += self.pool.take(max(0, missing))
        step.add(Scheduled(sequence, sequence.done, end, first_row, tuple(sequence.blocks)))

    def _admit(self, step: _Step) -> None:
        """Start waiting sequences, by turn, while there are blocks for all of their tokens."""
        if len(self._running) >= self.limits.max_num_seqs:
            return
        for sequence in list(self._waiting):
            if (
                len(self._running) >= self.limits.max_num_seqs
                or min(step.tokens, step.rows, step.prefill_tokens) < 1
            ):
                return
            if sequence.must_wait:
                continue
            cached = self.pool.find(sequence.keys(sequence.first_row // BLOCK_SIZE))
            missing = num_blocks_for(len(sequence)) - len(cached)
            if missing > self.pool.num_free_without(cached):
                return
            self._waiting.remove(sequence)
            _insert(self._running, sequence)
            sequence.status = Status.RUNNING
            self.pool.add_references(cached)
            sequence.blocks = list(cached)
            sequence.done = len(cached) * BLOCK_SIZE
            if sequence.num_cached is None:
                sequence.num_cached = sequence.done
            end, first_row = self._reach(step, sequence, sequence.done)
            sequence.blocks += self.pool.take(num_blocks_for(end) - len(cached))
            step.add(Scheduled(sequence, sequence.done, end, first_row, tuple(sequence.blocks)))

    def _reach(self, step: _Step, sequence: Sequence, start: int) -> tuple[int, int]:
        """The end of a sequence's part, such that it fits in the step, and the part's first row."""
        reads = len(sequence) - start > 1
        end = min(len(sequence), start + (min(step.tokens, step.prefill_tokens) if reads else step.tokens))
        first_row = max(start, sequence.first_row)
        end = min(end, first_row + step.rows)
        return end, min(first_row, end)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release_blocks(sequence)
        sequence.status = Status.PREEMPTED
        self.num_preemptions += 1
        _insert(self._waiting, sequence)

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.done = 0


def _num_read(part: Scheduled) -> int:
    """Prompt tokens of a part; 0 for a sequence in decode."""
    count = part.confirmed_end - part.start
    return count if count > 1 else 0


def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
    insort(sequences, sequence, key=lambda s: s.turn)
