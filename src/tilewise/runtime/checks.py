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
    "tiles",
    "worker_type",
]

_validate = Validator("runtime", ConfigError)
invalid = _validate.invalid
sequence = _validate.sequence


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


def seconds(call: str, value: Any) -> float | None:
    """A timeout that is no Python float: seconds, or None for ever. A negative one has passed already."""
    return _validate.seconds(call, "a timeout", value)


def tiles(sizes: tuple[int, ...], lengths: tuple[int, ...], max_tiles: int) -> NoReturn:
    """Says what a grid of tiles is."""
    invalid(
        "tiles",
        f"a grid must have a size for some of the first dimensions, 4 at most, and at most {max_tiles} tiles",
        f"tiles of {shown(sizes)} for shape {lengths}",
        "correct them",
    )
