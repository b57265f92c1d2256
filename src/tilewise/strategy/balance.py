"""Divides the layers of a model among the virtual stages of a pipeline, so that the most expensive
stage costs as little as possible.

A layer costs the floating-point operations of its products. What comes before the first layer
(embeddings) belongs to the first virtual stage, what follows the last layer (norm, head, loss) to
the last one. So a head that costs as much as several layers takes their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from tilewise.core.dims import upper_bound
from tilewise.core.errors import LayoutError
from tilewise.core.validation import Validator
from tilewise.ir.contractions import factors_of
from tilewise.ir.graph import Graph, OpNode
from tilewise.strategy.strategy import PipelineStages

__all__ = ["divide_layers", "flops_of"]

_validate = Validator("pipeline", LayoutError)


def divide_layers(
    graph: Graph, layers: Sequence[OpNode], stages: int, division: PipelineStages
) -> tuple[int, ...]:
    """The number of layers of each virtual stage.

    Args:
        graph: the graph.
        layers: the calls of its layers in the forward pass.
        stages: number of virtual stages.
        division: what a user asks for.

    Raises:
        LayoutError: a user's numbers do not fit the stages or the layers, or there are too few layers.
    """
    wanted, first, last = division.layers, division.first_stage_less_layers, division.last_stage_less_layers
    assert not isinstance(wanted, str)  # `PipelineStages` has read a layout
    if first is not None or last is not None:
        wanted = _fewer_at_ends(len(layers), stages, first or 0, last or 0)
    if wanted is not None:
        if len(wanted) != stages or sum(wanted) != len(layers):
            _validate.invalid(
                "layers",
                f"layers must be divided among {stages} virtual stages, {len(layers)} in total",
                f"{', '.join(map(str, wanted))}: {sum(wanted)} layers in {len(wanted)} stages",
                "correct the numbers, or leave them out",
            )
        return tuple(wanted)
    if len(layers) < stages - 1:
        _validate.invalid(
            "stages",
            "a virtual stage must have a layer; only the last may do without",
            f"{len(layers)} layers of {graph.name!r} for {stages} virtual stages",
            "use fewer stages or chunks",
        )
    costs = [flops_of(graph, [layer]) for layer in layers]
    forward = [op for op in graph.ops if op.phase == "forward"]
    first = layers[0].id if layers else len(graph.ops)
    before = flops_of(graph, (op for op in forward if op.id < first))
    after = flops_of(graph, (op for op in forward if layers and op.id > layers[-1].id))
    return _divide(costs, stages, before, after)


def _fewer_at_ends(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Equal numbers of layers per virtual stage, but fewer in the first and in the last."""
    each, more = divmod(layers + first + last, stages)
    numbers = [each + (stage < more) for stage in range(stages)]
    numbers[0] -= first
    numbers[-1] -= last
    if min(numbers) < 0:
        _validate.invalid(
            "layers",
            f"no virtual stage may have fewer than 0 of {layers} layers",
            f"{', '.join(map(str, numbers))}",
            "take fewer layers from the first or the last",
        )
    return tuple(numbers)


def _divide(costs: Sequence[int], stages: int, before: int, after: int) -> tuple[int, ...]:
    """Runs of layers, of which the most expensive costs least. Of equally good divisions, the one
    whose early stages have fewer layers, because these store more microbatches.
    """
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # per number of layers that the first stages have: the cost of the most expensive, and their numbers
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(stages):
        is_last = stage == stages - 1
        extra = (before if stage == 0 else 0) + (after if is_last else 0)
        left = stages - 1 - stage
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for done, (most, numbers) in best.items():
            ends = [len(costs)] if is_last else range(done + 1, len(costs) - max(left - 1, 0) + 1)
            for end in ends:
                made = max(most, total[end] - total[done] + extra), (*numbers, end - done)
                if end not in following or made < following[end]:
                    following[end] = made
        best = following
    return best[len(costs)][1]


def flops_of(graph: Graph, ops: Iterable[OpNode]) -> int:
    """Floating-point operations of products, with every symbolic size at its bound; an element of
    any other op's result counts as one.
    """
    total = 0
    for op in ops:
        if op.op == "call":
            inside = graph.templates[op.attrs["template"]].graph
            total += flops_of(inside, inside.ops)
            continue
        factors = factors_of(graph, op)
        sizes: dict[str, int] = {}
        tensors = (*op.inputs, *op.outputs)
        for t, dims in zip(tensors, (*factors.inputs, *factors.outputs)):
            if t is not None and dims is not None:
                sizes.update(zip(dims, map(upper_bound, graph.spec(t).shape)))
        selected = {d for p in factors.partial_values if p.combine == "or" for d in p.factors}
        results = {d for dims in factors.outputs for d in dims} | selected
        is_product = len([d for d in factors.inputs if d]) > 1 and any(
            d not in results for dims in factors.inputs for d in dims or ()
        )
        total += 2 * prod(sizes.values()) if is_product else sum(_elements(graph, t) for t in op.outputs)
    return total


def _elements(graph: Graph, tensor: int) -> int:
    return prod(map(upper_bound, graph.spec(tensor).shape))
