"""The engine without thread and model: logits come from a function of the test."""

import numpy as np
import pytest

from pure.serve.scheduling import MAX_CONTEXT
from tilewise.core import NotFinite, ShapeError, TaskFailed
from tilewise.serve.core import EngineCore
from tilewise.serve.output_processor import OutputProcessor
from tilewise.serve.outputs import CompletionOutput, Delta, RequestOutputKind
from tilewise.serve.request import Request
from tilewise.serve.sampling_params import SamplingParams
from tilewise.serve.scheduler import Limits
from tilewise.serve.sequence import Sequence

LIMITS = Limits(4, 64, 8, 8, MAX_CONTEXT)


class Oracle:
    """Wants the token equal to the number of positions, unless a test overrides a step."""

    def __init__(self):
        self.num_calls = 0
        self.failures = {}
        self.broken = set()

    def prepare(self, parts):
        self.prepared = parts

    def run(self, parts, meanwhile, tokens=None):
        assert tokens is None or (parts is self.prepared and len(tokens) == len(parts))
        self.num_calls += 1
        meanwhile()
        if self.num_calls in self.failures:
            raise self.failures[self.num_calls]
        return np.concatenate([self._rows(part) for part in parts])

    def _rows(self, part):
        rows = np.zeros((part.end - part.first_row, 300), np.float32)
        for row, position in enumerate(range(part.first_row, part.end)):
            rows[row, position + 1] = np.nan if part.sequence.request.request_id in self.broken else 5.0
        return rows


def _request(name, length=3, **way):
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0, "detokenize": False, **way})
    return Request(
        name,
        tuple(range(length)),
        params.sampling(9),
        params.output_options(),
        scope=((b"salt", name.encode()),),
    )


def _end(core):
    reported = []
    while core.has_work:
        core.step(reported.extend)
    return reported


def _tokens(reported, name):
    return [
        event.token for request, event in reported if request.request_id == name and isinstance(event, Delta)
    ]


def _errors(reported):
    return {request.request_id: event for request, event in reported if isinstance(event, BaseException)}


@pytest.fixture
def oracle():
    return Oracle()


@pytest.fixture
def core(oracle):
    return EngineCore(oracle, LIMITS, None)


def test_requests_are_answered(core):
    """Each text follows the logits of its own rows."""
    core.add(_request("a"))
    core.add(_request("b", 70))
    reported = _end(core)
    assert _tokens(reported, "a") == [3, 4, 5, 6] and _tokens(reported, "b") == [70, 71, 72, 73]
    assert not core.has_request("a") and core.scheduler.pool.num_free == 8


@pytest.mark.parametrize("error", [TaskFailed("[x.y] it failed"), ShapeError("[x.y] no such token")])
def test_failed_call_is_an_error_of_its_requests(core, oracle, error):
    """One error each, also where a request has several texts in it; waiting requests continue."""
    for name in "ab":
        core.add(_request(name, n=2, temperature=1.0, seed=1))
    reported = []
    for _ in range(2):
        core.step(reported.extend)
    core.add(_request("c", n=2, temperature=1.0, seed=1))  # four texts run, these wait
    oracle.failures = {3: error}
    reported += _end(core)
    assert _errors(reported) == {"a": error, "b": error}
    assert len([event for _, event in reported if isinstance(event, BaseException)]) == 2
    assert len(_tokens(reported, "c")) == 8
    assert core.scheduler.pool.num_free == 8 and not core._states and not core._sequences


def test_nan_logits_fail_one_request(core, oracle):
    """The others of the call are unaffected."""
    oracle.broken = {"b"}
    for name in "abc":
        core.add(_request(name))
    reported = _end(core)
    assert set(_errors(reported)) == {"b"} and isinstance(_errors(reported)["b"], NotFinite)
    assert _tokens(reported, "a") == _tokens(reported, "c") == [3, 4, 5, 6]


def test_settings_that_leave_no_token_fail_one_request(core):
    """Detected only at the position that has none."""
    core.add(_request("a", allowed_token_ids=[3, 4], no_repeat_ngram_size=1))
    core.add(_request("b"))
    reported = _end(core)
    assert set(_errors(reported)) == {"a"} and _tokens(reported, "b") == [3, 4, 5, 6]


def test_aborted_requests_are_reported_once(core):
    """A delta without a token for every unfinished text; none for a request that had ended."""
    core.add(_request("a", n=2, temperature=1.0, seed=1))
    core.step(lambda _: None)
    reported = core.abort("a")
    ends = [(event.choice, event.token, event.finish_reason) for _, event in reported]
    assert ends[0][0] == 0 and ends[0][1] is not None  # the step's token was not yet reported
    assert ends[1:] == [(0, None, "abort"), (1, None, "abort")]
    assert core.abort("a") == [] and core.abort("never there") == [] and not core.has_work


def test_unexpected_error_is_raised(core, oracle):
    """A defect is not a failed call: the engine's thread reports it to all requests."""
    core.add(_request("a"))
    oracle.failures = {1: ZeroDivisionError()}
    with pytest.raises(ZeroDivisionError):
        core.step(lambda _: None)
    reported = core.fail_all(ShapeError("[x.y] defect"))
    assert set(_errors(reported)) == {"a"} and not core.has_work


def test_ends_of_many_texts_take_linear_work(core, monkeypatch):
    """Checks for ended texts grow with the number of texts, on the engine's side and on the caller's."""
    looks = []
    is_live, finished = Sequence.is_live.fget, CompletionOutput.finished
    monkeypatch.setattr(Sequence, "is_live", property(lambda self: looks.append(self) or is_live(self)))
    monkeypatch.setattr(CompletionOutput, "finished", lambda self: looks.append(self) or finished(self))
    request = _request("a", n=400, temperature=1.0, seed=1, max_tokens=1)
    core.add(request)
    processor = OutputProcessor(request, None, RequestOutputKind.FINAL_ONLY)
    outputs = [processor.add(event) for _, event in _end(core)]
    assert len(outputs) == 400 and outputs[-1].finished and outputs[:-1] == [None] * 399
    assert len(looks) < 20 * 400
