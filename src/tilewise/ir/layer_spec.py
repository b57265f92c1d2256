"""`LayerSpec`: one layer of a model as data, before there is a graph: its name, operands and
declarations.

It may be created in any thread or process. It is checked when it is created. Checks that need a
graph (whether operands exist and names are free) run when a graph is assembled from the
specifications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator, shown
from tilewise.ir.graph import TensorSpec

__all__ = ["LayerSpec"]

DECLARED = ("input", "parameter", "state")
_validate = Validator("ir", ShapeError)


@dataclass(frozen=True)
class LayerSpec:
    """One layer, or tensors outside of layers.

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
        ShapeError: a value has the wrong type, a name appears twice, or there is neither a function
            nor a tensor.
    """

    path: str
    kind: str = "layer"
    operands: tuple[str, ...] = ()
    function: object | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[tuple[str, TensorSpec], ...] = ()

    def __post_init__(self) -> None:
        call = "LayerSpec"
        _validate.text(call, "a path", self.path)
        _validate.text(call, "a kind", self.kind)
        operands = tuple(_validate.sequence(call, "operands", self.operands, "names"))
        for name in operands:
            _validate.text(call, f"an operand of {self.path!r}", name)
        object.__setattr__(self, "operands", operands)
        attrs = dict(_validate.mapping(call, "attributes", self.attrs, "values by name"))
        for name in attrs:
            _validate.text(call, f"the name of an attribute of {self.path!r}", name)
        object.__setattr__(self, "attrs", attrs)
        tensors = tuple(_validate.sequence(call, "tensors", self.tensors, "(kind, TensorSpec)"))
        names: set[str] = set()
        for pair in tensors:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], TensorSpec):
                _validate.invalid(
                    call, f"a tensor of {self.path!r} must be (kind, TensorSpec)", shown(pair), "pair them"
                )
            _validate.choice(call, f"the kind of a tensor of {self.path!r}", pair[0], DECLARED)
            _validate.text(call, f"the name of a tensor of {self.path!r}", pair[1].name)
            if pair[1].name in names:
                _validate.invalid(
                    call, f"names in {self.path!r} must be unique", f"{pair[1].name!r} twice", "rename one"
                )
            names.add(pair[1].name)
        object.__setattr__(self, "tensors", tensors)
        if self.function is None and not tensors:
            _validate.invalid(
                call,
                f"{self.path!r} must be a layer or declare tensors",
                "neither",
                "give it a function or tensors",
            )
        if self.function is None and (operands or attrs):
            _validate.invalid(
                call,
                f"{self.path!r} without a function may only declare tensors",
                "operands or attributes",
                "drop them",
            )
