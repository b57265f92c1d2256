"""A request's text depends only on the request: tokens, text and the bits of every logprob.

Requests of a small universe run alone once, on one device with a cache for everything. Histories
then mix them: any order and time of arrival, cancellations, caches of few blocks, steps of few
tokens, cached prefixes, right and wrong draft tokens, on several devices and numbers of workers.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native.serve.serving_models import MAX_CONTEXT, core_of, load, request_of, save_model
from tilewise.core import InternalError
from tilewise.generate import History
from tilewise.models import BLOCK_SIZE
from tilewise.serve import core as core_module
from tilewise.serve import generation_state
from tilewise.serve import runner as runner_module
from tilewise.serve import sequence as sequence_module
from tilewise.serve.blocks import BlockPool, block_key
from tilewise.serve.draft_model import DraftModel
from tilewise.serve.outputs import Delta
from tilewise.serve.sampling_params import SamplingParams
from tilewise.serve.scheduler import Limits, Scheduled, Scheduler
from tilewise.session import assemble
from tilewise.settings import SpeculativeConfig

VARIANTS = {
    "one": {},
    "two devices": {"tensor_parallel_size": 2},
    "one worker": {"workers_per_device": 1},
    "four devices": {"tensor_parallel_size": 4},
    "bf16": {"dtype": "bf16"},
    "bf16 on two devices": {"dtype": "bf16", "tensor_parallel_size": 2},
}
WAYS = [
    SamplingParams(max_tokens=40, temperature=0, logprobs=2),
    SamplingParams(max_tokens=30, temperature=0.9, top_p=0.95, seed=3, logprobs=0),
    SamplingParams(max_tokens=70, temperature=1.3, min_p=0.05, seed=4, logprobs=1, ignore_eos=True),
    SamplingParams(
        max_tokens=24,
        temperature=1.1,
        top_k=40,
        seed=5,
        n=3,
        logprobs=0,
        frequency_penalty=0.7,
        repetition_penalty=1.2,
        logit_bias={7: 3.0},
    ),
    SamplingParams(max_tokens=8, temperature=0.8, seed=6, n=2, logprobs=1, prompt_logprobs=1),
]
LENGTHS = (1, 7, 63, 64, 65, 129, 150)


@dataclass(frozen=True)
class Ask:
    """A request of the universe: a prefix of one of two token streams, and sampling settings."""

    stream: int
    length: int
    way: int

    def request(self, name, salt=0, priority=0):
        ids = np.random.default_rng(self.stream).integers(1, 250, MAX_CONTEXT)[: self.length].tolist()
        return request_of(name, ids, WAYS[self.way], salt, priority)


@dataclass(frozen=True)
class Arrive:
    """A request arrives."""

    ask: Ask
    salt: int
    priority: int


@dataclass(frozen=True)
class Drop:
    """A request, by its index among all arrivals, is cancelled."""

    number: int


@dataclass(frozen=True)
class Wait:
    """This many steps run."""

    count: int


asks = st.builds(Ask, st.integers(0, 1), st.sampled_from(LENGTHS), st.integers(0, len(WAYS) - 1))
events = st.one_of(
    st.builds(Arrive, asks, st.integers(0, 1), st.integers(-1, 1)),
    st.builds(Drop, st.integers(0, 9)),
    st.builds(Wait, st.integers(1, 30)),
)


@st.composite
def all_limits(draw):
    """Few blocks, few tokens, few sequences."""
    seqs = draw(st.integers(1, 8))
    return Limits(
        seqs, draw(st.integers(seqs, 128)), draw(st.integers(seqs, 16)), draw(st.integers(4, 12)), MAX_CONTEXT
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One model directory, loaded in several ways."""
    directory = save_model(tmp_path_factory.mktemp("model") / "llama")
    models = {name: load(directory, **how) for name, how in VARIANTS.items()}
    smaller = save_model(tmp_path_factory.mktemp("model") / "smaller", num_hidden_layers=1)
    for model in models.values():
        model.draft_model = DraftModel(str(smaller), model, 3)
    yield models
    for model in models.values():
        model.draft_model.close()
        model.close()


@pytest.fixture(scope="module")
def alone(served):
    """The text of an ask alone, by dtype; computed once."""
    cached = {}

    def write(name, ask):
        model = "bf16" if "bf16" in name else "one"
        if (model, ask) not in cached:
            core = core_of(served[model])
            core.add(ask.request("alone"))
            reported = []
            while core.has_work:
                core.step(reported.extend)
            cached[model, ask] = _written(reported)["alone"]
        return cached[model, ask]

    return write


def _written(deltas):
    """Every delta per request and choice, without the number of cached tokens."""
    written = {}
    for request, delta in deltas:
        assert isinstance(delta, Delta), delta
        if delta.finish_reason != "abort":
            fields = (delta.token, delta.text, delta.finish_reason, delta.logprobs, delta.prompt_logprobs)
            written.setdefault(request.request_id, {}).setdefault(delta.choice, []).append(fields)
    return written


@dataclass
class Oracle:
    """Drafts the text of the request alone, with a wrong token at every few positions."""

    history: History
    text: list[int]
    wrong_every: int

    def draft(self, most):
        start = self.history.num_new
        right = enumerate(self.text[start : start + min(most, 6)], start)
        return [token if place % self.wrong_every else (token + 1) % 250 for place, token in right]


GUESSING = {
    "no guesses": None,
    "repetitions": SpeculativeConfig(4, prompt_lookup_max=3, prompt_lookup_min=1),
    "a smaller model": SpeculativeConfig(3, model="smaller"),
    "mostly right": 5,
    "mostly wrong": 2,
}


def _play(model, limits, history, write, guessing=None, free_tokens=None):
    """Run a history; every text equals the text alone, or its beginning if it was cancelled."""
    speculation = guessing if isinstance(guessing, SpeculativeConfig) else None
    draft_model = model.draft_model if speculation is not None and speculation.model else None
    for event in history:
        if isinstance(event, Arrive):
            write(event.ask)  # now: later it would write over the cache of what is played
    core = core_of(model, limits, speculation, draft_model, free_tokens)
    requests, dropped, reported = {}, set(), []
    for event in history:
        if isinstance(event, Arrive):
            name = f"{len(requests)}"
            requests[name] = event.ask
            core.add(event.ask.request(name, event.salt, event.priority))
            if isinstance(guessing, int):
                for sequence in core._sequences[name]:
                    text = [delta[0] for delta in write(event.ask)[sequence.choice]]
                    sequence.drafter = Oracle(sequence.history, text, guessing)
        elif isinstance(event, Drop):
            dropped.add(f"{event.number}")
            reported += core.abort(f"{event.number}")
        else:
            for _ in range(event.count):
                core.step(reported.extend)
    while core.has_work:
        core.step(reported.extend)
    written = _written(reported)
    for name, ask in requests.items():
        for choice, expected in write(ask).items():
            deltas = written.get(name, {}).get(choice, [])
            assert deltas == expected[: len(deltas)], (name, ask, choice)
            assert len(deltas) == len(expected) or name in dropped
    assert core.scheduler.pool.num_free == limits.num_blocks
    return core


def histories(most):
    """A way to load the model, limits, up to this many events, a way to draft, and a prefill budget."""
    events_of_history = st.lists(events, min_size=1, max_size=most)
    draft_ways, budgets = st.sampled_from([*GUESSING]), st.sampled_from([1, 7, None])
    return given(st.sampled_from([*VARIANTS]), all_limits(), events_of_history, draft_ways, budgets)


@settings(max_examples=25)
@histories(12)
def test_texts_equal_those_of_requests_alone(served, alone, name, limits, history, guessing, free_tokens):
    """Every token, text and logprob, with any other requests and on any devices."""
    _play(served[name], limits, history, partial(alone, name), GUESSING[guessing], free_tokens)


@pytest.mark.soak
@settings(max_examples=3_000)
@histories(20)
def test_texts_equal_those_of_requests_alone_at_length(
    served, alone, name, limits, history, guessing, free_tokens
):
    """The same, many more times."""
    _play(served[name], limits, history, partial(alone, name), GUESSING[guessing], free_tokens)


SMALL = Limits(5, 48, 6, 6, MAX_CONTEXT)
BUSY = [
    *(Arrive(Ask(i % 2, (65, 129, 150)[i % 3], i % 4), i // 3 % 2, 0) for i in range(6)),
    Wait(20),
    Drop(1),
    *(Arrive(Ask(i % 2, 150, 4 - i), 0, 0) for i in range(3)),
    Wait(200),
    *(Arrive(Ask(0, length, way), salt, 0) for length, way, salt in ((150, 0, 0), (150, 1, 1), (129, 4, 0))),
]


def test_a_busy_history_preempts_and_hits_the_cache(served, alone, monkeypatch):
    """The mechanisms that the faults below disturb do occur, and change nothing."""
    previews, use_preview = [], Scheduler.use_preview
    for event in BUSY:
        if isinstance(event, Arrive):
            alone("one", event.ask)  # now: its steps are not those that are counted
    monkeypatch.setattr(Scheduler, "use_preview", lambda self: previews.append(use_preview(self)))
    core = _play(served["one"], SMALL, BUSY, partial(alone, "one"))
    assert core.scheduler.num_preemptions > 0 and len(previews) > 20


def test_right_drafts_save_calls_and_change_nothing(served, alone):
    """A busy history with draft tokens that are wrong at every fifth position: the same texts in fewer steps."""
    wide, history = Limits(3, 64, 16, 16, MAX_CONTEXT), [e for e in BUSY if isinstance(e, Arrive)]
    plain, guessed = (_play(served["one"], wide, history, partial(alone, "one"), how) for how in (None, 5))
    assert guessed.scheduler.num_steps < plain.scheduler.num_steps * 0.7


def test_a_model_drafts_for_itself(served, alone, tmp_path):
    """With itself as the draft model every draft token is right, except at the end of a text; also
    for sampled texts.
    """
    with closing(DraftModel(str(save_model(tmp_path / "llama")), served["one"], 3)) as draft_model:
        for ask in (Ask(0, 65, 0), Ask(1, 7, 2)):
            core = core_of(served["one"], None, SpeculativeConfig(3, model="itself"), draft_model)
            core.add(ask.request("guessed"))
            reported, calls = [], 0
            while core.has_work:
                core.step(reported.extend)
                calls += 1
            deltas = _written(reported)["guessed"]
            assert deltas == alone("one", ask)
            assert calls <= len(deltas[0]) / 4 + 3


def test_repetitions_are_drafted(served):
    """A repeating greedy text of a small model: several tokens per call."""
    ids, tokens = [9, 8, 7] * 9, {}
    for name, speculation in (("plain", None), ("guessed", GUESSING["repetitions"])):
        core = core_of(served["one"], None, speculation)
        core.add(request_of(name, ids, SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)))
        reported, calls = [], 0
        while core.has_work:
            core.step(reported.extend)
            calls += 1
        tokens[name] = [delta.token for _, delta in reported]
        assert calls == 90 if speculation is None else calls < 60
    assert tokens["plain"] == tokens["guessed"]


def _freed_early(monkeypatch):
    complete = Scheduler.complete

    def wrong(self, parts):
        complete(self, parts)
        for part in parts:
            block = part.sequence.blocks[0]
            if len(part.sequence.blocks) > 1 and block not in self.pool._free:
                self.pool._free[block] = None  # and its holder goes on reading it
                self.pool._free.move_to_end(block, last=False)

    monkeypatch.setattr(Scheduler, "complete", wrong)


def _wrong_slot(monkeypatch):
    inputs = runner_module.call_inputs

    def wrong(parts, max_blocks):
        arrays = inputs(parts, max_blocks)
        arrays["slots"] = np.where(arrays["positions"] == BLOCK_SIZE, arrays["slots"] + 1, arrays["slots"])
        return arrays

    monkeypatch.setattr(runner_module, "call_inputs", wrong)


def _wrong_position(monkeypatch):
    inputs = runner_module.call_inputs

    def wrong(parts, max_blocks):
        arrays = inputs(parts, max_blocks)
        return {**arrays, "positions": np.maximum(arrays["positions"] - (arrays["positions"] > 90), 0)}

    monkeypatch.setattr(runner_module, "call_inputs", wrong)


def _without_tokens(monkeypatch):
    monkeypatch.setattr(sequence_module, "block_key", lambda scope, parent, ids: block_key(scope, parent, []))


def _draws_by_place(monkeypatch):
    places, make = iter(range(1 << 30)), generation_state.Sampler
    monkeypatch.setattr(
        generation_state,
        "Sampler",
        lambda sampling, history, ends, _: make(sampling, history, ends, next(places) % 3),
    )


def _rows_swapped(monkeypatch):
    run = runner_module.Runner.run
    monkeypatch.setattr(runner_module.Runner, "run", lambda self, *args: run(self, *args)[::-1])


def _prepared_wrongly(monkeypatch):
    def wrong(self, parts):
        prepare(self, parts)
        self._prepared[1]["positions"][-1] -= 1

    prepare = runner_module.Runner.prepare
    monkeypatch.setattr(runner_module.Runner, "prepare", wrong)


def _draws_as_before(monkeypatch):
    batch = core_module.Batch

    def wrong(samplers, lengths=None, **masks):
        return batch(samplers, lengths and [n - 1 for n in lengths], **masks)

    monkeypatch.setattr(core_module, "Batch", wrong)


def _still_found(monkeypatch):
    monkeypatch.setattr(BlockPool, "_forget", lambda self, block: None)


def _guesses_are_kept(monkeypatch):
    monkeypatch.setattr(Scheduled, "confirmed_end", property(lambda self: self.end))


def _guesses_are_believed(monkeypatch):
    monkeypatch.setattr(core_module._Row, "confirms", lambda self, token: bool(self.drafts))


FAULTS = [_freed_early, _wrong_slot, _wrong_position, _without_tokens, _draws_by_place, _rows_swapped]
FAULTS += [_prepared_wrongly, _draws_as_before, _still_found, _guesses_are_kept, _guesses_are_believed]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_faults_change_texts(served, alone, monkeypatch, plant):
    """The twin: every one of these changes the result."""
    for event in BUSY:
        if isinstance(event, Arrive):
            alone("one", event.ask)
    plant(monkeypatch)
    with pytest.raises((AssertionError, InternalError, IndexError, ValueError)):
        for guesses in (GUESSING["mostly right"], None):
            _play(served["one"], SMALL, BUSY, partial(alone, "one"), guesses)


def test_a_dropped_partial_value_changes_texts(alone, tmp_path, monkeypatch):
    """Two devices without one partial value of their sums."""
    dropped = []

    class Dropping(assemble.Program):
        def add_instr(self, device, template, instruction, first_signal):
            if instruction.label == "linear:self_attn.o_proj.weight/reduce_scatter" and device == 0:
                *others, last, _ = instruction.operands
                instruction = replace(instruction, operands=(*others, last, last))
                dropped.append(instruction)
            super().add_instr(device, template, instruction, first_signal)

    monkeypatch.setattr(assemble, "Program", Dropping)
    with closing(load(save_model(tmp_path / "llama"), tensor_parallel_size=2)) as model:
        assert dropped
        with pytest.raises(AssertionError):
            _play(model, SMALL, BUSY, partial(alone, "one"))


@pytest.mark.parametrize("forgotten", ["salt", "parent"])
def test_keys_without_a_field_find_blocks_of_others(served, alone, monkeypatch, forgotten):
    """With the salt in the key, another user's blocks are not found; without the parent, blocks of
    another text are.
    """

    def wrong(scope, parent, ids):
        return block_key(() if forgotten == "salt" else scope, b"" if forgotten == "parent" else parent, ids)

    def cached(first, second):
        core, reported = core_of(served["one"]), []
        for request in (first, second):
            core.add(request)
            while core.has_work:
                core.step(reported.extend)
        return next(delta.num_cached_tokens for request, delta in reported if request is second)

    way = WAYS[0]
    ids = np.random.default_rng(5).integers(1, 250, 200).tolist()
    if forgotten == "salt":
        pair = request_of("a", ids[:150], way, salt=0), request_of("b", ids[:150], way, salt=1)
    else:  # the second's blocks are the first's, in the other order
        pair = request_of("a", ids[:129], way), request_of("b", [*ids[64:128], *ids[:64], 5], way)
    assert cached(*pair) == 0
    monkeypatch.setattr(sequence_module, "block_key", wrong)
    assert cached(*pair) == 2 * BLOCK_SIZE


def test_prompt_logprobs_are_those_of_a_forward(served):
    """A prompt read in chunks has the logprobs of a prompt read at once, None for the first token."""
    ids = np.random.default_rng(8).integers(1, 250, 100).tolist()
    logprobs = []
    for limits in (None, Limits(1, 7, 3, 4, MAX_CONTEXT)):
        core, reported = core_of(served["one"], limits), []
        core.add(request_of("p", ids, SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)))
        while core.has_work:
            core.step(reported.extend)
        logprobs.append(reported[0][1].prompt_logprobs)
    assert logprobs[0] == logprobs[1] and logprobs[0][0] is None and len(logprobs[0]) == 100
    for token, figures in zip(ids[1:], logprobs[0][1:]):
        assert token in figures and len(figures) <= 2
        assert min(figure.rank for figure in figures.values()) == 1
