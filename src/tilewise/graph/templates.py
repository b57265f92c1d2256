"""Layer templates: `@layer` marks a function, and all calls of the function with one signature (the
operands' specs and the static attributes) share one template. The first call is traced, fused and
stored. Later calls record only which parameters of the graph, by module path, take the place of the
template's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import update_wrapper
from operator import itemgetter
from typing import Any

from tilewise.core.errors import ShapeError
from tilewise.core.frozen import FrozenMap
from tilewise.core.validation import Validator, shown
from tilewise.graph.adapters import Adapter, adapters_of_layer
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.declarations import is_dropout_key
from tilewise.graph.draft import Declared, DraftedLayer, GraphDraft
from tilewise.graph.passes import simplify
from tilewise.ir.counts import counts
from tilewise.ir.graph import Template, TensorNode, TensorSpec

__all__ = ["LayerFunction", "call_outlined", "layer", "trace_layer"]

_validate = Validator("graph", ShapeError)


class LayerFunction:
    """A layer function, whose calls become `call` ops on a shared template.

    The function takes a `GraphBuilder`, tensors, and keyword attributes that can be compared. It
    declares its parameters and states with names relative to the call's `path`, and returns one
    tensor.
    """

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[..., TensorNode]) -> None:
        self.function = function
        update_wrapper(self, function)

    def __call__(self, graph: GraphBuilder, *operands: TensorNode, path: str, **static: Any) -> TensorNode:
        """Record one use of the layer. Its parameters are named `path + "." + name`.

        Raises:
            ShapeError: an operand belongs to another graph, a name is taken, an attribute is not
                comparable, or the function does not return a tensor of its graph. Then nothing is
                recorded.
        """
        _validate.text("layer", "the path of a layer", path)
        for operand in operands:
            graph.draft.own("layer", operand)
        with graph.all_or_nothing():
            drafted = self.drafted(graph, [operand.spec for operand in operands], static, path)
            return _record_call(graph, drafted, operands, path)

    def drafted(
        self, graph: GraphBuilder, operands: Sequence[TensorSpec], static: Mapping[str, Any], path: str
    ) -> DraftedLayer:
        """The graph's template for operands with these specs, these attributes, and weights with the
        formats and adapters of the layer at `path`. If the graph has none, it is traced.

        Raises:
            ShapeError: an attribute is not comparable, or the function cannot be traced.
        """
        draft = graph.draft
        formats = _formats_of_layer(graph.formats, path)
        adapters = adapters_of_layer(graph.adapters, path)
        settings = tuple(formats.items()), tuple(adapters.items())  # quantized_matmul is that of the graph
        signature = self, _forms(draft, operands), _numbers(draft, static), settings
        drafted = draft.layers.get(signature)
        if drafted is None:
            products = formats, graph.quantized_matmul
            template = trace_layer(self, operands, static, graph.k_splits, *products, adapters)
            declared = tuple(_declared(template, len(operands)))
            name = f"{self.function.__module__}.{self.__name__}"
            drafted = draft.new_layer(signature, name, template, declared)
        return drafted

    def __reduce__(self) -> str:
        """Pickles the function by its module and name."""
        return self.__qualname__


def trace_layer(
    layer: LayerFunction,
    operands: Sequence[TensorSpec],
    attributes: Mapping[str, Any],
    k_splits: int,
    formats: Mapping[str, str] | None = None,
    quantized_matmul: str = "exact",
    adapters: Mapping[str, Adapter] | None = None,
) -> Template:
    """Trace a layer's function on operands with these specs. The template depends on nothing but
    the arguments. Each graph that uses the template gives it its own key.

    Raises:
        ShapeError: the function declares an input or an output, or does not return a tensor of its
            graph.
    """
    counts.traced += 1
    inner = GraphBuilder(
        layer.__name__,
        k_splits=k_splits,
        formats=formats,
        quantized_matmul=quantized_matmul,
        adapters=adapters,
    )
    formal = [inner.draft.declare("input", s.renamed(f"operand{i}")) for i, s in enumerate(operands)]
    result = inner.draft.own("layer", layer.function(inner, *formal, **attributes))
    inputs = [t.spec.name for t in inner.draft.tensors if t.kind == "input"][len(formal) :]
    own = [name for name in inputs if not is_dropout_key(name)]
    if own:
        _validate.invalid(
            "layer",
            "a layer must take its inputs as operands",
            f"an input {own[0]!r} of its own",
            "pass it in",
        )
    if inner.draft.outputs:
        _validate.invalid(
            "layer",
            "a layer must not declare outputs or a loss",
            f"an output {next(iter(inner.draft.outputs))!r} of its own",
            "declare it in the graph, on the layer's result",
        )
    inner.output(result, "result")
    frozen = simplify(inner.freeze())
    outside = [
        t.id
        for t in frozen.tensors
        if t.kind in ("parameter", "state", "constant") or (t.kind == "input" and is_dropout_key(t.spec.name))
    ]
    return Template(layer.__name__, frozen, (*(t.id for t in formal), *outside), (result.id,))


def _formats_of_layer(formats: Mapping[str, str], path: str) -> dict[str, str]:
    """Formats of the weights of a layer, by their names in it."""
    start = f"{path}."
    return {name.removeprefix(start): formats[name] for name in sorted(formats) if name.startswith(start)}


def _forms(draft: GraphDraft, operands: Iterable[TensorSpec | None]) -> tuple[int, ...]:
    """The operands' specs without names, as numbers."""
    return tuple(-1 if spec is None else draft.values.number(spec.form) for spec in operands)


def _numbers(draft: GraphDraft, attributes: Mapping[str, Any]) -> tuple[object, ...]:
    """Attributes, as numbers."""
    numbers = []
    for name, value in sorted(attributes.items(), key=itemgetter(0)):
        try:
            numbers.append((name, draft.values.number(value)))
        except TypeError:
            _validate.invalid(
                "layer", f"attribute {name!r} must be comparable as a whole", shown(value), "pass a tuple"
            )
    return tuple(numbers)


def _record_call(
    graph: GraphBuilder, layer: DraftedLayer, operands: tuple[TensorNode, ...], path: str
) -> TensorNode:
    draft = graph.draft
    template = draft.templates[layer.key]
    arguments = [t.id for t in operands]
    for kind, family, formal, is_frozen in layer.declared:
        if family is not None:
            arguments.append(draft.declare_renamed(kind, family.member(path)).id)
            if is_frozen:
                draft.freeze_parameter(arguments[-1])
            continue
        # all calls share a constant, so it belongs to the calling graph
        name = f"{template.graph.name}{layer.number}.{template.graph.spec(formal).name}"
        bound = (
            graph.find(name)
            if graph.has(name)
            else graph.constant(
                template.graph.constant_values[formal],
                name=name,
                labels=template.graph.spec(formal).labels,
                storage=template.graph.spec(formal).storage,
            )
        )
        arguments.append(bound.id)
    specs = [template.graph.spec(r) for r in template.results]
    (out,) = draft.append("call", tuple(arguments), specs, layer.attrs, label=path)
    return draft.tensors[out]


def _declared(template: Template, num_operands: int) -> Iterator[Declared]:
    """What every use of a layer declares, after its operands."""
    frozen = {*template.graph.frozen}
    for i in template.arguments[num_operands:]:
        t = template.graph.tensors[i]
        family = None if t.kind == "constant" else t.spec.named("", f".{t.spec.name}")
        yield t.kind, family, i, i in frozen


def call_outlined(
    graph: GraphBuilder, op: str, operands: Sequence[TensorNode | None], attrs: Mapping[str, Any], label: str
) -> Mapping[str, Any]:
    """Append an op without outputs as a call of a template. Equal ops on operands of equal specs
    share the template, so that it is laid out and lowered once. Returns the attributes that all
    these calls share.
    """
    draft = graph.draft
    kinds = tuple(None if t is None else t.kind for t in operands)
    specs = [None if t is None else t.spec for t in operands]
    key = op, kinds, _forms(draft, specs), _numbers(draft, attrs)
    call = draft.outlined.get(key)
    if call is None:
        inner = GraphBuilder(op, k_splits=graph.k_splits)
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
        while name in draft.templates:  # a loaded graph may already have the name
            number += 1
            name = f"{op}#{number}"
        arguments = tuple(t.id for t in formal if t is not None)
        draft.templates[name] = Template(name, inner.freeze(), arguments, ())
        call = draft.outlined[key] = FrozenMap({"template": name, "saved": ()})
    draft.append("call", tuple(t.id for t in operands if t is not None), [], call, label=label)
    return call


def layer(function: Callable[..., TensorNode]) -> LayerFunction:
    """Decorator that makes `function(graph, *tensors, **attributes) -> tensor` a layer template.

    Raises:
        ShapeError: `function` is not a function.
    """
    if not hasattr(function, "__name__") or not callable(function):
        _validate.invalid(
            "layer", "a layer must be a function of a graph", shown(function), "pass one that has a name"
        )
    return LayerFunction(function)
