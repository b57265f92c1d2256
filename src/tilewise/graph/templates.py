"""Layers declared once: `@layer` marks a function of the graph; calls with one signature share one template.

The first call with a signature (specs of the operands, static attributes) is traced, fused and kept; every later call
records bindings only: which parameters of the calling graph stand for the template's, by module path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewise.core.border import Border, shown
from tilewise.core.errors import ShapeError
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.passes import simplify
from tilewise.ir.counts import counts
from tilewise.ir.graph import Template, TensorNode

__all__ = ["LayerFunction", "call_outlined", "layer"]

_border = Border("graph", ShapeError)


class LayerFunction:
    """A function of a graph whose calls become `call` ops on a shared template.

    The function takes a `GraphBuilder`, tensors, and comparable keyword attributes; it declares its parameters and
    states with names relative to the call's `path` and returns one tensor.
    """

    def __init__(self, function: Callable[..., TensorNode]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __call__(self, graph: GraphBuilder, *operands: TensorNode, path: str, **static: Any) -> TensorNode:
        """Record one use of the layer; its parameters are named `path + "." + name`.

        Raises:
            ShapeError: an operand belongs to another graph, a name is taken, an attribute is not comparable, or the
                function returns no tensor of its graph; nothing is recorded then.
        """
        _border.instance("layer", "the first argument", graph, GraphBuilder, "pass the graph")
        _border.text("layer", "the path of a layer", path)
        for t in operands:
            graph.draft.own("layer", t)
        with graph.all_or_nothing():
            key = self._name(graph, operands, static)
            if key not in graph.draft.templates:
                graph.draft.layers[key] = self, _signature(operands), static
                graph.draft.templates[key] = self._trace(graph, key, operands, static)
            return _record_call(graph, graph.draft.templates[key], operands, path)

    def _name(self, graph: GraphBuilder, operands: tuple[TensorNode, ...], static: dict[str, Any]) -> str:
        """The function's own name; in one graph, every further signature gets a number behind it, in order of first
        use, and so does another function of that name."""
        for name, value in static.items():
            if not _is_equal(value, value):
                _border.refuse(
                    "layer", f"attribute {name!r} must be comparable as a whole", shown(value), "pass a tuple"
                )
        wanted = _signature(operands)
        base = key = f"{self.function.__module__}.{self.__name__}"
        number = 1
        while key in graph.draft.templates:  # those of a loaded graph are no function's
            function, signature, attributes = graph.draft.layers.get(key, (None, (), {}))
            if function is self and signature == wanted and _is_equal(attributes, static):
                break
            number += 1
            key = f"{base}#{number}"
        return key

    def _trace(
        self, graph: GraphBuilder, key: str, operands: tuple[TensorNode, ...], static: dict[str, Any]
    ) -> Template:
        counts.traced += 1
        inner = GraphBuilder(self.__name__, reduction_chunks=graph.reduction_chunks)
        formal = []
        for i, t in enumerate(operands):
            formal.append(inner.draft.declare("input", t.spec.renamed(f"operand{i}")))
        result = inner.draft.own("layer", self.function(inner, *formal, **static))
        own = [t.spec.name for t in inner.draft.tensors if t.kind == "input"][len(formal) :]
        if own:
            _border.refuse(
                "layer",
                "a layer takes its inputs as operands",
                f"an input {own[0]!r} of its own",
                "pass it in",
            )
        inner.output(result, "result")
        frozen = simplify(inner.freeze())
        outside = [t.id for t in frozen.tensors if t.kind in ("parameter", "state", "constant")]
        return Template(key, frozen, (*(t.id for t in formal), *outside), (result.id,))


def _signature(operands: Sequence[TensorNode]) -> tuple[object, ...]:
    """What a template's trace depends on, of its operands."""
    return tuple(t.spec.form for t in operands)


def _is_equal(a: object, b: object) -> bool:
    """Whether two attributes are the same; False for what cannot be compared as a whole, as arrays cannot."""
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return False


def _record_call(
    graph: GraphBuilder, template: Template, operands: tuple[TensorNode, ...], path: str
) -> TensorNode:
    arguments = [t.id for t in operands]
    for formal in template.arguments[len(operands) :]:
        node = template.graph.tensors[formal]
        if node.kind == "constant":  # what does not change between layers is the calling graph's
            name = f"{template.graph.name}{list(graph.draft.templates).index(template.key)}.{node.spec.name}"
            bound = (
                graph.find(name)
                if graph.has(name)
                else graph.constant(template.graph.constant_values[formal], name=name)
            )
        else:
            bound = graph.draft.declare(node.kind, node.spec.renamed(f"{path}.{node.spec.name}"))
        arguments.append(bound.id)
    specs = [template.graph.spec(r) for r in template.results]
    (out,) = graph.draft.append(
        "call", tuple(arguments), specs, {"template": template.key, "saved": ()}, label=path
    )
    return graph.draft.tensors[out]


def call_outlined(
    graph: GraphBuilder, op: str, operands: Sequence[TensorNode | None], attrs: Mapping[str, Any], label: str
) -> None:
    """Append an op without outputs as the call of a template, which equal ops on operands of equal specs share: it is
    laid out and lowered once."""
    draft = graph.draft
    given = [t for t in operands if t is not None]
    kinds = tuple(None if t is None else t.kind for t in operands)
    key = (op, kinds, _signature(given), tuple(sorted(attrs.items())))
    if key not in draft.outlined:
        inner = GraphBuilder(op, reduction_chunks=graph.reduction_chunks)
        inner.draft.phase = draft.phase
        formal = [
            None
            if t is None
            else inner.draft.declare(
                t.kind if t.kind in ("parameter", "state") else "input", t.spec.renamed(f"operand{i}")
            )
            for i, t in enumerate(operands)
        ]
        inner.op(op, formal, **attrs)
        name, number = op, len(draft.outlined)
        while name in draft.templates:
            number += 1
            name = f"{op}#{number}"
        draft.outlined[key] = name
        draft.templates[name] = Template(
            name, inner.freeze(), tuple(t.id for t in formal if t is not None), ()
        )
    template = {"template": draft.outlined[key], "saved": ()}
    draft.append("call", tuple(t.id for t in given), [], template, label=label)


def layer(function: Callable[..., TensorNode]) -> LayerFunction:
    """Mark `function(graph, *tensors, **attributes) -> tensor` as a layer template.

    Raises:
        ShapeError: it is no function.
    """
    if not hasattr(function, "__name__") or not callable(function):
        _border.refuse(
            "layer", "a layer is a function of a graph", shown(function), "pass one that has a name"
        )
    return LayerFunction(function)
