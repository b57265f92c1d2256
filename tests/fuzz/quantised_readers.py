"""Readers of quantised safetensors directories: damaged settings, and damaged tensors of valid settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors.numpy

from support.quantised_layers import SCHEMES, Scheme, awq, compressed, fp8, gptq
from tilewise.checkpoint import QuantisedTensor, open_weights
from tilewise.core import TilewiseError

_SCHEMES = (gptq(4, 32, 1, "plain"), awq(32), compressed(4, 32, "packed"), fp8("block"))


def _tensors(scheme: Scheme) -> bytes:
    tensors, _ = scheme.layer(np.random.default_rng(0), 8, 64)
    return safetensors.numpy.save(
        {f"a.{name}": np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    )


def _attempts(folder: Path, attempts: Iterator[tuple[bytes, bytes]]) -> None:
    """Open the same directory with each pair of settings and tensors; raises the error if all fail."""
    errors: list[TilewiseError] = []
    count = 0
    for settings, tensors in attempts:
        count += 1
        (folder / "config.json").write_bytes(b'{"quantization_config": ' + settings + b"}")
        (folder / "model.safetensors").write_bytes(tensors)
        try:
            for name, tensor in open_weights(folder).items():
                if isinstance(tensor, QuantisedTensor):
                    assert name.endswith(".weight") and np.asarray(tensor).shape == tensor.shape
        except TilewiseError as error:
            assert "\n" not in str(error)
            errors.append(error)
    if len(errors) == count:
        raise errors[0]


def read_quantisation(folder: Path, data: bytes) -> None:
    """`quantization_config`, with valid tensors of every method."""
    _attempts(folder, ((data, _tensors(scheme)) for scheme in _SCHEMES))


def valid_quantisations() -> list[bytes]:
    """Settings of every scheme."""
    return [json.dumps(scheme.config).encode() for scheme in SCHEMES]


def read_quantised_tensors(folder: Path, data: bytes) -> None:
    """Tensors, with valid settings of every method."""
    _attempts(folder, ((json.dumps(scheme.config).encode(), data) for scheme in _SCHEMES))


def valid_quantised_tensors() -> list[bytes]:
    """One layer of every method."""
    return [_tensors(scheme) for scheme in _SCHEMES]
