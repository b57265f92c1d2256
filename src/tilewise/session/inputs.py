"""Checks values from outside before a tensor is written: shape, kind of numbers, and indices within
range.

Kernels do not check their operands, so wrong values must be rejected here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.dims import Dim, Size, upper_bound
from tilewise.core.dtypes import DTYPES, DType, is_float
from tilewise.core.errors import ShapeError, TilewiseError
from tilewise.core.validation import Validator, shown
from tilewise.graph.declarations import INV_COUNT, POSITIONS, is_own_name
from tilewise.graph.ops.loss import CrossEntropy
from tilewise.ir.graph import Graph, TensorSpec
from tilewise.ir.op import bind
from tilewise.kernels.dlpack import array_of, has_dlpack
from tilewise.optim.optimizer import is_hyper

__all__ = [
    "Bounds",
    "as_array",
    "check_constants",
    "check_inputs",
    "check_value",
    "counted_labels",
    "index_bounds",
    "inputs_of",
    "is_finite",
    "is_own_input",
]

Bounds = list[tuple[int, Size, Size | None]]
Symbols = Mapping[Dim, int]
_validate = Validator("session", ShapeError)


def index_bounds(graph: Graph) -> dict[str, Bounds]:
    """Per input, state or constant by name, the ranges that ops require of its indices, in layers too."""
    bounds_by_template: dict[str, dict[int, Bounds]] = {}  # by template
    bounds_by_tensor = _indices_of(graph, bounds_by_template)
    bounds_by_name: dict[str, Bounds] = {}
    for t in graph.tensors:
        if t.id in bounds_by_tensor and t.kind != "result":
            bounds_by_name.setdefault(t.spec.name, []).extend(bounds_by_tensor[t.id])
    return bounds_by_name


def _indices_of(graph: Graph, bounds_by_template: dict[str, dict[int, Bounds]]) -> dict[int, Bounds]:
    """The ranges that ops require of tensors that they use as indices, by tensor; each template once."""
    bounds_by_tensor: dict[int, Bounds] = {}

    def add(tensor: int | None, bounds: Bounds) -> None:
        if tensor is not None:
            own = bounds_by_tensor.setdefault(tensor, [])
            own += [b for b in bounds if b not in own]

    for op in reversed(graph.ops):  # the readers of a result come before its producer
        if op.op == "call":
            template = graph.templates[op.attrs["template"]]
            if template.key not in bounds_by_template:
                inside = _indices_of(template.graph, bounds_by_template)
                bounds_by_template[template.key] = {
                    position: inside[a] for position, a in enumerate(template.arguments) if a in inside
                }
            for position, bounds in bounds_by_template[template.key].items():
                add(op.inputs[position], bounds)
            continue
        bound = bind(op)
        for name, limits in bound.index_bounds(graph.spec).items():
            add(getattr(bound, name), [limits])
        for output, source in bound.declared.passes_indices:
            if op.outputs[output] in bounds_by_tensor:
                add(op.inputs[source], bounds_by_tensor.pop(op.outputs[output]))
    for tensor in bounds_by_tensor:
        if graph.tensors[tensor].kind == "result":
            raise ShapeError(
                f"[session.run] an index must be an input or a constant, or gathered from one where it is used; got "
                f"the result of a layer {graph.spec(tensor)}; gather it where it is used"
            )
    return bounds_by_tensor


def counted_labels(graph: Graph) -> tuple[str, int] | None:
    """The input with the labels that the loss counts, and the label value that it ignores; None
    without such a loss.
    """
    for op in graph.ops:
        loss = bind(op) if op.op == CrossEntropy.name else None
        if isinstance(loss, CrossEntropy) and graph.spec(loss.inv_count).name == INV_COUNT:
            return graph.spec(loss.labels).name, loss.ignore_index
    return None


def check_constants(graph: Graph) -> None:
    """Check that constants used as indices are in range.

    Raises:
        ShapeError: one is not.
    """
    bounds = index_bounds(graph)
    named = {graph.spec(tensor).name: value for tensor, value in graph.constant_values.items()}
    own = next((t for t in graph.of_kind("input") if t.spec.name == POSITIONS), None)
    if own is not None:
        named[POSITIONS] = np.arange(upper_bound(own.shape[-1]), dtype=np.int32)
    for name, value in named.items():
        for low, high, other in bounds.get(name, []):
            _check_indices(
                "constant", name, value, low, _smallest(high), None if other is None else _smallest(other)
            )


def _smallest(size: Size) -> int:
    return size.min if isinstance(size, Dim) else size


def inputs_of(graph: Graph) -> dict[str, TensorSpec]:
    """The inputs that a caller gives for a run, by name."""
    return {t.spec.name: t.spec for t in graph.of_kind("input") if not is_own_input(t.spec.name)}


def check_inputs(
    specs: Mapping[str, TensorSpec], inputs: Mapping[str, object], bounds: Mapping[str, Bounds]
) -> tuple[dict[str, NDArray[np.generic]], dict[Dim, int]]:
    """Check a run's inputs; returns them as arrays, and the symbols' values.

    Raises:
        ShapeError: an input is missing, unknown, of another shape or kind, or has an index out of
            range.
    """
    odd = [*(n for n in specs if n not in inputs), *(n for n in inputs if n not in specs)]
    if odd:
        wrong = "missing" if odd[0] in specs else "unknown"
        raise ShapeError(
            f"[session.run] a run needs exactly its inputs; got {', '.join(inputs) or 'none'} with {odd[0]!r} "
            f"{wrong}; pass {', '.join(specs)}"
        )
    arrays = {name: as_array("run", name, value) for name, value in inputs.items()}
    values = _symbol_values(specs, arrays)
    for name, value in arrays.items():
        check_value("run", specs[name], value, bounds.get(name, []), values)
    return arrays, values


def is_own_input(name: str) -> bool:
    """Whether the instance computes an input itself."""
    return is_own_name(name) or is_hyper(name)


def as_array(call: str, name: str, value: object) -> NDArray[np.generic]:
    """Anything that NumPy accepts as an array, without masked elements; arrays of other libraries by
    DLPack, without a copy.
    """
    _validate.without_mask(call, repr(name), value, *(value if isinstance(value, list | tuple) else ()))
    try:
        return array_of(value) if has_dlpack(value) else np.asarray(value)
    except TilewiseError:  # a tensor of a file that cannot be read
        raise
    except (BufferError, TypeError, ValueError, RuntimeError):  # unequal lengths, or a tensor with a gradient
        advice = "pass numpy.asarray of it, or tensor.detach() of a tensor"
        _validate.invalid(call, f"{name!r} must be an array", shown(value), advice)


def _symbol_values(
    specs: Mapping[str, TensorSpec], arrays: Mapping[str, NDArray[np.generic]]
) -> dict[Dim, int]:
    """The symbols' values that follow from the inputs' shapes."""
    values: dict[Dim, int] = {}
    for name, value in arrays.items():
        for size, length in zip(specs[name].shape, value.shape):
            if isinstance(size, Dim) and (
                not size.min <= length <= size.max or values.setdefault(size, length) != length
            ):
                raise ShapeError(
                    f"[session.run] {size} must lie in [{size.min}, {size.max}] and be one number; got {length} in "
                    f"{name!r}; split the call, or pass inputs of one size"
                )
    return values


def check_value(
    call: str, spec: TensorSpec, value: NDArray[np.generic], bounds: Bounds, symbols: Symbols
) -> None:
    """Check a value for an input, parameter, state or constant.

    Raises:
        ShapeError: it has another shape or kind, does not fit the dtype, or has an index out of
            range.
    """
    name = spec.name
    shape = tuple(symbols[s] if isinstance(s, Dim) else s for s in spec.shape)
    if value.shape != shape:
        _validate.invalid(call, "shapes must agree", f"{value.shape} for {name!r} {shape}", "reshape it")
    if not _is_kind(value.dtype, spec.dtype):
        what = shown(value) if value.dtype.hasobject else str(value.dtype)
        _validate.invalid(call, f"{name!r} must be {spec.dtype}", what, "convert it")
    if spec.dtype.name == "i32" and value.dtype != np.int32:
        limits = np.iinfo(np.int32)
        _check_indices(call, name, value, int(limits.min), int(limits.max) + 1, None)
    elif (
        spec.dtype.name != "i32"
        and value.size
        and not is_finite(value, spec.dtype)
        and is_finite(value, None)
    ):
        _validate.invalid(
            call, f"{name!r} must fit {spec.dtype}", "numbers beyond its range", "scale them down"
        )
    for low, high, other in bounds:
        also = None if other is None else _value_of(other, symbols)
        _check_indices(call, name, value, low, _value_of(high, symbols), also)


def _value_of(size: Size, symbols: Symbols) -> int:
    return symbols[size] if isinstance(size, Dim) else size


def _is_kind(dtype: np.dtype[np.generic], wanted: DType) -> bool:
    """Integers for i32; real numbers for everything else."""
    if wanted.name == "i32":
        return dtype.kind in "iu"
    return dtype.kind in "iu" or is_float(dtype)


def is_finite(value: NDArray[np.generic], target: DType | None) -> bool:
    """Whether all numbers are finite, also after conversion to the target type."""
    if value.dtype.kind in "iu":
        return True
    with np.errstate(over="ignore"):
        stored = value if target is None or value.dtype == target.numpy else value.astype(target.numpy)
    if stored.dtype == DTYPES["bf16"].numpy:
        return not bool(((stored.view(np.uint16) & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(stored).all())


def _check_indices(call: str, name: str, value: NDArray[Any], low: int, high: int, other: int | None) -> None:
    if not value.size or (low <= value.min() and value.max() < high):  # the usual case, tested quickly
        return
    wrong = (value < low) | (value >= high)
    if other is not None:
        wrong &= value != other
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        ranged = f"[{low}, {high}]" if other == high else f"[{low}, {high})"
        also = "" if other in (None, high) else f" or be {other}"
        raise ShapeError(
            f"[session.{call}] {name!r} must lie in {ranged}{also}; got {value[at]} at {list(at)}; correct it"
        )
