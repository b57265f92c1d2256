"""One op's agreement: which axes share each of its factors, given what its operands have and its results should have.

Contracted factors are settled first and only where every operand that has them is labelled, and alike, and a partial
of the op covers them; else they are whole. Then the others follow the strongest choice. An axis shares one factor of an
op. What is written on a state follows the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.core.dims import DimLabel, Size
from tilewise.core.mesh import MICRO, Axes
from tilewise.ir.graph import Graph, OpNode, TensorSpec
from tilewise.ir.layout import CHUNKS, LEAVES, in_space
from tilewise.ir.op import Factors, Partial, op_named
from tilewise.strategy.choice import CONTRACTED, FREE, PASSED, Choice, Choices

__all__ = ["Agreement", "agree", "behind", "label_for"]

Agreement = Mapping[str, Choice]


def agree(
    graph: Graph, op: OpNode, factors: Factors, choices: Mapping[int, Choices], wishes: Mapping[int, Choices]
) -> Agreement:
    """The choice for every factor of an op.

    Args:
        choices: of the inputs, by tensor id.
        wishes: what results should have, by tensor id, where anyone said so.
    """
    names = [n for dims in (*factors.inputs, *factors.outputs) for n in dims or ()]
    contracted = (
        {n for n in names if any(n not in dims for dims in factors.outputs)} if factors.outputs else set()
    )
    pinned = _pinned(graph, op, factors, choices)
    found: dict[str, Choice] = {}
    candidates = _candidates(op, factors, choices, wishes, contracted)
    operands = _operands_by_factor(graph, op, factors)
    beside: dict[str, set[str]] = {name: set() for name in names}  # factors that stand in one tensor
    for dims in (*factors.inputs, *factors.outputs):
        for name in dims or ():
            beside[name].update(dims or ())
    ordered = sorted(
        dict.fromkeys(names), key=lambda n: (n not in pinned, n not in contracted, _best(candidates[n]).rank)
    )
    for name in ordered:
        choice = pinned.get(name) or _best(candidates[name])
        must_be_whole = name in factors.whole or (
            name in contracted and not _may_share(factors, operands.get(name, ()), name)
        )
        if must_be_whole and in_space(choice.axes):
            choice = Choice(_without(choice.axes, {*choice.axes}), FREE, f"what {op.op} needs whole")
        taken = {a for other in beside[name] if other in found for a in in_space(found[other].axes)}
        if taken & set(choice.axes):
            choice = Choice(_without(choice.axes, taken), FREE, f"an axis that shares another dim of {op.op}")
        found[name] = choice
    return found


def behind(factors: Factors) -> int:
    """The rank of what comes out of an op."""
    return CONTRACTED if factors.partials else PASSED


def _best(candidates: Sequence[Choice]) -> Choice:
    return min(candidates, key=lambda c: c.rank, default=Choice((), FREE, "nothing that is shared"))


def _candidates(
    op: OpNode,
    factors: Factors,
    choices: Mapping[int, Choices],
    wishes: Mapping[int, Choices],
    contracted: set[str],
) -> dict[str, list[Choice]]:
    """Per factor what operands have, in their order; then what a result should have, if the op contracts nothing."""
    found: dict[str, list[Choice]] = {}
    for tensor, dims in zip(op.inputs, factors.inputs):
        if tensor is not None:
            for name, choice in zip(dims or (), choices[tensor]):
                found.setdefault(name, []).append(choice)
    for tensor, dims in zip(op.outputs, factors.outputs):
        for name, wish in zip(dims, wishes.get(tensor, ())):
            own = found.setdefault(name, [])
            if name not in contracted and name not in factors.moved and not factors.partials:
                own.append(wish)
    for dims in factors.outputs:
        for name in dims:
            found.setdefault(name, [])
    return found


def _pinned(graph: Graph, op: OpNode, factors: Factors, choices: Mapping[int, Choices]) -> dict[str, Choice]:
    """Factors of what stays where it is: states that the op writes on, weights whose gradient it makes."""
    rule, found = op_named(op.op), dict[str, Choice]()
    written = {i for _, i in rule.in_place} if rule.must_alias else set()
    for position, (tensor, dims) in enumerate(zip(op.inputs, factors.inputs)):
        if tensor is None or dims is None or graph.tensors[tensor].kind not in ("parameter", "state"):
            continue
        is_gradient = bool(rule.accumulates) and dims in factors.outputs
        if position in written or not op.outputs or is_gradient:
            for name, choice in zip(dims, choices[tensor]):
                found.setdefault(name, choice)
    return found


_Operand = tuple[int, TensorSpec, tuple[str, ...]]


def _operands_by_factor(graph: Graph, op: OpNode, factors: Factors) -> dict[str, list[_Operand]]:
    found: dict[str, list[_Operand]] = {}
    for operand in _operands(graph, op, factors):
        for name in dict.fromkeys(operand[2]):
            found.setdefault(name, []).append(operand)
    return found


def _may_share(factors: Factors, operands: Sequence[_Operand], name: str) -> bool:
    """Whether a contraction may be shared: partials cover every output, and what cuts their trees is labelled, alike
    where sizes are."""
    lacking = {i for i, dims in enumerate(factors.outputs) if name not in dims}
    for tree in (CHUNKS, LEAVES):
        partials = [p for p in factors.partials if p.tree == tree and name in p.factors]
        if lacking <= {o for p in partials for o in p.outputs} and all(
            _is_cut_alike(operands, name, p) for p in partials
        ):
            return True
    return False


def _is_cut_alike(operands: Sequence[_Operand], name: str, partial: Partial) -> bool:
    cuts = {
        (spec.shape[dims.index(name)], _cut(spec, dims.index(name)))
        for position, spec, dims in operands
        if partial.cut_by is None or position in partial.cut_by
    }
    labelled = all(cut is not None and cut[-1] == (partial.tree == LEAVES) for _, cut in cuts)
    return labelled and len({size for size, _ in cuts}) == len(cuts)


def _cut(spec: TensorSpec, dim: int) -> tuple[int, int, bool] | None:
    label = spec.labels[dim]
    return None if label is None else (label.atom, label.group, label.is_summed_by_leaves)


def _operands(graph: Graph, op: OpNode, factors: Factors) -> list[_Operand]:
    return [
        (position, graph.spec(tensor), dims)
        for position, (tensor, dims) in enumerate(zip(op.inputs, factors.inputs))
        if tensor is not None and dims is not None
    ]


def _without(axes: Axes, taken: set[str]) -> Axes:
    """The major axes up to the first that is taken, since what follows would be cut out of order; and time."""
    free = next((i for i, axis in enumerate(axes) if axis in taken and axis != MICRO), len(axes))
    return tuple(axis for i, axis in enumerate(axes) if i < free or axis == MICRO)


def label_for(
    graph: Graph, op: OpNode, factors: Factors, choices: Mapping[int, Choices], name: str, size: Size
) -> DimLabel | None:
    """The label of the operand whose choice a factor follows, among dims of that size; None if it has none."""
    ranked = [
        (choices[tensor][dim].rank, dim, spec.labels[dim])
        for (_, spec, dims), tensor in zip(
            _operands(graph, op, factors),
            (t for t, d in zip(op.inputs, factors.inputs) if t is not None and d is not None),
        )
        for dim, factor in enumerate(dims)
        if factor == name and spec.shape[dim] == size
    ]
    return min(ranked, key=lambda r: r[0], default=(FREE, 0, None))[2]
