"""Every family's config.json: read in all spellings, written unchanged, rejected by name when not computable."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest

from tilewise import models
from tilewise.core import ConfigError

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "rope_scaling": YARN, "num_key_value_heads": 2},
    "mistral": {**SIZES, "sliding_window": None, "num_key_value_heads": 2},
    "qwen2": {**SIZES, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "qwen3": {**SIZES, "layer_types": ["full_attention"] * 4, "attention_bias": True},
    "gemma2": {**SIZES, "hidden_act": "gelu_pytorch_tanh"},
    "gemma3_text": {
        **SIZES,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "_sliding_window_pattern": 2,
    },
    "phi3": {**SIZES, "rope_scaling": LONG, "original_max_position_embeddings": 16},
    "smollm3": {**SIZES, "no_rope_layers": [1, 0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 9},
    "olmo2": {**SIZES, "attention_bias": True},
    "granite": {**SIZES, "embedding_multiplier": 12, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    "gpt2": {**GPT2, "n_inner": None, "n_ctx": 64},
    "bert": {**SIZES, "position_embedding_type": "absolute", "hidden_dropout_prob": 0.1},
}


def read(family: str, **changes: Any) -> models.ModelConfig:
    """The configuration of a file with those changes; None removes a key, "null" is null."""
    fields = {**FAMILIES[family], "model_type": family, **changes}
    return models.config_from_dict(
        {key: None if value == "null" else value for key, value in fields.items() if value is not None}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_written_configuration_is_read_back(family, tmp_path):
    """The same configuration, found by the family's name and by its architecture alone."""
    config = read(family)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), allow_nan=False))
    assert models.open(tmp_path) == config and config.model_type == family
    nameless = {k: v for k, v in config.to_dict().items() if k != "model_type"}
    assert models.config_from_dict(nameless) == config
    assert models.num_parameters(config) > 0 and models.max_context(config) > 0


@pytest.mark.parametrize("change", [{"rms_norm_eps": 0}, {"model_type": "mamba"}, {"vocab_size": "9"}])
def test_errors_name_the_file(tmp_path, change):
    """For any error in it: value, family, type."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **change}))
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "config.json"))):
        models.open(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_keys_are_rejected(family):
    """They may change what a model computes; those without effect are listed by name."""
    assert (
        read(family, attention_dropout=0.1, torch_dtype="bfloat16", transformers_version="4.57.0") is not None
    )
    for key in ("rope_scale", "num_experts", "logit_scale", "x" * 10_000):
        with pytest.raises(
            ConfigError, match=f"{key[:20]}.*must be a field that this family's models have"
        ) as caught:
            read(family, **{key: 3})
        assert len(str(caught.value)) < 600
    with pytest.raises(ConfigError, match="quantization_config"):
        read(family, quantization_config={"a": "b"})
    with pytest.raises(
        ConfigError, match=r"num_experts.*--ignore-config-field num_experts.*ignore_config_fields"
    ):
        read(family, num_experts=8)
    fields = {**read(family).to_dict(), "num_experts": 8, "quantization_config": {"a": "b"}}
    names = ("num_experts", "quantization_config", "not there")
    assert models.config_from_dict(fields, ignore=names) == read(family)


UNKNOWN = {  # unknown field -> its value, and whether it is ignored
    "alibi": (None, True),
    "use_qk_norm": (False, True),
    "model_name": ("a model", True),
    "_model_name_or_path": ("a model", True),
    "dataset_path": ("here", True),
    "training_revision": ("abc", True),
    "framework_version": (2, True),
    "version": ("2024", True),
    "modelVersion": (1.5, True),
    "base_model": ("a/b", True),
    "finetuned_from": ("org/model", True),
    "axolotl": ("0.4.1.dev0", True),
    "num_experts": (0, False),
    "use_alibi": (True, False),
    "logit_scale": ("0.5", False),
    "version_count": (2, False),
    "model_version": ({}, False),
    "model_is_version": (True, False),
    "activation_name": ("relu", False),
    "rope_version": ("1.0.0", False),
    "attn_kernel": ("org/kernel", False),
    "residual_type": ("parallel", False),
    "name": ([], False),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_fields_are_judged_by_name_and_value(name, caplog, tmp_path):
    """null, false, names, paths and versions are ignored with one log line; other fields are rejected."""
    value, is_ignored = UNKNOWN[name]
    fields = {**FAMILIES["qwen2"], "model_type": "qwen2", name: value}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "other_version": "1"}))
    if is_ignored:
        assert models.open(tmp_path) == models.open(tmp_path) == read("qwen2")
        (line,) = (record.getMessage() for record in caplog.records)
        assert name in line and "other_version = '1'" in line and str(tmp_path / "config.json") in line
    else:
        with pytest.raises(ConfigError, match=f"{name} must be a field that"):
            models.open(tmp_path)
        assert models.open(tmp_path, ignore=[name]) == read("qwen2")
    with pytest.raises(ConfigError, match=f"{name} must be a field that"):
        models.config_from_dict(fields, only_known=True)


@pytest.mark.parametrize(
    ("family", "same"),
    [
        *((family, {"is_decoder": True, "is_causal": True}) for family in FAMILIES if family != "bert"),
        ("bert", {"is_decoder": False, "is_causal": False}),
        *((family, {"auto_map": {"AutoConfig": "a.B"}, "name_or_path": "x"}) for family in FAMILIES),
        (
            "llama",
            {"_flash_attn_2_enabled": True, "use_rope": "null", "gated_mlp": True, "type_vocab_size": 16},
        ),
        ("llama", {"rope_scaling": {**YARN, "finetuned": True}}),
        ("llama", {"rope_scaling": {**YARN, "note": None, "is_new": False}}),
        ("gpt2", {"use_rope": False}),
    ],
)
def test_fields_that_state_the_family_s_behaviour_are_accepted(family, same):
    """Fields that restate what a family computes, in words of other programs, have no effect."""
    fields = read(family, **same).to_dict()
    (fields.get("rope_scaling") or {}).pop("finetuned", None)
    assert models.config_from_dict(fields) == read(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_headless_classes_are_read(family):
    """Files of a family's base class, with a model_type and without; LLaMA's first ones too."""
    for name in models.FAMILIES[family].config.also:
        assert read(family, architectures=[name]) == read(family)
        assert read(family, architectures=[name], model_type=None) == read(family)


def test_fields_of_the_computation_are_not_ignored():
    """Otherwise another model would run; fields of rope_scaling are named with a dot."""
    for name in ("rope_theta", "rope_scaling", "rope_parameters", "hidden_size"):
        with pytest.raises(ConfigError, match=f"{name} must not be ignored"):
            models.config_from_dict({**FAMILIES["llama"], "model_type": "llama"}, ignore=[name])
    fields = {**FAMILIES["llama"], "model_type": "llama", "rope_scaling": {**YARN, "attn_factor": 1.5}}
    with pytest.raises(ConfigError, match=r"--ignore-config-field rope_scaling\.attn_factor"):
        models.config_from_dict(fields)
    assert models.config_from_dict(fields, ignore=["rope_scaling.attn_factor"]) == read("llama")
    for names in ("a", [3], [""]):
        with pytest.raises(ConfigError, match="ignore"):
            models.config_from_dict(fields, ignore=names)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_required(family):
    """None has a default: a file without them is not a 7B."""
    required = GPT2 if family == "gpt2" else SIZES
    for key in required:
        if key == "n_positions":
            continue
        with pytest.raises(
            ConfigError, match=f"{key}|{models.FAMILIES[family].config.spelled(key)}|hidden_size"
        ):
            read(family, **{key: None})
        with pytest.raises(ConfigError):
            read(family, **{key: "3"})
        with pytest.raises(ConfigError):
            read(family, **{key: 1 << 40})


UNSUPPORTED: dict[str, list[tuple[dict[str, Any], str]]] = {  # changes of a family's file, and words of the error
    "mistral": [
        ({"sliding_window": 0}, "sliding_window"),
    ],
    "qwen2": [
        ({"layer_types": ["full_attention"]}, "layer_types must name 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "chunked_attention"),
        ({"sliding_window": "null"}, "sliding_window must be set"),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, "sliding_window must be set"),
        ({"use_mrope": True}, "use_mrope"),
    ],
    "qwen3": [
        ({"head_dim": 7}, "head_dim must be even"),
        ({"use_rope": False}, "use_rope"),
    ],
    "gemma2": [
        ({"hidden_act": "silu", "hidden_activation": "gelu"}, "hidden_act must equal"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"sliding_window": 8, "sliding_window_size": 9}, "sliding_window_size must equal"),
    ],
    "gemma3_text": [
        ({"rope_local_base_freq": 0}, "rope_local_base_freq"),
        ({"rope_parameters": {"full_attention": {}, "other": {}}, "rope_scaling": None}, "rope_parameters"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling": None},
            "rope_theta and no scaling",
        ),
        ({"sliding_window_pattern": 3}, "_sliding_window_pattern must equal"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}, "rope_scaling": None,
             "rope_local_base_freq": 7.0},
            "rope_local_base_freq must equal",
        ),
    ],
    "phi3": [
        ({"rope_scaling": {**LONG, "long_factor": [1.0]}}, "long_factor must be a list of 4"),
        ({"rope_scaling": {**LONG, "short_factor": [1.0] * 3 + ["x"]}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "absent or longrope"),
        ({"partial_rotary_factor": 0.5}, "short_factor must be a list of 2"),
        ({"partial_rotary_factor": 0.1, "rope_scaling": None}, "partial_rotary_factor must rotate an even"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must lie in"),
        ({"partial_rotary_factor": "1"}, "partial_rotary_factor"),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {**LONG, "partial_rotary_factor": 1.0}},
            "partial_rotary_factor must equal",
        ),
        ({"full_attn_mod": 2}, "full_attn_mod must be 1"),
        ({"lm_head_bias": True}, "lm_head_bias must be False"),
        (
            {"rope_scaling": {**LONG, "original_max_position_embeddings": 7}},
            "original_max_position_embeddings must equal",
        ),
    ],
    "smollm3": [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must name at least 4 layers"),
        ({"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers must have values of 0 or 1"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, "sliding_window must be set"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types must name 4 layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ],
    "olmo2": [
        ({"clip_qkv": 8.0}, "clip_qkv must be a field"),
        ({"attention_bias": "yes"}, "attention_bias"),
    ],
    "granite": [
        ({"logits_scaling": 0.0}, "logits_scaling must lie in"),
        ({"residual_multiplier": -0.5}, "residual_multiplier must lie in"),
        ({"embedding_multiplier": 1e30}, "embedding_multiplier must lie in"),
        ({"attention_multiplier": "x"}, "attention_multiplier"),
        ({"num_local_experts": 40}, "num_local_experts must be a field"),
    ],
    "gpt2": [
        ({"n_embd": 30}, "n_embd must divide by n_head"),
        ({"n_embd": 4}, "n_embd / n_head must lie in"),
        ({"hidden_size": 32}, "hidden_size must be a field .* name it n_embd"),
        ({"activation_function": "relu6"}, "activation_function must be one of"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
    ],
    "bert": [
        ({"hidden_size": 4}, "hidden_size / num_attention_heads must lie in"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"layer_norm_eps": 1e-60}, "layer_norm_eps"),
        ({"architectures": ["BertForSequenceClassification"]}, "architectures"),
        ({"is_causal": True}, "is_causal"),
    ],
    "llama": [
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "torch_dtype must equal dtype"),
        (
            {"rope_theta": 1e4, "rope_scaling": None, "rope_parameters": {"rope_theta": 500.0}},
            "rope_theta must equal",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 2.0}}, "beta_slow must be below"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "finetuned": True}}, "must have"),
        ({"is_causal": False}, "is_causal"),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 33},
            "original_max_position_embeddings must equal",
        ),
        ({"rope_scaling": YARN, "rope_theta": 0.5}, "rope_theta must be above 1"),
        ({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, "must name one"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [(family, *case) for family, cases in UNSUPPORTED.items() for case in cases],
)
def test_unsupported_fields_are_rejected_by_name(family, changes, words):
    """One line that names the family and the field."""
    read(family)
    with pytest.raises(ConfigError, match=words) as caught:
        read(family, **changes)
    assert str(caught.value).startswith(f"[models.{family}]") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model_type": "mamba"},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": ["LlamaForCausalLM", "X"]},
        {"model_type": "gemma3", "architectures": ["Gemma3ForSequenceClassification"], "text_config": {}},
    ],
    ids=str,
)
def test_other_models_are_rejected(fields):
    """The error lists the supported ones."""
    with pytest.raises(ConfigError, match="model_type must be one of llama, mistral"):
        models.config_from_dict({**SIZES, **fields})


def test_missing_and_null_differ_where_none_is_a_value():
    """Mistral's first files have a window without the field; null means none."""
    assert read("mistral", sliding_window=None).decoder.layers[0].window == 4096
    assert read("mistral", sliding_window="null").decoder.layers[0].window is None
    assert read("gemma2", attn_logit_softcapping=None).decoder.attention_softcap == 50.0
    assert read("gemma2", attn_logit_softcapping="null").decoder.attention_softcap is None


def test_zero_in_yarn_means_not_set():
    """As in transformers, which computes `mscale and mscale_all_dim` and `beta_fast or 32`."""
    scaling = {**YARN, "mscale": 0.7}
    for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        unset = {key: value for key, value in scaling.items() if key != name}
        for zero in (0, 0.0):
            assert read("llama", rope_scaling={**scaling, name: zero}) == read("llama", rope_scaling=unset)


def test_contexts_follow_from_scaling():
    """YaRN and linear scaling multiply the context; llama3 and longrope files have the multiplied one."""
    assert models.max_context(read("llama", max_position_embeddings=32)) == 128
    linear = {"rope_type": "linear", "factor": 2.5}
    assert models.max_context(read("llama", max_position_embeddings=32, rope_scaling=linear)) == 80
    original = {"original_max_position_embeddings": 32}
    for nested, above in (
        (original, {}),
        ({}, original),
    ):  # the length after stretching is max_position_embeddings
        config = read("llama", max_position_embeddings=80, rope_scaling={**linear, **nested}, **above)
        assert models.max_context(config) == models.default_context(config) == 80
        dynamic = {"rope_type": "dynamic", "factor": 2.0, **nested}
        config = read("llama", max_position_embeddings=80, rope_scaling=dynamic, **above)
        assert (models.max_context(config), models.default_context(config)) == (160, 80)
    assert models.max_context(read("phi3", max_position_embeddings=64)) == 64


def test_kinds_of_layers():
    """Windows and ropes are at the layers of the files."""
    qwen, gemma2, gemma3 = (read(f).decoder.layers for f in ("qwen2", "gemma2", "gemma3_text"))
    assert [kind.window for kind in qwen] == [None, None, 9, 9]
    assert [kind.window for kind in gemma2] == [4096, None, 4096, None]
    assert [(kind.window, kind.rope) for kind in gemma3] == [(4096, 1), (None, 0), (4096, 1), (None, 0)]
    layers = read("smollm3").decoder.layers
    assert [(kind.window, kind.rope) for kind in layers] == [(None, 0), (9, None), (None, 0), (None, 0)]
    every = read("smollm3", no_rope_layers=None, no_rope_layer_interval=2, use_sliding_window=False)
    assert [kind.rope for kind in every.decoder.layers] == [0, None, 0, None]


def test_both_spellings_of_a_partial_rotation():
    """Next to the scaling, or in `rope_parameters`; with and without a scaling."""
    for scaling in ({"rope_type": "default"}, {**LONG, "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}):
        nested = {**scaling, "rope_theta": 1e4, "partial_rotary_factor": 0.8}
        config = read("phi3", rope_scaling=None, rope_parameters=nested)
        above = None if scaling["rope_type" if "rope_type" in scaling else "type"] == "default" else scaling
        assert config == read("phi3", rope_scaling=above, partial_rotary_factor=0.8)
        assert config.rope().rotary_dim == 6


def test_scaled_gemma_multiplies_its_context_once():
    """Its max_position_embeddings includes rope_scaling's factor; other families' does not."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    for family, times in (("gemma3_text", 1), ("llama", 8)):
        config = read(family, rope_scaling=scaling, max_position_embeddings=64)
        assert models.max_context(config) == 64 * times


def test_text_part_of_models_with_images():
    """Token ids of the whole model take precedence; other fields must agree; fields of images are
    not read.
    """
    text = {**FAMILIES["gemma3_text"], "eos_token_id": 5, "rms_norm_eps": 1e-5, "model_type": "gemma3_text"}
    whole = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 7},
        "image_token_index": 262144,
        "initializer_range": 0.5,
    }

    def read_whole(**changes):
        return models.config_from_dict({k: v for k, v in {**whole, **changes}.items() if v != "absent"})

    alone = models.config_from_dict(text)
    assert read_whole() == read_whole(architectures=None) == read_whole(model_type="absent") == alone
    assert read_whole(eos_token_id=[1, 6]).eos_token_ids == (1, 6)
    assert read_whole(eos_token_id=None, rms_norm_eps=1e-5, dtype="bfloat16").eos_token_ids == (5,)
    for changes, words in (
        ({"rms_norm_eps": 0.5}, "rms_norm_eps must equal text_config.rms_norm_eps"),
        ({"text_config": None}, "text_config must have the fields of the text model"),
        ({"text_config": {}}, "hidden_size"),
        ({"text_config": {**text, "final_logit_softcapping": 30.0}}, "final_logit_softcapping must be null"),
        ({"text_config": {**text, "tie_word_embeddings": False}}, "tie_word_embeddings must equal"),
        ({"text_config": {**text, "model_type": "llama"}}, "text_config.model_type must be gemma3_text"),
        ({"num_experts": 8}, "num_experts must be a field"),
        ({"architectures": ["Gemma3ForSequenceClassification"]}, "model_type must be one of .*gemma3_text"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_whole(**changes)


STRANGE = [0, -1, 1, True, 1.5, None, "x", 1 << 63, float("nan"), [1], (), b"x", {}, {"a": 1}]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_valid_configuration_is_read_back(family):
    """Any value of any field: a ConfigError, or a configuration that equals its written file."""
    kind = models.FAMILIES[family].config
    count = 0
    for name in (field.name for field in fields(kind)):
        for value in STRANGE:
            try:
                config = kind(**{**SIZES, **{name: value}})
            except ConfigError:
                count += 1
                continue
            assert models.config_from_dict(config.to_dict()) == config, (name, value)
    assert count > 100
