"""Op families. Importing this package registers every op (ir.op.op_named finds them)."""

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
