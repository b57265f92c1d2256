"""Lion: moves weights by the sign of an interpolated momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewise.core.validation import Validator
from tilewise.optim.optimizer import Optimizer
from tilewise.optim.rule import Parameter, fused, sign

__all__ = ["Lion"]

_validate = Validator("optim")


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Evolved sign momentum (Lion), with half of AdamW's state.

    Args:
        beta1: share of the momentum in the direction of a step, in [0, 1).
        beta2: decay of the momentum, in [0, 1).

    Settings of all optimizers: `Optimizer`. Typical learning rates are three to ten times smaller
    than for AdamW, and typical weight decay is larger by the same factor.

    Raises:
        ConfigError: a value is out of range.

    Source: Chen et al. 2023, algorithm 2.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 1.0

    states: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta1 >= 1 or self.beta2 >= 1:
            _validate.invalid("Lion", "betas must lie in [0, 1)", str(self), "correct it")

    def update(self, parameter: Parameter) -> None:
        """Decay the weight, and move it against the sign of the interpolated momentum. Then update
        the momentum.
        """
        g, lr, momentum = parameter.gradient, parameter.hyper["lr"], parameter.states["exp_avg"]
        direction = sign(fused(momentum, self.beta1, (1 - self.beta1) * g))
        parameter.weight = fused(direction, -lr, parameter.weight * (1 - lr * self.weight_decay))
        parameter.states["exp_avg"] = fused(momentum, self.beta2, (1 - self.beta2) * g)
