"""The parameters of a task: how it uses its buffers.

`Input`, `Output`, `InOut` and `Commute` are native classes, because nearly every submission uses
them. `Reduce` and `NoDep` derive from the same base. A parameter may be reused for many tasks.
Hints that cannot be satisfied are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tilewise._native.tasks import Commute, InOut, Input, OpenRuntime, Operand, Output, Param
from tilewise.core.validation import Validator, shown
from tilewise.ir.policy import TaskExecutionHints
from tilewise.runtime.buffers import MAX_BYTES, Buffer, Region, dtype_of, shape_of
from tilewise.runtime.kernels import Kernel

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
    "check_handles",
    "describe_output",
]

_validate = Validator("runtime")

SUMS = {np.dtype(np.float32): "sum_f32", np.dtype(np.float64): "sum_f64", np.dtype(np.int64): "sum_i64"}


class Mode:
    """Access modes as the C interface numbers them."""

    INPUT, OUTPUT, INOUT, COMMUTE, REDUCE, NO_DEP = range(6)


@dataclass(frozen=True)
class NewOutput:
    """The shape of an output that the runtime allocates."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def describe_output(
    x: object, bytes: int | None, shape: Sequence[int] | int | None, dtype: DTypeLike
) -> NewOutput:
    """The output that `Output(bytes=...)` or `Output(shape=..., dtype=...)` asks for. The native
    class calls this function.
    """
    if (bytes is None) == (shape is None) or x is not None or (bytes is not None and dtype is not None):
        _validate.invalid(
            "Output",
            "an output must be a buffer, a number of bytes, or a shape and dtype",
            ", ".join(f"{name} {shown(value)}" for name, value in _named(x, bytes, shape, dtype))
            or "nothing",
            "pass exactly one",
        )
    if bytes is not None:
        sizes: tuple[int, ...] = (
            _validate.integer("Output", "an output must have at least one byte: bytes", bytes, 1, MAX_BYTES),
        )
        return NewOutput(sizes, np.dtype(np.uint8))
    sizes = shape_of("Output", shape)
    return NewOutput(sizes, dtype_of("Output", np.float32 if dtype is None else dtype, sizes))


def _named(*values: object) -> list[tuple[str, object]]:
    names = ("x", "bytes", "shape", "dtype")
    return [(name, value) for name, value in zip(names, values) if value is not None]


class Reduce(Param):
    """The task overwrites its own partial value. The partial values of all such tasks are added to
    `x` in order of submission.

    Args:
        x: a whole buffer.
        combine: name of the kernel that adds a partial value ("sum_f32", "sum_f64", "sum_i64",
            "max_f32", "min_f32"), or a native kernel of the buffer's runtime: kernel(buffers =
            {target, partial}, scalars = {bytes}). None: the sum of the buffer's dtype, which must
            be float32, float64 or int64.

    Raises:
        ConfigError: `x` is not a whole buffer, or there is no sum for its dtype.
    """

    def __init__(self, x: Buffer, combine: Any = None) -> None:
        if isinstance(x, Region):
            _validate.invalid("Reduce", "a reduction must name a whole buffer", shown(x), "drop the index")
        kernel = _combine_id(x, combine) if isinstance(x, Buffer) else 0
        super().__init__("Reduce", x, Mode.REDUCE, kernel)


def _combine_id(x: Buffer, combine: Any) -> int:
    native: Any = x.native
    if combine is None:
        combine = SUMS.get(x.dtype)
        if combine is None:
            _validate.invalid(
                "Reduce",
                "a reduction without `combine` must be of float32, float64 or int64",
                f"a buffer of {x.dtype}",
                'pass combine="sum_f32" for its bytes as such, or a native kernel',
            )
    if isinstance(combine, str):
        return int(native.find_kernel(combine))
    if not isinstance(combine, Kernel) or combine.native is not native or combine.is_python:
        _validate.invalid(
            "Reduce",
            "combine must be the name of a kernel, or a native kernel of the buffer's runtime",
            shown(combine),
            'pass "sum_f32", or what Runtime.kernel returned',
        )
    return combine.id


class NoDep(Param):
    """The kernel gets the address, but the runtime records no access. The caller is responsible for
    the order of tasks.

    Args:
        x: a buffer or region. Its memory stays alive while it is registered.
        address: an address, instead of `x`.
    """

    def __init__(self, x: Operand | None = None, *, address: int | None = None) -> None:
        if (x is None) == (address is None):
            _validate.invalid(
                "NoDep",
                "pass a buffer or an address",
                f"{shown(x)} and {shown(address)}",
                "drop or add one",
            )
        if address is None:
            super().__init__("NoDep", x, Mode.NO_DEP)
        else:
            at = _validate.integer("NoDep", "an address", address, 0, (1 << 64) - 1)
            super().__init__(Mode.NO_DEP, at, at)


def check_handles(hints: TaskExecutionHints, native: OpenRuntime) -> None:
    """Raise ConfigError if a buffer to prefetch belongs to another runtime, or is no longer valid."""
    for buffer in hints.prefetch_handles:
        if not isinstance(buffer, Buffer) or buffer.native is not native:
            _validate.invalid(
                "hints",
                "buffers to prefetch must be the runtime's own",
                f"{buffer!r} of another",
                "drop it",
            )
        native.address(buffer.handle)
