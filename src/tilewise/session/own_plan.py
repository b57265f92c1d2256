"""Checks that a plan belongs to a graph: compares the graph's declarations with what the plan runs.

Inputs, outputs and everything that fixes the bits of sums must be as declared; the error names each
difference. Passes rewrite ops, so a plan keeps a digest of the ops as the user defined them. A plan
also contains the backward pass and the optimizer, which the graph does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.core.dims import Dim, Size, upper_bound
from tilewise.core.errors import PlanError
from tilewise.core.validation import Validator, shown
from tilewise.graph import GraphBuilder
from tilewise.graph.declarations import SEED
from tilewise.graph.draft import GraphDraft
from tilewise.ir.digest import digest_computation
from tilewise.ir.graph import Graph, TensorSpec
from tilewise.plan import PlanTables
from tilewise.session.inputs import is_own_input

__all__ = ["require_own"]

_validate = Validator("session", PlanError)
_GIVEN = {"input", "parameter", "state", "constant"}
_FIELDS = ("labels", "storage", "init", "init_scale")
_OPTIMIZER = "optimizer."  # prefix of the names of its states and inputs
_NORM = "grad_norm"

Named = dict[str, tuple[str, TensorSpec]]  # kind and spec


def _definition_of(graph: GraphBuilder) -> str:
    """The digest of what a graph computes: of its definition without its name and layout hints,
    which change no bit.
    """
    return digest_computation(graph.freeze(), graph.draft.loss_id)


def require_own(graph: GraphBuilder, optimizer: object, plan: PlanTables) -> None:
    """Reject the plan of another graph.

    Args:
        graph: the graph that the plan should belong to.
        optimizer: the graph's, or None.
        plan: a plan with any strategy, accumulation, sizes, recomputation and offload.

    Raises:
        PlanError: names the first difference.
    """
    odd = next(_differences(graph, optimizer, plan), None)
    if odd is not None:
        _validate.invalid(
            "instantiate",
            "a plan must be one of this graph",
            f"that of {plan.graph.name!r} with {odd} in {graph.name!r}",
            "pass what this graph's plan() returned, or run another graph's with GraphInstance(plan)",
        )


def _differences(graph: GraphBuilder, optimizer: object, plan: PlanTables) -> Iterator[str]:
    mine, theirs = _named(graph.draft), _named(plan.graph)
    added = {SEED, _NORM, *(f"{name}.grad" for name, (kind, _) in theirs.items() if kind == "parameter")}
    for name, (kind, spec) in theirs.items():
        if name not in mine and name not in added and not name.startswith(_OPTIMIZER):
            yield f"{kind} {name!r} {spec}, absent"
    sizes: dict[Dim, Size] = {}
    for name, (kind, spec) in mine.items():
        if name not in theirs:
            yield f"no {name!r}, which is {kind} {spec}"
        elif spec is not theirs[name][1] or kind != theirs[name][0]:
            yield from _of_tensor(name, (kind, spec), theirs[name], sizes)
    if graph.k_splits != plan.graph.k_splits:
        yield f"k_splits={plan.graph.k_splits}, which is {graph.k_splits}"
    yield from _of_optimizer(optimizer, plan.optimizer)
    values = _constants(plan.graph)
    for name, value in _constants(graph.draft).items():
        if value is not values[name] and value.tobytes() != values[name].tobytes():
            yield f"constant {name!r} of other values than"
    if plan.definition != _definition_of(graph):
        yield "other ops, symbols or loss than"


def _named(graph: GraphDraft | Graph) -> Named:
    """A graph's inputs and outputs by name, without the inputs that an instance computes itself."""
    outside = {
        t.spec.name: (t.kind, t.spec)
        for t in graph.tensors
        if t.kind in _GIVEN and not is_own_input(t.spec.name)
    }
    return outside | {name: ("output", graph.tensors[i].spec) for name, i in graph.outputs.items()}


def _of_tensor(
    name: str, mine: tuple[str, TensorSpec], theirs: tuple[str, TensorSpec], sizes: dict[Dim, Size]
) -> Iterator[str]:
    """Differences of one tensor; `sizes` are the plan's sizes of symbols, as far as they are known."""
    (kind, own), (other_kind, other) = mine, theirs
    if kind != other_kind:
        yield f"{other_kind} {name!r}, which is {kind}"
    is_alike = own.dtype == other.dtype and len(own.shape) == len(other.shape)
    if not is_alike or not all(_is_size_of(one, two, sizes) for one, two in zip(own.shape, other.shape)):
        yield f"{kind} {name!r} {other}, which is {own}"
    for field in () if kind == "output" else _FIELDS:
        one, two = getattr(own, field), getattr(other, field)
        if one != two:
            yield f"{kind} {name!r} of {field} {shown(two)}, which is {shown(one)}"


def _is_size_of(own: Size, other: Size, sizes: dict[Dim, Size]) -> bool:
    """Whether the plan's size may stand for the graph's: a symbol may have been replaced by a number."""
    if isinstance(own, Dim) and own.min <= upper_bound(other) <= own.max:
        return sizes.setdefault(own, other) == other and (other == own or not isinstance(other, Dim))
    return own == other


def _of_optimizer(mine: object, theirs: object) -> Iterator[str]:
    """Differences of two optimizers, field by field if they have the same class."""
    if type(mine) is not type(theirs) or not is_dataclass(mine):
        if mine != theirs:
            yield f"optimizer {shown(theirs)}, which is {shown(mine)}"
        return
    for field in fields(mine):
        own, other = getattr(mine, field.name), getattr(theirs, field.name)
        if own != other:
            yield f"optimizer {type(mine).__name__} of {field.name} {shown(other)}, which is {shown(own)}"


def _constants(graph: GraphDraft | Graph) -> dict[str, NDArray[np.generic]]:
    return {graph.tensors[i].spec.name: value for i, value in graph.constant_values.items()}
