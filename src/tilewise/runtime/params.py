"""How a task uses its buffers, and what it may ask of the scheduler.

`Input`, `Output`, `InOut` and `Commute` are native (they stand in the way of every submission); the others build on
the same base. A parameter may be kept and used for many tasks. Refuses hints that cannot be honoured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from tilewise._native.tasks import Commute, InOut, Input, Operand, Output, Param

if TYPE_CHECKING:
    from tilewise.runtime.buffers import Buffer, Region

__all__ = [
    "Commute",
    "InOut",
    "Input",
    "Mode",
    "NewOutput",
    "NoDep",
    "Output",
    "Param",
    "Reduce",
    "TaskExecutionHints",
    "describe_output",
]


class Mode:
    """Access modes as the C interface numbers them."""

    INPUT, OUTPUT, INOUT, COMMUTE, REDUCE, NO_DEP = range(6)


@dataclass(frozen=True)
class NewOutput:
    """What an output of the runtime's own looks like."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def describe_output(bytes: int | None, shape: Sequence[int] | int | None, dtype: DTypeLike) -> NewOutput:
    """What `Output(bytes=...)` or `Output(shape=..., dtype=...)` asks for; called by the native class."""
    if (bytes is None) == (shape is None):
        raise ValueError(
            "[runtime.Output] an output must be a buffer, a number of bytes, or a shape and dtype; got "
            f"bytes {bytes} and shape {shape}; pass exactly one"
        )
    kind = np.dtype(np.uint8 if bytes is not None else np.float32 if dtype is None else dtype)
    size = bytes if bytes is not None else shape
    sizes = tuple(size) if isinstance(size, Sequence) else (int(size or 0),)
    if min(sizes, default=1) <= 0:
        raise ValueError(
            f"[runtime.Output] an output must have at least one byte; got shape {sizes}; correct it"
        )
    return NewOutput(sizes, kind)


class Reduce(Param):
    """The task overwrites a partial of its own; the partials are added to `x` in order of submission.

    Args:
        x: a whole buffer; a region is refused by `submit`.
        combine: name of the kernel that adds a partial ("sum_f32", "sum_f64", "sum_i64", "max_f32", "min_f32"), or a
            kernel of the buffer's runtime: kernel(buffers = {target, partial}, scalars = {bytes}).
    """

    def __init__(self, x: Buffer | Region, combine: Any = "sum_f32") -> None:
        kernel = x._core.find_kernel(combine) if isinstance(combine, str) else combine.id
        super().__init__(x, Mode.REDUCE, kernel)


class NoDep(Param):
    """The kernel gets the address and the runtime sees no access: the caller answers for the order.

    Args:
        x: buffer or region; the runtime still keeps its memory for as long as it is registered.
        address: an address instead.
    """

    def __init__(self, x: Operand | None = None, *, address: int | None = None) -> None:
        if (x is None) == (address is None):
            raise ValueError(
                f"[runtime.NoDep] pass a buffer or an address; got {x} and {address}; drop one of them"
            )
        if x is not None:
            super().__init__(x, Mode.NO_DEP)
        else:
            super().__init__(Mode.NO_DEP, 0, address or 0, address)


@dataclass(frozen=True)
class TaskExecutionHints:
    """What a task asks of the scheduler. A hint that cannot be honoured is an error, never silently dropped.

    Attributes:
        target_node: the device; a runtime is one device, so None or 0.
        target_worker: the worker that must run the task; None: any of its type.
        priority: higher first; 0 is the fast path.
        prefetch_inputs: bring the inputs to the device before the task runs. All memory of this device is where its
            workers read it, so this holds already.
        prefetch_handles: the same for further buffers; they must be alive.
    """

    target_node: int | None = None
    target_worker: int | None = None
    priority: int = 0
    prefetch_inputs: bool = False
    prefetch_handles: tuple[Buffer, ...] = ()

    def __post_init__(self) -> None:
        if self.target_node not in (None, 0):
            raise ValueError(
                "[runtime.hints] target_node must be this runtime's device; got "
                f"{self.target_node}; a runtime is device 0: submit to the other device's runtime"
            )
        if self.target_worker is not None and self.target_worker < 0:
            raise ValueError(
                f"[runtime.hints] target_worker must be a worker's number; got {self.target_worker}; pass None for any"
            )

        if not -(1 << 31) <= self.priority < 1 << 31:
            raise ValueError(
                f"[runtime.hints] priority must be an integer of 32 bits; got {self.priority}; choose a smaller one"
            )

    def check_handles(self) -> None:
        """Raise ValueError when a buffer to prefetch is no longer alive."""
        for buffer in self.prefetch_handles:
            buffer._core.address(buffer.handle)
