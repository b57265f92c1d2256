"""Readers of adapters in PEFT's directories: damaged settings, and damaged tensors with valid settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import safetensors.numpy

from tilewise import models
from tilewise.checkpoint.adapters import LoraConfig, open_adapter
from tilewise.core import TilewiseError
from tilewise.models.gpt2 import GPT2Config
from tilewise.models.llama import LlamaConfig

_LLAMA = LlamaConfig(64, 16, 24, 2, num_attention_heads=2, num_key_value_heads=1)
_GPT2 = GPT2Config(64, 16, 32, 1, 2, max_position_embeddings=16, bos_token_id=0, eos_token_ids=(0,))
_LAYOUTS = (
    models.lora_layout(
        _LLAMA, LoraConfig(r=4, alpha=8, rank_pattern={"layers.1.*v_proj": 2}, init="gaussian")
    ),
    models.lora_layout(
        _GPT2, LoraConfig(r=2, target_modules="all-linear", modules_to_save=("ln_f",), use_rslora=True)
    ),
)


def _read(folder: Path) -> None:
    """What opens fits its model, or is rejected."""
    adapter = open_adapter(folder)
    assert adapter.config.r > 0 and adapter.config.target_modules
    config = _LLAMA if any("self_attn" in name for name in adapter.tensors) else _GPT2
    loaded = models.load_adapter(adapter, config)
    for name, tensor in loaded.weights.items():
        assert tuple(np.asarray(tensor).shape) == loaded.layout.shapes[name]


def _read_any(folder: Path, attempts: Iterator[tuple[bytes, bytes]]) -> None:
    """Open the same directory with each pair of settings and tensors; raises an error if all fail."""
    errors: list[TilewiseError] = []
    count = 0
    for settings, tensors in attempts:
        count += 1
        (folder / "adapter_config.json").write_bytes(settings)
        (folder / "adapter_model.safetensors").write_bytes(tensors)
        try:
            _read(folder)
        except TilewiseError as error:
            assert "\n" not in str(error)
            errors.append(error)
    if len(errors) == count:
        raise errors[0]


def read_adapter_settings(folder: Path, data: bytes) -> None:
    """adapter_config.json, next to valid tensors of each model."""
    _read_any(folder, ((data, tensors) for tensors in valid_tensors()))


def read_adapter_tensors(folder: Path, data: bytes) -> None:
    """Tensors, next to valid settings of each model."""
    _read_any(folder, ((settings, data) for settings in valid_settings()[:2]))


@cache
def valid_settings() -> list[bytes]:
    """Settings as Tilewise writes them, and with more of PEFT's fields."""
    own = [layout.files("base")["adapter_config.json"] for layout in _LAYOUTS]
    theirs = {**json.loads(own[0]), "eva_config": None, "lora_bias": False, "layer_replication": None}
    return [*own, json.dumps({**theirs, "alpha_pattern": {"model.layers.0.*": 4.5}}).encode()]


@cache
def valid_tensors() -> list[bytes]:
    """The tensors of an adapter of each model."""
    rng = np.random.default_rng(0)
    files = []
    for layout in _LAYOUTS:
        values = {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in layout.shapes.items()
        }
        stored = layout.stored(values)
        files.append(safetensors.numpy.save({name: np.ascontiguousarray(tensor) for name, tensor in stored}))
    return files
