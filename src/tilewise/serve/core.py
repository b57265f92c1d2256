"""The engine without its thread: requests in, steps, pieces out.

Owns the scheduler and the texts of all live sequences. A call of the model that fails is an error of the requests that
took part in it; logits that are no numbers are one of their own request. All others go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from tilewise.core import TilewiseError
from tilewise.generate import History, Pick, pick_tokens
from tilewise.serve.draft_model import DraftModel
from tilewise.serve.outputs import Piece
from tilewise.serve.request import Request
from tilewise.serve.scheduler import Limits, Scheduled, Scheduler
from tilewise.serve.sequence import Sequence
from tilewise.serve.speculation import SpeculativeConfig
from tilewise.serve.text import Text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Computes", "EngineCore", "Event"]

Event = tuple[Request, Piece | BaseException]
"""Something that a request's caller is told."""


class Computes(Protocol):
    """What computes a step: a `Runner`."""

    def run(self, parts: list[Scheduled]) -> list[NDArray[Any]]:
        """The logits of each part."""
        ...


@dataclass
class _Writing:
    """A text on its way through the rows of one step."""

    sequence: Sequence
    text: Text
    rows: NDArray[Any]
    drafts: tuple[int, ...]
    place: int = 0
    is_right: bool = True

    @property
    def row(self) -> NDArray[Any]:
        """Logits of its next token."""
        row: NDArray[Any] = self.rows[self.place]
        return row

    @property
    def is_open(self) -> bool:
        """Whether the next row is known to be its own."""
        return self.is_right and self.sequence.is_live

    def confirms(self, token: int) -> bool:
        """Go on to the next row; whether the token was the one that row was computed for."""
        self.is_right = self.place < len(self.drafts) and self.drafts[self.place] == token
        self.place += 1
        return self.is_right


class EngineCore:
    """Continuous batching. One thread at a time.

    Args:
        runner: computes the steps.
        limits: of a step and of the cache.
        tokenizer: of the model.
        speculation: how next tokens are guessed; None: they are not.
        draft_model: that guesses them, where a model does.
    """

    def __init__(
        self,
        runner: Computes,
        limits: Limits,
        tokenizer: Tokenizer,
        speculation: SpeculativeConfig | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.scheduler = Scheduler(limits)
        self._runner = runner
        self._tokenizer = tokenizer
        self._speculation = speculation
        self._draft_model = draft_model
        self._threads = len(os.sched_getaffinity(0))
        self._texts: dict[Sequence, Text] = {}
        self._sequences: dict[str, list[Sequence]] = {}

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""
        return self.scheduler.has_work

    @property
    def num_requests(self) -> int:
        """Requests that are not finished."""
        return len(self._sequences)

    def has_request(self, request_id: str) -> bool:
        """Whether a request of that name is not finished."""
        return request_id in self._sequences

    def add(self, request: Request) -> None:
        """A new request, checked by its caller."""
        sequences: list[Sequence] = []
        for choice in range(request.sampling.n):
            leader = sequences[0] if sequences else None
            history = History(request.ids)
            sequence = Sequence(request, choice, history, leader)
            if self._speculation is not None and not request.is_pooled:
                sequence.drafter = self._speculation.drafter(sequence)
            sequences.append(sequence)
        self._texts |= {sequence: Text(sequence, self._tokenizer) for sequence in sequences}
        self._sequences[request.request_id] = sequences
        self.scheduler.add(sequences)

    def abort(self, request_id: str) -> list[Event]:
        """End a request here; nothing happens to one that has ended."""
        live = [s for s in self._sequences.get(request_id, ()) if s.is_live]
        pieces: list[Event] = [(sequence.request, self._texts[sequence].abort()) for sequence in live]
        for sequence in live:
            self._end(sequence, "abort")
        return pieces

    def abort_all(self) -> list[Event]:
        """End all requests here."""
        return [event for request_id in list(self._sequences) for event in self.abort(request_id)]

    def fail_all(self, error: BaseException) -> list[Event]:
        """All requests end with an error."""
        return list(self._fail([s for group in self._sequences.values() for s in group], error))

    def step(self) -> list[Event]:
        """Schedule, call the model once, draw tokens."""
        if self._draft_model is not None:
            self._draft_model.guess(self.scheduler.running)
        parts = self.scheduler.schedule()
        if not parts:
            return []
        try:
            logits = self._runner.run(parts)
        except TilewiseError as error:
            return list(self._fail([part.sequence for part in parts], error))
        self.scheduler.complete(parts)
        return list(self._take(parts, logits))

    def _take(self, parts: Iterable[Scheduled], logits: Iterable[NDArray[Any]]) -> Iterator[Event]:
        """What a step's logits bring: a token for each text that has its row, another while its guesses are right."""
        writing: list[_Writing] = []
        for part, rows in zip(parts, logits):
            sequence = part.sequence
            if not sequence.is_live or not len(rows):
                continue
            text = self._texts[sequence]
            try:
                text.read_prompt(part.first_row, rows)
                if sequence.left > 0:
                    continue
                if sequence.request.is_pooled:
                    yield self._told(sequence, text.pool(rows[-1]))
                else:
                    last = rows[-1 - len(part.drafts) :]
                    writing.append(_Writing(sequence, text, last, part.drafts))
            except TilewiseError as error:
                yield from self._fail([sequence], error)
        while writing:
            yield from self._write(writing)
            writing = [one for one in writing if one.is_open]

    def _write(self, writing: Iterable[_Writing]) -> Iterator[Event]:
        """A token for each; those whose guess was right stay open."""
        picks: list[tuple[_Writing, Pick]] = []
        for one in writing:
            try:
                picks.append((one, one.text.pick(one.row)))
            except TilewiseError as error:
                yield from self._fail([one.sequence], error)
        for (one, _), token in zip(picks, pick_tokens([pick for _, pick in picks], self._threads)):
            if not one.sequence.is_live:  # another text of its request has failed
                continue
            try:
                if isinstance(token, TilewiseError):
                    raise token
                piece = one.text.extend(one.row, token)
            except TilewiseError as error:
                yield from self._fail([one.sequence], error)
                continue
            yield self._told(one.sequence, piece)
            if one.sequence.is_live and one.confirms(token):
                self.scheduler.accept(one.sequence)

    def _told(self, sequence: Sequence, piece: Piece) -> Event:
        if piece.finish_reason is not None:
            self._end(sequence, piece.finish_reason)
        return sequence.request, piece

    def _fail(self, sequences: Iterable[Sequence], error: BaseException) -> Iterator[Event]:
        """The requests of these end with an error, each once."""
        for request in dict.fromkeys(s.request.request_id for s in sequences if s.is_live):
            group = self._sequences[request]
            for sequence in group:
                if sequence.is_live:
                    self._end(sequence, "error")
            yield group[0].request, error

    def _end(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.finish(sequence, reason)
        del self._texts[sequence]
        group = self._sequences[sequence.request.request_id]
        if not any(other.is_live for other in group):
            del self._sequences[sequence.request.request_id]
