"""Element types. One table; everything else asks it."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tilewise.core.border import shown
from tilewise.core.errors import ShapeError

__all__ = ["DTYPES", "DType", "dtype"]


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: `f32`, `bf16`, `i32` or `f64`.
        code: its number in the tile program (native/base/dtype.h has the same).
        numpy: the NumPy dtype that holds it.
    """

    name: str
    code: int
    numpy: np.dtype

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return int(self.numpy.itemsize)

    def __str__(self) -> str:
        return self.name


DTYPES = {
    "f32": DType("f32", 0, np.dtype(np.float32)),
    "bf16": DType("bf16", 1, np.dtype(ml_dtypes.bfloat16)),
    "i32": DType("i32", 2, np.dtype(np.int32)),
    "f64": DType("f64", 3, np.dtype(np.float64)),
}
_SPELLINGS = {
    "float32": "f32",
    "fp32": "f32",
    "bfloat16": "bf16",
    "int32": "i32",
    "float64": "f64",
    "fp64": "f64",
}


def dtype(name: str | DType) -> DType:
    """The element type of that name; `float32`, `fp32`, `bfloat16`, `int32` and `float64` are accepted too.

    Raises:
        ShapeError: there is none.
    """
    if isinstance(name, DType):
        return name
    found = DTYPES.get(_SPELLINGS.get(name, name)) if isinstance(name, str) else None
    if found is None:
        raise ShapeError(
            f"[core.dtype] a dtype must be one of {', '.join(DTYPES)}; got {shown(name)}; choose one of them"
        )
    return found
