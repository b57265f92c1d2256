"""Which tokens of which sequence go into the next call of the model, and which blocks of the cache they have.

A pure state machine without tensors, threads or time: `schedule` decides, `complete` takes down that the call was
made, `finish` ends a sequence. Sequences that write go first with a token each; then prompts are read in chunks,
oldest first: as much as fits the step where no sequence writes or speed of all counts, else so little that those
that do hardly notice; what is then left confirms guesses. When blocks run out, the youngest running sequence gives
up its own and waits to read its tokens again. A sequence's turn is fixed when it arrives: the number of the step,
plus a waiting time per priority; so the oldest running sequence always gets on, and none waits for ever.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilewise.core import Border, InternalError
from tilewise.models import BLOCK_SIZE
from tilewise.serve.blocks import BlockPool
from tilewise.serve.prefill_budget import USUAL_FREE_TOKENS
from tilewise.serve.sequence import Sequence, Status

__all__ = ["Limits", "Scheduled", "Scheduler", "num_blocks_for"]

PRIORITY_STEPS = 1024
"""Steps of waiting that one priority is worth."""
_MOST = 1 << 31
_border = Border("serve")


def num_blocks_for(num_positions: int) -> int:
    """Blocks that hold so many positions."""
    return -(-num_positions // BLOCK_SIZE)


@dataclass(frozen=True)
class Limits:
    """What one step and the cache hold.

    Args:
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: of one step.
        max_rows: positions of one step whose logits can be computed.
        num_blocks: of the cache.
        max_context: positions of one sequence.
        paces_prompts: a step that writes reads little of prompts.

    Raises:
        ConfigError: a sequence would not fit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_rows: int
    num_blocks: int
    max_context: int
    paces_prompts: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_rows", "num_blocks", "max_context"):
            _border.integer("limits", name, getattr(self, name), 1, _MOST)
        for name in ("max_num_batched_tokens", "max_rows"):
            if getattr(self, name) < self.max_num_seqs:
                got = f"{getattr(self, name)} and {self.max_num_seqs}"
                rule = f"{name} must not be below max_num_seqs: each writes a token a step"
                _border.refuse("limits", rule, got, "correct one of them")
        if self.num_blocks < num_blocks_for(self.max_context):
            got = f"{self.num_blocks} blocks of {BLOCK_SIZE} positions for {self.max_context}"
            advice = "give the cache more memory (kv_cache_memory_bytes), or choose a shorter context"
            _border.refuse("limits", "the KV cache must hold one sequence of full length", got, advice)


class Scheduled(NamedTuple):
    """A sequence's part of a step: positions `[start, end)`, logits from `first_row` on.

    Attributes:
        sequence: whose.
        start: first position; those before it are in the cache.
        end: behind the last position, guesses included.
        first_row: the first position whose logits are wanted; `end` where none are.
        blocks: of the sequence, enough for `end` positions.
        drafts: guesses, whose positions are the last ones.
    """

    sequence: Sequence
    start: int
    end: int
    first_row: int
    blocks: tuple[int, ...]
    drafts: tuple[int, ...] = ()

    @property
    def known(self) -> int:
        """Behind the last position whose token is no guess."""
        return self.end - len(self.drafts)


@dataclass
class _Step:
    """A decision as it forms."""

    tokens: int
    rows: int
    reading: int
    parts: dict[Sequence, Scheduled] = field(default_factory=dict)

    def add(self, part: Scheduled) -> None:
        self.parts[part.sequence] = part
        self.tokens -= part.end - part.start
        self.rows -= part.end - part.first_row
        self.reading -= _num_read(part)

    def remove(self, sequence: Sequence) -> None:
        part = self.parts.pop(sequence, None)
        if part is not None:
            self.tokens += part.end - part.start
            self.rows += part.end - part.first_row
            self.reading += _num_read(part)


class Scheduler:
    """The sequences of one engine.

    Args:
        limits: of a step and of the cache.

    Attributes:
        free_tokens: prompt tokens that a step may read while texts are written, as `PrefillBudget` measures it. Where
            more texts than that are written, as many prompt tokens as texts.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.free_tokens = USUAL_FREE_TOKENS
        self.pool = BlockPool(limits.num_blocks)
        self.num_steps = 0
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []  # both in the order of turns

    @property
    def has_work(self) -> bool:
        """Whether a sequence is not finished."""
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have blocks."""
        return len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that have blocks, in the order of their turns."""
        return tuple(self._running)

    def live(self) -> list[Sequence]:
        """All sequences that are not finished."""
        return [*self._running, *self._waiting]

    def add(self, sequences: Iterable[Sequence]) -> None:
        """New sequences; those that share a prompt in order of their choices."""
        for sequence in sequences:
            sequence.turn = (
                self.num_steps + sequence.request.priority * PRIORITY_STEPS,
                self._num_arrivals,
            )
            self._num_arrivals += 1
            _insert(self._waiting, sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """A sequence ends, wherever it stands, and its blocks are free for others. One that has ended is left alone."""
        if sequence.status is Status.FINISHED:
            return
        (self._running if sequence.status is Status.RUNNING else self._waiting).remove(sequence)
        self._give_up_blocks(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def schedule(self) -> list[Scheduled]:
        """What the next call computes; empty when there is nothing to do."""
        self.num_steps += 1
        writing: list[Sequence] = []
        reading: list[Sequence] = []
        for sequence in self._running:
            (writing if len(sequence.history.ids) - sequence.done == 1 else reading).append(sequence)
        tokens = self.limits.max_num_batched_tokens
        paces = writing and self.limits.paces_prompts
        reading_budget = max(self.free_tokens, len(writing)) if paces else tokens
        step = _Step(tokens, self.limits.max_rows, reading_budget)
        for sequence in writing:
            start = sequence.done
            if sequence.status is not Status.RUNNING:  # given up for one before it
                continue
            if start < len(sequence.blocks) * BLOCK_SIZE and step.tokens > 0 and step.rows > 0:
                step.parts[sequence] = Scheduled(sequence, start, start + 1, start, tuple(sequence.blocks))
                step.tokens -= 1
                step.rows -= 1
            else:
                self._extend(step, sequence)
        for sequence in reading:
            if sequence.status is Status.RUNNING:
                self._extend(step, sequence)
        self._admit(step)
        self._add_drafts(step)
        if self.has_work and not step.parts:
            raise InternalError(
                f"[serve.scheduler] every step must get on; got none of {len(self._running)} running and "
                f"{len(self._waiting)} waiting sequences with {self.pool.num_free} free blocks; report it"
            )
        return list(step.parts.values())

    def foresee(self, parts: PySequence[Scheduled]) -> list[Scheduled] | None:
        """What `schedule` will return next if each part of the step under way brings its text one token and nothing
        else happens; None where that is not known. Blocks that this takes are the sequences' own at once.

        Args:
            parts: of the step under way.
        """
        is_full = len(self._running) >= self.limits.max_num_seqs
        if len(parts) != len(self._running) or (self._waiting and not is_full):
            return None
        writing: list[Sequence] = []
        missing: list[Sequence] = []
        for part in parts:
            sequence, end = part.sequence, part.end
            if end != len(sequence.history.ids) or part.first_row != end - 1 or sequence.drafter is not None:
                return None
            if end >= self.limits.max_context:
                return None
            writing.append(sequence)
            if end == len(sequence.blocks) * BLOCK_SIZE:
                missing.append(sequence)
        if writing != self._running or len(missing) > self.pool.num_free:
            return None
        for sequence in missing:
            sequence.blocks += self.pool.take(1)
        return [
            Scheduled(sequence, part.end, part.end + 1, part.end, tuple(sequence.blocks))
            for sequence, part in zip(writing, parts)
        ]

    def repeat(self) -> None:
        """A step is what was foreseen."""
        self.num_steps += 1

    def complete(self, parts: Iterable[Scheduled]) -> None:
        """The call was made: its positions are in the cache, and blocks that became full can be found. Guesses may be
        wrong; those that are right, `accept` takes down."""
        for part in parts:
            sequence, known = part.sequence, part.known
            if sequence.status is Status.FINISHED:  # it failed while the call was made
                continue
            if known // BLOCK_SIZE == sequence.done // BLOCK_SIZE:
                sequence.done = known
            else:
                self._advance(sequence, known)
            if known >= sequence.history.num_prompt:
                sequence.has_read_prompt = True

    def accept(self, sequence: Sequence) -> None:
        """A guess was right, and was added to the text: its position, which the last call computed, is in the cache."""
        self._advance(sequence, len(sequence))

    def _advance(self, sequence: Sequence, done: int) -> None:
        """So many positions are in the cache; blocks that became full can be found."""
        full = done // BLOCK_SIZE
        keys = sequence.keys(full)
        for index in range(sequence.done // BLOCK_SIZE, full):
            self.pool.name(sequence.blocks[index], keys[index])
        sequence.done = done

    def _add_drafts(self, step: _Step) -> None:
        """Guesses for texts that get a token in this step, on what the step and the cache have left."""
        for sequence, part in list(step.parts.items()):
            if sequence.drafter is None or part.end < len(sequence):
                continue
            request = sequence.request
            most = min(
                step.tokens,
                step.rows,
                request.sampling.max_tokens - sequence.history.num_new - 1,
                min(self.limits.max_context, request.max_model_len) - part.end - 1,
                (len(sequence.blocks) + self.pool.num_free) * BLOCK_SIZE - part.end,
            )
            drafts = sequence.drafter.draft(most) if most > 0 else []
            if drafts:
                end = part.end + len(drafts)
                missing = num_blocks_for(end) - len(sequence.blocks)
                sequence.blocks += self.pool.take(max(0, missing))
                step.remove(sequence)
                step.add(part._replace(end=end, blocks=tuple(sequence.blocks), drafts=tuple(drafts)))

    def _extend(self, step: _Step, sequence: Sequence) -> None:
        """Give a running sequence its part, on blocks of younger ones if need be."""
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
        """Let sequences in, in the order of turns, while all of their tokens have room."""
        if len(self._running) >= self.limits.max_num_seqs:
            return
        for sequence in list(self._waiting):
            if (
                len(self._running) >= self.limits.max_num_seqs
                or min(step.tokens, step.rows, step.reading) < 1
            ):
                return
            if sequence.must_wait:
                continue
            found = self.pool.find(sequence.keys(sequence.first_row // BLOCK_SIZE))
            missing = num_blocks_for(len(sequence)) - len(found)
            if missing > self.pool.num_free_beside(found):
                return
            self._waiting.remove(sequence)
            _insert(self._running, sequence)
            sequence.status = Status.RUNNING
            self.pool.hold(found)
            sequence.blocks = list(found)
            sequence.done = len(found) * BLOCK_SIZE
            if sequence.num_cached is None:
                sequence.num_cached = sequence.done
            end, first_row = self._reach(step, sequence, sequence.done)
            sequence.blocks += self.pool.take(num_blocks_for(end) - len(found))
            step.add(Scheduled(sequence, sequence.done, end, first_row, tuple(sequence.blocks)))

    def _reach(self, step: _Step, sequence: Sequence, start: int) -> tuple[int, int]:
        """How far a sequence gets on within what the step has left, and from where on its logits are wanted."""
        reads = len(sequence) - start > 1
        end = min(len(sequence), start + (min(step.tokens, step.reading) if reads else step.tokens))
        first_row = max(start, sequence.first_row)
        end = min(end, first_row + step.rows)
        return end, min(first_row, end)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._give_up_blocks(sequence)
        sequence.status = Status.PREEMPTED
        self.num_preemptions += 1
        _insert(self._waiting, sequence)

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.done = 0


def _num_read(part: Scheduled) -> int:
    """Tokens of a part that are read: none of one that writes."""
    count = part.known - part.start
    return count if count > 1 else 0


def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
    insort(sequences, sequence, key=lambda s: s.turn)
