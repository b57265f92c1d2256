"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.validation import Validator
from tilewise.optim.optimizer import Optimizer
from tilewise.optim.rule import Parameter, fused

__all__ = ["SGD"]

_validate = Validator("optim")


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Gradient descent with momentum, like `torch.optim.SGD` without dampening, but with decoupled
    weight decay.

    Args:
        momentum: decay of the momentum, in [0, 1).
        nesterov: whether to use Nesterov's step, which adds the gradient to `momentum` times the updated
            momentum buffer.

    Settings of all optimizers: `Optimizer`.

    Raises:
        ConfigError: a value is out of range.

    Source: Sutskever et al. 2013.
    """

    momentum: float = 0.9
    nesterov: bool = False

    states: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum >= 1:
            _validate.invalid("SGD", "momentum must lie in [0, 1)", str(self), "correct it")
        object.__setattr__(self, "nesterov", _validate.truth("SGD", "nesterov", self.nesterov))

    def _settings(self) -> set[str]:
        return super()._settings() - {"nesterov"}

    def update(self, parameter: Parameter) -> None:
        """Update the momentum. Then decay the weight and move it against the momentum."""
        lr = parameter.hyper["lr"]
        momentum = fused(parameter.states["momentum"], self.momentum, parameter.gradient)
        change = fused(momentum, self.momentum, parameter.gradient) if self.nesterov else momentum
        parameter.weight = fused(change, -lr, parameter.weight * (1 - lr * self.weight_decay))
        parameter.states["momentum"] = momentum
