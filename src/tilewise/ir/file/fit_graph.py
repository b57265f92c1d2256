"""Checks of a graph from a file before anything else reads it: ids refer to existing rows, and
layers do not contain themselves.

`read_rows` has checked the types of single fields. `ir.validate` checks the remaining rules of a
graph.
"""

from __future__ import annotations

from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.op import check_call

__all__ = ["require", "require_graph"]

_KINDS = ("input", "parameter", "state", "constant", "result")
_PHASES = ("forward", "backward", "update")
_MAX_WALK = 1 << 21  # graphs, counted as often as calls lead to them
_DEEPEST = 64  # nesting of layers


def require(holds: bool, what: str, *values: object) -> None:
    """Raise an error if a condition is false.

    Args:
        what: the message, with a placeholder for each of the values.

    Raises:
        Unreadable: the condition is false.
    """
    if not holds:
        words = [v if isinstance(v, str | int) else shown(v) for v in values]
        raise Unreadable(what.format(*words) if words else what)


def require_graph(graph: Graph) -> None:
    """Reject a graph with numbers outside of its tables, in its layers too.

    Raises:
        Unreadable: names the tensor, op or layer.
    """
    _require_graph(graph, {}, 0)
    _require_root(graph)


def _require_graph(graph: Graph, walked: dict[int, int], depth: int) -> int:
    """Check a graph's ids against its tables, and its templates' too. Returns how many graphs a
    walk along its calls visits.
    """
    if id(graph) in walked:
        return walked[id(graph)]
    require(depth <= _DEEPEST, "layers are nested more than {} deep", _DEEPEST)
    for i, t in enumerate(graph.tensors):
        # a result whose op a pass removed has no producer
        fits = t.producer is None or (t.kind == "result" and 0 <= t.producer < len(graph.ops))
        require(
            t.id == i and t.kind in _KINDS and fits,
            "tensor {} of {!r} is invalid: {}",
            i,
            graph.name,
            t,
        )
    tensor_ids = range(len(graph.tensors))
    weight = 1 + sum(_require_graph(t.graph, walked, depth + 1) for t in graph.templates.values())
    for op in graph.ops:
        ids = (*(i for i in op.inputs if i is not None), *op.outputs)
        require(
            all(i in tensor_ids for i in ids),
            "op {!r} refers to tensors that {!r} does not have",
            op.label,
            graph.name,
        )
        require(op.phase in _PHASES, "op {!r} has the unknown phase {!r}", op.label, op.phase)
        weight += _require_op(graph, op, walked)
        require(weight <= _MAX_WALK, "its templates call each other too often")
    for key, template in graph.templates.items():
        require(
            template.graph.k_splits == graph.k_splits,
            "template {!r} has {} k splits",
            key,
            template.graph.k_splits,
        )
        inside = range(len(template.graph.tensors))
        ends = (*template.arguments, *template.results)
        require(
            key == template.key and all(i in inside for i in ends),
            "template {!r} has another key, or tensors that it does not have",
            key,
        )
    for tensor, value in graph.constant_values.items():
        require(tensor in tensor_ids, "constant {} does not exist", tensor)
        node = graph.tensors[tensor]
        fits = node.kind == "constant" and value.shape == node.shape and value.dtype == node.spec.dtype.numpy
        require(
            fits,
            "constant {!r} {} is an array {}{}",
            node.spec.name,
            node.spec,
            value.dtype,
            list(value.shape),
        )
    require(
        all(t in tensor_ids for t in (*graph.hints, *graph.outputs.values())),
        "hints and outputs must refer to tensors",
    )
    walked[id(graph)] = weight
    return weight


def _require_op(graph: Graph, op: OpNode, walked: dict[int, int]) -> int:
    if op.op != "call":
        checked = check_call(op.op, op.inputs, op.attrs)
        same = all(type(checked[name]) is type(value) for name, value in op.attrs.items())
        require(same and checked == dict(op.attrs), "op {!r} has attributes of other types", op.label)
        return 0
    template = graph.templates.get(op.attrs.get("template", ""))
    require(
        template is not None and set(op.attrs) == {"template", "saved"},
        "op {!r} calls no template",
        op.label,
    )
    assert template is not None
    inside, saved = range(len(template.graph.tensors)), op.attrs["saved"]
    require(
        isinstance(saved, tuple) and all(s in inside for s in saved),
        "op {!r} saves no tensors",
        op.label,
    )
    return walked[id(template.graph)]


def _require_root(graph: Graph) -> None:
    """Check the root graph: every constant has a value, and every name belongs to one tensor."""
    require(
        graph.constant_values.keys() == {t.id for t in graph.of_kind("constant")},
        "every constant must have a value",
    )
    names = [t.spec.name for t in graph.tensors if t.kind != "result"]
    require(all(names) and len(set(names)) == len(names), "tensors from outside must have unique names")
