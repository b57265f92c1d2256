"""Validation of arguments of the task runtime.

Owns what `core.validation` lacks: timeouts, shapes, dtypes, paths, and what the native side would report in other words
or not at all. Every error is a `ConfigError`, raised before anything starts; an index out of range is an `IndexError`.
A submission is validated here only after the native side has found something wrong, or if it uses more than buffers and
scalars.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from tilewise.core.errors import ConfigError
from tilewise.core.validation import Validator, shown

__all__ = [
    "callback",
    "dtype",
    "instance",
    "integer",
    "invalid",
    "operand",
    "output_path",
    "parameter",
    "path",
    "patience",
    "region_bytes",
    "region_dimensions",
    "region_entries",
    "region_entry",
    "region_place",
    "scalar",
    "seconds",
    "sequence",
    "shape",
    "shown",
    "text",
    "tile",
    "tiles",
    "truth",
    "without_mask",
    "worker_type",
]

MAX_BYTES = (1 << 63) - 1
LONGEST_S = 1e9

_validate = Validator("runtime", ConfigError)
invalid = _validate.invalid
integer = _validate.integer
truth = _validate.truth
instance = _validate.instance
sequence = _validate.sequence
text = _validate.text
without_mask = _validate.without_mask


def scalar(call: str, value: Any) -> NoReturn:
    """Says why a value cannot be a scalar of a native kernel; called when its conversion has failed."""
    invalid(
        call,
        "a scalar must be an integer of 64 bits or a float",
        shown(value),
        "convert it; larger data go into buffers",
    )


def worker_type(call: str, value: Any) -> NoReturn:
    """Says what a worker type is; called when the value is none of the four."""
    invalid(call, "worker_type must be one of WorkerType", shown(value), "pass WorkerType.CUBE, VECTOR, ...")


def callback(call: str, value: Any) -> NoReturn:
    """Says what can be called back; called when the value cannot."""
    invalid(call, "a callback must be callable without arguments", shown(value), "pass a function")


def parameter(call: str, value: Any) -> NoReturn:
    """Says what stands in `params`; called when the value does not belong there."""
    invalid(
        call,
        "params must be Input, Output, InOut, Commute, Reduce or NoDep",
        shown(value),
        "wrap the buffer in one of them",
    )


def operand(call: str, value: Any) -> NoReturn:
    """Says what a parameter can name; called when it is neither buffer nor region."""
    invalid(call, "a parameter must name a Buffer or a Region", shown(value), "register the memory first")


def region_entry(index: Any, length: int) -> NoReturn:
    """Says what an index of a buffer is made of; called when an entry is something else."""
    invalid(
        "region",
        "a box must be made of integers and non-empty, ascending slices",
        f"{shown(index)} for a length of {length}",
        "correct it",
    )


def region_place(place: Any, length: int) -> NoReturn:
    """Says that an integer lies outside; an IndexError, because loops over a buffer end by it."""
    raise IndexError(
        f"[runtime.region] an index must lie inside the buffer; got {shown(place)} of {length}; correct it"
    )


def region_entries(index: Any, num_dims: int) -> NoReturn:
    """Says that an index has more entries than the buffer has dimensions."""
    raise IndexError(
        f"[runtime.region] an index must have at most {num_dims} entries; got {shown(index)}; correct it"
    )


def region_dimensions(index: Any, num_dims: int) -> NoReturn:
    """Says that a box has more dimensions than the runtime compares."""
    invalid(
        "region",
        "a box must have at most 4 dimensions",
        f"{num_dims} for {shown(index)}",
        "register a view with fewer dimensions, or use Buffer.region",
    )


def region_bytes(offset: int, size: Any, stride: Any, num_bytes: int) -> NoReturn:
    """Says that a box in bytes leaves its buffer."""
    invalid(
        "region",
        f"a region must lie inside its buffer of {num_bytes} bytes",
        f"offset {offset}, size {shown(size)} and stride {shown(stride)}",
        "correct it",
    )


def tile(place: Any, counts: tuple[int, ...]) -> NoReturn:
    """Says how a tile is named; an IndexError where only the place is wrong."""
    places = place if isinstance(place, tuple) else (place,)
    if len(places) == len(counts) and all(
        isinstance(at, Integral) and not isinstance(at, bool) for at in places
    ):
        raise IndexError(
            f"[runtime.tiles] a tile must lie in the grid; got {shown(place)} of {counts}; correct it"
        )
    invalid("tiles", f"a tile must be named by {len(counts)} integers", shown(place), "pass grid[i, j]")


def tiles(sizes: tuple[int, ...], lengths: tuple[int, ...], max_tiles: int) -> NoReturn:
    """Says what a grid of tiles is."""
    invalid(
        "tiles",
        f"a grid must have a size for some of the first dimensions, 4 at most, and at most {max_tiles} tiles",
        f"tiles of {shown(sizes)} for shape {lengths}",
        "correct them",
    )


def seconds(call: str, value: Any, name: str = "a timeout") -> float | None:
    """A timeout: seconds, or None for ever. A negative one has passed already."""
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        invalid(call, f"{name} must be a number of seconds, or None", shown(value), "pass a float")
    return number


def patience(call: str, name: str, value: Any) -> float:
    """Seconds to wait for something that must come: more than none."""
    number = seconds(call, value, name)
    if number is None or number <= 0:
        invalid(call, f"{name} must be more than 0 seconds", shown(value), "pass 10.0")
    return min(number, LONGEST_S)


def shape(call: str, value: Any) -> tuple[int, ...]:
    """The sizes of an array: a positive integer, or a sequence of them."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(integer(call, "every size of a shape", size, 1, MAX_BYTES) for size in value)
    return (integer(call, "a shape that is no sequence", value, 1, MAX_BYTES),)


def dtype(call: str, value: DTypeLike, sizes: Sequence[int]) -> np.dtype[Any]:
    """The type of an array's elements: no Python objects, and the whole array within 63 bits."""
    try:
        kind = np.dtype(value)
    except (TypeError, ValueError):
        invalid(call, "a dtype must be one that NumPy knows", shown(value), "correct it")
    if kind.hasobject or kind.itemsize == 0 or kind.subdtype is not None:
        invalid(
            call, "elements must be plain memory of one byte or more", f"dtype {kind}", "choose another dtype"
        )
    if math.prod(sizes) * kind.itemsize > MAX_BYTES:
        invalid(
            call,
            "an array must have less than 2**63 bytes",
            f"shape {tuple(sizes)} of {kind}",
            "make it smaller",
        )
    return kind


def path(call: str, value: Any) -> str:
    """A path as text, as the native side takes it."""
    given = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(given, str) or not given or "\0" in given:
        invalid(
            call, "a path must be a str or a Path, neither empty nor with a zero", shown(value), "correct it"
        )
    return given


def output_path(call: str, value: Any) -> Path:
    """A path to write to when a block has ended: its folder must exist before the block begins."""
    target = Path(path(call, value))
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        invalid(
            call,
            "a file must be writable in a folder that exists",
            f"'{target}'",
            "make the folder, or choose another",
        )
    return target
