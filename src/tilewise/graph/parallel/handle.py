"""`SpecHandle`: the object with which one thread describes layers. It touches no graph and shares no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewise.core.dims import DimLabel, Size
from tilewise.core.dtypes import DType
from tilewise.core.dtypes import dtype as dtype_of
from tilewise.core.errors import ShapeError, TilewiseError
from tilewise.core.validation import Validator, shown
from tilewise.graph.templates import LayerFunction
from tilewise.ir.graph import TensorSpec
from tilewise.ir.layer_spec import LayerSpec

__all__ = ["Describe", "SpecHandle", "describe_item", "in_words"]

_validate = Validator("graph", ShapeError)


class SpecHandle:
    """Collects the specifications of one item.

    Args:
        kind: the name of such an item in messages, such as `layer` or `kv_cache`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.specs: list[LayerSpec] = []

    def layer(self, function: LayerFunction, *operands: str, path: str, **attrs: Any) -> str:
        """Add a call of a layer function, and return its path, which is also the name of its
        result.

        Args:
            function: marked with `tw.layer`.
            operands: names of tensors of the graph, or paths of layers.
            path: the layer's path; its parameters are named `path + "." + name`.
            attrs: the function's keyword attributes.

        Raises:
            ShapeError: `function` is no layer function, or the specification is invalid (see `ir.LayerSpec`).
        """
        _validate.instance("layer", "the first argument", function, LayerFunction, "mark it with tw.layer")
        self.specs.append(LayerSpec(path, self.kind, operands, function, attrs))
        return path

    def tensor(
        self,
        kind: str,
        shape: Sequence[Size],
        dtype: str | DType,
        *,
        name: str,
        labels: Sequence[DimLabel | None] = (),
        storage: str = "rows",
    ) -> str:
        """Add a tensor from outside (an input, parameter or state), and return its name. If a layer
        declares a tensor of that name, both declarations must match.

        Raises:
            ShapeError: shape, dtype, labels or name are invalid.
        """
        spec = TensorSpec(tuple(shape), dtype_of(dtype), tuple(labels), name, storage=storage)
        self.specs.append(LayerSpec(name, self.kind, tensors=((kind, spec),)))
        return name


Describe = Callable[[SpecHandle, Any], object]
"""Describes one item, such as a layer's number, with a handle; its return value is ignored."""


def describe_item(describe: Describe, kind: str, number: int, item: Any, where: str) -> tuple[LayerSpec, ...]:
    """The specifications of one item.

    Raises:
        ShapeError: `describe` raised. The message names the item, the thread, the last
            specification and the function.
    """
    handle = SpecHandle(kind)
    try:
        describe(handle, item)
    except Exception as error:
        last = f", after {handle.specs[-1].path!r}" if handle.specs else ""
        raise ShapeError(
            f"[graph.parallel] {kind} {number} ({shown(item)}) must be described without an error; got "
            f"{in_words(error)} in {where}{last}; "
            f"correct {getattr(describe, '__qualname__', 'the function')}"
        ) from error
    return tuple(handle.specs)


def in_words(error: Exception) -> str:
    """An error's text on one line. For errors of other libraries, the text begins with the error's
    type.
    """
    return (
        str(error)
        if isinstance(error, TilewiseError)
        else f"{type(error).__name__}: {shown(str(error))[1:-1]}"
    )
