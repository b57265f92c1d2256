"""Error messages of the native bindings of tasks (`native/bind/tasks_*.cc`), which look these functions up by name.

The native code validates a value while it converts it, and calls the function here only when the value is invalid.
Every error is a `ConfigError`; an index out of range is an `IndexError`.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NoReturn

from tilewise.core.errors import ConfigError
from tilewise.core.validation import Validator, shown

__all__ = [
    "callback",
    "operand",
    "packed_buffer",
    "packed_sizes",
    "parameter",
    "region_bytes",
    "region_dimensions",
    "region_entries",
    "region_entry",
    "region_place",
    "scalar",
    "seconds",
    "sequence",
    "tile",
    "tile_float",
    "tile_integer",
    "tile_operand",
    "tile_runtime",
    "tiles",
    "worker_type",
]

_validate = Validator("runtime", ConfigError)
_tiles = Validator("tile", ConfigError)
invalid = _validate.invalid
sequence = _validate.sequence


def scalar(call: str, value: Any) -> NoReturn:
    """Reports a value that cannot be a scalar of a native kernel."""
    invalid(
        call,
        "a scalar must be an integer of 64 bits or a float",
        shown(value),
        "convert it; larger data go into buffers",
    )


def worker_type(call: str, value: Any) -> NoReturn:
    """Reports an invalid worker type."""
    invalid(call, "worker_type must be one of WorkerType", shown(value), "pass WorkerType.CUBE, VECTOR, ...")


def callback(call: str, value: Any) -> NoReturn:
    """Reports a callback that is not callable."""
    invalid(call, "a callback must be callable without arguments", shown(value), "pass a function")


def parameter(call: str, value: Any) -> NoReturn:
    """Reports an entry of `params` that is not a parameter."""
    invalid(
        call,
        "params must be Input, Output, InOut, Commute, Reduce or NoDep",
        shown(value),
        "wrap the buffer in one of them",
    )


def operand(call: str, value: Any) -> NoReturn:
    """Reports a parameter's operand that is neither buffer nor region."""
    invalid(call, "a parameter must name a Buffer or a Region", shown(value), "register the memory first")


def region_entry(index: Any, length: int) -> NoReturn:
    """Reports an invalid entry of a buffer's index."""
    invalid(
        "region",
        "a box must be made of integers and non-empty, ascending slices",
        f"{shown(index)} for a length of {length}",
        "correct it",
    )


def region_place(place: Any, length: int) -> NoReturn:
    """Reports an integer index out of range, by an IndexError, with which Python ends loops over a buffer."""
    raise IndexError(
        f"[runtime.region] an index must lie inside the buffer; got {shown(place)} of {length}; correct it"
    )


def region_entries(index: Any, num_dims: int) -> NoReturn:
    """Reports an index with more entries than the buffer has dimensions."""
    raise IndexError(
        f"[runtime.region] an index must have at most {num_dims} entries; got {shown(index)}; correct it"
    )


def region_dimensions(index: Any, num_dims: int) -> NoReturn:
    """Reports a box with more dimensions than the runtime compares."""
    invalid(
        "region",
        "a box must have at most 4 dimensions",
        f"{num_dims} for {shown(index)}",
        "register a view with fewer dimensions, or use Buffer.region",
    )


def region_bytes(offset: int, size: Any, stride: Any, num_bytes: int) -> NoReturn:
    """Reports a box in bytes that does not lie in its buffer."""
    invalid(
        "region",
        f"a region must lie inside its buffer of {num_bytes} bytes",
        f"offset {offset}, size {shown(size)} and stride {shown(stride)}",
        "correct it",
    )


def tile(place: Any, counts: tuple[int, ...]) -> NoReturn:
    """Reports an invalid index of a tile, by an IndexError if it is only out of range."""
    places = place if isinstance(place, tuple) else (place,)
    if len(places) == len(counts) and all(
        isinstance(at, Integral) and not isinstance(at, bool) for at in places
    ):
        raise IndexError(
            f"[runtime.tiles] a tile must lie in the grid; got {shown(place)} of {counts}; correct it"
        )
    invalid("tiles", f"a tile must be named by {len(counts)} integers", shown(place), "pass grid[i, j]")


def tile_operand(value: Any) -> NoReturn:
    """Reports an operand of a tile call that is no tile."""
    shape = getattr(value, "shape", None)
    invalid_tile(
        "an operand must be a buffer or region of one or two dimensions with contiguous columns, or a PackedTile",
        shown(value) if shape is None else f"shape {shape} of {getattr(value, 'dtype', 'no dtype')}",
        "register the array, and index rows and columns by slices",
    )


def tile_runtime(value: Any) -> NoReturn:
    """Reports an operand of another runtime."""
    invalid_tile(
        "a call's tiles must belong to one runtime",
        f"{shown(value)} of another",
        "register its memory here",
    )


def tile_integer(value: Any) -> NoReturn:
    """Reports an attribute of a kernel that is not an integer of 64 bits."""
    invalid_tile("an integer of a kernel must have 64 bits", shown(value), "pass an int")


def tile_float(value: Any) -> NoReturn:
    """Reports an attribute of a kernel that is not a number."""
    invalid_tile("a float of a kernel must be a number", shown(value), "pass a float")


def packed_buffer(value: Any) -> NoReturn:
    """Reports a buffer that cannot have a weight in panels."""
    invalid_tile(
        "panels must be a buffer of one dimension",
        shown(value),
        "register the result of kernels.pack_weight, or use tile.pack",
    )


def packed_sizes(rows: int, cols: int, expected: int, got: int) -> NoReturn:
    """Reports a buffer of another size than its weight in panels."""
    invalid_tile(
        f"a weight of {rows} x {cols} in panels must have {expected} elements",
        f"a buffer of {got}",
        "correct the sizes",
    )


def invalid_tile(rule: str, got: str, advice: str) -> NoReturn:
    """Raises the error of a tile call."""
    _tiles.invalid("call", rule, got, advice)


def seconds(call: str, value: Any) -> float | None:
    """Convert a timeout that is not a Python float to seconds, or None for no limit. A negative
    timeout has already passed.
    """
    return _validate.seconds(call, "a timeout", value)


def tiles(sizes: tuple[int, ...], lengths: tuple[int, ...], max_tiles: int) -> NoReturn:
    """Reports invalid sizes of a grid of tiles."""
    invalid(
        "tiles",
        f"a grid must have a size for some of the first dimensions, 4 at most, and at most {max_tiles} tiles",
        f"tiles of {shown(sizes)} for shape {lengths}",
        "correct them",
    )
