"""Tensors of files in a quantised format (`tilewise.formats`), which are read row by row and not expanded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint.open_file import OpenFile, RowsOfFile
from tilewise.core.dtypes import DTYPES
from tilewise.formats import KERNEL_FORMATS, WeightFormat

__all__ = ["QuantisedTensor", "formats_of"]


@dataclass(frozen=True)
class QuantisedTensor(RowsOfFile):
    """A quantised matrix of a file, or some of its rows.

    Indexing and conversion to an array give its numbers in bf16. Loading takes the blocks as they are.

    Attributes:
        file: the file that contains it.
        name: name of the tensor in the file.
        format: the format of its blocks.
        shape: rows and columns, in elements.
        read_blocks: reads rows `[first, first + count)` of the whole tensor as uint8
            `[count, format.row_bytes(columns)]`, in the order of blocks that `format` describes. Raises
            CheckpointError if the file has changed.
        begin: position of its first byte in the file, by which pieces of files are read in order.
        first_row: the first row that belongs to this tensor.
    """

    file: OpenFile
    name: str
    format: WeightFormat
    shape: tuple[int, int]
    read_blocks: Callable[[int, int], NDArray[np.uint8]]
    begin: int = 0
    first_row: int = 0

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type that the numbers have in a model: bf16."""
        return DTYPES["bf16"].numpy

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks."""
        return self.shape[0] * self.format.row_bytes(self.shape[1])

    @property
    def extent_bytes(self) -> int:
        """Bytes of the file that it spans."""
        return self.nbytes

    def rows(self, first: int, count: int) -> QuantisedTensor:
        """A range of rows."""
        assert 0 <= first <= first + count <= self.shape[0]
        return replace(self, shape=(count, self.shape[1]), first_row=self.first_row + first)

    def blocks(self, first: int, count: int) -> NDArray[np.uint8]:
        """Rows `[first, first + count)` of this tensor in blocks, uint8 `[count, format.row_bytes(columns)]`.

        Raises:
            CheckpointError: the file has changed since it was opened.
        """
        return self.read_blocks(self.first_row + first, count)

    def read(self) -> NDArray[Any]:
        """The numbers of all elements in bf16."""
        return self.format.dequantise(self.blocks(0, self.shape[0])).astype(self.dtype)


def formats_of(weights: Mapping[str, object]) -> dict[str, str]:
    """The formats that quantised tensors among weights keep in memory, by name."""
    blocks = {name: t.format.name for name, t in weights.items() if isinstance(t, QuantisedTensor)}
    return {name: form for name, form in blocks.items() if form in KERNEL_FORMATS}
