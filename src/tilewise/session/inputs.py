"""What a run may be given: every input, of the right shape and kind, with indices that lie in what they name.

Kernels trust their operands; this is the border where values from outside are checked, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewise.core.dims import Dim, Size
from tilewise.core.errors import ShapeError
from tilewise.graph.builder import INV_COUNT
from tilewise.ir.graph import Graph
from tilewise.ir.op import op_named
from tilewise.optim.adamw import HYPER

__all__ = ["Bounds", "check_inputs", "input_bounds", "symbol_values"]

Bounds = list[tuple[int, Size, int | None]]
_OWN = (INV_COUNT, HYPER)  # filled in by the instance itself


def input_bounds(graph: Graph) -> dict[str, Bounds]:
    """Per input by name, the ranges that ops using it as indices ask for, in layers too."""
    found: dict[str, Bounds] = {}

    def walk(inside: Graph, names: Mapping[int | None, str]) -> None:
        for op in inside.ops:
            if op.op == "call":
                template = inside.templates[op.attrs["template"]]
                bound: dict[int | None, str] = {
                    f: names[a] for f, a in zip(template.arguments, op.inputs) if a in names
                }
                if bound:
                    walk(template.graph, bound)
                continue
            asked = getattr(op_named(op.op), "index_bounds", None)
            if asked is not None:
                specs = [None if i is None else inside.spec(i) for i in op.inputs]
                for position, limits in asked(specs, op.attrs).items():
                    tensor = op.inputs[position]
                    if tensor in names and limits not in found.setdefault(names[tensor], []):
                        found[names[tensor]].append(limits)

    walk(graph, {t.id: t.spec.name for t in graph.of_kind("input")})
    return found


def symbol_values(graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[Dim, int]:
    """The symbols' values that the inputs' shapes imply.

    Raises:
        ShapeError: a value outside its bounds, or two values of one symbol.
    """
    values: dict[Dim, int] = {}
    specs = {t.spec.name: t.spec for t in graph.of_kind("input")}
    for name, value in inputs.items():
        for size, given in zip(specs[name].shape if name in specs else (), value.shape):
            if isinstance(size, Dim) and (
                not size.min <= given <= size.max or values.setdefault(size, given) != given
            ):
                raise ShapeError(
                    f"[session.run] {size} must lie in [{size.min}, {size.max}] and be one number; got {given} in "
                    f"{name!r}; split the call"
                )
    return values


def check_inputs(
    graph: Graph, inputs: Mapping[str, np.ndarray], bounds: Mapping[str, Bounds]
) -> dict[Dim, int]:
    """Everything about a run's inputs; returns the symbols' values.

    Raises:
        ShapeError: an input is missing, unknown, of another shape or kind, or holds an index that names nothing.
    """
    specs = {t.spec.name: t.spec for t in graph.of_kind("input") if t.spec.name not in _OWN}
    odd = [*(n for n in specs if n not in inputs), *(n for n in inputs if n not in specs)]
    if odd:
        raise ShapeError(
            f"[session.run] a run takes exactly its inputs; got {', '.join(inputs) or 'none'} with {odd[0]!r} "
            f"missing or unknown; give {', '.join(specs)}"
        )
    values = symbol_values(graph, inputs)
    for name, value in inputs.items():
        spec = specs[name]
        shape = tuple(values[s] if isinstance(s, Dim) else s for s in spec.shape)
        if value.shape != shape:
            raise ShapeError(
                f"[session.run] shapes must agree; got {value.shape} for {name!r} {shape}; reshape it"
            )
        kind = np.integer if spec.dtype.name == "i32" else np.number
        if not np.issubdtype(value.dtype, kind) and value.dtype != spec.dtype.numpy:
            raise ShapeError(
                f"[session.run] {name!r} takes {spec.dtype}; got {value.dtype}; convert it, knowing what is lost"
            )
        for low, high, other in bounds.get(name, []):
            _check_indices(name, value, low, values[high] if isinstance(high, Dim) else high, other)
    return values


def _check_indices(name: str, value: np.ndarray, low: int, high: int, other: int | None) -> None:
    wrong = (value < low) | (value >= high)
    if other is not None:
        wrong &= value != other
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        also = "" if other is None else f" or be {other}"
        raise ShapeError(
            f"[session.run] {name!r} must lie in [{low}, {high}){also}; got {value[at]} at {list(at)}; correct it"
        )
