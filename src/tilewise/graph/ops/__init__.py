"""All families of ops. Importing this package registers every op, so that `ir.op.op_named` finds
it.
"""

from tilewise.graph.ops import (
    arithmetic,
    attention,
    bias,
    dropout,
    elementwise,
    embedding,
    gather,
    indexing,
    kernel,
    linear,
    loss,
    norm,
    optimizer,
    preference,
    reduce,
    reshard,
    update,
    views,
    whole_batch,
    windows,
)

__all__ = [
    "arithmetic",
    "attention",
    "bias",
    "dropout",
    "elementwise",
    "embedding",
    "gather",
    "indexing",
    "kernel",
    "linear",
    "loss",
    "norm",
    "optimizer",
    "preference",
    "reduce",
    "reshard",
    "update",
    "views",
    "whole_batch",
    "windows",
]
