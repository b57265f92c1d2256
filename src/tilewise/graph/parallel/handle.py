"""`SpecHandle`: what one thread describes layers with. It touches no graph and nothing that another thread has."""

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
    """Gathers the specifications of one item.

    Args:
        kind: what they are counted as: `layer`, `kv_cache`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.specs: list[LayerSpec] = []

    def layer(self, function: LayerFunction, *operands: str, path: str, **attrs: Any) -> str:
        """One use of a layer function; returns its path, which is the name of its result.

        Args:
            function: marked with `tw.layer`.
            operands: names of tensors of the graph, or paths of layers.
            path: the layer's; its parameters are named `path + "." + name`.
            attrs: the function's keyword attributes.

        Raises:
            ShapeError: it is no layer function, or no specification (`ir.LayerSpec`).
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
        """A tensor from outside; returns its name. Where a layer declares one of that name, the two are held together.

        Raises:
            ShapeError: shape, dtype, labels or name are invalid.
        """
        spec = TensorSpec(tuple(shape), dtype_of(dtype), tuple(labels), name, storage=storage)
        self.specs.append(LayerSpec(name, self.kind, tensors=((kind, spec),)))
        return name


Describe = Callable[[SpecHandle, Any], object]
"""Describes one item, such as a layer's number, with a handle; what it returns is not used."""


def describe_item(describe: Describe, kind: str, number: int, item: Any, where: str) -> tuple[LayerSpec, ...]:
    """What one item consists of.

    Raises:
        ShapeError: the function raised; says which, for which item, where, and what was described last.
    """
    handle = SpecHandle(kind)
    try:
        describe(handle, item)
    except Exception as error:
        behind = f", behind {handle.specs[-1].path!r}" if handle.specs else ""
        raise ShapeError(
            f"[graph.parallel] {kind} {number} ({shown(item)}) must be described without an error; got "
            f"{in_words(error)} in {where}{behind}; "
            f"correct {getattr(describe, '__qualname__', 'the function')}"
        ) from error
    return tuple(handle.specs)


def in_words(error: Exception) -> str:
    """An error in a sentence: our own as it is, another's with its type, on one line."""
    return (
        str(error)
        if isinstance(error, TilewiseError)
        else f"{type(error).__name__}: {shown(str(error))[1:-1]}"
    )
