"""Working memory of the one kernel that needs more for longer sequences.

Every worker has `SCRATCH_BYTES` of its own (native/kernels/kernel.h), which all kernels but one cut their work to.
The backward pass of attention keeps a KV head's whole sequence there, so its length is bounded, and planners of runs
ask here before any data is read. The sum follows native/kernels/attention_backward.cc, rounded up where levels
differ.
"""

from __future__ import annotations

__all__ = ["SCRATCH_BYTES", "longest_sequence"]

SCRATCH_BYTES = 64 << 20
_GRANULE = 64  # positions that are worked on together
_PANEL = 32
_FLOAT_BYTES = 4


def longest_sequence(head_dim: int, group: int, values_per_word: int) -> int:
    """The longest sequence whose backward pass of attention fits a worker's scratch.

    Args:
        group: query heads per KV head on one device.
        values_per_word: 2 where pairs of bf16 are multiplied (bf16 at the level `avx512_bf16`), else 1.
    """
    width = -(-head_dim // _PANEL) * _PANEL
    steps = -(-head_dim // values_per_word)
    blocks = -(-steps // 128)
    along = width * _GRANULE // values_per_word
    entries = 2 + (group - 1).bit_length()
    per_granule = 2 * 2 * _PANEL * steps + along + entries * 2 * _GRANULE * width
    fixed = 2 * blocks * 70 * 144 + 2 * along + 5 * _GRANULE * 144 + _GRANULE * width
    return max(0, (SCRATCH_BYTES // _FLOAT_BYTES - fixed) // per_granule * _GRANULE)
