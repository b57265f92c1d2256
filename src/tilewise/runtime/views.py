"""Views: shapes, strides and dtypes of a native kernel's parameters.

Each submission to a kernel with `views=True` creates views from its buffers and regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.runtime.buffers import type_of
from tilewise.runtime.params import NewOutput, Param

__all__ = ["Views", "views_of"]

# (pto_type, bytes of an element, sizes in elements, strides in bytes) per parameter; None: its bytes.
View = tuple[int, int, tuple[int, ...], tuple[int, ...]]
Views = list[View | None]


def views_of(params: Sequence[Param]) -> Views:
    """One view per parameter."""
    return [_view_of(getattr(param, "target", None)) for param in params]


def _view_of(target: Any) -> View | None:
    if isinstance(target, NewOutput):
        shape, dtype = target.shape, target.dtype
        return type_of(dtype), dtype.itemsize, shape, _strides_of(shape, dtype.itemsize)
    if not hasattr(target, "array"):
        return None  # an address
    dtype = getattr(target, "dtype", None) or target.array.dtype
    strides = getattr(target, "strides", None)
    shape = tuple(target.shape)
    return (
        type_of(dtype),
        dtype.itemsize,
        shape,
        _strides_of(shape, dtype.itemsize) if strides is None else tuple(strides),
    )


def _strides_of(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    strides = [item_bytes]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[::-1]) if shape else ()
