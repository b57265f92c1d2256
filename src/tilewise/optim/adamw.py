"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tilewise.core.validation import Validator
from tilewise.optim.optimizer import Optimizer
from tilewise.optim.rule import Parameter, fused, sqrt

__all__ = ["AdamW"]

_validate = Validator("optim")


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`.

    Args:
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment; above 0 in fp32.

    Settings of all optimizers: `Optimizer`.

    Raises:
        ConfigError: a value is out of range.

    Source: Loshchilov and Hutter 2019.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    nonnegative: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    per_step: ClassVar[tuple[str, ...]] = ("lr", "correction1", "correction2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta1 >= 1 or self.beta2 >= 1 or np.float32(self.eps) <= 0:
            _validate.invalid(
                "AdamW", "betas must lie in [0, 1), and eps must be above 0 in fp32", str(self), "correct it"
            )

    def values(self, step: int, lr: float) -> Sequence[float]:
        """The learning rate, and the bias corrections of the moments."""
        return lr, 1 - self.beta1**step, 1 - self.beta2**step

    def update(self, parameter: Parameter) -> None:
        """Update both moments. Then decay the weight, and move it against the scaled first moment."""
        g, lr = parameter.gradient, parameter.hyper["lr"]
        first = fused(parameter.states["exp_avg"], self.beta1, (1 - self.beta1) * g)
        second = fused(parameter.states["exp_avg_sq"], self.beta2, (1 - self.beta2) * g * g)
        root = 1 / sqrt(parameter.hyper["correction2"])  # once per step, not per element
        change = first / fused(sqrt(second), root, self.eps)
        decayed = parameter.weight * (1 - lr * self.weight_decay)
        parameter.weight = fused(change, -(lr / parameter.hyper["correction1"]), decayed)
        parameter.states["exp_avg"], parameter.states["exp_avg_sq"] = first, second
