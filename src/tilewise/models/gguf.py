"""What the GGUF file of a decoder contains: its architecture, key-values and tensors.

Files are those of llama.cpp's converter. It changes some tensors: rows of Llama's queries and keys
are reordered, and 1 is added to the weights of Gemma's norms. Rejected are models that compute
something which llama.cpp's architecture of this name does not, because llama.cpp would run another
model: windows, biases, scalings and activations, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from tilewise.checkpoint import Tensor
from tilewise.checkpoint.gguf_writer import FILE_TYPES, GgufTensor, Value
from tilewise.core.log import get_logger
from tilewise.core.validation import Validator, shown
from tilewise.models.decoder.architecture import Decoder
from tilewise.models.decoder.rope import ORIGINAL, Rope
from tilewise.models.model_config import ModelConfig

__all__ = ["gguf_tensors", "gguf_values"]

_validate = Validator("models")
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)")
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OF_PHI3 = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LARGE_LAYERS = {"gemma2": 46, "gemma3": 62}  # of 27 billion parameters, whose scale of scores differs


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp's architecture of a name computes.

    Attributes:
        name: `general.architecture`.
        biases: the biases of `Decoder` that it may have.
        activation: of the MLP.
        names: names of tensors in layers that differ from Llama's.
        is_permuted: whether rows of queries and keys are reordered.
        window: "no", "every" layer, or "some" layers in a period.
    """

    name: str
    biases: frozenset[str] = frozenset()
    activation: str = "silu"
    names: Mapping[str, str] = field(default_factory=dict)
    is_permuted: bool = False
    window: str = "no"


_LLAMA = _Architecture("llama", frozenset(("qkv_bias", "out_bias", "mlp_bias")), is_permuted=True)
_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _Architecture("qwen2", frozenset(("qkv_bias",))),
    "qwen3": _Architecture("qwen3"),
    "phi3": _Architecture("phi3", names=_OF_PHI3, window="every"),
    "gemma2": _Architecture("gemma2", activation="gelu_tanh", names=_OF_GEMMA, window="some"),
    "gemma3_text": _Architecture("gemma3", activation="gelu_tanh", names=_OF_GEMMA, window="some"),
}


def gguf_values(config: ModelConfig, kind: str) -> dict[str, Value]:
    """The key-values of a model, without those of its tokenizer.

    Args:
        config: of the model.
        kind: type of the matrices: `bf16`, `q8_0` or `q4_0`.

    Raises:
        ConfigError: llama.cpp has no such model; names what it lacks.
    """
    architecture, decoder = _architecture(config), _decoder(config)
    name = architecture.name
    values: dict[str, Value] = {
        "general.architecture": name,
        "general.type": "model",
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
        f"{name}.vocab_size": decoder.vocab_size,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": decoder.hidden_size,
        f"{name}.block_count": len(decoder.layers),
        f"{name}.feed_forward_length": decoder.intermediate_size,
        f"{name}.attention.head_count": decoder.num_heads,
        f"{name}.attention.head_count_kv": decoder.num_kv_heads,
        f"{name}.attention.key_length": decoder.head_dim,
        f"{name}.attention.value_length": decoder.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": decoder.norm_eps,
        f"{name}.rope.dimension_count": _rotary_dim(decoder),
        f"{name}.rope.freq_base": decoder.ropes[0].theta,
    }
    of_rope = {f"{name}.rope.scaling.{key}": value for key, value in _scaling(config, decoder).items()}
    of_windows = {f"{name}.{key}": value for key, value in _windows(config, decoder).items()}
    return {**values, **of_rope, **of_windows}


def gguf_tensors(config: ModelConfig, tensors: Mapping[str, Tensor], kind: str) -> Iterator[GgufTensor]:
    """The tensors of a model's file.

    Vectors are written as f32. Matrices whose rows are not whole blocks of 32 elements are written
    as bf16. In a q4_0 file, the embedding and the head are q8_0.

    Args:
        config: of the model.
        tensors: by their names in the family's files, from `stored_tensors`.
        kind: type of the matrices: `bf16`, `q8_0` or `q4_0`.

    Raises:
        ConfigError: llama.cpp has no such model; names what it lacks.
    """
    architecture, decoder = _architecture(config), _decoder(config)
    for name, factors in _factors(config, decoder).items():
        yield GgufTensor(name, "f32", np.asarray(factors, np.float32))
    heads = {"attn_q": decoder.num_heads, "attn_k": decoder.num_kv_heads}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        inner = {**_IN_LAYER, **architecture.names}[match[2]] if match else ""
        stored = f"blk.{match[1]}.{inner}.{match[3]}" if match else _TOP[name]
        moved = heads.get(inner, 0) if architecture.is_permuted else 0
        offset = decoder.norm_offset if name.endswith("norm.weight") else 0.0
        yield GgufTensor(stored, _kind(stored, tuple(tensor.shape), kind), tensor, moved, offset)


def _kind(stored: str, shape: tuple[int, ...], kind: str) -> str:
    """The type of a tensor in a file whose matrices have type `kind`."""
    if len(shape) < 2:
        return "f32"
    if shape[1] % 32:
        return "bf16"
    return "q8_0" if kind == "q4_0" and stored in ("token_embd.weight", "output.weight") else kind


def _architecture(config: ModelConfig) -> _Architecture:
    if config.model_type not in _ARCHITECTURES:
        rule = f"models that are written as GGUF must be of {', '.join(_ARCHITECTURES)}"
        _validate.invalid("gguf", rule, config.model_type, "convert it with llama.cpp's converter")
    return _ARCHITECTURES[config.model_type]


def _decoder(config: ModelConfig) -> Decoder:
    """The model, which llama.cpp's architecture must be able to run."""
    architecture = _architecture(config)
    decoder: Decoder = getattr(config, "decoder")  # noqa: B009  # every family of the table has one
    for bias in ("qkv_bias", "out_bias", "mlp_bias"):
        if getattr(decoder, bias) and bias not in architecture.biases:
            _lacks(architecture, bias)
    if architecture.name == "phi3" and decoder.q_size != decoder.hidden_size:
        _lacks(
            architecture,
            f"heads of {decoder.q_size} elements together with hidden_size {decoder.hidden_size}",
        )
    if _rotary_dim(decoder) != decoder.head_dim and architecture.name != "phi3":
        _lacks(architecture, f"partial rotation of {_rotary_dim(decoder)} of {decoder.head_dim} elements")
    if decoder.activation != architecture.activation:
        _lacks(architecture, f"activation {decoder.activation}")
    if architecture.name.startswith("gemma"):
        large = len(decoder.layers) == _LARGE_LAYERS[architecture.name]
        scale = decoder.hidden_size // decoder.num_heads if large else decoder.head_dim
        query_scalar = getattr(config, "query_pre_attn_scalar", scale)
        if query_scalar != scale:
            _lacks(architecture, f"query_pre_attn_scalar {query_scalar}; this size of it has {scale}")
        has_caps = (decoder.attention_softcap is not None, decoder.logits_softcap is not None)
        expected = architecture.name == "gemma2"
        if has_caps != (expected, expected):
            _lacks(architecture, f"softcaps {decoder.attention_softcap} and {decoder.logits_softcap}")
    return decoder


def _rotary_dim(decoder: Decoder) -> int:
    """Elements of a head that are rotated."""
    return decoder.ropes[0].rotary_dim or decoder.head_dim


def _lacks(architecture: _Architecture, what: str) -> NoReturn:
    rule = f"a GGUF file must describe what llama.cpp computes for {architecture.name}"
    _validate.invalid("gguf", rule, what, "use the safetensors")


def _windows(config: ModelConfig, decoder: Decoder) -> dict[str, Value]:
    """Keys of sliding windows and of softcaps."""
    architecture = _architecture(config)
    windows = [layer.window for layer in decoder.layers]
    sizes = {window for window in windows if window is not None}
    if not sizes and architecture.window != "some":
        return {}
    if architecture.window == "no":
        if config.model_type != "mistral":
            _lacks(architecture, "sliding windows")
        get_logger("models").warning(
            "llama.cpp has no sliding windows for this architecture: texts of more than %d tokens differ",
            min(sizes),
        )
        return {}
    window = next(iter(sizes), None)
    if window is None or len(sizes) > 1:
        _lacks(architecture, f"windows {shown(sorted(sizes))}")
    keys: dict[str, Value] = {"attention.sliding_window": window}
    if architecture.window == "every":
        return keys if None not in windows else _lacks(architecture, "a window in some layers")
    period = 2 if architecture.name == "gemma2" else windows.index(None) + 1 if None in windows else 0
    if period < 1 or windows != [None if (i + 1) % period == 0 else window for i in range(len(windows))]:
        _lacks(architecture, "windows that are not in a period")
    if architecture.name == "gemma2":
        caps = {"attn": decoder.attention_softcap, "final": decoder.logits_softcap}
        return {**keys, **{f"{place}_logit_softcapping": float(cap or 0) for place, cap in caps.items()}}
    own = {"attention.sliding_window_pattern": period, "rope.freq_base_swa": decoder.ropes[1].theta}
    return {**keys, **own}


def _scaling(config: ModelConfig, decoder: Decoder) -> dict[str, Value]:
    """Keys of the scaling of RoPE; `_factors` has the tensors of other kinds."""
    rope = decoder.ropes[0]
    scaling = dict(rope.scaling or {})
    kind = scaling.pop("rope_type", "none")
    make: Mapping[str, Callable[[Rope, dict[str, Any]], dict[str, Value]]] = {
        "none": lambda rope, fields: {},
        "llama3": lambda rope, fields: {},
        "linear": lambda rope, fields: {"type": "linear", "factor": float(fields["factor"])},
        "yarn": _yarn,
        "longrope": _longrope,
    }
    architecture = _architecture(config)
    only = {"llama3": "llama", "longrope": "phi3"}
    if kind not in make or only.get(kind, architecture.name) != architecture.name:
        _lacks(architecture, f"rope_scaling {kind}")
    try:
        return make[kind](rope, scaling)
    except _Lacking as error:
        _lacks(architecture, str(error))


class _Lacking(Exception):
    """A field of a scaling that files cannot have."""


def _yarn(rope: Rope, fields: dict[str, Any]) -> dict[str, Value]:
    keys: dict[str, Value] = {"type": "yarn", "factor": float(fields.pop("factor"))}
    keys["original_context_length"] = int(fields.pop(ORIGINAL, rope.max_positions))
    for name in ("beta_fast", "beta_slow"):
        if name in fields:
            keys[f"yarn_{name}"] = float(fields.pop(name))
    odd = [
        name
        for name, value in fields.items()
        if (name, value) not in (("truncate", True), ("finetuned", True))
    ]
    if odd:
        raise _Lacking(f"rope_scaling.{odd[0]}")
    return keys


def _longrope(rope: Rope, fields: dict[str, Any]) -> dict[str, Value]:
    original = int(fields.get(ORIGINAL, rope.max_positions))
    factor = float(fields.get("factor", rope.max_positions / original))
    usual = float(np.sqrt(1 + np.log(factor) / np.log(original))) if factor > 1 else 1.0
    attention = float(fields.get("attention_factor", usual))
    return {"original_context_length": original, "attn_factor": attention}


def _factors(config: ModelConfig, decoder: Decoder) -> dict[str, Any]:
    """Tensors with one divisor per frequency: of `llama3`, and of `longrope`."""
    rope = decoder.ropes[0]
    scaling = rope.scaling or {}
    if scaling.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": scaling[f"{kind}_factor"] for kind in ("long", "short")}
    if scaling.get("rope_type") != "llama3":
        return {}
    half = decoder.head_dim // 2
    wavelength = 2 * np.pi * rope.theta ** (np.arange(half) / half)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling[ORIGINAL] / wavelength - low) / (high - low), 0.0, 1.0)
    return {"rope_freqs.weight": 1 / ((1 - smooth) / scaling["factor"] + smooth)}
