"""The labels of a decoder's dims, by which strategies shard it. Model code only refers to these
labels.

`heads` and `kv_heads` are cut between heads, `vocab` in blocks of 64 rows, `mlp` in pairs.
"""

from __future__ import annotations

from tilewise.core.dims import BATCH, DimLabel
from tilewise.models.decoder.architecture import Decoder

__all__ = ["BATCH", "MLP", "VOCAB", "heads_label", "kv_heads_label"]

MLP = DimLabel("mlp", 2)
VOCAB = DimLabel("vocab", 64)


def heads_label(decoder: Decoder) -> DimLabel:
    """Query heads side by side."""
    return DimLabel("heads", decoder.head_dim)


def kv_heads_label(decoder: Decoder) -> DimLabel:
    """KV heads side by side; each goes with its group of query heads."""
    return DimLabel("kv_heads", decoder.head_dim, decoder.num_heads // decoder.num_kv_heads)
