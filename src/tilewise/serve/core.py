"""The engine without its thread: takes requests, runs steps and reports deltas.

Owns the scheduler and the generation state of every live sequence. A model call that fails ends the requests of that
step with an error; logits that are not finite end only their own request. All other requests continue.
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
from tilewise.serve.generation_state import GenerationState
from tilewise.serve.outputs import Delta
from tilewise.serve.prefill_budget import PrefillBudget
from tilewise.serve.request import Request
from tilewise.serve.scheduler import Limits, Scheduled, Scheduler
from tilewise.serve.sequence import Sequence, Status
from tilewise.serve.speculation import make_drafter
from tilewise.settings import SpeculativeConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Computes", "EngineCore", "Event"]

Event = tuple[Request, Delta | BaseException]
"""What is reported to the caller of a request."""

Report = Callable[[PySequence[Event]], object]
"""Called with events, in their order."""


class Computes(Protocol):
    """Computes the steps: a `Runner`, or a stand-in of tests."""

    def prepare(self, parts: list[Scheduled]) -> None:
        """Prepare the next call for parts of one token each, before the tokens are known."""
        ...

    def run(
        self,
        parts: list[Scheduled],
        meanwhile: Callable[[], object],
        tokens: list[int] | None = None,
    ) -> NDArray[Any]:
        """Compute the logits of a step, in the order of its parts; they are valid until the next call.

        `meanwhile` is called while the devices compute. With `tokens`, the parts are those that `prepare` got.
        """
        ...


class _Row(NamedTuple):
    """A row of a step's logits from which a token is sampled, and the draft tokens of the following
    rows.
    """

    state: GenerationState
    row: int
    drafts: tuple[int, ...]

    def confirms(self, token: int) -> bool:
        """Whether the first draft token equals the sampled token, so that the next row is valid,
        too.
        """
        return bool(self.drafts) and self.drafts[0] == token


class _SampledToken(NamedTuple):
    """A sampled token that is not detokenized yet."""

    state: GenerationState
    token: int
    reason: str | None
    num_new: int
    row: NDArray[Any] | None


class _PreparedStep:
    """The step after the current one, prepared while the devices compute. It is used if no sampled
    token ends a text.

    Args:
        parts: the parts of that step.
        states: generation state of each part.
    """

    def __init__(self, parts: list[Scheduled], states: list[GenerationState]) -> None:
        self.parts, self.states = parts, states
        self.rows = np.arange(len(parts))
        self.reported_places = [place for place, state in enumerate(states) if state.reports_logprobs]
        lengths = [part.start for part in parts]
        self.batch = Batch([state.sampler for state in states], lengths)
        self.end_ids = frozenset[int]().union(*{state.end_ids for state in states})


_LastStep = tuple[list[Scheduled], list[GenerationState], list[int], dict[int, NDArray[Any]]]
"""A step that is not recorded yet: its parts, states, tokens, and by place the logits that are reported."""


class EngineCore:
    """Continuous batching. Not thread-safe.

    Between two model calls only the work that the second call needs is done: tokens are sampled, and finished texts
    are removed. Detokenizing, log probabilities and reports wait until the devices compute again. If no text ends
    and no request arrives, the next call was already prepared while the last one was computed.

    Args:
        runner: computes the steps.
        limits: sizes of a step and of the cache.
        tokenizer: tokenizer of the model.
        speculation: how draft tokens are guessed; None for no speculative decoding.
        draft_model: the model that guesses draft tokens, for the method `draft_model`; otherwise
            None.
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
        self._states: dict[Sequence, GenerationState] = {}
        self._sequences: dict[str, list[Sequence]] = {}
        self._unreported: list[_SampledToken | Event] = []
        self._next: tuple[_PreparedStep, list[int]] | None = None
        self._last_step: _LastStep | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self.scheduler.has_work

    @property
    def num_requests(self) -> int:
        """Number of requests that are not finished."""
        return len(self._sequences)

    def has_request(self, request_id: str) -> bool:
        """Whether a request of that name is not finished."""
        return request_id in self._sequences

    def add(self, request: Request) -> None:
        """Add a request, which its caller has checked."""
        self._next = None
        sequences: list[Sequence] = []
        for choice in range(request.sampling.n):
            leader = sequences[0] if sequences else None
            history = History(request.ids)
            sequence = Sequence(request, choice, history, leader)
            if self._speculation is not None and not request.is_pooled:
                sequence.drafter = make_drafter(self._speculation, sequence)
            sequences.append(sequence)
        self._states |= {
            sequence: GenerationState(sequence, self._tokenizer, self._token_bytes) for sequence in sequences
        }
        self._sequences[request.request_id] = sequences
        self.scheduler.add(sequences)

    def abort(self, request_id: str) -> list[Event]:
        """End a request, and return all events up to and including the end. No effect on a request
        that has ended.
        """
        events = self.settle()
        live = [s for s in self._sequences.get(request_id, ()) if s.is_live]
        events += [(sequence.request, self._states[sequence].abort()) for sequence in live]
        for sequence in live:
            self._end(sequence, "abort")
        return events

    def fail_all(self, error: BaseException) -> list[Event]:
        """End all requests with an error."""
        events = self.settle()
        return events + self._fail([s for group in self._sequences.values() for s in group], error)

    def step(self, report: Report) -> None:
        """Schedule, call the model once and sample tokens.

        Events of the step before are reported while the model computes. Events of this step are
        reported by the next step, or at the end of this call if no request is left.

        Args:
            report: called with events, on this thread.
        """
        if self._draft_model is not None:
            report(self.settle())
            self._draft_model.guess(self.scheduler.running)
        prepared: _PreparedStep | None = None

        def meanwhile() -> None:
            nonlocal prepared
            report(self.settle())
            prepared = self._prepare_next(parts)

        tokens: list[int] | None = None
        if self._next is not None:
            (now, tokens), self._next = self._next, None
            parts = now.parts
            self.scheduler.use_preview()
        else:
            self._record_last_step()
            self.scheduler.free_tokens = self._prefill_budget.free_tokens
            parts = self.scheduler.schedule()
            self._record_start(parts)
        begin = time.perf_counter()
        try:
            rows = self._runner.run(parts, meanwhile, tokens) if parts else np.zeros((0, 0))
        except TilewiseError as error:
            report([*self.settle(), *self._fail([part.sequence for part in parts], error)])
            return
        num_tokens = sum([part.end - part.start for part in parts])
        self._prefill_budget.note(num_tokens, num_tokens == len(parts), time.perf_counter() - begin)
        if prepared is None or not self._start_prepared(parts, prepared, rows):
            self.scheduler.complete(parts)
            self._use_logits(parts, rows)
        if not self.has_work:
            report(self.settle())

    def _record_start(self, parts: list[Scheduled]) -> None:
        """Record the time at which texts were first part of a step."""
        now = time.monotonic()
        for state in (self._states[part.sequence] for part in parts):
            if state.begun_s is None:
                state.begun_s = now

    def _prepare_next(self, parts: list[Scheduled]) -> _PreparedStep | None:
        """Prepare the step after these parts. None if that step depends on more than the tokens
        sampled for these parts.
        """
        if any(part.sequence.status is Status.FINISHED for part in parts):
            return None
        states = [self._states[part.sequence] for part in parts]
        if not all(state.is_plain and state.longest > part.end + 1 for state, part in zip(states, parts)):
            return None
        following = self.scheduler.preview(parts)
        if following is None:
            return None
        self._runner.prepare(following)
        return _PreparedStep(following, states)

    def _start_prepared(self, parts: list[Scheduled], prepared: _PreparedStep, rows: NDArray[Any]) -> bool:
        """Sample tokens. Returns whether the prepared step can run. If it cannot, no state has
        changed.
        """
        tokens = prepared.batch.sample(rows, prepared.rows, self._threads)
        if min(tokens) < 0 or not prepared.end_ids.isdisjoint(tokens):
            return False
        logits = {place: np.array(rows[place]) for place in prepared.reported_places}
        self._next, self._last_step = (prepared, tokens), (parts, prepared.states, tokens, logits)
        return True

    def _record_last_step(self) -> None:
        """Update the states with the last step's tokens, if the next step was started before this
        update.
        """
        if self._last_step is None:
            return
        (parts, states, tokens, logits), self._last_step = self._last_step, None
        self.scheduler.complete(parts)
        for place, (state, token) in enumerate(zip(states, tokens)):
            state.take(token)
            history = state.sequence.history
            num_new = len(history.ids) - history.num_prompt
            self._unreported.append(_SampledToken(state, token, None, num_new, logits.get(place)))

    def settle(self) -> list[Event]:
        """Detokenize the sampled tokens, and return all events that are not reported yet, in order."""
        self._record_last_step()
        unreported, self._unreported = self._unreported, []
        events: list[Event] = []
        failed: set[str] = set()
        for one in unreported:
            request = one.state.request if isinstance(one, _SampledToken) else one[0]
            if request.request_id in failed:
                continue
            if not isinstance(one, _SampledToken):
                events.append(one)
                continue
            try:
                events.append((request, one.state.delta(one.token, one.reason, one.num_new, one.row)))
            except TilewiseError as error:
                failed.add(request.request_id)
                self._fail(self._sequences.get(request.request_id, ()), error)
                events.append((request, error))
        return events

    def _use_logits(self, parts: Iterable[Scheduled], rows: NDArray[Any]) -> None:
        """Sample from a step's logits: one token for each text with a row, and one more for each
        confirmed draft token.
        """
        pending: list[_Row] = []
        end = 0
        for part in parts:
            sequence, first = part.sequence, end
            end += part.end - part.first_row
            if first == end or sequence.status is Status.FINISHED:
                continue
            state = self._states[sequence]
            try:
                if state.wants_prompt:
                    state.read_prompt(part.first_row, rows[first:end])
                if len(sequence.history.ids) > sequence.done:
                    continue
                if sequence.request.is_pooled:
                    self._unreported.append((sequence.request, state.pool(rows[end - 1])))
                    self._end(sequence, "stop")
                else:
                    pending.append(_Row(state, end - 1 - len(part.drafts), part.drafts))
            except TilewiseError as error:
                self._unreported += self._fail([sequence], error)
        while pending:
            pending = self._sample(pending, rows)

    def _sample(self, pending: list[_Row], rows: NDArray[Any]) -> list[_Row]:
        """Sample a token for each row. Returns the next row of each text whose draft token was
        confirmed.
        """
        masks: list[NDArray[np.uint8] | None] = []
        if any(one.state.is_structured for one in pending):
            pending, masks = self._grammar_masks(pending)
        if not pending:
            return []
        samplers = [one.state.sampler for one in pending]
        batch = Batch(samplers, masks=masks)
        tokens = batch.sample(rows, np.array([one.row for one in pending], np.int64), self._threads)
        confirmed: list[_Row] = []
        for place, (one, token) in enumerate(zip(pending, tokens)):
            state, row, drafts = one
            sequence = state.sequence
            if sequence.status is Status.FINISHED:  # another text of the request has failed
                continue
            try:
                if token < 0:
                    raise batch.error(place, rows[row])
                reason = state.take(token)
                num_new = len(sequence.history.ids) - sequence.history.num_prompt
                if state.ends_by_text:
                    delta = state.delta(token, reason, num_new, rows[row])
                    self._unreported.append((state.request, delta))
                    reason = delta.finish_reason
                else:
                    logits = np.array(rows[row]) if state.reports_logprobs else None
                    self._unreported.append(_SampledToken(state, token, reason, num_new, logits))
            except TilewiseError as error:
                self._unreported += self._fail([sequence], error)
                continue
            if reason is not None:
                self._end(sequence, reason)
            elif one.confirms(token):
                self.scheduler.accept(sequence)
                confirmed.append(_Row(state, row + 1, drafts[1:]))
        return confirmed

    def _grammar_masks(self, pending: list[_Row]) -> tuple[list[_Row], list[NDArray[np.uint8] | None]]:
        """The rows whose grammar has not failed, and the tokens that each grammar allows."""
        allowed: list[_Row] = []
        masks: list[NDArray[np.uint8] | None] = []
        for one in pending:
            try:
                masks.append(one.state.mask())
                allowed.append(one)
            except TilewiseError as error:
                self._unreported += self._fail([one.state.sequence], error)
        return allowed, masks

    def _fail(self, sequences: Iterable[Sequence], error: BaseException) -> list[Event]:
        """End the requests of these sequences with an error, each once."""
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
        del self._states[sequence]
        group = self._sequences[sequence.request.request_id]
        if not any(other.is_live for other in reversed(group)):  # the last texts usually end last
            del self._sequences[sequence.request.request_id]
