"""PEFT's directories: what is read, what is rejected by name, and what is written."""

import json

import numpy as np
import pytest

from tilewise import models
from tilewise.checkpoint.adapters import LoraConfig, is_adapter, open_adapter, save_adapter
from tilewise.core import CheckpointError, ConfigError
from tilewise.models.llama import LlamaConfig

MODEL = LlamaConfig(64, 16, 24, 2, num_attention_heads=2, num_key_value_heads=1)


def written(folder, **settings):
    """An adapter of the model with random values."""
    layout = models.lora_layout(MODEL, LoraConfig(r=4, **settings))
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in layout.shapes.items()}
    save_adapter(folder, layout.files("base-model"), layout.stored(values))
    return layout, values


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": "all-linear", "exclude_modules": ("down_proj",), "alpha": 2.5, "use_rslora": True},
        {
            "target_modules": r".*layers\.1\..*(q|k)_proj",
            "rank_pattern": {"k_proj": 2},
            "alpha_pattern": {"k_proj": 3},
        },
        {"modules_to_save": ("lm_head", "norm"), "target_modules": ("q_proj", "up_proj"), "init": "gaussian"},
    ],
)
def test_round_trip(tmp_path, settings):
    """What is written is read as the same adapters, scales and values."""
    layout, values = written(tmp_path / "a", **settings)
    assert is_adapter(tmp_path / "a") and not is_adapter(tmp_path)
    adapter = open_adapter(tmp_path / "a")
    loaded = models.load_adapter(adapter, MODEL)
    assert adapter.base == "base-model"
    assert dict(loaded.layout.adapters) == dict(layout.adapters)
    assert loaded.layout.saved == layout.saved and loaded.layout.shapes == layout.shapes
    for name, value in values.items():
        assert np.array_equal(np.asarray(loaded.weights[name]), value), name


@pytest.mark.parametrize(
    "field, value",
    [
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("peft_type", "LOHA"),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]),
        ("a_field_of_the_future", 3),
    ],
)
def test_settings_that_are_not_supported_are_named(tmp_path, field, value):
    """A setting that would change the result is an error that names it."""
    written(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ConfigError, match=field):
        open_adapter(tmp_path)


def test_settings_without_an_effect_are_accepted(tmp_path):
    """Fields that are null, false or empty have no effect, whatever they are called."""
    written(tmp_path)
    path = tmp_path / "adapter_config.json"
    content = {**json.loads(path.read_text()), "eva_config": None, "use_x": False, "y_pattern": {}, "zs": []}
    path.write_text(json.dumps(content))
    open_adapter(tmp_path)


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_16", "olora", "loftq", "eva", "orthogonal", "other", 1]
)
def test_initializations_that_are_not_supported_are_named(init):
    """Only the random initializations of LoRA are computed."""
    with pytest.raises(ConfigError, match=str(init)):
        LoraConfig(init=init)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(", "a*b*c*d*e*", "(x|y){9}", "", "a" * 600, "(?:ab)*\n"])
def test_regular_expressions_that_may_be_slow_are_rejected(pattern):
    """A file may not contain a regular expression that takes exponential time."""
    with pytest.raises(ConfigError, match="regular expression"):
        LoraConfig(target_modules=pattern)
    with pytest.raises(ConfigError, match="regular expression"):
        LoraConfig(alpha_pattern={pattern: 1})


def test_tensors_of_some_modules_are_missing(tmp_path, caplog):
    """One warning says how many; a complete adapter has none."""
    layout, values = written(tmp_path / "a", target_modules=("up_proj",))
    models.load_adapter(tmp_path / "a", MODEL)
    assert "has no tensors" not in caplog.text
    some = [(name, value) for name, value in layout.stored(values) if ".layers.0." in name]
    save_adapter(tmp_path / "b", layout.files(None), some)
    models.load_adapter(tmp_path / "b", MODEL)
    assert "no tensors for 1 of the 2 modules" in caplog.text and "layers.1.mlp.up_proj" in caplog.text


def test_damaged_directories(tmp_path):
    """No settings, no tensors, tensors of another model, or of embeddings."""
    with pytest.raises(CheckpointError, match="adapter_config"):
        open_adapter(tmp_path)
    written(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="must have adapter_model"):
        open_adapter(tmp_path / "a")
    layout, values = written(tmp_path / "b", target_modules=("up_proj",))
    wider = LlamaConfig(64, 16, 32, 2, num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(CheckpointError, match="up_proj"):
        models.load_adapter(tmp_path / "b", wider)
    other = models.config_from_dict({"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2,
                                     "bos_token_id": 0, "eos_token_id": 0})  # fmt: skip
    with pytest.raises(ConfigError, match="must belong to the model"):
        models.load_adapter(tmp_path / "b", other)
    stored = dict(layout.stored(values))
    tables = {"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 64), np.float32)}
    save_adapter(tmp_path / "c", layout.files(None), [*stored.items(), *tables.items()])
    with pytest.raises(ConfigError, match="lora_embedding_A"):
        open_adapter(tmp_path / "c")


def test_merging_adds_the_product(tmp_path):
    """`w + scale * b a` in fp32, rounded to the dtype of the weight; modules that are saved replace the model's."""
    layout, values = written(tmp_path, alpha=6, modules_to_save=("lm_head",))
    rng = np.random.default_rng(1)
    base = {n: rng.standard_normal(s).astype(np.float32) for n, s in models.parameter_shapes(MODEL)}
    merged = models.merged_weights(base, models.load_adapter(tmp_path, MODEL))
    for name, value in base.items():
        expected = value
        if name in layout.adapters:
            a, b = (values[n] for n in layout.adapters[name].names(name))
            expected = value + np.float32(1.5) * (b @ a)
        expected = values.get(name, expected)
        assert np.array_equal(np.asarray(merged[name]), expected), name
