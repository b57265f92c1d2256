"""`ModelParts`: a model divided at its layers, so that layers can be defined one after another or
in parallel. A family provides the parts; `build` makes the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewise.core.collector import collector_paused
from tilewise.core.errors import ShapeError
from tilewise.core.validation import Validator
from tilewise.ir.graph import TensorNode, TensorSpec
from tilewise.nn import GraphBuilder, LayerFunction

__all__ = ["STREAM", "LayerUse", "ModelParts"]

STREAM = "stream"
"""What the first layer reads, among the tensors before it; every other layer reads the one before it."""
_validate = Validator("models", ShapeError)

Named = Mapping[str, TensorNode]


@dataclass(frozen=True)
class LayerUse:
    """One layer, which reads the stream and tensors from before all layers.

    Attributes:
        function: the layer function.
        path: its name in the model.
        operands: what it reads besides the stream, by name among the tensors before the layers.
        attrs: its attributes.
    """

    function: LayerFunction
    path: str
    operands: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelParts:
    """A model for one purpose.

    Attributes:
        before: adds inputs and embedding; returns the stream, as `STREAM`, and what layers and head
            read.
        num_layers: number of layers.
        layer: returns the layer with a number; does not change a graph.
        after: adds norm, head and outputs after the last layer.
        caches: returns the KV cache of the layer with a number, by full names; None for models
            without.
    """

    before: Callable[[GraphBuilder], Named]
    num_layers: int
    layer: Callable[[int], LayerUse]
    after: Callable[[GraphBuilder, TensorNode, Named], None]
    caches: Callable[[int], tuple[TensorSpec, ...]] | None = None

    def build(self, graph: GraphBuilder) -> None:
        """Add the model to an empty graph, layer by layer; completely or not at all."""
        with collector_paused(), graph.all_or_nothing():
            named = self.before(graph)
            x = named[STREAM]
            for use in map(self.layer, range(self.num_layers)):
                x = use.function(
                    graph, x, *(named[name] for name in use.operands), path=use.path, **use.attrs
                )
            self.after(graph, x, named)
