"""Checks of a graph definition from a file: a graph builder must be able to produce the same
definition.

`ir.file` has checked the types of single fields. This module checks that numbers refer to existing
rows, declares every tensor from outside again on a builder, infers the results of every op again,
and checks every call against its layer. Everything must equal what the file says. Every failure is
reported in one sentence.
"""

from __future__ import annotations

from dataclasses import replace

from tilewise.core.dims import Dim
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import TilewiseError
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.declarations import INV_COUNT, POSITIONS, SEED, is_dropout_key, is_own_name
from tilewise.graph.file.content import Definition
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode, TensorSpec
from tilewise.ir.hints import as_tensor_layout
from tilewise.ir.op import check_call, results_of_call
from tilewise.ir.validate import validate_graph

__all__ = ["require_definition"]

_OWN = (INV_COUNT, POSITIONS, SEED)
_MAX_WALK = 1 << 21  # graphs, counted as often as calls lead to them
_DEEPEST = 64  # nesting of layers


def require_definition(definition: Definition) -> None:
    """Reject a definition that no calls of a builder produce.

    Raises:
        Unreadable: says what is wrong.
    """
    graph, loss = definition
    try:
        graphs: dict[int, tuple[Graph, int]] = {}
        _walk(graph, graphs, 0)
        for of, _ in graphs.values():
            _require_tables(of, is_layer=of is not graph)
            _require_declarations(of, is_layer=of is not graph)
            for key, template in of.templates.items():
                _require_interface(of, key, template)
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


def _require(holds: bool, what: str, *values: object) -> None:
    """Raise an error if a condition is false. `what` is the message, with a placeholder for each of
    the values.
    """
    if not holds:
        words = [v if isinstance(v, str | int) else shown(v) for v in values]
        raise Unreadable(what.format(*words) if words else what)


def _walk(graph: Graph, graphs: dict[int, tuple[Graph, int]], depth: int) -> int:
    """Collect a graph and the graphs of its layers, each once and before the graphs that call it.
    Returns how many graphs a walk along its calls visits.
    """
    if id(graph) not in graphs:
        _require(depth <= _DEEPEST, "layers are nested more than {} deep", _DEEPEST)
        inside = {key: _walk(t.graph, graphs, depth + 1) for key, t in graph.templates.items()}
        called = [inside.get(op.attrs.get("template", ""), 0) for op in graph.ops if op.op == "call"]
        num_visited = 1 + sum(inside.values()) + sum(called)
        _require(num_visited <= _MAX_WALK, "its templates call each other too often")
        graphs[id(graph)] = graph, num_visited
    return graphs[id(graph)][1]


# ---- tensors --------------------------------------------------------------------------------------------------------


def _require_tables(graph: Graph, is_layer: bool) -> None:
    """Check that ids refer to tensors of the graph, that tensors name their producers, and that there
    is no backward pass.
    """
    tensor_ids = range(len(graph.tensors))
    for op in graph.ops:
        _require(
            op.phase == "forward",
            "op {!r} is in phase {!r}; a definition has only forward ops",
            op.label,
            op.phase,
        )
        _require(
            all(i in tensor_ids for i in (*op.given, *op.outputs)),
            "op {!r} refers to tensors that {!r} does not have",
            op.label,
            graph.name,
        )
    _require(
        all(t in tensor_ids for t in (*graph.hints, *graph.outputs.values())),
        "hints and outputs must refer to tensors",
    )
    _require(
        graph.constant_values.keys() == {t.id for t in graph.of_kind("constant")},
        "every constant must have a value",
    )
    kinds = [graph.tensors[t].kind if t in tensor_ids else "nothing" for t in graph.frozen]
    _require(
        {*kinds} <= {"parameter"} and [*graph.frozen] == sorted({*graph.frozen}),
        "frozen tensors must be parameters in ascending order; got {}",
        graph.frozen,
    )
    producers = {o: i for i, op in enumerate(graph.ops) for o in op.outputs}
    for i, t in enumerate(graph.tensors):
        # fusing leaves unused results in layers
        is_made = t.producer is not None or (is_layer and t.kind == "result")
        _require(
            t.id == i and t.producer == producers.get(i) and is_made >= (t.kind == "result"),
            "tensor {} of {!r} has kind {!r}, id {} and producer {}; op {} makes it",
            i,
            graph.name,
            t.kind,
            t.id,
            t.producer,
            producers.get(i),
        )


def _require_declarations(graph: Graph, is_layer: bool) -> None:
    """Check that a builder accepts the inputs, parameters, states, constants and hints."""
    maker = GraphBuilder(graph.name, k_splits=graph.k_splits)
    checked_forms: set[object] = set()
    for node in graph.tensors:
        if node.kind == "result":
            continue
        spec = node.spec if node.spec.tile_hint is None else replace(node.spec, tile_hint=None)
        form = node.kind, spec.form, spec.init, spec.init_scale
        if form in checked_forms and node.kind != "constant" and spec.name not in _OWN:
            maker.draft.declare(node.kind, spec)  # everything but its name was checked
            continue
        checked_forms.add(form)
        made = _declare(maker, graph, node, spec, is_layer)
        _require(
            made.kind == node.kind and made.spec == spec,
            "{} {!r} differs from its declaration {}",
            node.kind,
            spec.name,
            str(made.spec),
        )
    for tensor, hint in graph.hints.items():
        rank = len(graph.tensors[tensor].shape)
        same = as_tensor_layout("load", hint, rank, f"tensor {tensor}") == hint
        _require(same, "the layout of tensor {} is invalid: {}", tensor, hint)


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
    if is_layer or is_own_name(name):  # an operand may be anything
        _require_own(spec)
        return maker.draft.declare("input", spec)
    return maker.input(shape, dtype, name=name, labels=labels, storage=storage)


def _require_own(spec: TensorSpec) -> None:
    """Check that inputs that the framework itself declares have their fixed form."""
    if spec.name == INV_COUNT:
        own = TensorSpec((1,), DTYPES["f32"], name=INV_COUNT, storage="vector")
        _require(spec == own, "{!r} has an invalid form: {}", spec.name, str(spec))
    if is_dropout_key(spec.name):
        is_key = spec.storage == "rows" and spec.dtype.name == "i32" and len(spec.shape) == 2
        is_key = is_key and isinstance(spec.shape[0], int) and spec.shape[1] == 4
        _require(is_key, "{!r} has an invalid form: {}", spec.name, str(spec))
    if spec.name == POSITIONS:
        batch, length = spec.shape if len(spec.shape) == 2 else (None, None)
        own = TensorSpec(spec.shape, DTYPES["i32"], spec.labels, POSITIONS, storage="scalars")
        _require(
            isinstance(batch, int) and isinstance(length, Dim) and spec == own,
            "{!r} has an invalid form: {}",
            spec.name,
            str(spec),
        )


# ---- ops and layers -------------------------------------------------------------------------------------------------


def _require_op(graph: Graph, op: OpNode) -> None:
    if op.op == "call":
        inferred = _infer_call(graph, op)
    else:
        checked = check_call(op.op, op.inputs, op.attrs)
        same = all(type(checked[name]) is type(value) for name, value in op.attrs.items())
        _require(same and checked == dict(op.attrs), "op {!r} has attributes of other types", op.label)
        specs = [None if i is None else graph.spec(i) for i in op.inputs]
        inferred = results_of_call(op.op, specs, op.attrs)
    stated = [graph.spec(o) for o in op.outputs]
    _require(
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
    fits = set(op.attrs) == {"template", "saved"} and op.attrs["template"] in graph.templates
    _require(fits, "op {!r} calls no template", op.label)
    template = graph.templates[op.attrs["template"]]
    _require(op.attrs["saved"] == (), "op {!r} saves tensors; a definition has no backward pass", op.label)
    _require(len(op.given) == len(template.arguments), "op {!r} binds {} tensors", op.label, len(op.given))
    for argument, tensor in zip(template.arguments, op.given):
        formal, actual = template.graph.tensors[argument], graph.tensors[tensor]
        _require(
            formal.spec.form == actual.spec.form and formal.kind in ("input", actual.kind),
            "op {!r} binds {} {} to {} {}",
            op.label,
            actual.kind,
            _in_words(actual.spec),
            formal.kind,
            _in_words(formal.spec),
        )
    return [template.graph.spec(r) for r in template.results]


def _require_interface(graph: Graph, key: str, template: Template) -> None:
    """Check that a layer's arguments are its inputs, followed by its other tensors from outside in
    order, and that the layer has one result, which is its output.
    """
    inside = template.graph
    _require(key == template.key, "template {!r} has another key", key)
    _require(inside.k_splits == graph.k_splits, "template {!r} has {} k splits", key, inside.k_splits)
    is_own = {t.id: is_dropout_key(t.spec.name) for t in inside.tensors}
    inputs = [t.id for t in inside.tensors if t.kind == "input" and not is_own[t.id]]
    others = [t.id for t in inside.tensors if t.kind in ("parameter", "state", "constant") or is_own[t.id]]
    _require(
        template.arguments == (*inputs, *others),
        "layer {!r} has other arguments than its tensors from outside",
        key,
    )
    is_result = inside.outputs == dict(zip(("result",), template.results))
    _require(
        is_result and len(template.results) == 1, "layer {!r} has the outputs {}", key, list(inside.outputs)
    )


def _require_ends(graph: Graph, loss: int | None) -> None:
    """Check that names of outputs are not names of other tensors, and that `GraphBuilder.loss`
    would accept the loss.
    """
    names = {t.spec.name: t.id for t in graph.tensors if t.kind != "result"}
    for name, tensor in graph.outputs.items():
        _require(name != "" and names.get(name, tensor) == tensor, "the output's name {!r} is taken", name)
    if loss is None:
        return
    _require(0 <= loss < len(graph.tensors), "its loss is tensor {} of {}", loss, len(graph.tensors))
    maker = GraphBuilder.thaw(replace(graph, outputs={}))
    maker.loss(maker.draft.tensors[loss])
    _require(graph.outputs.get("loss") == loss, "its loss is not its output 'loss'")
