"""Optimizers, whose updates become ops of the training graph."""

from tilewise.optim.adamw import AdamW
from tilewise.optim.lion import Lion
from tilewise.optim.optimizer import Optimizer, ParameterGroup
from tilewise.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "Lion", "Optimizer", "ParameterGroup"]
