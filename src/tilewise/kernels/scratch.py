"""Upper bounds of the scratch memory that a kernel takes from its worker, over all instruction-set
levels and dtypes.

The planner gives every worker the scratch memory that the largest call of its plan needs. The
formulas follow the native code, which divides its scratch memory with `Carver`
(native/kernels/tree.h). A test runs the kernels with exactly this much memory.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["scratch_bytes"]

_ROWS = 16  # rows per block of attention, on the level with most (native/kernels/attention/kv_blocks.h)
_PACKED_ROWS = 24  # the same in words of packs: 12 rows of two words per step
_LEAST_ROWS = 12
_PANEL, _LANES, _KV_BLOCK = 32, 16, 64
_BLOCK_STEPS, _ROW_STRIDE = 128, 144
_ROUNDING = 1 << 14  # for pieces that begin at cache lines
_PRODUCT = 17 << 20  # packs, and the state of blocks between windows: bounded by constants of product.h
_UPDATE_BLOCK, _CACHE_LINE = 64, 64  # of update.cc
_PER_STEP, _PER_RANGE = 4, 1024  # bytes of segments, copies and windows

Shape = tuple[int, int]


def scratch_bytes(kernel: str, ints: Sequence[int], shapes: Sequence[Shape]) -> int:
    """The maximum scratch memory of one call, in bytes; 0 for kernels that need none.

    Args:
        kernel: full name of the kernel, for example `attention_backward_bf16`.
        ints: integer attributes of the call.
        shapes: rows and columns of every operand, as large as a task may see it; (0, 0) for an
            absent operand.
    """
    base = kernel.rpartition("_")[0]
    if base in ("matmul", "matmul_dx"):
        ranges = ints[3:]
        steps = sum(max(0, end - begin) for begin, end in zip(ranges[::2], ranges[1::2]))
        return _product(steps, len(ranges) // 2)
    if base == "gemm":
        return _product(max(max(shape) for shape in shapes[1:3]), 1)
    if base == "matmul_dw":
        tokens = max(shape[0] for shape in shapes[1:5])
        batch_splits = -(-tokens // ints[0])
        runs = -(-tokens // (ints[3] or ints[0]))
        return _product(tokens, runs + 1) + (1 << 20) + batch_splits * _PANEL * 4
    if base in ("attention", "attention_paged"):
        return _attention(heads=ints[1], kv_heads=ints[2], dim=ints[3])
    if base == "update":
        values = sum(shape[1] for shape in shapes[-2:]) + len(shapes) + len(ints)  # an upper bound
        return values * (_UPDATE_BLOCK * 4 + 2 * _CACHE_LINE) + _ROUNDING
    if base == "softmax":
        return 4 * shapes[0][1] + _ROUNDING
    if base == "attention_backward":
        return _attention_backward(seq=ints[0], heads=ints[1], kv_heads=ints[2], dim=ints[3])
    return 0


def _product(steps: int, ranges: int) -> int:
    return _PRODUCT + _PER_STEP * steps + _PER_RANGE * ranges


def _panels(dim: int) -> int:
    return -(-dim // _PANEL)


def _row_blocks(dim: int, rows: int) -> int:
    """Words of a block of rows, packed along the head size: one word per element, or one per two
    elements.
    """
    return 2 * -(-dim // (2 * _BLOCK_STEPS)) * rows * _ROW_STRIDE


def _attention(heads: int, kv_heads: int, dim: int) -> int:
    rows = max(1024, heads // kv_heads) + _ROWS
    sums = rows * _panels(dim) * _PANEL + 2 * (rows // _LEAST_ROWS + 1) * _LANES
    span = 16 * (2 * _PANEL * dim + _panels(dim) * _PANEL * _KV_BLOCK)
    words = sums + span + _row_blocks(dim, _ROWS) + _PACKED_ROWS * _ROW_STRIDE + 2 * _ROWS * _PANEL
    return 4 * words + _ROUNDING


def _attention_backward(seq: int, heads: int, kv_heads: int, dim: int) -> int:
    kv_blocks = -(-seq // _KV_BLOCK)
    across, along = 2 * _PANEL * dim, _panels(dim) * _KV_BLOCK * _PANEL
    block = _KV_BLOCK * _panels(dim) * _PANEL
    entries, group = 2, heads // kv_heads
    while group > 1:
        entries, group = entries + 1, (group + 1) // 2
    packed = 2 * (_row_blocks(dim, _KV_BLOCK) + along + _KV_BLOCK * _ROW_STRIDE)
    own = packed + 4 * _KV_BLOCK * _KV_BLOCK + block
    return 4 * (kv_blocks * (2 * across + along + 2 * entries * block) + own) + _ROUNDING
