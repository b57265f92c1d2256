"""Element types and their names: one table for the planner, configurations and the command line."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tilewise.core.errors import ConfigError, ShapeError
from tilewise.core.validation import shown

__all__ = [
    "DTYPES",
    "KV_CACHE_DTYPES",
    "MAX_F32",
    "MIN_F32",
    "MODEL_DTYPES",
    "QUANTIZED_MATMULS",
    "DType",
    "choose_dtype",
    "dtype",
    "is_float",
    "model_dtype",
]


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: `f32`, `bf16`, `i32` or `f64`.
        numpy: the corresponding NumPy dtype.
    """

    name: str
    numpy: np.dtype

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the name; unpickling returns the one object of this type, which makes comparisons fast."""
        return (dtype, (self.name,)) if DTYPES.get(self.name) is self else (DType, (self.name, self.numpy))

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return int(self.numpy.itemsize)

    def __str__(self) -> str:
        return self.name


DTYPES = {
    "f32": DType("f32", np.dtype(np.float32)),
    "bf16": DType("bf16", np.dtype(ml_dtypes.bfloat16)),
    "i32": DType("i32", np.dtype(np.int32)),
    "f64": DType("f64", np.dtype(np.float64)),
}
MAX_F32 = float(np.finfo(np.float32).max)
MIN_F32 = float(np.finfo(np.float32).tiny)  # the smallest positive normal number
_SPELLINGS = {
    "float32": "f32",
    "fp32": "f32",
    "bfloat16": "bf16",
    "int32": "i32",
    "float64": "f64",
    "fp64": "f64",
}


def dtype(name: str | DType) -> DType:
    """The element type with this name; `float32`, `fp32`, `bfloat16`, `int32` and `float64` are
    accepted too.

    Raises:
        ShapeError: no type has this name.
    """
    if isinstance(name, DType):
        return name
    known_dtype = DTYPES.get(_SPELLINGS.get(name, name)) if isinstance(name, str) else None
    if known_dtype is None:
        raise ShapeError(
            f"[core.dtype] a dtype must be one of {', '.join(DTYPES)}; got {shown(name)}; choose one of them"
        )
    return known_dtype


_COMPUTED = ("bf16", "f32")
KV_CACHE_DTYPES = ("auto", "int8")  # auto: that of the model
QUANTIZED_MATMULS = ("exact", "grouped")  # how products use quantised weights (docs/numerics.md, rule 12)
MODEL_DTYPES = (*_COMPUTED, *(name for name, means in _SPELLINGS.items() if means in _COMPUTED))
"""Every spelling of the types that models compute in."""


def model_dtype(name: str) -> str:
    """`bf16` or `f32`, from any spelling.

    Raises:
        ConfigError: models do not compute in this type.
    """
    return _computed(name, MODEL_DTYPES)


def choose_dtype(name: str, stored: str | None) -> str:
    """Like `model_dtype`; `auto` is the type in which a model's weights are stored, or bf16 if
    models do not compute in it.

    Args:
        stored: the type in the model's config.json; None if missing.

    Raises:
        ConfigError: models do not compute in this type.
    """
    auto = stored if stored in MODEL_DTYPES else "bf16"
    return _computed(auto if isinstance(name, str) and name == "auto" else name, ("auto", *MODEL_DTYPES))


def _computed(name: str, allowed: tuple[str, ...]) -> str:
    if not isinstance(name, str) or name not in allowed:
        raise ConfigError(
            f"[core.dtype] a model's dtype must be one of {', '.join(allowed)}; got {shown(name)}; choose one of them"
        )
    return _SPELLINGS.get(name, name)


def is_float(dtype: np.dtype) -> bool:
    """Whether weights may have this dtype: any floating-point type."""
    return bool(np.issubdtype(dtype, np.floating)) or dtype == DTYPES["bf16"].numpy
