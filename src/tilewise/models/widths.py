"""How many devices can share the heads of a model, and the number of k splits that follows from it.

A sum over heads is cut into k splits, which are combined along a tree. Devices share the heads in
nodes of this tree. 8 k splits fit models whose heads halve: 1, 2, 4 or 8 devices. A model with 3 KV
heads needs a number with a factor 3: of 12 k splits, 3 devices have 4 each, and 2 devices have 8 and
4. The number depends on the model alone, never on the devices, so it does not change between meshes.
"""

from __future__ import annotations

from contextlib import suppress

from tilewise.core.dims import DimLabel, shard_range
from tilewise.core.errors import LayoutError
from tilewise.core.tree import node_widths

__all__ = ["default_k_splits", "widths_of_heads"]

_USUAL = 8
_MOST_KV_HEADS = 128  # an odd factor of more heads would make k splits too small


def default_k_splits(num_heads: int, num_kv_heads: int) -> int:
    """The k splits of a model's graph: 8 if several devices can then share its heads; otherwise the
    smallest number from 8 on that is the odd factor of its KV heads times a power of two.

    Args:
        num_heads: query heads.
        num_kv_heads: heads of keys and values.
    """
    odd = num_kv_heads // (num_kv_heads & -num_kv_heads)
    if odd == 1 or num_kv_heads > _MOST_KV_HEADS or len(widths_of_heads(num_heads, num_kv_heads, _USUAL)) > 1:
        return _USUAL
    number = odd
    while number < _USUAL:
        number *= 2
    return number


def widths_of_heads(num_heads: int, num_kv_heads: int, k_splits: int | None = None) -> list[int]:
    """The numbers of devices that can share the heads.

    Args:
        num_heads: query heads.
        num_kv_heads: heads of keys and values.
        k_splits: k splits of the graph; None: the default.
    """
    if k_splits is None:
        k_splits = default_k_splits(num_heads, num_kv_heads)
    label = DimLabel("kv_heads", 1, num_heads // num_kv_heads)
    widths = []
    for width in node_widths(k_splits):
        with suppress(LayoutError):
            parts = [shard_range(label, num_kv_heads, k_splits, width, place) for place in range(width)]
            heads = [
                shard_range(DimLabel("heads", 1), num_heads, k_splits, width, place) for place in range(width)
            ]
            if all(begin < end for begin, end in (*parts, *heads)):
                widths.append(width)
    return widths
