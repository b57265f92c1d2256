"""Layers of a model as data, before there is a graph: `LayerSpec`, and `SpecHandle`, with which one
thread describes layers. Neither touches a graph or shares data. Checks that need a graph (whether
operands exist and names are free) run when a graph is assembled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.core.dims import DimLabel, Size
from tilewise.core.dtypes import DType
from tilewise.core.dtypes import dtype as dtype_of
from tilewise.core.errors import ShapeError, TilewiseError
from tilewise.core.validation import Validator, shown
from tilewise.graph.templates import LayerFunction
from tilewise.ir.graph import TensorSpec

__all__ = ["Describe", "LayerSpec", "SpecHandle", "describe_item", "in_words"]

DECLARED = ("input", "parameter", "state")
_validate = Validator("graph", ShapeError)


@dataclass(frozen=True)
class LayerSpec:
    """One layer, or tensors outside of layers. It may be created in any thread or process.

    Attributes:
        path: name in the model, such as `layers.17`. Other layers read its result by this name, and
            the names of its parameters begin with it.
        kind: what progress reports call it: `layer` or `kv_cache`, for example.
        operands: names of what the layer reads, in order: tensors of the graph, or paths of earlier
            layers.
        function: the layer function (`tw.layer`); None if only tensors are declared.
        attrs: the attributes that the function is called with.
        tensors: declarations `(kind, spec)` with kind `input`, `parameter` or `state`. They may be
            omitted for a layer, whose function declares them.

    Raises:
        ShapeError: the path is no name, operands are not a sequence, a kind is unknown, or there is
            neither a function nor a tensor.
    """

    path: str
    kind: str = "layer"
    operands: tuple[str, ...] = ()
    function: LayerFunction | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[tuple[str, TensorSpec], ...] = ()

    def __post_init__(self) -> None:
        _validate.text("LayerSpec", "a path", self.path)
        operands = tuple(_validate.sequence("LayerSpec", "operands", self.operands, "names"))
        object.__setattr__(self, "operands", operands)
        object.__setattr__(self, "attrs", dict(self.attrs))
        for kind, _ in self.tensors:
            _validate.choice("LayerSpec", f"the kind of a tensor of {self.path!r}", kind, DECLARED)
        if self.function is None and (not self.tensors or operands or self.attrs):
            _validate.invalid(
                "LayerSpec",
                f"{self.path!r} without a function must declare tensors, and nothing else",
                "no tensors, operands or attributes",
                "give it a function or tensors",
            )


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
            ShapeError: `function` is no layer function, or the specification is invalid (see `LayerSpec`).
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
        spec = TensorSpec(shape, dtype_of(dtype), labels, name, storage=storage)
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
