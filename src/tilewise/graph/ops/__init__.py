"""All families of ops. Importing this package registers every op, so that `ir.op.op_named` finds
it.
"""

from tilewise.graph.ops import (
    arithmetic,
    attention,
    batch,
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
    reduce,
    reshard,
    update,
    views,
    windows,
)

__all__ = [
    "arithmetic",
    "attention",
    "batch",
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
    "reduce",
    "reshard",
    "update",
    "views",
    "windows",
]
