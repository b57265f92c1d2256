"""What an encoder's dims count: the declaration that strategies shard by, the same as decoders'."""

from __future__ import annotations

from tilewise.core.dims import BATCH, DimLabel
from tilewise.models.bert.config import BertConfig
from tilewise.models.decoder.sharding import MLP, VOCAB

__all__ = ["BATCH", "MLP", "VOCAB", "heads_label"]


def heads_label(config: BertConfig) -> DimLabel:
    """Heads side by side; queries, keys and values have as many."""
    return DimLabel("heads", config.head_dim)
