"""Choosing tokens as transformers and vLLM choose them: penalties, forbidden tokens, filters, stop strings."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from pure.generate.sampling_reference import apply_processors, candidates, sample
from tilewise.core import ConfigError
from tilewise.data import train_tokenizer
from tilewise.generate import History, Sampling, choose_token, encode_prompt
from tilewise.generate import sampling as sampling_module
from tilewise.generate.detokenizer import StopFinder
from tilewise.generate.prompts import word_ids
from tilewise.generate.sampling import Batch, Sampler
from tilewise.kernels.sampling import Rules, apply_logits_processors

VOCAB = 24
ENDS = (3, 7)


def _history(prompt, written):
    history = History(prompt)
    for token in written:
        history.append(token)
    return history


def _processed(logits, sampling, history, ends=(), mask=None):
    """The scores after the native logits processors."""
    scores, rules = logits.astype(np.float64), Sampler(sampling, history, ends).rules
    apply_logits_processors(scores, (rules, None if rules is None else history.counted, mask))
    return scores


def _ours(logits, sampling, history, ends=ENDS):
    ids, weights = candidates(_processed(logits, sampling, history, ends), sampling)
    probability = np.zeros(len(logits))
    probability[ids] = weights / weights.sum()
    return probability


def _theirs(logits, s, history, order=None):
    """Their processors in the order of `GenerationMixin._get_logits_processor`."""
    made = []
    if s.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.no_repeat_ngram_size:
        made.append(NoRepeatNGramLogitsProcessor(s.no_repeat_ngram_size))
    if s.bad_words_ids:
        made.append(NoBadWordsLogitsProcessor([list(w) for w in s.bad_words_ids], list(ENDS)))
    if s.min_tokens:
        made.append(MinNewTokensLengthLogitsProcessor(history.num_prompt, s.min_tokens, list(ENDS)))
    made.append(TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        made.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        made.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        made.append(MinPLogitsWarper(s.min_p))
    if s.typical_p < 1:
        made.append(TypicalLogitsWarper(s.typical_p))
    made = made if order is None else order(made)
    ids = torch.tensor([history.ids])
    scores = LogitsProcessorList(made)(ids, torch.tensor(logits, dtype=torch.float64)[None])
    return torch.softmax(scores, -1)[0].numpy()


IDS = st.integers(0, VOCAB - 1)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 0, 1, 5, 20, 99]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.93]),
    min_p=st.sampled_from([0.0, 0.0, 0.04, 0.3, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.1, 0.6, 0.95]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    no_repeat_ngram_size=st.sampled_from([0, 2, 3]),
    bad_words_ids=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=4),
    min_tokens=st.integers(0, 8),
)


@settings(max_examples=200)
@given(SAMPLINGS, st.integers(0, 10**6), st.lists(IDS, min_size=4, max_size=20), st.lists(IDS, max_size=8))
def test_probabilities_are_those_of_transformers(sampling, seed, prompt, written):
    """Every setting at once, on random logits and texts: each token's probability within 1e-6."""
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB)
    history = _history(prompt, written)
    assert np.abs(_ours(logits, sampling, history) - _theirs(logits, sampling, history)).max() < 1e-6


WIDE = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-300, 0.2, 0.7, 1.0, 3.0, 1e9]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 500]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.2, 0.95]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    seed=st.integers(0, 2**63 - 1),
).filter(lambda sampling: sampling.typical_p == 1 or sampling.temperature < 1e9)  # else rounding decides


def compare_samples(sampling, seed, size, spread, digits):
    """Several rows at once, against sorting; random numbers next to a border may fall on either side."""
    rng = np.random.default_rng(seed)
    histories = [History(rng.integers(0, size, 5 + i).tolist()) for i in range(5)]
    rows = np.stack([rng.normal(0, spread, size).round(digits).astype(np.float32) for _ in histories])
    batch = Batch([Sampler(sampling, history, (), i) for i, history in enumerate(histories)])
    for threads in (1, 3):
        for i, (history, token) in enumerate(zip(histories, batch.sample(rows, np.arange(5), threads))):
            scores = apply_processors(rows[i], sampling, history)
            expected, distance = sample(scores, sampling, len(history), i)
            assert token == expected or distance < 1e-12, (token, expected, distance)
            assert token == choose_token(rows[i], sampling, history, (), i)


@settings(max_examples=150)
@given(
    WIDE,
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 255, 256, 257, 3000]),
    st.sampled_from([0.01, 1.0, 9.0]),
    st.sampled_from([0, 2, 9]),
)
def test_native_sampling_equals_sorting(sampling, seed, size, spread, digits):
    """With all settings, vocabulary sizes and ties; several rows at once, on several threads."""
    compare_samples(sampling, seed, size, spread, digits)


@pytest.mark.parametrize("wrong", ["top_k", "seed", "choice", "position"])
def test_a_wrong_sample_is_detected(wrong, monkeypatch):
    """The twin: with one setting changed behind the reference's back, tokens differ."""

    def changed(scores, sampling, position, choice):
        if wrong == "top_k":
            sampling = replace(sampling, top_k=1)
        elif wrong == "seed":
            sampling = replace(sampling, seed=sampling.seed + 1)
        return reference(scores, sampling, position + (wrong == "position"), choice + (wrong == "choice"))

    reference = globals()["sample"]
    monkeypatch.setitem(globals(), "sample", changed)
    with pytest.raises(AssertionError):
        compare_samples(Sampling(temperature=1.0), 1, 300, 1.0, 9)


def test_frequencies_match_probabilities():
    """Eight thousand seeds: frequencies within four standard deviations of the probabilities."""
    logits = np.random.default_rng(3).normal(0, 1.5, 12).astype(np.float32)
    count = 8_000
    ways = [Sampling(temperature=1.0, top_p=0.95, seed=seed) for seed in range(count)]
    batch = Batch([Sampler(way, History([1])) for way in ways])
    counts = np.bincount(batch.sample(logits[None], np.zeros(count, np.int64), 2), minlength=12)
    probabilities = _ours(logits, ways[0], History([1]), ())
    assert (
        np.abs(counts - count * probabilities) <= 4 * np.sqrt(count * probabilities * (1 - probabilities))
    ).all()


def test_error_of_one_row_leaves_others():
    """Errors are at the indices of their rows."""
    rows = np.array([[0, 1, 2, 3], [1, np.nan, 0, 0], [0, -np.inf, 0, 0]], np.float32)
    forbidding, unknown = Sampling(bad_words_ids=[(0,), (1,), (2,), (3,)]), Sampling(logit_bias={7: 1.0})
    kinds = [(0, Sampling()), (1, Sampling()), (0, forbidding), (0, Sampling(temperature=1.0))]
    kinds += [(2, Sampling()), (1, Sampling(repetition_penalty=2.0)), (0, unknown)]
    batch = Batch([Sampler(sampling, History([0])) for _, sampling in kinds])
    tokens = batch.sample(rows, np.array([row for row, _ in kinds]))
    assert tokens[0] == 3 and 0 <= tokens[3] < 4
    wrong = [place for place, token in enumerate(tokens) if token < 0]
    assert [type(batch.error(place, rows[kinds[place][0]])).__name__ for place in wrong] == [
        "NotFinite",
        "ConfigError",
        "NotFinite",
        "NotFinite",
        "ConfigError",
    ]
    assert "below the vocabulary's 4; got 7" in str(batch.error(6, rows[0]))


PROCESSED = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6, 1.7e308]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.1, -1.3]),
    no_repeat_ngram_size=st.integers(0, 4),
    bad_words_ids=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=4),
    logit_bias=st.dictionaries(IDS, st.floats(-1e6, 1e6), max_size=5),
    allowed_token_ids=st.one_of(st.just(()), st.lists(IDS, max_size=20)),
    min_tokens=st.integers(0, 8),
)


def compare_processors(sampling, seed, prompt, written, masked):
    """Every bit of every score; the masks of grammars may be shorter or longer than a row."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, VOCAB)
    history = _history(prompt[:-1], prompt[-1:] + written)
    mask = None if masked is None else rng.integers(0, 2, masked).astype(np.uint8)
    ends = (*ENDS, VOCAB + 5)
    processed = _processed(logits, sampling, history, ends, mask)
    assert processed.tobytes() == apply_processors(logits, sampling, history, ends, mask).tobytes()


ASKED = (
    st.integers(0, 10**6),
    st.lists(st.integers(0, VOCAB + 2), min_size=1, max_size=20),
    st.lists(st.integers(0, VOCAB + 2), max_size=12),
    st.sampled_from([None, None, VOCAB - 3, VOCAB, VOCAB + 9]),
)


@settings(max_examples=300)
@given(PROCESSED, *ASKED)
def test_native_penalties_are_those_of_numpy(sampling, seed, prompt, written, masked):
    """All settings at once, to the bit; tokens of a text may lie beyond the logits."""
    compare_processors(sampling, seed, prompt, written, masked)


@pytest.mark.parametrize("wrong", ["presence", "bias", "bad_words", "allowed", "ends", "mask"])
def test_other_penalty_is_detected(wrong, monkeypatch):
    """The twin: with one rule omitted for the native code, scores differ."""
    sampling = Sampling(
        presence_penalty=0.5,
        logit_bias={2: 1.0, 1: 1.0},
        bad_words_ids=[(0,), (4,)],
        allowed_token_ids=range(9),
        min_tokens=9,
    )
    compare_processors(sampling, 1, [1, 2], [5, 6, 8], VOCAB)
    if wrong == "mask":
        native, name = apply_logits_processors, "apply_logits_processors"
        monkeypatch.setitem(globals(), name, lambda scores, used: native(scores, (*used[:2], None)))
    else:
        monkeypatch.setattr(
            sampling_module, "Rules", lambda **rules: Rules(**{k: v for k, v in rules.items() if k != wrong})
        )
    with pytest.raises(AssertionError):
        compare_processors(sampling, 1, [1, 2], [5, 6, 8], VOCAB)


def test_other_order_of_filters_is_detected():
    """The twin: with filters in the opposite order the comparison fails."""
    sampling = Sampling(temperature=2.0, top_k=12, top_p=0.7, min_p=0.2, typical_p=0.5)
    history, apart = History([1, 2]), 0
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(0, 3, VOCAB)
        turned = _theirs(logits, sampling, history, lambda made: made[::-1])
        apart += np.abs(_ours(logits, sampling, history) - turned).max() > 1e-6
    assert apart > 5


def test_greedy_applies_penalties():
    """The likeliest token after penalties, not before."""
    logits = np.array([3.0, 2.9, -1.0], np.float32)
    assert choose_token(logits, Sampling(), History([0])) == 0
    assert choose_token(logits, Sampling(repetition_penalty=1.2), History([0])) == 1
    assert choose_token(logits, Sampling(presence_penalty=0.5), History([0])) == 0
    assert choose_token(logits, Sampling(presence_penalty=0.5), _history([], [0])) == 1
    assert choose_token(logits, Sampling(min_tokens=1), History([]), {0, 1}) == 2
    assert choose_token(logits, Sampling(bad_words_ids=[(0,), (2, 1)]), History([2])) == 2


def test_extreme_penalties_forbid_nothing():
    """A penalty that overflows a double still leaves tokens to choose; ids beyond the logits are ignored."""
    logits = np.array([-3.0, 2.0], np.float32)
    sampling = Sampling(repetition_penalty=1.7e308, temperature=1.0)
    assert choose_token(logits, sampling, History([0, 1, 9])) == 1
    assert choose_token(logits, Sampling(frequency_penalty=1.0), _history([], [9, 1, 1, 1, 1, 1, 1])) == 0


@pytest.mark.parametrize(
    "settings_", [{"no_repeat_ngram_size": 1}, {"bad_words_ids": [(0,), (1,)]}, {"min_tokens": 1}]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_tokens_forbidden_is_an_error(settings_, temperature):
    """No text is generated."""
    sampling = Sampling(temperature=temperature, **settings_)
    ends = (0, 1) if "min_tokens" in settings_ else ()
    with pytest.raises(ConfigError, match="at least one token must be allowed"):
        choose_token(np.zeros(2, np.float32), sampling, History([0, 1]), ends)


def test_bad_words_outside_the_vocabulary_are_rejected():
    """The error names the id."""
    with pytest.raises(ConfigError, match=r"below the vocabulary's 2; got 5"):
        choose_token(np.zeros(2, np.float32), Sampling(bad_words_ids=[(5,)]), History([]))


def test_bad_words_have_variants_with_and_without_a_space():
    """A word in a text has a space before it or not; both are forbidden."""
    tokenizer = train_tokenizer(["hello world " * 10], vocab_size=280)
    assert word_ids(tokenizer, ["world", "world"]) == [
        tuple(encode_prompt(tokenizer, text)) for text in ("world", " world")
    ]


def test_choices_differ_and_the_first_equals_a_single_one():
    """Texts of one prompt sample different tokens from one seed; the first samples what a single one does."""
    logits = np.zeros(50, np.float32)
    one = Sampling(temperature=1.0, seed=4)
    samples = [
        [choose_token(logits, one, History([0] * at), choice=choice) for at in range(9)]
        for choice in range(4)
    ]
    assert samples[0] == [choose_token(logits, one, History([0] * at)) for at in range(9)]
    assert len({tuple(row) for row in samples}) == 4


TEXTS = st.text(alphabet="ab", max_size=12)


@settings(max_examples=200)
@given(TEXTS, st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3), st.booleans(), st.data())
def test_text_ends_at_its_stop_string_however_it_is_split(text, strings, is_included, data):
    """It ends where brute force finds the first complete stop string, of which nothing is shown before."""
    text += "cab"
    ends = [(end, end - len(s)) for end in range(1, len(text) + 1) for s in strings if text[:end].endswith(s)]
    expected = text if not ends else text[: min(ends)[0] if is_included else min(ends)[1]]
    finder, shown, is_stopped = StopFinder(strings, is_included), "", False
    while text and not is_stopped:
        size = data.draw(st.integers(1, len(text)))
        more, is_stopped = finder.add(text[:size])
        shown, text = shown + more, text[size:]
        assert expected.startswith(shown)
    assert shown + finder.finish() == expected and is_stopped == bool(ends)
    assert finder.finish() == ""
