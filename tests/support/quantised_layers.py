"""Quantised layers as the methods define them, in plain NumPy: codes, scales and zero points, packed, and the weight.

It shares no code with the product. A `Scheme` gives the content of `quantization_config` and makes layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

Array = NDArray[Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SCALES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}


def packed(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Codes along the last dim in words of 32 bits, lowest first; `order` names the code of each place."""
    per = 32 // bits
    padded = (
        np.pad(codes, ((0, 0), (0, -codes.shape[1] % per))).reshape(len(codes), -1, per).astype(np.uint64)
    )
    words = sum(
        padded[:, :, code] << np.uint64(bits * place) for place, code in enumerate(order or range(per))
    )
    return np.asarray(words).astype(np.uint32).view(np.int32)


@dataclass(frozen=True)
class Scheme:
    """A method with its settings.

    Attributes:
        name: of the scheme.
        config: the content of `quantization_config`.
        layer: from a generator and the sizes n and k to the tensors of a layer by the ends of their names, and its
            weight in fp32.
    """

    name: str
    config: Mapping[str, Any]
    layer: Callable[[np.random.Generator, int, int], tuple[dict[str, Array], Array]]


def _numbers(
    rng: np.random.Generator, n: int, k: int, group: int, scale: str, top: int
) -> tuple[Array, Array, Array, Array]:
    """Codes `[n, k]`, scales and zero points `[n, G]`, and the group of each input."""
    group_of = np.arange(k) // (k if group == -1 else group)
    num_groups = int(group_of[-1]) + 1
    codes = rng.integers(0, top, (n, k))
    scales = rng.uniform(0.005, 0.02, (n, num_groups)).astype(SCALES[scale])
    return codes, scales, rng.integers(0, top, (n, num_groups)), group_of


def _weight(codes: Array, scales: Array, zeros: Array, group_of: Array) -> Array:
    return scales.astype(np.float32)[:, group_of] * (codes - zeros[:, group_of]).astype(np.float32)


def gptq(bits: int, group: int, version: int, order: str = "", scale: str = "f16") -> Scheme:
    """GPTQ; `order` is "": no g_idx, "plain": i // group, "runs": whole runs of 32 inputs, "scattered"."""

    def layer(rng: np.random.Generator, n: int, k: int) -> tuple[dict[str, Array], Array]:
        codes, scales, zeros, group_of = _numbers(rng, n, k, group, scale, 1 << bits)
        stored = zeros
        if version == 1:
            zeros = np.where(stored == 255, 0, stored) + 1
            stored = zeros - 1
        if order == "runs":
            group_of = rng.permutation(group_of.reshape(-1, 32)).reshape(-1)
        elif order == "scattered":
            group_of = rng.permutation(group_of)
        tensors = {
            "qweight": packed(codes, bits).T,
            "qzeros": packed(stored.T, bits),
            "scales": scales.T,
        }
        if order:
            tensors["g_idx"] = group_of.astype(np.int32)
        return tensors, _weight(codes, scales, zeros, group_of)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": order in ("runs", "scattered"),
    }
    names = {1: {}, 2: {"checkpoint_format": "gptq_v2"}}
    return Scheme(f"gptq{version}-{bits}-{group}-{order}-{scale}", {**config, **names[version]}, layer)


def awq(group: int, scale: str = "f16") -> Scheme:
    """AWQ of 4 bits."""

    def layer(rng: np.random.Generator, n: int, k: int) -> tuple[dict[str, Array], Array]:
        codes, scales, zeros, group_of = _numbers(rng, n, k, group, scale, 16)
        tensors = {
            "qweight": packed(codes.T, 4, AWQ_ORDER),
            "qzeros": packed(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T,
        }
        return tensors, _weight(codes, scales, zeros, group_of)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Scheme(f"awq-{group}-{scale}", config, layer)


def compressed(bits: int, group: int, zero: str = "", scale: str = "bf16") -> Scheme:
    """pack-quantized; `zero` is "": symmetric, "packed" or "int8"."""

    def layer(rng: np.random.Generator, n: int, k: int) -> tuple[dict[str, Array], Array]:
        codes, scales, zeros, group_of = _numbers(rng, n, k, group, scale, 1 << bits)
        middle = 1 << (bits - 1)
        if not zero:
            zeros = np.full_like(zeros, middle)
        tensors = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array([n, k], np.int64),
        }
        if zero == "packed":
            tensors["weight_zero_point"] = packed(zeros.T, bits).T
        elif zero:
            tensors["weight_zero_point"] = (zeros - middle).astype(np.int8)
        return tensors, _weight(codes, scales, zeros, group_of)

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": not zero,
        "strategy": "channel" if group == -1 else "group",
    }
    weights["group_size"] = None if group == -1 else group
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": [],
    }
    return Scheme(f"compressed-{bits}-{group}-{zero}-{scale}", config, layer)


def fp8(kind: str, method: str = "fp8", scale: str = "f32") -> Scheme:
    """FP8, or int8 in compressed-tensors; `kind` is "block", "row" or "tensor"."""
    is_int = method == "int8"

    def layer(rng: np.random.Generator, n: int, k: int) -> tuple[dict[str, Array], Array]:
        numbers = rng.normal(0, 20, (n, k)).clip(-120, 120)
        codes = numbers.astype(np.int8 if is_int else ml_dtypes.float8_e4m3fn)
        shape = {"block": (-(-n // 128), -(-k // 128)), "row": (n, 1), "tensor": (1,)}[kind]
        scales = rng.uniform(1e-4, 1e-3, shape).astype(SCALES[scale])
        whole = scales.astype(np.float32)
        if kind == "block":
            whole = np.repeat(np.repeat(whole, 128, 0), 128, 1)[:n, :k]
        part = "weight_scale_inv" if kind == "block" and method == "fp8" else "weight_scale"
        tensors = {"weight": codes, part: scales, "input_scale": np.ones(1, np.float32)}
        return tensors, codes.astype(np.float32) * whole

    if method == "fp8":
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        if kind == "block":
            config["weight_block_size"] = [128, 128]
    else:
        weights = {"num_bits": 8, "type": "int" if is_int else "float", "symmetric": True}
        weights["strategy"] = {"block": "block", "row": "channel", "tensor": "tensor"}[kind]
        if kind == "block":
            weights["block_structure"] = [128, 128]
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        name = "int-quantized" if is_int else "float-quantized"
        config = {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}
    return Scheme(f"{method}-{kind}-{scale}", config, layer)


SCHEMES = (
    gptq(4, 32, 1, "plain"),
    gptq(4, 128, 2),
    gptq(8, 64, 1),
    gptq(8, -1, 2, scale="f32"),
    gptq(4, 64, 2, "runs", "bf16"),
    awq(32),
    awq(128, "bf16"),
    awq(-1),
    compressed(4, 32),
    compressed(4, 128, "packed"),
    compressed(8, 64, "int8", "f16"),
    compressed(8, -1, scale="f32"),
    compressed(4, -1, "packed"),
    fp8("block"),
    fp8("block", scale="bf16"),
    fp8("tensor"),
    fp8("row", "float8"),
    fp8("block", "float8", "bf16"),
    fp8("row", "int8", "bf16"),
)


def write_directory(directory: Path, scheme: Scheme, tensors: Mapping[str, Array]) -> Path:
    """A directory with these tensors and a config.json that names the scheme."""
    directory.mkdir(exist_ok=True)
    config = {"model_type": "llama", "quantization_config": scheme.config}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(contiguous, directory / "model.safetensors")
    return directory
