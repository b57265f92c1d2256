"""Saving and loading whole Hugging Face directories."""

import json
import os

import numpy as np
import pytest
import transformers
from tokenizers import processors

from tilewise.checkpoint import (
    check_token_ids,
    load_generation_config,
    load_tokenizer,
    open_weights,
    save_pretrained,
)
from tilewise.checkpoint.generation import _NEUTRAL, _WITHOUT_EFFECT, _GenerationConfig
from tilewise.core import CheckpointError, ConfigError
from tilewise.data import train_tokenizer

TOKENIZER = train_tokenizer(["hello world " * 10], vocab_size=300)
SIZE = TOKENIZER.get_vocab_size()


def test_second_save_replaces_the_whole_directory(tmp_path):
    """A second save replaces the first and leaves no hidden files."""
    target = tmp_path / "model"
    save_pretrained(
        target, {"a": 1}, [("w", np.zeros(3, np.float32))], generation_config={"eos_token_id": [0, 1]}
    )
    save_pretrained(target, {"a": 2}, [("w", np.ones(3, np.float32))])
    assert json.loads((target / "config.json").read_text()) == {"a": 2}
    assert load_generation_config(target, 8) == {}
    np.testing.assert_array_equal(open_weights(target)["w"], np.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_failed_save_leaves_the_old_directory(tmp_path):
    """After an error while writing, the old directory is intact."""
    target = tmp_path / "model"
    save_pretrained(target, {"a": 1}, [("w", np.zeros(3, np.float32))])

    def broken():
        yield "w", np.ones(3, np.float32)
        raise RuntimeError("device gone")

    with pytest.raises(RuntimeError, match="device gone"):
        save_pretrained(target, {"a": 2}, broken())
    assert json.loads((target / "config.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_files_have_default_mode(tmp_path):
    """Weights are readable by the same users as config.json."""
    save_pretrained(
        tmp_path / "model", {"a": 1}, [("w", np.zeros(3, np.float32))], TOKENIZER, {"eos_token_id": 0}
    )
    (tmp_path / "other").touch()
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 5 and set(modes.values()) == {(tmp_path / "other").stat().st_mode}


def _save_tokenizer(directory, change):
    content = json.loads(TOKENIZER.to_str())
    change(content)
    (directory / "tokenizer.json").write_text(json.dumps(content))


def test_truncation_and_padding_of_a_tokenizer_are_ignored(tmp_path):
    """A prompt is encoded whole and unpadded, as in transformers, whatever lengths the file sets."""

    def shorten(content):
        content["truncation"] = {
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        content["padding"] = {
            "strategy": {"Fixed": 50},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }

    _save_tokenizer(tmp_path, shorten)
    text = "hello world hello world"
    assert load_tokenizer(tmp_path, SIZE).encode(text).ids == TOKENIZER.encode(text).ids


def test_tokens_beyond_the_vocabulary_are_rejected_where_used(tmp_path, caplog):
    """An added token at vocab_size is loaded (text Gemma 3 has one), and texts that use it are
    rejected by its name. A vocabulary larger than the model's is one warning; a smaller one is
    padded.
    """
    _save_tokenizer(tmp_path, lambda content: None)
    assert load_tokenizer(tmp_path, SIZE + 64).get_vocab_size() == SIZE
    added = {**json.loads(TOKENIZER.to_str())["added_tokens"][0], "id": SIZE, "content": "<|extra|>"}
    _save_tokenizer(tmp_path, lambda content: content["added_tokens"].append(added))
    tokenizer = load_tokenizer(tmp_path, SIZE)
    assert not caplog.records
    check_token_ids(tokenizer, tokenizer.encode("hello").ids, SIZE, "a prompt")
    ids = tokenizer.encode("hello<|extra|>").ids
    with pytest.raises(
        ConfigError, match=rf"of a prompt must lie below .* {SIZE}; got {SIZE}, which is '<\|extra\|>'"
    ):
        check_token_ids(tokenizer, ids, SIZE, "a prompt")
    with pytest.raises(ConfigError, match=f"of logit_bias must lie below .* {SIZE}; got {1 << 40};"):
        check_token_ids(tokenizer, [1 << 40], SIZE, "logit_bias")
    _save_tokenizer(
        tmp_path, lambda content: content["model"]["vocab"].update({"hello world": 4_000_000_000})
    )
    for _ in range(2):
        load_tokenizer(tmp_path, 1 << 20)
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"reaches id 4000000000, beyond config.json's vocab_size {1 << 20}" in line


def _template(content):
    single = [{"SpecialToken": {"id": "absent", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": {},
    }


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"model":' * 5000,
        lambda content: content["model"].update(vocab={"a": 0, "b": 0}, merges=["a b"]),
        lambda content: content["model"].update(vocab={"a": -1}, merges=[]),
        lambda content: content["model"].update(type="Other"),
        lambda content: content["model"].update(continuing_subword_prefix="xx"),
        lambda content: content["model"].update(continuing_subword_prefix="x"),
        lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        _template,
    ],
)
def test_damaged_tokenizer_is_one_error(tmp_path, content):
    """A file that the library rejects, or panics on when loading or encoding, is a CheckpointError
    with the file's name. So is a prefix that merges lack, on which the library would abort the
    process.
    """
    if isinstance(content, bytes):
        (tmp_path / "tokenizer.json").write_bytes(content)
    else:
        _save_tokenizer(tmp_path, content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json must be readable; got '.*tokenizer\.json'"):
        load_tokenizer(tmp_path, SIZE)


@pytest.mark.parametrize("form", [list, " ".join])
def test_merges_that_have_the_prefix_are_used(tmp_path, form):
    """The twin of the missing prefix: merges in both spellings whose right sides have it."""
    merges = [form(["a", "##b"]), form(["ab", "##b"])]
    model = {"type": "BPE", "vocab": {"a": 0, "##b": 1, "ab": 2, "abb": 3}, "merges": merges}
    model["continuing_subword_prefix"] = "##"
    _save_tokenizer(
        tmp_path, lambda content: content.update(model=model, pre_tokenizer=None, added_tokens=[])
    )
    assert load_tokenizer(tmp_path, SIZE).encode("abb").ids == [3]


def test_a_template_of_known_tokens_is_used(tmp_path):
    """The twin of the broken template: the tokenizer's begin tokens precede the prompt."""
    tokenizer = load_tokenizer(_saved(tmp_path), SIZE)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    assert load_tokenizer(tmp_path, SIZE).encode("hello").ids == [0, *TOKENIZER.encode("hello").ids]


def _saved(directory):
    _save_tokenizer(directory, lambda content: None)
    return directory


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_special_files_are_named_in_errors(tmp_path, name):
    """A pipe is not waited for; a directory and a dangling link are not reported as missing files."""
    with pytest.raises(CheckpointError, match=r"must hold tokenizer\.json"):
        load_tokenizer(tmp_path, 8)
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)):
        make(tmp_path / name)
        with pytest.raises(CheckpointError, match=name):
            (load_tokenizer if name == "tokenizer.json" else load_generation_config)(tmp_path, SIZE)
        (tmp_path / name).rmdir() if make is os.mkdir else (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "object"),
        ("{", "not JSON"),
        ('{"eos_token_id": [1, null]}', "eos_token_id"),
        ('{"eos_token_id": [1, -1]}', "eos_token_id.*got -1"),
        ('{"temperature": NaN}', "NaN"),
        ('{"temperature": -1}', "temperature"),
        ('{"do_sample": 1}', "do_sample"),
        ('{"no_repeat_ngram_size": -2}', "no_repeat_ngram_size"),
        ('{"bad_words_ids": [[]]}', "bad_words_ids.0"),
        ('{"bad_words_ids": [[1], [-8]]}', "bad_words_ids.1"),
        ('{"max_new_tokens": 0}', "max_new_tokens"),
        ('{"stop_strings": [""]}', "stop_strings"),
    ],
)
def test_damaged_generation_config_is_one_error(tmp_path, content, words):
    """Types are not coerced and ids are not negative; the error names the file."""
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_generation_config(tmp_path, 8)
    message = str(caught.value)
    assert "generation_config.json" in message
    assert "generation_config=False in Python" in message


def test_settings_of_generation_that_are_allowed(tmp_path, caplog):
    """Neutral values and fields without effect are accepted; unknown fields are one line in the log."""
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [1, 7], "use_cache": "often", "bos_token_id": null, "num_beams": 1, "guidance_scale": 1.0,'
        ' "suppress_tokens": [], "top_p": 0.5, "temperature": 1, "transformers_version": "5", "style": "baroque",'
        ' "trust_remote_code": false}'
    )
    for _ in range(2):
        settings = load_generation_config(tmp_path, 8)
    assert settings == {"eos_token_id": [1, 7], "top_p": 0.5, "temperature": 1.0}
    (line,) = (record.getMessage() for record in caplog.records)
    assert "unknown fields are ignored: style, trust_remote_code" in line and str(tmp_path) in line


def test_unsupported_settings_are_warnings(tmp_path, caplog):
    """One warning per setting that would change the text, and one for ids beyond the vocabulary."""
    file = {
        "num_beams": 4,
        "suppress_tokens": [3],
        "guidance_scale": 1.5,
        "max_time": 3.0,
        "num_beam_groups": True,
    }
    tokens = {"bos_token_id": 9, "eos_token_id": [8, 1, 99], "bad_words_ids": [[1, 8], [2], [10]]}
    (tmp_path / "generation_config.json").write_text(json.dumps({**file, **tokens, "top_k": 5}))
    for _ in range(2):
        loaded = load_generation_config(tmp_path, 8)
    assert loaded == {"eos_token_id": [1], "bad_words_ids": [[2]], "top_k": 5}
    lines = [record.getMessage() for record in caplog.records]
    for name in file:
        assert len([line for line in lines if f"{name} is not supported and is ignored" in line]) == 1
    assert "vocab_size 8 are ignored: 8, 9, 10, 99" in lines[-1] and len(lines) == len(file) + 1
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 8}')
    assert load_generation_config(tmp_path, 8) == {"eos_token_id": []}
    assert load_generation_config(tmp_path, 9) == {"eos_token_id": 8}


@pytest.mark.skipif(
    not transformers.__version__.startswith("5.24."), reason="the settings of transformers 5.24 are known"
)
def test_every_setting_of_transformers_is_handled():
    """Each field that their class can write is used, ignored, or a warning for a value that is not neutral."""
    names = {name for name in vars(transformers.GenerationConfig()) if name != "generation_kwargs"}
    assert names <= {*_GenerationConfig.model_fields, *_NEUTRAL, *_WITHOUT_EFFECT}
