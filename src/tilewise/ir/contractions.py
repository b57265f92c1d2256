"""Finds where an op contracts, and which mesh axes share the contraction.

A factor is the name of a dim in an op's declaration, as in einsum. An op contracts a factor of its
inputs if an output does not have the factor, or has it in coarser pieces.

If devices or microbatches share such a factor, each computes a partial value (ir/layout.py). The
package `strategy` makes a pending reduction for each partial value, and `ir.validate` checks that
none is missing. Both use this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilewise.core.dims import DimLabel, upper_bound
from tilewise.core.errors import InternalError
from tilewise.core.mesh import Axes
from tilewise.core.validation import Validator
from tilewise.ir.factors import Factors, PartialValue
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import BATCH_SPLITS, GROUPS, K_SPLITS, TensorLayout
from tilewise.ir.op import bind

__all__ = [
    "Contraction",
    "SeenLayouts",
    "factors_of",
    "find_contractions",
    "group_of",
    "is_covered_by",
    "tree_of",
]


class SeenLayouts(NamedTuple):
    """Layouts of an op's operands and results as the op reads and writes them. An operand that
    appears twice may have two layouts.
    """

    inputs: tuple[TensorLayout | None, ...]
    outputs: tuple[TensorLayout, ...]

    @classmethod
    def of(cls, op: OpNode, layouts: Sequence[TensorLayout]) -> SeenLayouts:
        """The layouts of an op's tensors, for a graph in which changes of layout are ops already."""
        inputs = tuple(None if t is None else layouts[t] for t in op.inputs)
        return cls(inputs, tuple(layouts[t] for t in op.outputs))


_validate = Validator("ir", InternalError)


@dataclass(frozen=True)
class Contraction:
    """A factor of an op that devices or microbatches share and that the op contracts.

    Attributes:
        factor: the factor's name.
        tensor, dim: an input, and its dim with this factor.
        axes: axes that share the factor, including time (microbatches).
        label: label of the dim.
        outputs: positions of the outputs that are partial.
        tree: the tree along which parts are combined.
    """

    factor: str
    tensor: int
    dim: int
    axes: Axes
    label: DimLabel | None
    outputs: tuple[int, ...]
    tree: str


def factors_of(graph: Graph, op: OpNode) -> Factors:
    """The factors that an op declares. They are cached on the graph, because every stage needs them."""
    cached = graph.cache.get(op.id)
    if cached is None or cached[0] is not op:
        declared = bind(op).factors(graph.spec)
        _check_factors(graph, op, declared)
        cached = graph.cache[op.id] = op, declared
    factors: Factors = cached[1]
    return factors


def _check_factors(graph: Graph, op: OpNode, factors: Factors) -> None:
    """Check that an op that makes its factors itself names every dim of its operands and results.

    Raises:
        InternalError: names the op and the tensor.
    """
    named = zip((*op.inputs, *op.outputs), (*factors.inputs, *factors.outputs))
    if len(factors.inputs) != len(op.inputs) or len(factors.outputs) != len(op.outputs):
        got = f"names for {len(factors.inputs)} and {len(factors.outputs)}"
        _validate.invalid(
            op.op, "`factors` must name the dims of all operands and results", got, "correct it"
        )
    for tensor, names in named:
        if tensor is not None and (names is None or len(names) != len(graph.tensors[tensor].shape)):
            got = f"{names} for {graph.spec(tensor)}"
            _validate.invalid(
                op.op, "`factors` must name every dim of an operand or result", got, "correct it"
            )


def tree_of(label: DimLabel | None) -> str:
    """The tree along which sums over a dim are combined, by the role of its label."""
    return BATCH_SPLITS if label is not None and label.is_summed_by_batch_splits else K_SPLITS


def is_covered_by(contraction: Contraction, output: int, partial: PartialValue) -> bool:
    """Whether a partial value that the op declares belongs to this contraction and to this output."""
    return (
        contraction.factor in partial.contracts
        and contraction.tree == partial.tree
        and output in partial.outputs
    )


def find_contractions(
    graph: Graph,
    op: OpNode,
    factors: Factors,
    seen_layouts: SeenLayouts,
) -> Iterator[Contraction]:
    """Every shared factor of an op's inputs that makes an output partial."""
    seen: set[tuple[str, Axes, str]] = set()
    for tensor, names, layout in zip(op.inputs, factors.inputs, seen_layouts.inputs):
        if tensor is None or names is None or layout is None:
            continue
        for dim, (factor, axes) in enumerate(zip(names, layout)):
            if not axes or factor in factors.moved:
                continue
            label = graph.spec(tensor).labels[dim]
            lacking = tuple(i for i, names in enumerate(factors.outputs) if factor not in names)
            coarse = _coarser_outputs(graph, op, factors, factor, label)
            for outputs, tree in ((lacking, tree_of(label)), (coarse, GROUPS)):
                if outputs and (factor, axes, tree) not in seen:
                    seen.add((factor, axes, tree))
                    yield Contraction(factor, tensor, dim, axes, label, outputs, tree)


def group_of(graph: Graph, op: OpNode, contraction: Contraction) -> tuple[int, int]:
    """The number of groups (KV heads) and of members in each group (query heads), for a contraction
    within groups.
    """
    spec = graph.spec(op.outputs[contraction.outputs[0]])
    for label, size in zip(spec.labels, spec.shape):
        if label is not None and label.group > 1:
            return upper_bound(size) // label.atom, label.group
    return 1, 1


def _coarser_outputs(
    graph: Graph, op: OpNode, factors: Factors, factor: str, label: DimLabel | None
) -> tuple[int, ...]:
    """Outputs whose dim counts groups of the input's elements, such as gradients of KV heads from
    query heads.
    """
    positions = []
    for position, (tensor, names) in enumerate(zip(op.outputs, factors.outputs)):
        own = graph.spec(tensor).labels[names.index(factor)] if factor in names else None
        if own is not None and own.group > (label.group if label is not None else own.group):
            positions.append(position)
    return tuple(positions)
