"""Layout hints: the two notations in which users write them, and the one form that is used
internally.

A layout hint says which mesh axes shard each dim of a tensor.

The first notation is one entry per dim, as in JAX's PartitionSpec: `("dp", None, ("tp", "cp"))`.
`None` means that the dim is not sharded, and a tuple lists several axes, major first. Trailing dims
may be left out. The second is one entry per mesh axis, as in torch.distributed.tensor: `{"dp":
Shard(0), "tp": Replicate()}`. Axes that shard the same dim are ordered as in the mapping, major
first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.core.errors import LayoutError
from tilewise.core.frozen import FrozenMap
from tilewise.core.mesh import MICRO, Axes
from tilewise.core.validation import Validator, shown

__all__ = ["Hint", "Replicate", "Shard", "as_frozen_hint", "as_tensor_layout"]

_validate = Validator("ir", LayoutError)
_ADVICE = 'write ("dp", None, "tp"), or {"dp": Shard(0), "tp": Replicate()}'


@dataclass(frozen=True)
class Shard:
    """A mesh axis shards one dim.

    Args:
        dim: number of the dim, from 0.

    Raises:
        LayoutError: `dim` is not a valid number of a dim.
    """

    dim: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", _validate.integer("Shard", "dim", self.dim, 0, 63))


@dataclass(frozen=True)
class Replicate:
    """Every device along a mesh axis has the whole tensor."""


Hint = Sequence[str | Axes | None] | Mapping[str, Shard | Replicate]


def as_tensor_layout(call: str, hint: object, rank: int, name: str) -> tuple[Axes, ...]:
    """A user's layout of a tensor with `rank` dims, in the internal form.

    Raises:
        LayoutError: the layout has neither notation, names a dim that the tensor does not have,
            names time, or names an axis twice.
    """
    dims = _axes_by_dim(call, hint, name)
    if len(dims) > rank:
        _validate.invalid(
            call,
            f"a layout must have at most one entry per dim of {name!r}",
            f"{shown(hint)} for {rank} dims",
            _ADVICE,
        )
    return (*dims, *((),) * (rank - len(dims)))


def as_frozen_hint(call: str, hint: Hint, name: str) -> tuple[Hint, set[str]]:
    """A copy of a user's layout for tensors that are not known yet, and the set of axes that the
    layout names.

    Raises:
        LayoutError: the layout has neither notation, names time, or names an axis twice.
    """
    used = {axis for axes in _axes_by_dim(call, hint, name) for axis in axes}
    return FrozenMap(hint) if isinstance(hint, Mapping) else tuple(hint), used


def _axes_by_dim(call: str, hint: object, name: str) -> list[Axes]:
    """The axes of each dim that a layout names. No axis appears twice."""
    dims = _by_axis(call, hint, name) if isinstance(hint, Mapping) else _by_dim(call, hint, name)
    used = [axis for axes in dims for axis in axes]
    if MICRO in used:
        _validate.invalid(
            call,
            f"a layout must not name {MICRO!r}, because microbatches follow from the batch",
            f"{shown(hint)} for {name!r}",
            "drop it",
        )
    if len(set(used)) != len(used):
        _validate.invalid(
            call,
            "a layout may name each mesh axis only once",
            f"{shown(hint)} for {name!r}",
            "drop one of them",
        )
    return dims


def _by_dim(call: str, hint: object, name: str) -> list[Axes]:
    if not isinstance(hint, Sequence) or isinstance(hint, str | bytes):
        _validate.invalid(call, f"a layout of {name!r} must have one of two forms", shown(hint), _ADVICE)
    dims: list[Axes] = []
    for entry in hint:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if not isinstance(axes, tuple) or not all(isinstance(a, str) and a for a in axes):
            _validate.invalid(call, f"a layout of {name!r} must have one of two forms", shown(hint), _ADVICE)
        dims.append(axes)
    return dims


def _by_axis(call: str, hint: Mapping[Any, object], name: str) -> list[Axes]:
    axes_by_dim: dict[int, Axes] = {}
    for axis, placed in hint.items():
        if not isinstance(axis, str) or not axis or not isinstance(placed, Shard | Replicate):
            _validate.invalid(call, f"a layout of {name!r} must have one of two forms", shown(hint), _ADVICE)
        if isinstance(placed, Shard):
            axes_by_dim[placed.dim] = (*axes_by_dim.get(placed.dim, ()), axis)
    return [axes_by_dim.get(d, ()) for d in range(max(axes_by_dim, default=-1) + 1)]
