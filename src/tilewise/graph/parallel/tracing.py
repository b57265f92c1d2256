"""`TemplateTable`: the templates that a list of layers needs, each traced once.

A template is the structure of a layer. It depends on the layer's signature: its function, the forms
of its operands and its attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tilewise.core.errors import ShapeError
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.templates import LayerFunction, trace_layer
from tilewise.ir.graph import Template, TensorNode, TensorSpec
from tilewise.ir.layer_spec import LayerSpec

__all__ = ["TemplateTable"]

_Key = tuple[object, ...]


class TemplateTable:
    """Templates by signature.

    Args:
        graph: the graph that the layers will be written into. It is only read here.
        layers: all layers, in order.
        named: further tensors that layers read, by name.
    """

    def __init__(
        self, graph: GraphBuilder, layers: Sequence[LayerSpec], named: Mapping[str, TensorSpec]
    ) -> None:
        self._graph = graph
        self._layers = layers
        self._named = named
        self._templates: dict[_Key, Template | None] = {}  # None: tracing raised, and will again in `record`

    def record(self, graph: GraphBuilder, spec: LayerSpec, operands: tuple[TensorNode, ...]) -> TensorNode:
        """Write a layer's call into the graph, with the template of its signature if that has been
        traced.
        """
        function = spec.function
        assert isinstance(function, LayerFunction)
        key = self._key(spec, tuple(t.spec for t in operands))
        return function.record(
            graph, operands, spec.path, spec.attrs, None if key is None else self._templates.get(key)
        )

    def declared_names(self, wanted: Collection[str]) -> set[str]:
        """Those of the wanted names that layers will declare, as far as the templates of the layers
        can be traced.
        """
        if not wanted:
            return set()
        declared: set[str] = set()
        specs: dict[str, TensorSpec] = {}
        for layer in self._layers:
            operands = self._operands(layer, specs)
            key = None if operands is None else self._key(layer, operands)
            template = None if key is None else self._templates.get(key)
            if (
                operands is not None
                and key not in self._templates
                and isinstance(layer.function, LayerFunction)
            ):
                template = _trace(layer.function, operands, layer.attrs, self._graph.k_splits)
                if key is not None:
                    self._templates[key] = template
            if template is None:
                continue
            specs[layer.path] = template.graph.spec(template.results[0])
            formal = (template.graph.tensors[i] for i in template.arguments[len(layer.operands) :])
            declared.update(f"{layer.path}.{t.spec.name}" for t in formal if t.kind in ("parameter", "state"))
        return declared & set(wanted)

    def _operands(self, layer: LayerSpec, specs: Mapping[str, TensorSpec]) -> tuple[TensorSpec, ...] | None:
        """The specs of the layer's operands; None if an operand has no spec yet."""
        operands = []
        for name in layer.operands:
            if name in specs:
                operands.append(specs[name])
            elif name in self._named:
                operands.append(self._named[name])
            elif self._graph.has(name):
                operands.append(self._graph.find(name).spec)
            else:
                return None
        return tuple(operands)

    def _key(self, layer: LayerSpec, operands: tuple[TensorSpec, ...]) -> _Key | None:
        """The layer's signature; None if it is invalid, which `record` reports."""
        assert isinstance(layer.function, LayerFunction)
        try:
            return layer.function.signature(self._graph.draft, operands, layer.attrs)
        except ShapeError:
            return None


def _trace(
    function: LayerFunction, operands: tuple[TensorSpec, ...], attrs: Mapping[str, Any], k_splits: int
) -> Template | None:
    """A template, or None if the function raised. The error is raised again when the layer is
    written into the graph.
    """
    with suppress(Exception):
        return trace_layer(function, operands, attrs, k_splits)
    return None
