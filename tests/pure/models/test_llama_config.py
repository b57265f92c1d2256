"""Llama configurations and names: read as files spell them, refused when not computable."""

import json

import numpy as np
import pytest

from tilewise.core import CheckpointError, ConfigError
from tilewise.models.llama.config import LlamaConfig
from tilewise.models.llama.weights import file_name, parameter_shapes, rename_from_files

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


def test_round_trip(tmp_path):
    """What is written is read back, RoPE scaling and several EOS ids included."""
    config = LlamaConfig(**SIZES, rope_scaling=LLAMA3, eos_token_ids=(1, 2), tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert LlamaConfig.from_pretrained(tmp_path) == config


def test_defaults_follow_from_sizes():
    """KV heads and the head size have defaults."""
    config = LlamaConfig(64, 32, 48, 1, 4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)


def test_both_spellings_of_rope():
    """transformers 5 puts theta and scaling into `rope_parameters`, earlier ones into two fields."""
    new = LlamaConfig.from_dict({**SIZES, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    old = LlamaConfig.from_dict({**SIZES, "rope_theta": 5e5, "rope_scaling": LLAMA3})
    assert new == old and new.rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"model_type": "qwen2"}, "architectures"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 30}, "hidden_size"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": 10**9}, "hidden_size"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_unsupported_is_refused_by_name(change, word):
    """What the graph does not compute is an error that names the field."""
    with pytest.raises(ConfigError, match=word):
        LlamaConfig.from_dict({**SIZES, **change})


def test_missing_and_broken_files(tmp_path):
    """No config.json, and one that is not JSON, are clear errors."""
    with pytest.raises(ConfigError, match=r"must hold config\.json"):
        LlamaConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="must be JSON"):
        LlamaConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_num_parameters_equals_sum_of_shapes(tied):
    """The count is that of all shapes."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    assert config.num_parameters() == sum(int(np.prod(shape)) for _, shape in parameter_shapes(config))
    assert ("lm_head.weight" in dict(parameter_shapes(config))) is not tied


def test_names_in_files():
    """Files put `model.` before every name but that of the head."""
    names = {name: file_name(name) for name, _ in parameter_shapes(LlamaConfig(**SIZES))}
    assert names.pop("lm_head.weight") == "lm_head.weight"
    assert all(stored == f"model.{name}" for name, stored in names.items())


def test_renaming_checks_names_and_shapes():
    """A missing or misshapen parameter is named; a stored tied head is ignored."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    stored = {file_name(n): np.zeros(s, np.float32) for n, s in parameter_shapes(config)}
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    renamed = rename_from_files(stored, config)
    assert list(renamed) == [name for name, _ in parameter_shapes(config)]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        rename_from_files(
            {k: v for k, v in stored.items() if k != "model.layers.1.mlp.up_proj.weight"}, config
        )
    stored["model.norm.weight"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        rename_from_files(stored, config)
