"""The methods of quantisation, and which of them a directory's config.json names."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import ValidationError

from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.checkpoint.quantised_files.awq import Awq
from tilewise.checkpoint.quantised_files.compressed_tensors import CompressedTensors
from tilewise.checkpoint.quantised_files.fp8 import Fp8
from tilewise.checkpoint.quantised_files.gptq import Gptq
from tilewise.checkpoint.quantised_files.layers import EXPANDED, Method
from tilewise.checkpoint.stored import Stored
from tilewise.checkpoint.tensors import FileTensor
from tilewise.core.errors import CheckpointError, ConfigError
from tilewise.core.log import get_logger
from tilewise.core.validation import Validator, bare, shown
from tilewise.files.reading import Unreadable, first_problem, plain_json, read_whole

__all__ = [
    "OLDER_SETTINGS",
    "QUANTISATION_KEYS",
    "Quantisation",
    "parse_quantisation",
    "quantisation_of_directory",
    "without_zero_biases",
]

_validate = Validator("checkpoint", ConfigError)
_METHODS: Mapping[str, type[Method]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
}
QUANTISATION_KEYS = ("quantization_config", "compression_config")
"""The fields of config.json that say how weights are quantised."""
_OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
OLDER_SETTINGS = tuple(_OLDER_FILES)
"""Files with the settings of GPTQ and AWQ, in directories whose config.json does not have them."""
_ADVICE = "give the unquantised weights, or weights of a supported method"


class _Method(Protocol):
    """The settings of a method, from `quantization_config`."""

    quant_method: Any
    parts: tuple[str, ...]

    def unsupported(self) -> str | None: ...

    def weights(self, files: Mapping[str, FileTensor]) -> Iterator[QuantisedTensor]: ...


class Quantisation:
    """How the weights of a directory are quantised.

    Args:
        method: its checked settings.
    """

    def __init__(self, method: _Method) -> None:
        self._method = method

    @property
    def name(self) -> str:
        """The name of the method: `gptq`, `awq`, `compressed-tensors` or `fp8`."""
        return str(self._method.quant_method)

    def weights(self, files: Mapping[str, FileTensor]) -> Mapping[str, FileTensor | QuantisedTensor]:
        """The weights that files hold, by the names of the model's weights.

        Args:
            files: the tensors of a directory, by name. Layers without tensors of the method are not
                quantised, whatever `modules_to_not_convert` or `ignore` lists.

        Raises:
            CheckpointError: tensors of a layer are missing, contradict each other, or have shapes or
                settings that are not supported.
        """
        weights = {tensor.name: tensor for tensor in self._method.weights(files)}
        expanded = sorted(name for name, tensor in weights.items() if tensor.format.name == EXPANDED)
        if expanded:
            get_logger("checkpoint").warning(
                "%d of %d quantised weights are expanded to bf16, because adjacent inputs have different scales or "
                "rows are not a multiple of 32; the first is %s",
                len(expanded),
                len(weights),
                bare(expanded[0]),
            )
        quantised = {name.removesuffix(".weight") for name in weights}
        rest: dict[str, FileTensor] = {}
        for name, tensor in files.items():
            layer, _, part = name.rpartition(".")
            if name in weights and part == "weight" and self.name in ("gptq", "awq"):
                raise CheckpointError(
                    f"[checkpoint.quantised_files] a layer must be quantised or not; got both {bare(name)} and packed "
                    "codes; download the files again"
                )
            is_part = part in self._method.parts and (layer in quantised or part in _FOR_CACHES)
            if name not in weights and not is_part:
                rest[name] = tensor
        return {**rest, **weights}


_FOR_CACHES = ("k_scale", "v_scale")  # of a quantised KV cache; they stand next to no weight


def parse_quantisation(settings: object) -> Quantisation:
    """The method of a `quantization_config`.

    Args:
        settings: the parsed value.

    Raises:
        ConfigError: the method, or one of its settings, is not supported.
    """
    call, values = (
        "quantised_files",
        _validate.mapping("quantised_files", QUANTISATION_KEYS[0], settings, "settings"),
    )
    method = values.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        rule = f"quant_method in quantization_config must be one of {', '.join(_METHODS)}"
        _validate.invalid(call, rule, shown(method), _ADVICE)
    try:
        parsed: Any = _METHODS[method].model_validate(values)
    except ValidationError as error:
        rule = f"quantization_config must have supported settings of {method}"
        _validate.invalid(call, rule, first_problem(error), _ADVICE)
    if odd := parsed.unsupported():
        rule = f"quantization_config must have supported settings of {method}"
        _validate.invalid(call, rule, bare(odd), _ADVICE)
    return Quantisation(parsed)


def quantisation_of_directory(directory: Path) -> Quantisation | None:
    """The quantisation that a directory's config.json names; None if it names no supported method.

    Opening the configuration rejects other methods, unless the caller ignores the field.
    Older files of AutoGPTQ and AutoAWQ have the settings in quantize_config.json and quant_config.json.

    Raises:
        ConfigError: the settings are not supported, or a file is not JSON.
    """
    config = _content(directory / "config.json")
    for key in QUANTISATION_KEYS:
        if (settings := config.get(key)) is not None:
            is_read = isinstance(settings, dict) and settings.get("quant_method") in tuple(_METHODS)
            return parse_quantisation(settings) if is_read else None
    for name, method in _OLDER_FILES.items():
        if settings := _content(directory / name):
            return parse_quantisation({"quant_method": method, **settings})
    return None


def _content(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not os.path.lexists(path):
        return {}
    try:
        content = plain_json(read_whole(path))
    except Unreadable as error:
        _validate.invalid(
            "quantised_files", f"{path.name} must be JSON", f"{str(path)!r}: {error}", "repair it"
        )
    if not isinstance(content, dict):
        got = f"{shown(content)} in {str(path)!r}"
        _validate.invalid("quantised_files", f"{path.name} must hold an object", got, "repair it")
    return content


def without_zero_biases(files: Mapping[str, Stored], names: Collection[str]) -> Mapping[str, Stored]:
    """Tensors without biases that AutoGPTQ adds to quantised layers of models that have none.

    Args:
        files: the tensors of a quantised directory.
        names: the tensors that the model has. Other biases of quantised layers are left out if they
            are zero.
    """
    extra = [
        name
        for name, tensor in files.items()
        if name.endswith(".bias")
        and name not in names
        and isinstance(files.get(f"{name.removesuffix('.bias')}.weight"), QuantisedTensor)
        and tensor.ndim == 1
        and not np.any(np.asarray(tensor))
    ]
    return {name: tensor for name, tensor in files.items() if name not in extra}
