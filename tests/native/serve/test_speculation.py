"""Prompt lookup: draft tokens, rejected settings, and equal texts of `LLM` with and without it."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native.serve.serving_models import TEXTS, save_model
from pure.hostile import FROM_JSON
from support.faults import inject
from tilewise.core import ConfigError, TilewiseError
from tilewise.generate import History
from tilewise.serve import LLM, SamplingParams, SpeculativeConfig, StructuredOutputsParams
from tilewise.serve.speculation import NgramDrafter


def searched(ids, count, longest, shortest):
    """By searching: the tokens after the previous occurrence of the longest known run of last tokens."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[len(ids) - size :]:
                period = len(ids) - end
                return [ids[end + index % period] for index in range(count)]
    return []


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=9),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_drafts_equal_those_of_a_search(parts, count, shortest, more):
    """However the text grows between two drafts."""
    history = History(parts[0])
    drafter = NgramDrafter(history, count, shortest + more, shortest)
    for part in parts[1:]:
        assert drafter.draft(count) == searched(history.ids, count, shortest + more, shortest)
        for token in part:
            history.append(token)
    assert drafter.draft(2) == searched(history.ids, min(2, count), shortest + more, shortest)


CONFIGS = [
    {"num_speculative_tokens": 4, "prompt_lookup_max": 2},
    {"num_speculative_tokens": 3, "model": "smaller"},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_texts_are_the_same(tmp_path, monkeypatch, config):
    """Sampled, greedy, structured, several per prompt: draft tokens change nothing."""
    schema = {"type": "array", "items": {"enum": ["abab", "cdcd"]}, "minItems": 6, "maxItems": 6}
    params = [
        SamplingParams(max_tokens=60, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=60, seed=2, n=2, logprobs=1, frequency_penalty=0.4),
        SamplingParams(max_tokens=90, seed=3, structured_outputs=StructuredOutputsParams(json=schema)),
    ]
    directory = save_model(tmp_path / "llama")
    save_model(tmp_path / "smaller", num_hidden_layers=1, max_position_embeddings=64)
    monkeypatch.chdir(tmp_path)
    texts = []
    for speculative in (None, config):
        with LLM(directory, dtype="f32", max_num_seqs=4, speculative_config=speculative) as llm:
            texts.append([output.outputs for output in llm.generate(TEXTS, params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "num_speculative_tokens is required"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 3, "method": "eagle"}, "method must be one of"),
        ({"num_speculative_tokens": 3, "method": "draft_model"}, "method draft_model needs model"),
        ({"num_speculative_tokens": 3, "model": 7}, "model"),
        ({"num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "must not be above"),
        ({"num_speculative_tokens": 3, "tokens": 2}, "a setting must be one of"),
        (7, "speculative_config"),
    ],
)
def test_mistakes_are_named(tmp_path, config, words):
    """Before a model is read."""
    with pytest.raises(ConfigError, match=words):
        LLM(tmp_path, speculative_config=config)


def test_hostile_values_are_rejected_or_accepted():
    """Any JSON value of the command line is valid or a ConfigError."""
    for name in ("num_speculative_tokens", "method", "prompt_lookup_max", "prompt_lookup_min"):
        for value in FROM_JSON:
            with contextlib.suppress(ConfigError):
                SpeculativeConfig.of({"num_speculative_tokens": 2, name: value})


def test_invalid_draft_models_are_rejected(tmp_path, thread_count):
    """Another vocabulary, no directory: nothing of the model remains."""
    directory, before = save_model(tmp_path / "llama"), thread_count()
    other = tmp_path / "other"
    save_model(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 8}))
    for model, words in ((other, "must have the model's vocab_size"), (tmp_path / "nowhere", "nowhere")):
        config = {"num_speculative_tokens": 2, "model": str(model)}
        with pytest.raises(TilewiseError, match=words):
            LLM(directory, dtype="f32", speculative_config=config)
    assert thread_count(before) <= before


def test_a_failing_draft_model_does_not_change_texts(tmp_path):
    """Its error is logged; the text is the same."""
    directory, way = save_model(tmp_path / "llama"), SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    config = {"num_speculative_tokens": 2, "model": str(directory)}
    with LLM(directory, dtype="f32") as llm:
        expected = llm.generate(TEXTS, way)
    with LLM(directory, dtype="f32", speculative_config=config) as llm:
        (replica,) = llm.engine._replicas
        inject(replica._draft_model._model.instance, "throw", 0, "attention_paged", 0)
        speculative = llm.generate(TEXTS, way)
        again = llm.generate(TEXTS, way)
    for outputs in (speculative, again):
        assert [output.outputs for output in outputs] == [output.outputs for output in expected]


def test_defaults_are_vllms():
    """A single bound sets the other; without bounds, both are five."""
    configs = [
        SpeculativeConfig(1),
        SpeculativeConfig(1, prompt_lookup_min=2),
        SpeculativeConfig(1, prompt_lookup_max=3),
    ]
    assert [(one.prompt_lookup_min, one.prompt_lookup_max) for one in configs] == [(5, 5), (2, 2), (3, 3)]
