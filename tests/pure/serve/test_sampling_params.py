"""Settings with vLLM's names: rejected values, resolved values; biases, allowed tokens and logprobs by hand."""

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.hostile import accepted
from tilewise.core import ConfigError
from tilewise.generate import History, Sampling, choose_token
from tilewise.serve.logprobs import token_logprobs
from tilewise.serve.outputs import RequestOutputKind
from tilewise.serve.sampling_params import SamplingParams
from tilewise.settings import settings_of

DEFAULTS = {  # vLLM's
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "bad_words": None,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "logit_bias": None,
    "allowed_token_ids": None,
    "output_kind": RequestOutputKind.CUMULATIVE,
}
RIGHT = {
    **DEFAULTS,
    "typical_p": 1.0,
    "no_repeat_ngram_size": 0,
    "min_tokens": 1,
    "seed": 3,
    "stop": ["a"],
    "stop_token_ids": [1],
    "bad_words": ["b"],
    "bad_words_ids": [[1]],
    "logprobs": 1,
    "prompt_logprobs": 1,
    "logit_bias": {1: 0.5},
    "allowed_token_ids": [1, 2],
}
EMPTY = {"()", "[]", "None"}
TAKEN = {
    "presence_penalty": {"-1", "0", "float32"},
    "frequency_penalty": {"-1", "0", "float32"},
    "repetition_penalty": {"2.5", "2**70", "float32"},
    "temperature": {"0", "2.5", "2**70", "float32"},
    "top_k": {"-1", "0"},
    "top_p": {"0"},
    "min_p": {"0"},
    "no_repeat_ngram_size": {"0"},
    "seed": {"None", "-1", "0"},
    "stop": {*EMPTY, "'x\\0y'", "'name'"},
    "stop_token_ids": EMPTY,
    "bad_words": EMPTY,
    "bad_words_ids": {*EMPTY, "objects"},
    "include_stop_str_in_output": {"True"},
    "ignore_eos": {"True"},
    "max_tokens": {"None", "-1"},
    "min_tokens": {"0"},
    "logprobs": {"None", "-1", "0"},
    "prompt_logprobs": {"None", "-1", "0"},
    "detokenize": {"True"},
    "skip_special_tokens": {"True"},
    "logit_bias": {"None", "{}"},
    "allowed_token_ids": {"None"},
}


def test_names_and_defaults_equal_vllm():
    """A request with default settings is the same request there."""
    assert {name: getattr(SamplingParams(), name) for name in DEFAULTS} == DEFAULTS


def test_invalid_settings_are_rejected():
    """Every setting, when it is made; accepted values are in the table."""
    assert accepted(SamplingParams, RIGHT) == TAKEN


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stop": "x", "detokenize": False}, "stop strings need detokenize=True"),
        ({"allowed_token_ids": []}, "must not be empty"),
        ({"n": 2, "temperature": 0}, "n must be 1"),
        ({"min_tokens": 20}, "min_tokens must not be above"),
        ({"top_k": -2}, "top_k"),
        ({"logprobs": -2}, "logprobs"),
        ({"seed": 1 << 63}, "seed"),
        ({"max_tokens": -2}, "max_tokens"),
    ],
)
def test_contradictions_are_rejected(wrong, words):
    """At once, before an engine sees them."""
    with pytest.raises(ConfigError, match=words):
        SamplingParams(**wrong)


def test_defaults_are_filled_in():
    """No limit is the room in the context; no seed, or -1, is a random one per request."""
    for none in (None, -1):
        open_ended = SamplingParams(max_tokens=none, seed=none, stop="x", top_k=-1)
        first, second = open_ended.sampling(37), open_ended.sampling(37)
        assert first.max_tokens == 37 and first.stop == ("x",) and first.top_k == 0
        assert first.seed != second.seed
    assert SamplingParams(seed=5).sampling(1).seed == 5
    assert len({SamplingParams(seed=seed).sampling(1).seed for seed in (-3, -2, 0, 2)}) == 4


def test_settings_of_a_file_round_trip_as_params():
    """Nothing is lost in either direction, and none of them is a default."""
    values = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "no_repeat_ngram_size": 4,
        "bad_words": ("a",),
        "bad_words_ids": ((1, 2),),
        "logit_bias": ((1, 0.5),),
        "allowed_token_ids": (1, 2),
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": (3,),
        "stop": ("b",),
        "include_stop_str_in_output": True,
        "n": 2,
        "seed": 7,
    }
    for name, one in settings_of(Sampling).items():
        if name not in values:
            values[name] = one.high if one.default != one.high else one.low
    sampling = Sampling(**values)
    assert all(getattr(sampling, field.name) != field.default for field in fields(Sampling))
    assert SamplingParams.of(sampling).sampling(1) == sampling
    assert SamplingParams.of(Sampling()).sampling(1) == Sampling()


LOGITS = np.array([0.5, 2.0, 1.0, 2.0, -3.0], np.float32)


def test_top_p_of_zero_leaves_the_likeliest_token():
    """For any random number: of equally likely tokens the lowest id."""
    wild = {"temperature": 9.0, "top_p": 0.0, "max_tokens": 1}
    drawn = {choose_token(LOGITS, SamplingParams(**wild).sampling(1), History([1])) for _ in range(50)}
    assert drawn == {1}


def test_biases_and_allowed_tokens():
    """A bias changes a logit, after penalties; the likeliest allowed token is drawn; an empty list allows none."""
    greedy = {"temperature": 0.0, "max_tokens": 1}
    history = History([1])
    assert choose_token(LOGITS, Sampling(**greedy), history) == 1
    assert choose_token(LOGITS, Sampling(**greedy, logit_bias={2: 1.5}), history) == 2
    assert choose_token(LOGITS, Sampling(**greedy, logit_bias={2: 1.0}), history) == 1
    assert choose_token(LOGITS, Sampling(**greedy, allowed_token_ids=(0, 4)), history) == 0
    assert choose_token(LOGITS, Sampling(**greedy, allowed_token_ids=(0, 4), logit_bias={4: 9}), history) == 4
    with pytest.raises(ConfigError, match="below the vocabulary's 5; got 5"):
        choose_token(LOGITS, Sampling(**greedy, allowed_token_ids=(5,)), history)
    with pytest.raises(ConfigError, match="at least one token must be allowed"):
        choose_token(
            LOGITS, Sampling(**greedy, allowed_token_ids=(3,), bad_words_ids=((3,),), min_tokens=1), history
        )


@given(st.lists(st.sampled_from([-3.0, 0.0, 0.5, 2.0, 7.0]), min_size=1, max_size=9), st.data())
def test_logprobs_are_those_of_the_raw_logits(logits, data):
    """Logarithms of a softmax; ranks count from the likeliest, lower ids first; the drawn token comes first."""
    token = data.draw(st.integers(0, len(logits) - 1))
    count = data.draw(st.integers(-1, 10))
    logprobs = token_logprobs(np.array(logits, np.float32), token, count)
    total = sum(math.exp(x) for x in logits)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    expected = order if count < 0 else order[:count]
    assert list(logprobs) == list(dict.fromkeys([token, *expected]))
    for id_, figure in logprobs.items():
        assert figure.logprob == pytest.approx(math.log(math.exp(logits[id_]) / total))
        assert order[figure.rank - 1] == id_
