"""What the methods share: finding the tensors of a layer, unpacking words, making blocks of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from tilewise.checkpoint.quantised import QuantisedTensor
from tilewise.checkpoint.tensors import FileTensor
from tilewise.core.errors import CheckpointError
from tilewise.core.validation import Validator, bare, shown
from tilewise.formats import weight_format
from tilewise.formats.group_blocks import GroupBlocks, block_size, group_blocks

__all__ = [
    "EXPANDED",
    "SCALES",
    "Array",
    "GroupedWeight",
    "Layer",
    "Method",
    "group_of_columns",
    "layers",
    "unpack_words",
]

Array = NDArray[Any]
EXPANDED = "bf16"
"""The format of weights that no block expresses."""
SCALES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
_validate = Validator("checkpoint", CheckpointError)


class Method(BaseModel, ABC):
    """The settings of a method that decide what its tensors mean.

    Attributes:
        parts: the ends of names of a quantised layer's tensors.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    parts: ClassVar[tuple[str, ...]]

    def unsupported(self) -> str | None:
        """What is not supported of these settings; None if everything is."""
        return None

    @abstractmethod
    def weights(self, files: Mapping[str, FileTensor]) -> Iterator[QuantisedTensor]:
        """The weight of every quantised layer.

        Args:
            files: all tensors of a directory, by name.

        Raises:
            CheckpointError: a layer's tensors contradict each other or the settings.
        """


@dataclass(frozen=True)
class Layer:
    """The tensors of one quantised layer.

    Attributes:
        name: its name, without `.weight`.
        files: all tensors of the directory.
    """

    name: str
    files: Mapping[str, FileTensor]

    def __contains__(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.files

    def tensor(
        self, part: str, dtypes: Collection[np.dtype[Any]], shape: tuple[int | None, ...] | None = None
    ) -> FileTensor:
        """One tensor.

        Args:
            part: the end of its name: `qweight`, ...
            dtypes: the allowed dtypes.
            shape: the sizes that it must have; None for any size of at least 1.

        Raises:
            CheckpointError: it is missing, or has another dtype or shape.
        """
        if part not in self:
            self.invalid(f"must have {part}", "none", "download the files again")
        tensor = self.files[f"{self.name}.{part}"]
        if tensor.dtype not in dtypes:
            names = " or ".join(str(dtype) for dtype in dtypes)
            self.invalid(f"must have {part} of dtype {names}", str(tensor.dtype), "such files are not loaded")
        if shape is not None and not _fits(tensor.shape, shape):
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            got = str(list(tensor.shape))
            self.invalid(
                f"must have {part} of shape [{sizes}]", got, "check bits and group_size in config.json"
            )
        return tensor

    def invalid(self, rule: str, got: str, advice: str) -> NoReturn:
        """Raise the error about this layer.

        Raises:
            CheckpointError: always.
        """
        _validate.invalid("quantised_files", f"quantised layer {bare(self.name)} {rule}", got, advice)


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        size > 0 and of in (None, size) for size, of in zip(shape, expected, strict=True)
    )


def layers(files: Mapping[str, FileTensor], part: str) -> Iterator[Layer]:
    """The layers that have a tensor whose name ends in `.PART`."""
    suffix = f".{part}"
    return (Layer(name.removesuffix(suffix), files) for name in files if name.endswith(suffix))


def unpack_words(words: Array, bits: int) -> Array:
    """Codes of 4 or 8 bits in rows of words of 32 bits, lowest bits first.

    Args:
        words: int32 `[rows, words]`.
        bits: 4 or 8.

    Returns:
        uint8 `[rows, words * 32 / bits]`.
    """
    row_bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return row_bytes
    codes = np.empty((*row_bytes.shape, 2), np.uint8)
    np.bitwise_and(row_bytes, 15, out=codes[..., 0])
    np.right_shift(row_bytes, 4, out=codes[..., 1])
    return codes.reshape(len(words), -1)


def group_of_columns(layer: Layer, k: int, num_groups: int, group_size: int) -> int:
    """Elements of a group along k; k for one scale per row.

    Raises:
        CheckpointError: k elements do not have this number of groups.
    """
    group = k if group_size == -1 else group_size
    if -(-k // group) != num_groups:
        rule = f"must have {-(-k // group)} groups of {group_size} along its {k} inputs"
        layer.invalid(rule, str(num_groups), "check group_size in config.json")
    return group


@dataclass(frozen=True)
class GroupedWeight:
    """A weight `[n, k]` of a layer, whose elements along k share scales in groups.

    Attributes:
        layer: the layer.
        source: the tensor of the codes.
        shape: n and k.
        element: `int4`, `int8` or `fp8_e4m3`.
        scale: dtype of the scales.
        group: elements along k that share a scale.
        codes: codes of rows `[first, first + count)`, uint8 `[count, k]`.
        scales: their scales, `[count, groups]`.
        zeros: their zero points, `[count, groups]`; None: the middle of the codes, or of fp8 no zero points.
        group_of: the group of each element along k, integers `[k]`; None: element i is in group i // `group`.
    """

    layer: Layer
    source: FileTensor
    shape: tuple[int, int]
    element: str
    scale: np.dtype[Any]
    group: int
    codes: Callable[[int, int], Array]
    scales: Callable[[int, int], Array]
    zeros: Callable[[int, int], Array] | None = None
    group_of: Array | None = None

    def tensor(self) -> QuantisedTensor:
        """The weight in blocks, or in the format `bf16` if no block divides its rows and groups."""
        block = self._block()
        if block is None:
            name, read_blocks = EXPANDED, self._expanded
        else:
            blocks = group_blocks(self.element, block, self.scale)
            name, read_blocks = blocks.name, partial(self._packed, blocks)
        kind, begin = weight_format(name), self.source.begin
        return QuantisedTensor(
            self.source.file, f"{self.layer.name}.weight", kind, self.shape, read_blocks, begin
        )

    def _packed(self, blocks: GroupBlocks, first: int, count: int) -> NDArray[np.uint8]:
        """Rows in blocks."""
        groups, zeros = self._groups()[:: blocks.block], self._zeros(first, count)
        if zeros is not None and not isinstance(zeros, int):
            zeros = zeros[:, groups]
        return blocks.pack(self.codes(first, count), self.scales(first, count)[:, groups], zeros)

    def _expanded(self, first: int, count: int) -> NDArray[np.uint8]:
        """Rows in the format `bf16`."""
        groups, codes = self._groups(), self.codes(first, count)
        scales, zeros = self.scales(first, count)[:, groups].astype(np.float32), self._zeros(first, count)
        if zeros is None:
            numbers = np.ascontiguousarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            shifts = zeros if isinstance(zeros, int) else zeros[:, groups].astype(np.float32)
            numbers = codes.astype(np.float32) - shifts
        with np.errstate(invalid="ignore", over="ignore"):  # scales of damaged files may be infinite
            rounded: Array = (scales * numbers).astype(ml_dtypes.bfloat16)
        return np.asarray(rounded.view(np.uint8))

    def _groups(self) -> Array:
        """The group of each element along k."""
        return np.arange(self.shape[1]) // self.group if self.group_of is None else self.group_of

    def _block(self) -> int | None:
        """Elements of the largest block whose elements are all in one group; None if no block fits."""
        k = self.shape[1]
        if self.group_of is None:
            return block_size(k, self.group)
        changes = np.flatnonzero(np.diff(self.group_of)) + 1  # where another group begins
        return block_size(k, int(np.gcd.reduce(changes, initial=0)) or k)

    def _zeros(self, first: int, count: int) -> Array | int | None:
        """Zero points of rows; one number for all if the weight is symmetric, None for fp8."""
        if self.zeros is None:
            return {"int4": 8, "int8": 128}.get(self.element)
        zeros = self.zeros(first, count)
        if zeros.size and zeros.max() > 255:
            got = shown(int(zeros.max()))
            self.layer.invalid("must have zero points from 0 to 255", got, "quantise again")
        return zeros
