"""Llama configurations and names: read in all spellings, rejected when not computable."""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest

from tilewise import models
from tilewise.core import CheckpointError, ConfigError
from tilewise.models.llama import LlamaConfig

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}


def test_both_spellings_of_rope():
    """transformers 5 puts theta and scaling into `rope_parameters`, earlier versions into two fields."""
    new = LlamaConfig.from_dict({**SIZES, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    old = LlamaConfig.from_dict({**SIZES, "rope_theta": 5e5, "rope_scaling": LLAMA3})
    assert new == old and new.rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_act": "relu6"}, "hidden_act"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"model_type": "qwen2"}, "architectures"),
        ({"rope_scaling": {"rope_type": "nope", "factor": 2.0}}, "rope_scaling"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"hidden_size": 30}, "hidden_size"),
        ({"hidden_size": 10**9}, "hidden_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"hidden_size": 32.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 4.0}}, "rope_scaling must equal"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, "rope_scaling"),
        ({"bos_token_id": 128}, "bos_token_id must lie in the vocabulary"),
        ({"eos_token_id": -1}, "eos_token_id must lie in the vocabulary"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
    ],
)
def test_unsupported_fields_are_rejected_by_name(change, word):
    """A field that the graph does not compute is an error with its name."""
    with pytest.raises(ConfigError, match=word):
        LlamaConfig.from_dict({**SIZES, **change})


def test_end_tokens_beyond_the_vocabulary_are_ignored(caplog):
    """A file loads with one warning; a configuration written by hand is an error."""
    for ends, left in (([1, 128, 500], (1,)), (128, ()), ([128], ())):
        values = {**SIZES, "eos_token_id": ends}
        for _ in range(2):
            assert LlamaConfig.from_dict(values, where=f"file {ends}").eos_token_ids == left
        with pytest.raises(ConfigError, match="eos_token_id must lie in the vocabulary, 0 to 127"):
            LlamaConfig.from_dict(values, only_known=True)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and "vocab_size 128 is ignored: 128, 500 (file [1, 128, 500])" in lines[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("factor", 0),
        ("factor", "8"),
        ("factor", float("nan")),
        ("factor", 1e-300),
        ("high_freq_factor", 1e40),
        ("factor", None),
        ("low_freq_factor", 0),
        ("low_freq_factor", 4.0),
        ("original_max_position_embeddings", -64),
        ("original_max_position_embeddings", 64.5),
    ],
)
def test_invalid_rope_scaling_is_rejected_by_name(name, value):
    """Numbers that the formula cannot use are errors with the field's name."""
    with pytest.raises(ConfigError, match=f"rope_scaling.*{'freq' if 'freq' in name else name}"):
        LlamaConfig(**SIZES, rope_scaling={**LLAMA3, name: value})
    assert LlamaConfig(**SIZES, rope_scaling=LLAMA3).rope_scaling == LLAMA3


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": True},
        {"rms_norm_eps": 1e40},
        {"rms_norm_eps": 1e-46},
        {"rope_theta": 1e-300},
        {"vocab_size": "two\nlines"},
    ],
)
def test_wrong_types_are_rejected_in_python(wrong):
    """A configuration made in Python has the same types."""
    with pytest.raises(ConfigError, match=next(iter(wrong)).removesuffix("s")):
        LlamaConfig(**{**SIZES, **wrong})


def test_missing_and_damaged_files_are_errors(tmp_path):
    """No config.json, invalid JSON, not an object or not a file are clear errors; a pipe is not waited for."""
    with pytest.raises(ConfigError, match=r"must hold config\.json"):
        LlamaConfig.from_pretrained(tmp_path)
    text = json.dumps(LlamaConfig(**SIZES).to_dict())
    for content, words in (
        ("{", "not JSON"),
        ('{"vocab_size": 128, ' + text[1:], "'vocab_size' appears twice"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=rf"config\.json must be JSON; got '.*config\.json': .*{words}"):
            LlamaConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="named pipe"):
        LlamaConfig.from_pretrained(tmp_path)


def test_stored_dtype_is_read():
    """Both spellings of the key; the stored dtype is also written."""
    assert LlamaConfig.from_dict({**SIZES, "torch_dtype": "float32"}).dtype == "float32"
    config = LlamaConfig.from_dict({**SIZES, "dtype": "bfloat16"})
    assert config.dtype == "bfloat16" and config.to_dict()["torch_dtype"] == "bfloat16"
    assert "torch_dtype" not in LlamaConfig(**SIZES).to_dict()


@pytest.mark.parametrize("tied", [True, False])
def test_num_parameters_equals_sum_of_shapes(tied):
    """The count equals the sum over all shapes."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    assert models.num_parameters(config) == sum(
        int(np.prod(shape)) for _, shape in models.parameter_shapes(config)
    )
    assert ("lm_head.weight" in dict(models.parameter_shapes(config))) is not tied


def test_names_in_files():
    """Files put `model.` before every name but that of the head."""
    table = models.file_layout(LlamaConfig(**SIZES)).table
    names = {name: tensor.name for tensor in table for name, _ in tensor.parameters}
    assert names.pop("lm_head.weight") == "lm_head.weight"
    assert all(stored == f"model.{name}" for name, stored in names.items())


def _stored(config, dtype=np.float32):
    """A file of zeros for a configuration."""
    zeros = {n: np.zeros(s, dtype) for n, s in models.parameter_shapes(config)}
    return {n: np.asarray(t) for n, t in models.stored_tensors(config, zeros)}


def test_renaming_checks_names_and_shapes():
    """A missing or misshapen parameter is named; a stored copy of a tied head is ignored."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    stored = _stored(config)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    renamed = models.file_layout(config).weights(stored)
    assert list(renamed) == [name for name, _ in models.parameter_shapes(config)]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        models.file_layout(config).weights(
            {k: v for k, v in stored.items() if k != "model.layers.1.mlp.up_proj.weight"}
        )
    stored["model.norm.weight"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        models.file_layout(config).weights(stored)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "norm.weight"]
)
def test_tensors_beyond_the_configuration_are_rejected(name):
    """Layers and biases that config.json does not describe, and a second spelling, are named."""
    config = LlamaConfig(**SIZES)
    stored = _stored(config)
    models.file_layout(config).weights(stored)
    with pytest.raises(CheckpointError, match=f"'{re.escape(name)}'"):
        models.file_layout(config).weights({**stored, name: np.zeros((2, 2), np.float32)})


def test_more_stored_layers_than_configured_are_rejected():
    """A config.json with a smaller num_hidden_layers is not a smaller model."""
    stored = _stored(LlamaConfig(**SIZES))
    with pytest.raises(CheckpointError, match=r"layers\.1\..*num_hidden_layers"):
        models.file_layout(LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).weights(stored)


def test_frequencies_in_older_files_are_ignored():
    """They follow from config.json; any dtype is accepted."""
    config = LlamaConfig(**SIZES)
    buffers = ("model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    stored = {**_stored(config), **{name: np.zeros(4, np.int64) for name in buffers}}
    assert len(models.file_layout(config).weights(stored)) == len(stored) - 2


def test_a_tied_head_must_be_the_embedding():
    """A stored head that differs anywhere from the embedding it is tied to is ambiguous, and rejected."""
    config = LlamaConfig(**{**SIZES, "vocab_size": 10_000}, tie_word_embeddings=True)
    stored = _stored(config, ml_dtypes.bfloat16)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].copy()
    models.file_layout(config).weights(stored)
    stored["lm_head.weight"][9_999, 31] = 1
    with pytest.raises(CheckpointError, match="which the configuration ties it to"):
        models.file_layout(config).weights(stored)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"][:-1]
    with pytest.raises(CheckpointError, match="which the configuration ties it to"):
        models.file_layout(config).weights(stored)
