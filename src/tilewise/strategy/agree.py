"""Chooses the mesh axes that share each factor of one op, from the layouts of the op's operands and
the layouts wanted for its results.

A factor is the name of a dim in the op's declaration, as in einsum. A `Choice` is a layout for one
dim, with a rank that says how strongly it is wanted, and why.

Contracted factors come first. A contracted factor is shared only if all operands that have it are
labelled, have the same layout, and the op declares a partial value for it; otherwise it is not
shared. Then each other factor takes the strongest choice among its dims. An axis shares at most one
factor of an op. A value that is written to a state has the state's layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewise.core.dims import UNLABELLED, DimLabel, Size, num_atoms, shard_range
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import MICRO, Axes, DeviceMesh
from tilewise.ir.contractions import SeenLayouts
from tilewise.ir.factors import Factors, PartialValue
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import BATCH_SPLITS, K_SPLITS, TensorLayout, in_space, show_axes
from tilewise.ir.op import op_named

__all__ = [
    "ASKED",
    "CONTRACTED",
    "FREE",
    "PASSED",
    "RULED",
    "Choice",
    "Choices",
    "OpDims",
    "agree",
    "as_layout",
    "label_for",
    "require_equal_cuts",
]

# Ranks in order of precedence: users' hints, a strategy's rules, layouts that pass through ops, results of
# contractions. A free dim is whole, and takes the layout of its neighbours.
ASKED, RULED, PASSED, CONTRACTED, FREE = range(5)


@dataclass(frozen=True)
class Choice:
    """A choice for one dim.

    The fields are the axes, the rank (how strongly the choice is wanted), the origin in words, and
    whether the choice comes from a hint, directly or through ops.
    """

    axes: Axes
    rank: int
    origin: str
    is_asked: bool = False

    def through(self, rank: int) -> Choice:
        """The choice after it has passed through an op: its rank is at most `rank`."""
        return self if self.rank == FREE else replace(self, rank=max(self.rank, rank))


Choices = tuple[Choice, ...]


def as_layout(choices: Sequence[Choice]) -> TensorLayout:
    """The layout that consists of these choices."""
    return tuple(choice.axes for choice in choices)


_NONE = Choice((), FREE, "nothing that is shared")


@dataclass(frozen=True)
class OpDims:
    """The factors of an op by name, with the dims in which each appears.

    Attributes:
        inputs: per factor, (position, tensor, dim) of the operands' dims that it names.
        outputs: per factor, (number, dim) of the results' dims.
    """

    graph: Graph
    op: OpNode
    factors: Factors
    inputs: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    outputs: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, (tensor, dims) in enumerate(zip(self.op.inputs, self.factors.inputs)):
            for dim, name in enumerate(dims or ()):
                if tensor is not None:
                    self.inputs.setdefault(name, []).append((position, tensor, dim))
        for number, names in enumerate(self.factors.outputs):
            for dim, name in enumerate(names):
                self.outputs.setdefault(name, []).append((number, dim))

    def lacking(self, name: str) -> set[int]:
        """Indices of the results that do not have a factor. For these results, the op contracts the
        factor.
        """
        return {*range(len(self.factors.outputs))} - {n for n, _ in self.outputs.get(name, ())}

    def places(self, name: str) -> Iterator[int]:
        """Indices of the tensors that have a factor: operands from 0 up, results from -1 down."""
        yield from (position for position, _, _ in self.inputs.get(name, ()))
        yield from (-1 - number for number, _ in self.outputs.get(name, ()))


def agree(dims: OpDims, choices: Mapping[int, Choices], wishes: Mapping[int, Choices]) -> dict[str, Choice]:
    """Choose the axes of every factor of an op.

    Args:
        dims: factors of the op.
        choices: choices of the operands' dims, by tensor id.
        wishes: layouts that hints ask for the results, by tensor id.
    """
    op, factors = dims.op, dims.factors
    pinned = _pinned(dims, choices)
    names = [*dims.inputs, *(n for n in dims.outputs if n not in dims.inputs)]
    contracted = {n for n in dims.inputs if dims.lacking(n)}
    best = {n: pinned.get(n) or _strongest(dims, choices, wishes, n, n in contracted) for n in names}
    used: dict[int, set[str]] = {}
    chosen: dict[str, Choice] = {}
    for name in sorted(names, key=lambda n: (n not in pinned, n not in contracted, best[n].rank)):
        choice = best[name]
        if in_space(choice.axes):
            if name in factors.whole or (name in contracted and not _may_share(dims, name)):
                choice = Choice(
                    _without(choice.axes, {*choice.axes}), FREE, f"{op.op}, which needs the dim whole"
                )
            taken = {axis for place in dims.places(name) for axis in used.get(place, ())}
            if taken & {*choice.axes}:
                axes = _without(choice.axes, taken)
                choice = Choice(axes, FREE, f"an axis that shares another dim of {op.op}")
            for place in dims.places(name):
                used.setdefault(place, set()).update(in_space(choice.axes))
        chosen[name] = choice
    return chosen


def require_equal_cuts(
    graph: Graph,
    op: OpNode,
    factors: Factors,
    layouts: SeenLayouts,
    relabelled: Mapping[int, Sequence[DimLabel | None]],
    mesh: DeviceMesh,
) -> None:
    """Reject dims of one factor that are shared along the same axes but whose labels cut the dims
    at different elements.

    Args:
        layouts: layouts of the operands as the op reads them, and of the results.
        relabelled: labels of operands that a reshard changes, by position.

    Raises:
        LayoutError: two labels differ; the message names both.
    """
    seen: dict[tuple[str, Size, Axes], DimLabel | None] = {}
    operands = [
        *zip(op.inputs, factors.inputs, layouts.inputs),
        *zip(op.outputs, factors.outputs, layouts.outputs),
    ]
    for position, (tensor, dims, layout) in enumerate(operands):
        if tensor is None or dims is None or layout is None or not any(layout):
            continue
        spec = graph.spec(tensor)
        for name, size, axes, label in zip(dims, spec.shape, layout, relabelled.get(position, spec.labels)):
            shared = in_space(axes)
            if not shared or name in factors.moved:
                continue
            first = seen.setdefault((name, size, shared), label)
            if first is label or _is_cut_at_the_same(first, label, size, graph.k_splits, mesh.size(*shared)):
                continue
            described = [
                "unlabelled" if one is None else f"{one.name!r} in pieces of {one.atom}"
                for one in (first, label)
            ]
            raise LayoutError(
                "[strategy.propagate] dims that devices share must be cut at the same elements; got "
                f"{described[0]} and {described[1]} for {size} elements of {op.label!r} ({op.op}) over "
                f"{show_axes(shared)}; give both dims one label"
            )


def _is_cut_at_the_same(
    a: DimLabel | None, b: DimLabel | None, size: Size, k_splits: int, shards: int
) -> bool:
    one, other = a or UNLABELLED, b or UNLABELLED
    if not isinstance(size, int) or num_atoms(one, size) == num_atoms(other, size):
        return True
    if one.is_summed_by_batch_splits or other.is_summed_by_batch_splits:
        return True
    return all(
        shard_range(one, size, k_splits, shards, s) == shard_range(other, size, k_splits, shards, s)
        for s in range(shards)
    )


def label_for(dims: OpDims, choices: Mapping[int, Choices], name: str, size: Size) -> DimLabel | None:
    """The label of the operand whose choice a factor follows, among dims of this size. None if
    there is no such label.
    """
    ranked = [
        (choices[tensor][dim].rank, spec.labels[dim])
        for _, tensor, dim in dims.inputs[name]
        if (spec := dims.graph.spec(tensor)).shape[dim] == size
    ]
    return min(ranked, key=lambda r: r[0], default=(FREE, None))[1]


def _strongest(
    dims: OpDims,
    choices: Mapping[int, Choices],
    wishes: Mapping[int, Choices],
    name: str,
    is_contracted: bool,
) -> Choice:
    """The choice with the best rank among the operands, in order, and then, if the op contracts
    nothing, among the hints on its results.
    """
    candidates = [choices[tensor][dim] for _, tensor, dim in dims.inputs.get(name, ())]
    if wishes and not is_contracted and not dims.factors.partial_values and name not in dims.factors.moved:
        results = ((dims.op.outputs[number], dim) for number, dim in dims.outputs.get(name, ()))
        candidates += [wishes[tensor][dim] for tensor, dim in results if tensor in wishes]
    return min(candidates, key=lambda c: c.rank, default=_NONE)


def _pinned(dims: OpDims, choices: Mapping[int, Choices]) -> dict[str, Choice]:
    """Factors whose layout is fixed: factors of states that the op writes, of weights whose
    gradient the op computes, and of weights in panels. A reshard cannot change the layout of
    weights in panels, so rows of activations change their layout instead.
    """
    op, factors = dims.op, dims.factors
    cls, pinned = op_named(op.op), dict[str, Choice]()
    written = {i for _, i in cls.declared.in_place} if cls.must_alias else set()
    for position, (tensor, names) in enumerate(zip(op.inputs, factors.inputs)):
        if tensor is None or names is None or dims.graph.tensors[tensor].kind not in ("parameter", "state"):
            continue
        is_gradient = bool(cls.declared.accumulates) and names in factors.outputs
        is_packed = dims.graph.spec(tensor).is_packed
        if position in written or not op.outputs or is_gradient or is_packed:
            for name, choice in zip(names, choices[tensor]):
                pinned.setdefault(name, choice)
    return pinned


def _may_share(dims: OpDims, name: str) -> bool:
    """Whether a contraction may be shared: the op declares partial values for every output, and the
    labels of the contracted dims are equal.
    """
    lacking = dims.lacking(name)
    for tree in (K_SPLITS, BATCH_SPLITS):
        partial_values = [p for p in dims.factors.partial_values if p.tree == tree and name in p.contracts]
        if lacking <= {o for p in partial_values for o in p.outputs} and all(
            _is_cut_alike(dims, name, p) for p in partial_values
        ):
            return True
    return False


def _is_cut_alike(dims: OpDims, name: str, partial: PartialValue) -> bool:
    cuts: dict[Size, tuple[int, int]] = {}
    for position, tensor, dim in dims.inputs[name]:
        if partial.cut_by is None or position in partial.cut_by:
            spec = dims.graph.spec(tensor)
            label = spec.labels[dim]
            if label is None or label.is_summed_by_batch_splits != (partial.tree == BATCH_SPLITS):
                return False
            cut = label.atom, label.group
            if cuts.setdefault(spec.shape[dim], cut) != cut:
                return False
    return True


def _without(axes: Axes, taken: set[str]) -> Axes:
    """The axes before the first one that is already used, and time. Axes after the used one would
    shard in a wrong order.
    """
    free = next((i for i, axis in enumerate(axes) if axis in taken and axis != MICRO), len(axes))
    return tuple(axis for i, axis in enumerate(axes) if i < free or axis == MICRO)
