"""Tile calls: kernels of the table as tasks on tiles of registered buffers.

`tilewise.tile` has one blocking and one asynchronous function per kernel, which the build makes from
the kernels' declarations; they call this module. A tile is a buffer or region of at most two
dimensions, or a weight in panels. The native library checks each call against its kernel's
declaration before it submits anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

from numpy.typing import NDArray

from tilewise._native.tiles import PackedTile, find, run
from tilewise._native.tiles import submit as submit_native
from tilewise.core.errors import ConfigError
from tilewise.core.validation import Validator
from tilewise.ir.policy import TaskExecutionHints
from tilewise.kernels import pack_weight
from tilewise.runtime.buffers import Buffer, Region
from tilewise.runtime.events import Event
from tilewise.runtime.extras import extras_of
from tilewise.runtime.handles import TaskHandle
from tilewise.runtime.kernels import WorkerType
from tilewise.runtime.runtime import Runtime

__all__ = ["PackedTile", "TaskOptions", "Tile", "find_kernel", "joined", "pack", "run", "submit"]

_validate = Validator("tile", ConfigError)

Tile = Buffer | Region | PackedTile
find_kernel = find


class TaskOptions(TypedDict, total=False):
    """Attributes of the task of an asynchronous call. `Runtime.submit` describes them."""

    worker_type: WorkerType
    after: Sequence[TaskHandle] | None
    wait_for: Sequence[tuple[Event, int]] | None
    hints: TaskExecutionHints | None
    predicate: Buffer | None
    name: str | None
    deadline: float | None


def submit(
    kernel: int,
    tiles: tuple[Tile | None, ...],
    ints: tuple[int, ...],
    floats: tuple[float, ...],
    options: TaskOptions,
) -> TaskHandle:
    """Submit a call as a task; returns its handle.

    Raises:
        ConfigError: the call does not match the kernel's declaration, or an option is invalid.
    """
    if not options:
        handle: TaskHandle = submit_native(kernel, tiles, ints, floats, WorkerType.VECTOR, None)
        return handle
    return _submit_with(kernel, tiles, ints, floats, **options)


def _submit_with(
    kernel: int,
    tiles: tuple[Tile | None, ...],
    ints: tuple[int, ...],
    floats: tuple[float, ...],
    *,
    worker_type: WorkerType = WorkerType.VECTOR,
    after: Sequence[TaskHandle] | None = None,
    wait_for: Sequence[tuple[Event, int]] | None = None,
    hints: TaskExecutionHints | None = None,
    predicate: Buffer | None = None,
    name: str | None = None,
    deadline: float | None = None,
) -> TaskHandle:
    native: Any = next((tile.native for tile in tiles if tile is not None), None)
    extras = None
    if native is not None:  # otherwise the call below reports the missing operands
        extras = extras_of(native, after, wait_for, hints, predicate, name, deadline, [])
    handle: TaskHandle = submit_native(kernel, tiles, ints, floats, worker_type, extras)
    return handle


def joined(kernel: str, *lists: Sequence[Tile]) -> Iterator[Tile]:
    """The members of lists of operands in turns, as kernels take them.

    Raises:
        ConfigError: the lists have different lengths.
    """
    if len({len(tiles) for tiles in lists}) > 1:
        _validate.invalid(
            kernel,
            "lists of operands must have equal lengths",
            ", ".join(str(len(tiles)) for tiles in lists),
            "correct them",
        )
    return (tile for members in zip(*lists, strict=True) for tile in members)


def pack(runtime: Runtime, weight: NDArray[Any]) -> PackedTile:
    """Register a copy of a weight in panels, as the products `tile.matmul` and `tile.matmul_dx` read it.

    Args:
        weight: `[n, k]`, float32 or bfloat16.

    Returns:
        The weight as an operand. `runtime.unregister(packed.buffer)` releases its memory.

    Raises:
        ShapeError: the weight does not have two dimensions.
    """
    name = "bf16" if weight.dtype.name == "bfloat16" else "f32"
    return PackedTile(runtime.register(pack_weight(weight, name)), *weight.shape)
