"""Checks of a graph definition from a file: a graph builder must be able to produce the same
definition.

`ir.file` has checked the types of single fields, and that each number refers to an existing row.
This module declares every tensor from outside again on a builder, infers the results of every op
again, and checks every call against its layer. Everything must equal what the file says. Every
failure is reported in one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewise.core.dims import Dim
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import TilewiseError
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable
from tilewise.graph.builder import INV_COUNT, POSITIONS, SEED, GraphBuilder
from tilewise.graph.file.content import Definition
from tilewise.ir.file import require, require_graph
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode, TensorSpec
from tilewise.ir.hints import as_tensor_layout
from tilewise.ir.op import results_of_call
from tilewise.ir.validate import validate_graph

__all__ = ["require_definition"]

_OWN = (INV_COUNT, POSITIONS, SEED)


def require_definition(definition: Definition) -> None:
    """Reject a definition that no calls of a builder produce.

    Raises:
        Unreadable: says what is wrong.
    """
    graph, loss = definition
    try:
        require_graph(graph)
        _require_phase(graph)
        _require_tensors(graph, is_layer=False)
        for template in _templates_in(graph):
            _require_phase(template.graph)
            _require_tensors(template.graph, is_layer=True)
            _require_interface(template)
        for of in (graph, *(t.graph for t in _templates_in(graph))):
            for op in of.ops:
                _require_op(of, op)
        validate_graph(graph)
        _require_ends(graph, loss)
    except Unreadable:
        raise
    except TilewiseError as error:
        words = str(error).rpartition(";")[0] or str(error)
        raise Unreadable(f"it breaks a rule: {' '.join(words.split())}") from None
    except Exception as error:  # a file may break what builders guarantee
        raise Unreadable(f"its tables do not fit each other: {type(error).__name__} {shown(error)}") from None


def _templates_in(graph: Graph) -> Iterator[Template]:
    """All templates of a graph, each once, including those of layers within layers."""
    seen: set[int] = set()
    ahead = list(graph.templates.values())
    while ahead:
        template = ahead.pop()
        if id(template) not in seen:
            seen.add(id(template))
            yield template
            ahead += template.graph.templates.values()


# ---- tensors --------------------------------------------------------------------------------------------------------


def _require_tensors(graph: Graph, is_layer: bool) -> None:
    """Check that a builder accepts the inputs, parameters, states, constants and hints, and that
    every result has a producer.
    """
    maker = GraphBuilder(graph.name, k_splits=graph.k_splits)
    checked_forms: set[object] = set()
    for node in graph.tensors:
        if node.kind == "result":
            require(
                is_layer or node.producer is not None,  # fusing leaves unused results in layers
                "result {} of {!r} comes from no op",
                node.id,
                graph.name,
            )
            continue
        spec = node.spec if node.spec.tile_hint is None else replace(node.spec, tile_hint=None)
        form = node.kind, spec.form, spec.init, spec.init_scale
        if form in checked_forms and node.kind != "constant" and spec.name not in _OWN:
            maker.draft.declare(node.kind, spec)  # everything but its name was checked
            continue
        checked_forms.add(form)
        made = _declare(maker, graph, node, spec, is_layer)
        require(
            made.spec == spec,
            "{} {!r} differs from its declaration {}",
            node.kind,
            spec.name,
            str(made.spec),
        )
    for tensor, hint in graph.hints.items():
        rank = len(graph.tensors[tensor].shape)
        same = as_tensor_layout("load", hint, rank, f"tensor {tensor}") == hint
        require(same, "the layout of tensor {} is invalid: {}", tensor, hint)
    num_made = sum(len(op.outputs) for op in graph.ops)
    num_results = sum(t.producer is not None for t in graph.tensors)
    require(num_made == num_results, "ops of {!r} make {} tensors of {}", graph.name, num_made, num_results)


def _declare(
    maker: GraphBuilder, graph: Graph, node: TensorNode, spec: TensorSpec, is_layer: bool
) -> TensorNode:
    shape, dtype, name, labels, storage = spec.shape, spec.dtype, spec.name, spec.labels, spec.storage
    if node.kind == "parameter":
        first = spec.init, spec.init_scale
        return maker.parameter(shape, dtype, name=name, labels=labels, init=first[0], init_scale=first[1])
    if node.kind == "state":
        return maker.state(shape, dtype, name=name, labels=labels, storage=storage)
    if node.kind == "constant":
        value = graph.constant_values[node.id]
        return maker.constant(value, name=name, labels=labels, storage=storage)
    if is_layer or name in (INV_COUNT, POSITIONS):  # an operand may be anything
        _require_own(spec)
        return maker.draft.declare("input", spec)
    return maker.input(shape, dtype, name=name, labels=labels, storage=storage)


def _require_own(spec: TensorSpec) -> None:
    """Check that inputs that the framework itself declares have their fixed form."""
    if spec.name == INV_COUNT:
        own = TensorSpec((1,), DTYPES["f32"], name=INV_COUNT, storage="vector")
        require(spec == own, "{!r} has an invalid form: {}", spec.name, str(spec))
    if spec.name == POSITIONS:
        batch, length = spec.shape if len(spec.shape) == 2 else (None, None)
        own = TensorSpec(spec.shape, DTYPES["i32"], spec.labels, POSITIONS, storage="scalars")
        require(
            isinstance(batch, int) and isinstance(length, Dim) and spec == own,
            "{!r} has an invalid form: {}",
            spec.name,
            str(spec),
        )


# ---- ops and layers -------------------------------------------------------------------------------------------------


def _require_phase(graph: Graph) -> None:
    odd = next((op for op in graph.ops if op.phase != "forward"), None)
    if odd is not None:
        raise Unreadable(f"op {odd.label!r} is in phase {odd.phase!r}; a definition has only forward ops")


def _require_op(graph: Graph, op: OpNode) -> None:
    specs = [None if i is None else graph.spec(i) for i in op.inputs]
    if op.op == "call":
        inferred = _infer_call(graph, op)
    else:
        hash(tuple(op.attrs.values()))
        inferred = results_of_call(op.op, specs, op.attrs)
    stated = [graph.spec(o) for o in op.outputs]
    require(
        inferred == stated,
        "op {!r} makes {}, not {}",
        op.label,
        ", ".join(map(_in_words, inferred)),
        ", ".join(map(_in_words, stated)),
    )


def _in_words(spec: TensorSpec) -> str:
    labels = ", ".join("-" if label is None else label.name for label in spec.labels)
    name = f" {spec.name!r}" if spec.name else ""
    return f"{spec}{name} ({labels}) {spec.storage}"


def _infer_call(graph: Graph, op: OpNode) -> list[TensorSpec]:
    """Check that a call binds to each of its layer's arguments a tensor of equal form, and of equal
    kind except for inputs. Return the specs of the call's results.
    """
    template = graph.templates[op.attrs["template"]]
    require(op.attrs["saved"] == (), "op {!r} saves tensors; a definition has no backward pass", op.label)
    require(len(op.given) == len(template.arguments), "op {!r} binds {} tensors", op.label, len(op.given))
    for argument, tensor in zip(template.arguments, op.given):
        formal, actual = template.graph.tensors[argument], graph.tensors[tensor]
        fits = formal.spec.form == actual.spec.form and formal.kind in ("input", actual.kind)
        require(
            fits,
            "op {!r} binds {} {} to {} {}",
            op.label,
            actual.kind,
            _in_words(actual.spec),
            formal.kind,
            _in_words(formal.spec),
        )
    return [template.graph.spec(r) for r in template.results]


def _require_interface(template: Template) -> None:
    """Check that a layer's arguments are its inputs, followed by its other tensors from outside in
    order, and that the layer has one result, which is its output.
    """
    graph = template.graph
    inputs = [t.id for t in graph.tensors if t.kind == "input"]
    others = [t.id for t in graph.tensors if t.kind in ("parameter", "state", "constant")]
    require(
        template.arguments == (*inputs, *others),
        "layer {!r} has other arguments than its tensors from outside",
        template.key,
    )
    require(
        graph.constant_values.keys() == {t.id for t in graph.of_kind("constant")},
        "every constant must have a value",
    )
    results = list(graph.outputs.values())
    is_result = list(template.results) == results and list(graph.outputs) == ["result"]
    require(is_result, "layer {!r} has the outputs {}", template.key, list(graph.outputs))


def _require_ends(graph: Graph, loss: int | None) -> None:
    """Check that names of outputs are not names of other tensors, and that `GraphBuilder.loss`
    would accept the loss.
    """
    names = {t.spec.name: t.id for t in graph.tensors if t.kind != "result"}
    for name, tensor in graph.outputs.items():
        require(name != "" and names.get(name, tensor) == tensor, "the output's name {!r} is taken", name)
    if loss is None:
        return
    require(0 <= loss < len(graph.tensors), "its loss is tensor {} of {}", loss, len(graph.tensors))
    maker = GraphBuilder.thaw(replace(graph, outputs={}))
    maker.loss(maker.draft.tensors[loss])
    require(graph.outputs.get("loss") == loss, "its loss is not its output 'loss'")
