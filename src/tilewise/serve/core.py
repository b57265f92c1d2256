"""The engine without its thread: requests in, steps, deltas out.

Owns the scheduler and the texts of all live sequences. A call of the model that fails is an error of the requests that
took part in it; logits that are no numbers are one of their own request. All others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as PySequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewise.core import TilewiseError
from tilewise.core.limits import num_cores
from tilewise.generate import Batch, History, TokenBytes
from tilewise.serve.draft_model import DraftModel
from tilewise.serve.outputs import Delta
from tilewise.serve.prefill_budget import PrefillBudget
from tilewise.serve.request import Request
from tilewise.serve.scheduler import Limits, Scheduled, Scheduler
from tilewise.serve.sequence import Sequence, Status
from tilewise.serve.speculation import make_drafter
from tilewise.serve.text import Text
from tilewise.settings import SpeculativeConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Computes", "EngineCore", "Event"]

Event = tuple[Request, Delta | BaseException]
"""Something that a request's caller is told."""


Tell = Callable[[PySequence[Event]], object]
"""Is told of events, in their order."""


class Computes(Protocol):
    """What computes a step: a `Runner`."""

    def prepare(self, parts: list[Scheduled]) -> None:
        """Parts of one token each that the next call may have; the tokens are not known yet."""
        ...

    def run(
        self,
        parts: list[Scheduled],
        meanwhile: Callable[[], object],
        tokens: list[int] | None = None,
    ) -> NDArray[Any]:
        """The logits that the parts want, in their order, to be read before the next call; `meanwhile` is called while
        they are computed. With the tokens, the parts that were prepared."""
        ...


class _Writing(NamedTuple):
    """A text that is to get a token, from a row of a step's logits; what was guessed to follow."""

    text: Text
    row: int
    drafts: tuple[int, ...]

    def confirms(self, token: int) -> bool:
        """Whether a guess was right, so that the next row is the text's, too."""
        return bool(self.drafts) and self.drafts[0] == token


class _Token(NamedTuple):
    """A token that was chosen and whose text is not made yet."""

    text: Text
    token: int
    reason: str | None
    num_new: int
    row: NDArray[Any] | None


class _Foreseen:
    """The step after the one under way, if each text gets a token that does not end it.

    Args:
        parts: of that step.
        texts: of the parts.
    """

    def __init__(self, parts: list[Scheduled], texts: list[Text]) -> None:
        self.parts, self.texts = parts, texts
        self.rows = np.arange(len(parts))
        self.told = [place for place, text in enumerate(texts) if text.tells_figures]
        lengths = [part.start for part in parts]
        self.batch = Batch([text.choose for text in texts], lengths)
        self.end_ids = frozenset[int]().union(*{text.end_ids for text in texts})


_Taken = tuple[list[Scheduled], list[Text], list[int], dict[int, NDArray[Any]]]
"""A step's parts, texts and tokens that are not taken down yet, and rows of those whose figures are told, by place."""


class EngineCore:
    """Continuous batching. One thread at a time.

    Between two calls of the model only what the second needs is done: tokens are chosen, and ended texts leave. Text,
    figures and telling wait until the devices compute again, and where no text ends and none comes, so does all
    else: the next call was made ready while the last one was computed.

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
        self._prefill_budget = PrefillBudget()
        self._runner = runner
        self._tokenizer, self._token_bytes = tokenizer, TokenBytes(tokenizer)
        self._speculation = speculation
        self._draft_model = draft_model
        self._threads = num_cores()
        self._texts: dict[Sequence, Text] = {}
        self._sequences: dict[str, list[Sequence]] = {}
        self._untold: list[_Token | Event] = []
        self._next: tuple[_Foreseen, list[int]] | None = None
        self._taken: _Taken | None = None

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
        self._next = None
        sequences: list[Sequence] = []
        for choice in range(request.sampling.n):
            leader = sequences[0] if sequences else None
            history = History(request.ids)
            sequence = Sequence(request, choice, history, leader)
            if self._speculation is not None and not request.is_pooled:
                sequence.drafter = make_drafter(self._speculation, sequence)
            sequences.append(sequence)
        self._texts |= {
            sequence: Text(sequence, self._tokenizer, self._token_bytes) for sequence in sequences
        }
        self._sequences[request.request_id] = sequences
        self.scheduler.add(sequences)

    def abort(self, request_id: str) -> list[Event]:
        """End a request here; nothing happens to one that has ended. Tells of all that came before, too."""
        events = self.settle()
        live = [s for s in self._sequences.get(request_id, ()) if s.is_live]
        events += [(sequence.request, self._texts[sequence].abort()) for sequence in live]
        for sequence in live:
            self._end(sequence, "abort")
        return events

    def abort_all(self) -> list[Event]:
        """End all requests here."""
        return [event for request_id in list(self._sequences) for event in self.abort(request_id)]

    def fail_all(self, error: BaseException) -> list[Event]:
        """All requests end with an error."""
        events = self.settle()
        return events + self._fail([s for group in self._sequences.values() for s in group], error)

    def step(self, tell: Tell) -> None:
        """Schedule, call the model once, choose tokens; what the step before brought is told beside the call, and what
        this one brings where none follows.

        Args:
            tell: of events.
        """
        if self._draft_model is not None:
            tell(self.settle())
            self._draft_model.guess(self.scheduler.running)
        foreseen: _Foreseen | None = None

        def meanwhile() -> None:
            nonlocal foreseen
            tell(self.settle())
            foreseen = self._foresee(parts)

        tokens: list[int] | None = None
        if self._next is not None:
            (now, tokens), self._next = self._next, None
            parts = now.parts
            self.scheduler.repeat()
        else:
            self._take_down()
            self.scheduler.free_tokens = self._prefill_budget.free_tokens
            parts = self.scheduler.schedule()
            self._date(parts)
        begin = time.perf_counter()
        try:
            rows = self._runner.run(parts, meanwhile, tokens) if parts else np.zeros((0, 0))
        except TilewiseError as error:
            tell([*self.settle(), *self._fail([part.sequence for part in parts], error)])
            return
        num_tokens = sum([part.end - part.start for part in parts])
        self._prefill_budget.note(num_tokens, num_tokens == len(parts), time.perf_counter() - begin)
        if foreseen is None or not self._goes_on(parts, foreseen, rows):
            self.scheduler.complete(parts)
            self._take(parts, rows)
        if not self.has_work:
            tell(self.settle())

    def _date(self, parts: list[Scheduled]) -> None:
        """Texts that wait no longer."""
        now = time.monotonic()
        for text in (self._texts[part.sequence] for part in parts):
            if text.begun_s is None:
                text.begun_s = now

    def _foresee(self, parts: list[Scheduled]) -> _Foreseen | None:
        """What comes after these parts, made ready; None where that depends on more than their tokens."""
        if any(part.sequence.status is Status.FINISHED for part in parts):
            return None
        texts = [self._texts[part.sequence] for part in parts]
        if not all(text.is_plain and text.longest > part.end + 1 for text, part in zip(texts, parts)):
            return None
        following = self.scheduler.foresee(parts)
        if following is None:
            return None
        self._runner.prepare(following)
        return _Foreseen(following, texts)

    def _goes_on(self, parts: list[Scheduled], foreseen: _Foreseen, rows: NDArray[Any]) -> bool:
        """Choose tokens; whether what was foreseen comes. Where not, nothing has changed."""
        tokens = foreseen.batch.draw(rows, foreseen.rows, self._threads)
        if min(tokens) < 0 or not foreseen.end_ids.isdisjoint(tokens):
            return False
        figures = {place: np.array(rows[place]) for place in foreseen.told}
        self._next, self._taken = (foreseen, tokens), (parts, foreseen.texts, tokens, figures)
        return True

    def _take_down(self) -> None:
        """What the last step brought, where the next one was begun before that was done."""
        if self._taken is None:
            return
        (parts, texts, tokens, figures), self._taken = self._taken, None
        self.scheduler.complete(parts)
        for place, (text, token) in enumerate(zip(texts, tokens)):
            text.take(token)
            history = text.sequence.history
            num_new = len(history.ids) - history.num_prompt
            self._untold.append(_Token(text, token, None, num_new, figures.get(place)))

    def settle(self) -> list[Event]:
        """Make the texts of tokens that were chosen; all that is to be told, in order."""
        self._take_down()
        untold, self._untold = self._untold, []
        events: list[Event] = []
        failed: set[str] = set()
        for one in untold:
            request = one.text.request if isinstance(one, _Token) else one[0]
            if request.request_id in failed:
                continue
            if not isinstance(one, _Token):
                events.append(one)
                continue
            try:
                events.append((request, one.text.delta(one.token, one.reason, one.num_new, one.row)))
            except TilewiseError as error:
                failed.add(request.request_id)
                self._fail(self._sequences.get(request.request_id, ()), error)
                events.append((request, error))
        return events

    def _take(self, parts: Iterable[Scheduled], rows: NDArray[Any]) -> None:
        """What a step's logits bring: a token for each text that has its row, another while its guesses are right."""
        writing: list[_Writing] = []
        end = 0
        for part in parts:
            sequence, first = part.sequence, end
            end += part.end - part.first_row
            if first == end or sequence.status is Status.FINISHED:
                continue
            text = self._texts[sequence]
            try:
                if text.wants_prompt:
                    text.read_prompt(part.first_row, rows[first:end])
                if len(sequence.history.ids) > sequence.done:
                    continue
                if sequence.request.is_pooled:
                    self._untold.append((sequence.request, text.pool(rows[end - 1])))
                    self._end(sequence, "stop")
                else:
                    writing.append(_Writing(text, end - 1 - len(part.drafts), part.drafts))
            except TilewiseError as error:
                self._untold += self._fail([sequence], error)
        while writing:
            writing = self._write(writing, rows)

    def _write(self, writing: list[_Writing], rows: NDArray[Any]) -> list[_Writing]:
        """A token for each; those whose guess was right go on with the next row."""
        masks: list[NDArray[np.uint8] | None] = []
        if any(one.text.is_structured for one in writing):
            writing, masks = self._masked(writing)
        if not writing:
            return []
        picks = [one.text.choose for one in writing]
        batch = Batch(picks, masks=masks)
        tokens = batch.draw(rows, np.array([one.row for one in writing], np.int64), self._threads)
        right: list[_Writing] = []
        for place, (one, token) in enumerate(zip(writing, tokens)):
            text, row, drafts = one
            sequence = text.sequence
            if sequence.status is Status.FINISHED:  # another text of its request has failed
                continue
            try:
                if token < 0:
                    raise batch.error(place, rows[row])
                reason = text.take(token)
                num_new = len(sequence.history.ids) - sequence.history.num_prompt
                if text.ends_by_text:
                    delta = text.delta(token, reason, num_new, rows[row])
                    self._untold.append((text.request, delta))
                    reason = delta.finish_reason
                else:
                    figures = np.array(rows[row]) if text.tells_figures else None
                    self._untold.append(_Token(text, token, reason, num_new, figures))
            except TilewiseError as error:
                self._untold += self._fail([sequence], error)
                continue
            if reason is not None:
                self._end(sequence, reason)
            elif one.confirms(token):
                self.scheduler.accept(sequence)
                right.append(_Writing(text, row + 1, drafts[1:]))
        return right

    def _masked(self, writing: list[_Writing]) -> tuple[list[_Writing], list[NDArray[np.uint8] | None]]:
        """Those whose grammars are followed, and which tokens these let come."""
        kept: list[_Writing] = []
        masks: list[NDArray[np.uint8] | None] = []
        for one in writing:
            try:
                masks.append(one.text.mask())
                kept.append(one)
            except TilewiseError as error:
                self._untold += self._fail([one.text.sequence], error)
        return kept, masks

    def _fail(self, sequences: Iterable[Sequence], error: BaseException) -> list[Event]:
        """The requests of these end with an error, each once."""
        events: list[Event] = []
        for request in dict.fromkeys(s.request.request_id for s in sequences if s.is_live):
            group = self._sequences[request]
            for sequence in group:
                if sequence.is_live:
                    self._end(sequence, "error")
            events.append((group[0].request, error))
        return events

    def _end(self, sequence: Sequence, reason: str) -> None:
        self._next = None
        self.scheduler.finish(sequence, reason)
        del self._texts[sequence]
        group = self._sequences[sequence.request.request_id]
        if not any(other.is_live for other in reversed(group)):  # the last are mostly the last to end
            del self._sequences[sequence.request.request_id]
