"""Optimizers as parts of the graph."""

from tilewise.optim.adamw import AdamW

__all__ = ["AdamW"]
