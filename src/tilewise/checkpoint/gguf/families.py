"""Which model a GGUF file holds: the config.json of its family, and the family's names of tensors.

llama.cpp's converter changes some tensors, and this module says how to undo it: it reorders rows of
Llama's queries and keys (`Family.is_permuted`), and adds 1 to the weights of Gemma's norms
(`Family.norm_offset`). Architectures without an entry in `FAMILIES` are rejected by name.

Gemma's scale of scores, and the limit between Gemma's sizes that it depends on, are not in files.
They are llama.cpp's constants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.gguf.metadata import Metadata, decimal
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable

__all__ = ["FAMILIES", "Family", "family_of"]

_LAYER = re.compile(r"blk\.([0-9]+)\.([a-z_]+)\.(weight|bias)")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_PHI3 = {**_IN_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OF_GEMMA = {
    **_IN_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_OLMO2 = {
    **_IN_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_TOP_OF_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_OF_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_TOP_OF_BERT = {
    "token_embd": "bert.embeddings.word_embeddings",
    "position_embd": "bert.embeddings.position_embeddings",
    "token_types": "bert.embeddings.token_type_embeddings",
    "token_embd_norm": "bert.embeddings.LayerNorm",
}
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# Keys that change the computation in a way that none of these families has, with the value that changes nothing.
_NEUTRAL = {
    "expert_count": 0,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attention.causal": True,
    "logit_scale": 0,
    "residual_scale": 0,
    "embedding_scale": 0,
    "use_parallel_residual": False,
}
_EFFECTIVE = {  # such keys that a family has
    "bert": {"attention.causal"},
    "granite": {"attention.scale", "logit_scale", "residual_scale", "embedding_scale"},
}
_MOST_FACTORS = 1 << 10
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_HALF_PRECISION = 1e-5  # relative error of factors that were computed in fp32


@dataclass(frozen=True)
class Source:
    """What a configuration is made of.

    Attributes:
        values: the keys of the architecture.
        shapes: shapes of tensors by their names in the file.
        vector: reads a vector of the file, by its name; None if the file does not have it.
    """

    values: Metadata
    shapes: Mapping[str, tuple[int, ...]]
    vector: Callable[[str], NDArray[Any] | None]

    def rows(self, name: str) -> int:
        """Number of rows of a matrix.

        Raises:
            Unreadable: there is no such matrix.
        """
        shape = self.shapes.get(name, ())
        if len(shape) != 2:
            raise Unreadable(f"it has no matrix {name}")
        return shape[0]


@dataclass(frozen=True)
class Family:
    """How files of one architecture become a model of a family.

    Attributes:
        model_type: of config.json.
        architecture: the class that config.json names.
        describe: the other fields of config.json.
        layers: what precedes the number of a layer in the family's names.
        names: what follows `blk.N.` in names of tensors, with the family's name of it.
        top: the names of tensors outside of layers, with the family's names.
        is_permuted: whether rows of queries and keys are in llama.cpp's order: element i of the first
            half of a head is followed by element i of the second half.
        is_transposed: whether the family's files have matrices of layers with input features as rows.
        norm_offset: what the converter added to weights of norms.
    """

    model_type: str
    architecture: str
    describe: Callable[[Source], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=lambda: _IN_LAYER)
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layers: str = "model.layers"
    is_permuted: bool = False
    is_transposed: bool = False
    norm_offset: float = 0.0

    def config(self, source: Source) -> dict[str, Any]:
        """The content of config.json, without what follows from the tokenizer.

        Raises:
            Unreadable: a key is missing or invalid, or asks for something that is not supported.
        """
        for key, neutral in _NEUTRAL.items():
            value = source.values.get(key)
            is_neutral = isinstance(value, bool | int | float) and value == neutral
            if value is not None and not is_neutral and key not in _EFFECTIVE.get(self.model_type, ()):
                raise Unreadable(f"{source.values.prefix}{key} = {shown(value, 40)} is not supported")
        config = {"architectures": [self.architecture], "model_type": self.model_type}
        return {**config, "vocab_size": source.rows("token_embd.weight"), **self.describe(source)}

    def name(self, stored: str) -> str:
        """The family's name of a tensor; the file's own name if the family has no such tensor."""
        match = _LAYER.fullmatch(stored)
        if match is not None and match[2] in self.names:
            return f"{self.layers}.{match[1]}.{self.names[match[2]]}.{match[3]}"
        base, _, kind = stored.rpartition(".")
        return f"{self.top[base]}.{kind}" if base in self.top and kind in ("weight", "bias") else stored

    def heads_of_rows(self, stored: str, config: Mapping[str, Any]) -> int:
        """Number of heads whose rows are reordered in a tensor; 0 if the rows are in the family's order."""
        match = _LAYER.fullmatch(stored) if self.is_permuted else None
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        return int(config[heads[match[2]]]) if match and match[2] in heads else 0

    def offset(self, stored: str) -> float:
        """What was added to a tensor."""
        return self.norm_offset if stored.endswith("norm.weight") else 0.0

    def has_transpose(self, stored: str, num_dims: int) -> bool:
        """Whether the family's files have the transpose of a tensor."""
        return self.is_transposed and num_dims == 2 and _LAYER.fullmatch(stored) is not None


def family_of(architecture: str) -> Family:
    """The family of `general.architecture`.

    Raises:
        Unreadable: it is not supported.
    """
    if architecture not in FAMILIES:
        raise Unreadable(
            f"general.architecture must be one of {', '.join(FAMILIES)}; got {shown(architecture)}, which is not "
            "supported"
        )
    return FAMILIES[architecture]


def _decoder(more: Callable[[Source, dict[str, Any]], dict[str, Any]], source: Source) -> dict[str, Any]:
    """The fields that all decoders with rotary positions have, and the `more` of a family."""
    values = source.values
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", hidden // heads if heads > 0 else 0)
    if values.integer("attention.value_length", head_dim) != head_dim:
        raise Unreadable(f"{values.prefix}attention.value_length must equal attention.key_length")
    config = {
        "hidden_size": hidden,
        "intermediate_size": values.integer("feed_forward_length"),
        "num_hidden_layers": values.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.integer("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": values.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in source.shapes,
    }
    rotated = values.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    return {**config, **more(source, config)}


def _llama(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in source.shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in source.shapes,
        "rope_scaling": _stretched(source, config) or _scaling(source.values),
    }


def _qwen2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {"rope_scaling": _scaling(source.values)}


def _qwen3(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    has_bias = "blk.0.attn_q.bias" in source.shapes
    return {"attention_bias": has_bias, "rope_scaling": _scaling(source.values)}


def _olmo2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    if source.values.get("attention.sliding_window") is not None:
        raise Unreadable(f"{source.values.prefix}attention.sliding_window is not supported: it is OLMo 3")
    return {"attention_bias": False, "rope_scaling": _scaling(source.values)}


def _granite(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    values = source.values
    return {
        **_llama(source, config),
        "attention_multiplier": values.number("attention.scale"),
        "embedding_multiplier": values.number("embedding_scale"),
        "residual_multiplier": values.number("residual_scale"),
        "logits_scaling": values.number("logit_scale"),
    }


def _gpt2(source: Source) -> dict[str, Any]:
    values = source.values
    return {
        "n_embd": values.integer("embedding_length"),
        "n_inner": values.integer("feed_forward_length"),
        "n_layer": values.integer("block_count"),
        "n_head": values.integer("attention.head_count"),
        "n_positions": values.integer("context_length"),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": "output.weight" not in source.shapes,
    }


def _bert(source: Source) -> dict[str, Any]:
    values = source.values
    return {
        "hidden_size": values.integer("embedding_length"),
        "intermediate_size": values.integer("feed_forward_length"),
        "num_hidden_layers": values.integer("block_count"),
        "num_attention_heads": values.integer("attention.head_count"),
        "max_position_embeddings": source.rows("position_embd.weight"),
        "type_vocab_size": source.rows("token_types.weight"),
        "layer_norm_eps": values.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
    }


def _phi3(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    longest = config["max_position_embeddings"]
    original = source.values.integer("rope.scaling.original_context_length", longest)
    window = source.values.integer("attention.sliding_window", 0)
    long, short = source.vector(LONG), source.vector(SHORT)
    more: dict[str, Any] = {
        "original_max_position_embeddings": original,
        "sliding_window": window or None,
    }
    if long is not None and short is not None:
        factors = {"long_factor": _decimals(long), "short_factor": _decimals(short)}
        more["rope_scaling"] = {"rope_type": "longrope", **factors}
        more["rope_scaling"] |= _attention_factor(source.values, longest / max(1, original), original)
    return more


def _gemma2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    values = source.values
    return {
        "query_pre_attn_scalar": _query_scalar("gemma2", config),
        "sliding_window": values.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
    }


def _gemma3(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    values = source.values
    more = {
        "query_pre_attn_scalar": _query_scalar("gemma3", config),
        "sliding_window": values.integer("attention.sliding_window", 1024),
        "rope_theta": values.number("rope.freq_base", 1e6),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 1e4),
        "rope_scaling": _scaling(values),
    }
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):  # whether each layer has a window
        kinds = np.where(pattern.astype(bool), "sliding_attention", "full_attention")
        return {**more, "layer_types": kinds.tolist()}
    return {**more, "sliding_window_pattern": values.integer("attention.sliding_window_pattern", 6)}


def _query_scalar(architecture: str, config: Mapping[str, Any]) -> int:
    """Scores are divided by its square root; only models of 27 billion parameters have an own value."""
    if config["num_hidden_layers"] == _LAYERS_OF_27B[architecture] and config["num_attention_heads"]:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _scaling(values: Metadata) -> dict[str, Any] | None:
    """`rope_scaling` of the keys `rope.scaling.*`."""
    kind = values.text("rope.scaling.type", "none")
    factor = values.number("rope.scaling.factor", 0.0)
    if values.get("rope.scale_linear") is not None:  # the key of older files
        kind, factor = "linear", values.number("rope.scale_linear")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise Unreadable(f"{values.prefix}rope.scaling.type = {shown(kind)} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if values.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = values.integer("rope.scaling.original_context_length")
    if values.get("rope.scaling.finetuned") is not None:
        scaling["finetuned"] = values.truth("rope.scaling.finetuned", False)
    if kind == "linear":
        return scaling
    if values.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise Unreadable(f"{values.prefix}rope.scaling.attn_factor must be 1 if the type is yarn")
    for ours in ("beta_fast", "beta_slow"):
        if values.get(f"rope.scaling.yarn_{ours}") is not None:
            scaling[ours] = values.number(f"rope.scaling.yarn_{ours}")
    return scaling


def _stretched(source: Source, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` of a file with one divisor per frequency, as Llama 3.1 has them.

    The divisors were computed from the fields of `llama3`, of which all published models have the
    same but the factor. With these fields, frequencies have the bits of the original's. Other
    divisors are used as they are, which is what `longrope` does.
    """
    divisors = source.vector(FREQUENCIES)
    if divisors is None:
        return None
    original, low, high = 8192, 1.0, 4.0
    factor = float(divisors.max())
    half = np.arange(len(divisors)) / len(divisors)
    with np.errstate(all="ignore"):  # of damaged files
        wavelength = 2 * np.pi * np.float64(config["rope_theta"]) ** half
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
    if factor > 1 and np.allclose(divisors, expected, rtol=_HALF_PRECISION, atol=0):
        fields = {"factor": decimal(factor), "low_freq_factor": low, "high_freq_factor": high}
        return {"rope_type": "llama3", **fields, "original_max_position_embeddings": original}
    exact = _decimals(divisors)
    return {"rope_type": "longrope", "long_factor": exact, "short_factor": exact, "attention_factor": 1.0}


def _attention_factor(values: Metadata, stretch: float, original: int) -> dict[str, float]:
    """`attention_factor` of longrope, if it is not the one that follows from the lengths."""
    if values.get("rope.scaling.attn_factor") is None:
        return {}
    stored = values.number("rope.scaling.attn_factor")
    usual = (1 + np.log(stretch) / np.log(original)) ** 0.5 if stretch > 1 and original > 1 else 1.0
    return {} if abs(stored - usual) <= 1e-4 * usual else {"attention_factor": stored}


def _decimals(numbers: NDArray[Any]) -> list[float]:
    if len(numbers) > _MOST_FACTORS:
        raise Unreadable(f"it has {len(numbers)} factors of RoPE, more than {_MOST_FACTORS}")
    return [decimal(float(number)) for number in numbers]


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", partial(_decoder, _llama), is_permuted=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", partial(_decoder, _qwen2)),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", partial(_decoder, _qwen3)),
    "phi3": Family("phi3", "Phi3ForCausalLM", partial(_decoder, _phi3), _OF_PHI3),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", partial(_decoder, _gemma2), _OF_GEMMA, norm_offset=1.0),
    "gemma3": Family(
        "gemma3_text", "Gemma3ForCausalLM", partial(_decoder, _gemma3), _OF_GEMMA, norm_offset=1.0
    ),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", partial(_decoder, _llama), is_permuted=True),
    "granite": Family("granite", "GraniteForCausalLM", partial(_decoder, _granite), is_permuted=True),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", partial(_decoder, _olmo2), _OF_OLMO2),
    "gpt2": Family(
        "gpt2", "GPT2LMHeadModel", _gpt2, _OF_GPT2, _TOP_OF_GPT2, "transformer.h", is_transposed=True
    ),
    "bert": Family("bert", "BertModel", _bert, _OF_BERT, _TOP_OF_BERT, "bert.encoder.layer"),
}
"""By `general.architecture`. Mistral's files name the architecture llama. SmolLM3's do not say which
layers have no rotary positions: as in llama.cpp, every fourth, which is the configuration's default.
"""
