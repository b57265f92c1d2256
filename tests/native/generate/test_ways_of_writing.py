"""Sampling settings in whole texts: equal to transformers, several texts per prompt, ends of texts."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from native.models.families import CASES, ids_of
from tilewise.core import ConfigError
from tilewise.generate import Sampling, combine_settings
from tilewise.serve import Engine

CASE = next(case for case in CASES if case.name == "qwen2")
PROMPT = ids_of(12)


def _tokenizer():
    """A tokenizer with a token per character, 131 in all."""
    characters = [chr(33 + i) if i < 94 else chr(0x4E00 + i) for i in range(131)]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A small model of transformers and its directory with a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    model = CASE.model()
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    _tokenizer().save(str(directory / "tokenizer.json"))
    return model, directory


@pytest.fixture(scope="module")
def engine(theirs):
    with Engine(theirs[1], dtype="f32", max_num_seqs=8) as made:
        yield made


def _write(engine, sampling, prompt=PROMPT):
    """Deltas per choice."""
    written = [[] for _ in range(sampling.n)]
    for delta in engine.stream([prompt], sampling):
        written[delta.choice].append(delta)
    return written


def _tokens(engine, sampling):
    return [delta.token for delta in _write(engine, sampling)[0]]


def test_greedy_text_is_that_of_transformers(theirs, engine):
    """64 tokens with penalties equal those of `generate` and differ from those without."""
    way = {"repetition_penalty": 0.7, "no_repeat_ngram_size": 3}
    with torch.no_grad():
        out = theirs[0].generate(
            torch.tensor([PROMPT]), max_new_tokens=64, do_sample=False, pad_token_id=0, **way
        )
    ours = _tokens(engine, Sampling(max_tokens=64, **way))
    assert ours == out[0, len(PROMPT) :].tolist()
    assert ours != _tokens(engine, Sampling(max_tokens=64))


def test_bad_words_are_not_generated(engine):
    """A word that would be generated is not, given as ids or as text; the twin without bad_words has it."""
    plain = _tokens(engine, Sampling(max_tokens=24))
    bad = plain[4]
    assert bad not in _tokens(engine, Sampling(max_tokens=24, bad_words_ids=[(bad,)]))
    word = engine.model.tokenizer.decode([bad])
    with pytest.raises(ConfigError, match="must be UTF-8 text"):
        engine.stream([PROMPT], Sampling(bad_words=["\ud800"]))
    assert word not in "".join(p.text for p in _write(engine, Sampling(max_tokens=24, bad_words=[word]))[0])


def test_end_tokens_and_min_tokens(theirs, engine, monkeypatch):
    """An end token ends a text, but not before `min_tokens`, and not with `ignore_eos`."""
    plain = _tokens(engine, Sampling(max_tokens=24))
    monkeypatch.setattr(engine.model, "end_ids", frozenset([plain[3]]))
    deltas = _write(engine, Sampling(max_tokens=24))[0]
    first = plain.index(plain[3])
    assert len(deltas) == first + 1 and deltas[-1].finish_reason == "stop"
    assert _tokens(engine, Sampling(max_tokens=24, ignore_eos=True)) == plain
    later = _tokens(engine, Sampling(max_tokens=24, min_tokens=9))
    assert len(later) >= 9 and plain[3] not in later[:9]
    with torch.no_grad():
        out = theirs[0].generate(
            torch.tensor([PROMPT]),
            max_new_tokens=24,
            min_new_tokens=9,
            eos_token_id=plain[3],
            do_sample=False,
            pad_token_id=0,
        )
    assert later == out[0, len(PROMPT) :].tolist()


def test_stop_strings_wait_for_min_tokens(engine):
    """A stop string before `min_tokens` is normal text."""
    plain = "".join(delta.text for delta in _write(engine, Sampling(max_tokens=24))[0])
    sampling = Sampling(max_tokens=24, stop=[plain[2]], min_tokens=24)
    assert "".join(delta.text for delta in _write(engine, sampling)[0])[:23] == plain[:23]


def test_generation_config_acts_as_in_transformers(theirs, tmp_path):
    """A directory with settings: 48 tokens equal `generate` without arguments; the twin ignores the file."""
    settings = {
        "do_sample": False,
        "temperature": 0.6,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "max_new_tokens": 48,
        "min_new_tokens": 40,
        "eos_token_id": [5, 6, 7, 8, 9],
        "bad_words_ids": [[11], [12, 13]],
        "pad_token_id": 0,
    }
    for path in theirs[1].iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model = type(theirs[0]).from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.generate(torch.tensor([PROMPT]))[0, len(PROMPT) :].tolist()
    with Engine(tmp_path, dtype="f32") as engine:
        sampling, taken = combine_settings(engine.model.generation_config, {}, len(PROMPT))
        assert _tokens(engine, sampling) == expected
        assert taken.keys() >= {"repetition_penalty", "max_tokens", "min_tokens"}
    with Engine(tmp_path, dtype="f32", generation_config=False) as engine:
        sampling, taken = combine_settings(engine.model.generation_config, {"max_tokens": 48}, len(PROMPT))
        assert taken == {} and _tokens(engine, sampling) != expected
