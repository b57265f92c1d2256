"""Histories of a scheduler, and a simulated cache with known contents: shared by all scheduler tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import strategies as st

from tilewise.generate import History, Sampling
from tilewise.models import BLOCK_SIZE
from tilewise.serve.request import Request
from tilewise.serve.scheduler import Limits, Scheduled, Scheduler
from tilewise.serve.sequence import Sequence, Status
from tilewise.settings import OutputOptions

MAX_CONTEXT = 4 * BLOCK_SIZE


@dataclass(frozen=True)
class Arrival:
    """A request: a prompt that is the beginning of one of a few streams, and its settings."""

    stream: int
    length: int
    num_new: int
    n: int = 1
    priority: int = 0
    salt: int = 0
    prompt_logprobs: bool = False
    guesses: tuple[bool, ...] = ()
    """Guesses for each step, and whether they are right."""

    def request(self, number: int) -> Request:
        ids = _ids(self.stream)[: self.length]
        return Request(
            f"request {number}",
            ids,
            Sampling(max_tokens=self.num_new, temperature=1.0, n=self.n),
            OutputOptions(prompt_logprobs=0 if self.prompt_logprobs else None),
            priority=self.priority,
            scope=((b"salt", bytes([self.salt])),),
        )


def _ids(stream: int) -> tuple[int, ...]:
    """Stream 3 is stream 0 after another first block."""
    own = tuple((stream % 3 * 7 + i * i) % 11 for i in range(MAX_CONTEXT))
    return own if stream < 3 else (1,) * BLOCK_SIZE + own[BLOCK_SIZE:]


@dataclass(frozen=True)
class Cancel:
    """Cancel a sequence, counted over all that ever arrived."""

    number: int


@dataclass(frozen=True)
class Steps:
    """Run this many steps."""

    count: int


arrivals = st.builds(
    Arrival,
    stream=st.integers(0, 3),
    length=st.integers(1, MAX_CONTEXT - 80),
    num_new=st.integers(1, 80),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    priority=st.sampled_from([0, 0, 0, -1, 1]),
    salt=st.integers(0, 1),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
    guesses=st.one_of(st.just(()), st.lists(st.booleans(), max_size=70).map(tuple)),
)
histories = st.lists(
    st.one_of(arrivals, st.builds(Cancel, st.integers(0, 20)), st.builds(Steps, st.integers(1, 12))),
    min_size=1,
    max_size=24,
)


@st.composite
def limits(draw):
    """Small ones."""
    seqs = draw(st.integers(1, 5))
    return Limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + draw(st.integers(0, 90)),
        max_rows=seqs + draw(st.integers(0, 9)),
        num_blocks=draw(st.integers(4, 14)),
        max_context=MAX_CONTEXT,
        paces_prompts=draw(st.booleans()),
    )


def start(request: Request, guesses: tuple[bool, ...] = ()) -> list[Sequence]:
    """The texts of a request."""
    sequences: list[Sequence] = []
    for choice in range(request.sampling.n):
        history = History(request.ids)
        drafter = Guesses(history, choice, guesses) if guesses else None
        sequences.append(Sequence(request, choice, history, sequences[0] if sequences else None, drafter))
    return sequences


def next_token(ids: list[int], choice: int) -> int:
    """The next token of a text."""
    return (sum(ids) * 5 + choice) % 11


@dataclass
class Guesses:
    """A drafter whose guesses are right as configured."""

    history: History
    choice: int
    right: tuple[bool, ...]

    def draft(self, most: int) -> list[int]:
        ids = list(self.history.ids)
        for is_right in self.right[:most]:
            token = next_token(ids, self.choice)
            ids.append(token if is_right else token + 1)
        return ids[len(self.history) :]


@dataclass
class Machine:
    """A scheduler with a model whose tokens are a function of a text, and a simulated cache.

    Every slot holds a hash of the text up to it with the scope of its request, as the KV cache of a
    model does. `check` asserts the invariants after a decision.
    """

    scheduler: Scheduler
    cache: dict[int, list[int]] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    texts: dict[Sequence, list[int]] = field(default_factory=dict)
    num_steps: int = 0
    num_accepted: int = 0
    num_previews: int = 0
    preview: tuple[list[Scheduled], list[Status]] | None = None

    def add(self, arrival: Arrival) -> None:
        new = start(arrival.request(len(self.sequences)), arrival.guesses)
        self.scheduler.add(new)
        self.sequences += new

    def play(self, history: list[object]) -> None:
        """All of a history, then steps until nothing is left to do."""
        for event in history:
            if isinstance(event, Arrival):
                self.add(event)
            elif isinstance(event, Cancel) and event.number < len(self.sequences):
                self.scheduler.finish(self.sequences[event.number], "abort")
                self.check_blocks()
            elif isinstance(event, Steps):
                for _ in range(event.count):
                    self.step()
        most = 40 + sum(3 * len(s) + 300 for s in self.sequences) * 4
        while self.scheduler.has_work:
            self.step()
            most -= 1
            assert most > 0, "sequences do not end"

    def step(self) -> list[Scheduled]:
        oldest = min(
            (s for s in self.sequences if s.status is Status.RUNNING), key=lambda s: s.turn, default=None
        )
        before = None if oldest is None else oldest.done
        is_preview = self.preview is not None and self.preview[1] == self._statuses()
        num_writing = sum(s.status is Status.RUNNING and s.num_uncached == 1 for s in self.sequences)
        parts = self.scheduler.schedule()
        self.num_steps += 1
        if self.preview is not None and is_preview:
            assert parts == self.preview[0], (
                "the preview must be what is scheduled where nothing else happens"
            )
            self.num_previews += 1
        self.check(parts)
        self.check_reading(parts, num_writing)
        self.check_blocks()
        following = self.scheduler.preview(parts)
        self.preview = None if following is None else (following, self._statuses())
        self.check_blocks()
        for part in parts:
            self._compute(part)
        self.scheduler.complete(parts)
        if oldest is not None:
            assert oldest.done > before, "the oldest running sequence must get on"
        for part in parts:
            sequence = part.sequence
            sequence.num_prompt_rows = max(sequence.num_prompt_rows, part.end)
            if sequence.num_uncached == 0:
                assert part.first_row < part.confirmed_end
                self._write(part)
        self.check_blocks()
        return parts

    def _statuses(self) -> list[Status]:
        return [sequence.status for sequence in self.sequences]

    def _write(self, part: Scheduled) -> None:
        """A token, and another for each right guess."""
        sequence = part.sequence
        for guess in (*part.drafts, None):
            token = next_token(sequence.history.ids, sequence.choice)
            sequence.history.append(token)
            if sequence.history.num_new >= sequence.request.sampling.max_tokens:
                self.scheduler.finish(sequence, "length")
                return
            if token != guess:
                return
            self.num_accepted += 1
            self.scheduler.accept(sequence)

    def _compute(self, part: Scheduled) -> None:
        """Read the earlier positions, write the new ones."""
        texts = self.texts.setdefault(part.sequence, [])
        for token in part.sequence.history.ids[len(texts) :]:
            texts.append(hash((texts[-1] if texts else part.sequence.request.scope, token)))
        texts = list(texts)  # those of guesses stand in the cache alone
        for token in part.drafts:
            texts.append(hash((texts[-1], token)))
        for index, block in enumerate(part.blocks):
            first = index * BLOCK_SIZE
            written = self.cache.setdefault(block, [0] * BLOCK_SIZE)
            start, end = max(0, part.start - first), max(0, min(BLOCK_SIZE, part.end - first))
            written[start:end] = texts[first + start : first + end]
            assert len(written) == BLOCK_SIZE
            assert written[:end] == texts[first : first + end], (
                "a position reads what another text has written"
            )

    def check(self, parts: list[Scheduled]) -> None:
        """The budget is kept, parts fit together, no block is written that another sequence holds."""
        limits = self.scheduler.limits
        assert sum(part.end - part.start for part in parts) <= limits.max_num_batched_tokens
        assert sum(part.end - part.first_row for part in parts) <= limits.max_rows
        assert len(parts) <= limits.max_num_seqs and self.scheduler.num_running <= limits.max_num_seqs
        assert len({part.sequence for part in parts}) == len(parts)
        holders = self.scheduler.pool.ref_counts()
        for part in parts:
            assert part.sequence.status is Status.RUNNING and part.start == part.sequence.done < part.end
            assert part.confirmed_end <= len(part.sequence) and part.end <= limits.max_context
            assert not part.drafts or part.confirmed_end == len(part.sequence)
            assert len(part.blocks) * BLOCK_SIZE >= part.end
            for index in range(part.start // BLOCK_SIZE, len(part.blocks)):
                assert holders[part.blocks[index]] == 1, "a block is written that another sequence holds"

    def check_reading(self, parts: list[Scheduled], num_writing: int) -> None:
        """Decoding texts wait for few prompt tokens: the free ones, or as many as there are texts."""
        chunks = [part.confirmed_end - part.start for part in parts]
        read = sum(count for count in chunks if count > 1)
        if num_writing and self.scheduler.limits.paces_prompts:
            assert read <= max(self.scheduler.free_tokens, num_writing)

    def check_blocks(self) -> None:
        """No block is lost, none is used twice: counts equal those of the running sequences."""
        num_owners = Counter(block for sequence in self.sequences for block in sequence.blocks)
        pool = self.scheduler.pool
        assert pool.ref_counts() == [num_owners[block] for block in range(pool.num_blocks)]
        assert pool.num_free == sum(count == 0 for count in pool.ref_counts())
        for sequence in self.sequences:
            assert sequence.status is Status.RUNNING or not sequence.blocks
