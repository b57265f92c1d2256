"""A GGUF file as a model: the files that a Hugging Face directory of it would have, and its weights
under the family's names.

The content of config.json, generation_config.json, tokenizer.json and tokenizer_config.json follows
from the file's metadata. So all readers of model directories read GGUF files by the same rules.
Weights have the original's order of rows, and norms their original values: adding 1 in fp32 and
subtracting it again returns a bf16 weight of at least 2**-16 exactly, and others with an error of at
most 2**-24.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.boxes import Box
from tilewise.checkpoint.gguf.families import FREQUENCIES, LONG, SHORT, Family, Source, family_of
from tilewise.checkpoint.gguf.files import GgufFiles, find_gguf, open_gguf
from tilewise.checkpoint.gguf.metadata import Metadata
from tilewise.checkpoint.gguf.tokenizer import (
    as_json,
    end_tokens,
    has_tokenizer,
    tokenizer_config,
    tokenizer_file,
)
from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.checkpoint.stored import Stored
from tilewise.checkpoint.tensors import FileTensor, PartedTensor, TensorPart, read_array
from tilewise.core import CheckpointError
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable
from tilewise.formats import WeightFormat
from tilewise.settings import Sampling, settings_of

__all__ = ["GgufModel", "gguf_model"]

_MAX_VECTOR = 1 << 16
_MAX_HEADS = 1 << 10
_POOLINGS = {1: "pooling_mode_mean_tokens", 2: "pooling_mode_cls_token", 3: "pooling_mode_lasttoken"}
# Recommended settings of generation whose names in files are not ours.
_OTHER_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def gguf_model(path: Path) -> GgufModel | None:
    """The GGUF model at a path: a file, or a directory whose only weights are one model in GGUF files.
    None if there is no such file.

    Raises:
        ConfigError: a directory has several models, or a file named .gguf has another format.
        CheckpointError: a file is damaged, incomplete or not supported.
    """
    file = find_gguf(path)
    return None if file is None else GgufModel(open_gguf(file))


class GgufModel:
    """A model in GGUF files.

    Args:
        files: the opened files.

    Attributes:
        files: the same.
        metadata: their key-values.
    """

    def __init__(self, files: GgufFiles) -> None:
        self.files = files
        self.metadata = Metadata(files.values)
        self._contents: dict[str, Callable[[], Any]] = {
            "config.json": self.config,
            "generation_config.json": self._generation,
        }
        try:
            if self.metadata.integer(f"{self.architecture}.pooling_type", 0):
                self._contents |= {"modules.json": _modules, "1_Pooling/config.json": self._pooling}
            if has_tokenizer(self.metadata):
                self._contents["tokenizer.json"] = self._tokenizer
                self._contents["tokenizer_config.json"] = partial(tokenizer_config, self.metadata)
        except Unreadable as error:
            raise self._unreadable(error) from None

    @property
    def path(self) -> Path:
        """The file, or the first of several."""
        return self.files.path

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files that a directory of this model would have, without weights."""
        return tuple(self._contents)

    def content(self, name: str) -> bytes:
        """The content of such a file.

        Raises:
            Unreadable: there is no such file, or the metadata is invalid.
        """
        if name not in self._contents:
            raise Unreadable(f"the metadata of a GGUF file has no {name}")
        return as_json(self._contents[name]())

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.metadata.text("general.architecture")

    @property
    def family(self) -> Family:
        """The family of the model.

        Raises:
            Unreadable: it is not supported.
        """
        return family_of(self.architecture)

    def config(self) -> dict[str, Any]:
        """The content of config.json.

        Raises:
            Unreadable: the architecture is not supported, or the metadata is invalid.
        """
        infos = self.files.infos
        shapes = {name: info.shape for name, info in infos.items()}
        source = Source(self.metadata.within(self.architecture), shapes, self._vector)
        config = self.family.config(source)
        config["torch_dtype"] = _dtype({info.kind for info in infos.values() if len(info.shape) > 1})
        if has_tokenizer(self.metadata):
            config |= self._token_ids(config["vocab_size"])
        return config

    def _generation(self) -> dict[str, Any]:
        """The content of generation_config.json."""
        settings: dict[str, Any] = {}
        if has_tokenizer(self.metadata):
            settings = self._token_ids(1 << 31)
        own = self.metadata.within("general.sampling")
        for name, declared in settings_of(Sampling).items():
            key = _OTHER_NAMES.get(name, name)
            if declared.kind in (int, float) and own.get(key) is not None:
                settings[name] = own.integer(key) if declared.kind is int else own.number(key)
        if settings.get("temperature", 0) > 0:
            settings["do_sample"] = True
        return settings

    def _token_ids(self, vocab_size: int) -> dict[str, Any]:
        """Ids of the tokens at the beginning and at the end of texts."""
        bos, ends = self.metadata.within("tokenizer.ggml").token("bos_token_id"), end_tokens(self.metadata)
        ids: dict[str, Any] = {} if bos is None or not 0 <= bos < vocab_size else {"bos_token_id": bos}
        return ids | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})

    def _pooling(self) -> dict[str, bool]:
        """The settings of the module of pooling."""
        kind = self.metadata.integer(f"{self.architecture}.pooling_type")
        return {_POOLINGS.get(kind, "pooling_mode_max_tokens"): True}

    def _tokenizer(self) -> dict[str, Any]:
        return tokenizer_file(self.metadata, self.architecture)

    def _vector(self, name: str) -> NDArray[Any] | None:
        info = self.files.infos.get(name)
        if info is None:
            return None
        if len(info.shape) != 1 or info.shape[0] > _MAX_VECTOR or info.kind != np.dtype(np.float32):
            raise Unreadable(
                f"tensor {shown(name)} must be a vector of f32; got {list(info.shape)} {info.kind}"
            )
        return np.asarray(self.files.tensors()[name])

    def weights(self) -> dict[str, Stored]:
        """The tensors of the model under the names of the family's files, in the original's order of
        rows. Quantised tensors stay in their blocks. Only vectors that the converter changed are read.

        Raises:
            CheckpointError: the metadata is invalid, or a tensor has a wrong number of rows.
        """
        try:
            family, config = self.family, self.config()
            weights: dict[str, Stored] = {}
            for stored, tensor in self.files.tensors().items():
                if stored in (FREQUENCIES, LONG, SHORT):  # are in the configuration
                    continue
                name = family.name(stored)
                if name in weights:
                    raise Unreadable(f"two tensors are {shown(name)}")
                heads = family.heads_of_rows(stored, config)
                original = _original(stored, tensor, heads, family.offset(stored))
                weights[name] = (
                    _transposed(original) if family.has_transpose(stored, tensor.ndim) else original
                )
            return weights
        except Unreadable as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Unreadable) -> CheckpointError:
        return CheckpointError(
            f"[checkpoint.gguf] the metadata of a GGUF file must describe a supported model; got {str(self.path)!r}: "
            f"{error}; choose another file, or the model's safetensors"
        )


def _modules() -> list[dict[str, Any]]:
    """modules.json of an encoder of sentences. llama.cpp scales vectors to length one."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    return [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]


def _dtype(kinds: Set[np.dtype[Any] | WeightFormat]) -> str:
    """The dtype of a model with matrices of these types. Quantised ones are bf16."""
    if kinds == {np.dtype(np.float32)}:
        return "float32"
    return "float16" if kinds <= {np.dtype(np.float32), np.dtype(np.float16)} else "bfloat16"


def _original(stored: str, tensor: FileTensor | QuantisedTensor, heads: int, offset: float) -> Stored:
    """A tensor as it was before conversion."""
    if heads:
        rows = tensor.shape[0] if tensor.ndim else 0
        if rows == 0 or not 0 < heads <= _MAX_HEADS or rows % (2 * heads):
            raise Unreadable(
                f"tensor {shown(stored)} must have rows of {heads} heads; got {list(tensor.shape)}"
            )
        if isinstance(tensor, QuantisedTensor):
            return _reordered(tensor, rows // heads)
        return _interleaved(tensor, rows // heads)
    if offset and tensor.ndim == 1:
        if tensor.shape[0] > 1 << 20 or tensor.dtype not in (np.float32, ml_dtypes.bfloat16, np.float16):
            raise Unreadable(f"tensor {shown(stored)} must be a vector of numbers; got {list(tensor.shape)}")
        with np.errstate(invalid="ignore"):  # loading rejects what is not finite
            return np.asarray(np.asarray(tensor, np.float32) - np.float32(offset))
    return tensor


def _transposed(tensor: Stored) -> Stored:
    """The transpose of a matrix. A quantised one is expanded to bf16: its blocks lie along rows."""
    if isinstance(tensor, FileTensor):
        return tensor.transpose()
    return np.asarray(read_array(tensor).T)


def _reordered(tensor: QuantisedTensor, head: int) -> QuantisedTensor:
    """The same rows in the original's order. Of each head of the file, the even rows are the first
    half of the original's, and the odd rows the second. Blocks lie within rows and stay as they are.
    """

    def read_blocks(first: int, count: int) -> NDArray[np.uint8]:
        begin, end = first // head * head, -(-(first + count) // head) * head
        rows = np.arange(first, first + count)
        within = rows % head
        places = rows - within + within % (head // 2) * 2 + within // (head // 2)
        blocks: NDArray[np.uint8] = tensor.read_blocks(begin, end - begin)[places - begin]
        return blocks

    return replace(tensor, read_blocks=read_blocks)


def _interleaved(tensor: FileTensor, head: int) -> Stored:
    """The same for tensors of plain dtypes: each half of a head is every second row of the file."""
    half = head // 2
    if tensor.ndim == 1:
        vector: NDArray[Any] = np.asarray(tensor).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)
        return vector
    parts = []
    for first in range(0, tensor.shape[0], half):
        begin = first // head * head + first % head // half
        rows = replace(
            tensor,
            shape=(half, *tensor.shape[1:]),
            begin=tensor.begin + begin * tensor.row_bytes,
            row_bytes=2 * tensor.row_bytes,
        )
        box = Box((first, *(0 for _ in tensor.shape[1:])), (half, *tensor.shape[1:]))
        parts.append(TensorPart(box, rows))
    return PartedTensor(tensor.shape, tensor.dtype, tuple(parts))
