"""The layout in which every 2-D weight is stored in memory: panels of 32 output features.

Converts between `W[n, k]` and the panel layout that kernels read (native/kernels/microkernel.h):
ceil(n / 32) panels of 32 rows. The last panel is padded with zeros, and `k` is padded to an even
number. An fp32 panel is `[k_pad][32]`. A bf16 panel is `[k_pad / 2][32][2]`: neighbours along k are
interleaved. Arrays that are not 2-D are rejected. This module uses only NumPy. Files, checkpoints
and tests use it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core import ShapeError, dtype
from tilewise.ir.graph import PANEL_ROWS

__all__ = ["PANEL_ROWS", "pack_weight", "packed_elements", "padded_columns", "unpack_weight"]


def padded_columns(k: int) -> int:
    """`k` rounded up to an even number."""
    return k + k % 2


def packed_elements(n: int, k: int) -> int:
    """Number of elements of the packed form of an `n` x `k` weight."""
    return -(-n // PANEL_ROWS) * PANEL_ROWS * padded_columns(k)


def pack_weight(w: NDArray[Any], dtype_name: str) -> NDArray[Any]:
    """The packed form of `w[n, k]`, flat, in `f32` or `bf16`.

    Raises:
        ShapeError: `w` is not 2-D.
    """
    if w.ndim != 2:
        raise ShapeError(f"[kernels.pack_weight] a weight must be 2-D; got shape {w.shape}; reshape it first")
    n, k = w.shape
    panels, k_pad = -(-n // PANEL_ROWS), padded_columns(k)
    padded = np.zeros((panels * PANEL_ROWS, k_pad), dtype(dtype_name).numpy)
    padded[:n, :k] = w
    if dtype(dtype_name).name == "bf16":
        pairs = padded.reshape(panels, PANEL_ROWS, k_pad // 2, 2)
        return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(-1)
    return np.ascontiguousarray(padded.reshape(panels, PANEL_ROWS, k_pad).transpose(0, 2, 1)).reshape(-1)


def unpack_weight(flat: NDArray[Any], n: int, k: int) -> NDArray[Any]:
    """`w[n, k]` from its packed form. The element type determines the layout: elements of 2 bytes
    are bf16.

    Raises:
        ShapeError: `flat` has another number of elements.
    """
    if flat.size != packed_elements(n, k):
        raise ShapeError(
            f"[kernels.unpack_weight] an {n} x {k} weight packs into {packed_elements(n, k)} elements; "
            f"got {flat.size}; check its shape"
        )
    panels, k_pad = -(-n // PANEL_ROWS), padded_columns(k)
    rows: NDArray[Any]
    if flat.itemsize == 2:
        rows = flat.reshape(panels, k_pad // 2, PANEL_ROWS, 2).transpose(0, 2, 1, 3)
    else:
        rows = flat.reshape(panels, k_pad, PANEL_ROWS).transpose(0, 2, 1)
    return np.ascontiguousarray(rows.reshape(panels * PANEL_ROWS, k_pad)[:n, :k])
