"""`matmul`: a product of matrices, a task per tile of the result.

Each task contracts the whole inner dim with the kernel `gemm`, so the bits of the result do not
depend on the tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator
from tilewise.runtime import Buffer, TaskGroup, WorkerType
from tilewise.runtime.tile_calls import TaskOptions, find_kernel, submit
from tilewise.tensor.loops import Tensor, automatic_steps, check_steps, tile_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["matmul"]

_validate = Validator("tensor", ShapeError)
_GEMM = find_kernel("gemm")


def matmul(
    a: Buffer | Tensor,
    b: Buffer | Tensor,
    c: Buffer | Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    accumulate: bool = False,
    tile: tuple[int, int] | None = None,
    **options: Unpack[TaskOptions],
) -> TaskGroup:
    """Submit `c = a b` for every tile of `c`.

    Args:
        a: `[m, k]`, f32 or bf16; `[k, m]` with `trans_a`.
        b: `[k, n]`, as `a`; `[n, k]` with `trans_b`.
        c: `[m, n]`, the dtype of `a`, or f32; overwritten.
        trans_a: whether `a` is transposed.
        trans_b: whether `b` is transposed.
        accumulate: whether the product is added to `c`, which must then be f32.
        tile: rows and columns of a tile of `c`; None for those of the tensors `c`, or automatic ones.
        options: attributes of the tasks, as `Runtime.submit` has them. The default of `worker_type`
            is `WorkerType.CUBE`.

    Returns:
        The tasks, in rows of tiles.

    Raises:
        ShapeError: inner or outer sizes differ.
        ConfigError: the dtypes do not match the kernel `gemm`.
    """
    check_steps("matmul", tile)
    left, right, result = (m.buffer if isinstance(m, Tensor) else m for m in (a, b, c))
    shapes = [tuple(buffer.shape) for buffer in (left, right, result)]
    if any(len(shape) != 2 for shape in shapes):
        _validate.invalid("matmul", "matrices must have two dimensions", f"{shapes}", "register 2-D arrays")
    m, k = shapes[0][::-1] if trans_a else shapes[0]
    inner, n = shapes[1][::-1] if trans_b else shapes[1]
    if k != inner or shapes[2] != (m, n):
        _validate.invalid(
            "matmul",
            "inner and outer sizes of a product must agree",
            f"{list(shapes[0])} and {list(shapes[1])} for {list(shapes[2])}",
            "pass trans_a or trans_b, or matrices of matching shapes",
        )
    steps = tile or (c.tile if isinstance(c, Tensor) else None)
    steps = steps or automatic_steps(m, n, result.dtype.itemsize, columns=True)
    rows, cols = min(steps[0], m), min(steps[1], n)
    options.setdefault("worker_type", WorkerType.CUBE)
    ints = (int(trans_a), int(trans_b), int(accumulate))
    group = TaskGroup()
    for i in range(-(-m // rows)):
        x = tile_of(left, (k, rows), (0, i)) if trans_a else tile_of(left, (rows, k), (i, 0))
        for j in range(-(-n // cols)):
            y = tile_of(right, (cols, k), (j, 0)) if trans_b else tile_of(right, (k, cols), (0, j))
            out = tile_of(result, (rows, cols), (i, j))
            group.add(submit(_GEMM, (out, x, y), ints, (), options))
    return group
