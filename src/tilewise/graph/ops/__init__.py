"""All families of ops. Importing this package registers every op, so that `ir.op.op_named` finds
it.
"""

from tilewise.graph.ops import (
    attention,
    bias,
    elementwise,
    embedding,
    gather,
    linear,
    loss,
    norm,
    optimizer,
    reduce,
    reshard,
    update,
)

__all__ = [
    "attention",
    "bias",
    "elementwise",
    "embedding",
    "gather",
    "linear",
    "loss",
    "norm",
    "optimizer",
    "reduce",
    "reshard",
    "update",
]
