"""`Adapter`: a low-rank adapter of a weight (LoRA), as a setting of a graph. `nn.linear` adds it.

A weight `[n, k]` with an adapter of rank r computes `x wᵀ + scale * (x aᵀ) bᵀ`, where a is `[r, k]` and
b is `[n, r]`. Both are parameters, whose names end in `.lora_A.weight` and `.lora_B.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewise.core.dims import MAX_SIZE
from tilewise.core.dtypes import MAX_F32
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator, shown

__all__ = ["LORA_A", "LORA_B", "Adapter", "adapters_of_layer", "check_adapters"]

LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"
_validate = Validator("graph", ShapeError)


@dataclass(frozen=True)
class Adapter:
    """The settings of one adapter.

    Args:
        rank: r, at least 1.
        scale: factor of the adapter's product.
        dropout: probability with which an element of the adapter's input is dropped in training, in
            [0, 1).
        shared: the name of the a that this adapter shares with others, if a file has their weights
            as one tensor: queries, keys and values of GPT-2. Empty: an a of its own.
        is_gated: whether `x aᵀ` is multiplied by a tensor of `GraphBuilder.gates`, which has r factors per
            row. Adapters of several requests can so be one: each row uses its own part of r.

    Raises:
        ShapeError: a value is out of range.
    """

    rank: int
    scale: float = 1.0
    dropout: float = 0.0
    shared: str = ""
    is_gated: bool = False

    def __post_init__(self) -> None:
        _validate.integer("Adapter", "rank", self.rank, 1, MAX_SIZE)
        scale = _validate.number("Adapter", "scale", self.scale, -MAX_F32, MAX_F32)
        object.__setattr__(self, "scale", scale)
        dropout = _validate.number("Adapter", "dropout", self.dropout, 0.0, 1.0)
        if dropout == 1.0:
            _validate.invalid("Adapter", "dropout must be below 1", "1", "lower it")
        object.__setattr__(self, "dropout", dropout)
        if self.shared:
            _validate.text("Adapter", "the name of a shared a", self.shared)

    def names(self, weight: str) -> tuple[str, str]:
        """The names of a and b, for the weight with this name."""
        module = weight.removesuffix(".weight")
        return self.shared or f"{module}.{LORA_A}", f"{module}.{LORA_B}"


def check_adapters(adapters: object) -> dict[str, Adapter]:
    """A copy of adapters by the names of their weights.

    Raises:
        ShapeError: it is not a mapping from names that end in `.weight` to `Adapter`s.
    """
    rule, advice = "adapters must be Adapter objects by names of weights", "pass models.lora.adapters_of(...)"
    if not isinstance(adapters, Mapping):
        _validate.invalid("GraphBuilder", rule, shown(adapters), advice)
    for name, adapter in adapters.items():
        if not isinstance(name, str) or not name.endswith(".weight") or not isinstance(adapter, Adapter):
            _validate.invalid("GraphBuilder", rule, f"{shown(adapter)} for {shown(name)}", advice)
    return dict(adapters)


def adapters_of_layer(adapters: Mapping[str, Adapter], path: str) -> dict[str, Adapter]:
    """Adapters of the weights of a layer, by their names in it."""
    start = f"{path}."
    return {
        name.removeprefix(start): replace(a, shared=a.shared.removeprefix(start)) if a.shared else a
        for name, a in sorted(adapters.items())
        if name.startswith(start)
    }
