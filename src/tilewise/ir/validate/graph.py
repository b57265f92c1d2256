"""The rules of a graph. They are checked between passes, and a violation is a defect of the pass
that ran last.
"""

from __future__ import annotations

from collections.abc import Container

from tilewise.core.errors import InternalError
from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.op import results_of_call

__all__ = ["validate_graph"]


def validate_graph(graph: Graph, validated: Container[int] = ()) -> None:
    """Check the rules of a graph: ids are dense; every operand exists before its use; every result
    has one producer; outputs of ops have the specs that their op infers; calls fit their templates;
    outputs exist. Its layers are checked too, except for those whose identities are in `validated`.

    Raises:
        InternalError: names the first rule that is violated.
    """
    for each in graph.with_layers():
        if id(each) not in validated:
            _validate(each)


def _validate(graph: Graph) -> None:
    tensors = graph.tensors
    defined: set[int | None] = {t.id for t in tensors if t.kind != "result"}
    defined.add(None)
    formal: dict[str, list[object]] = {}  # shapes and dtypes, by template
    _require(all(t.id == i for i, t in enumerate(tensors)), graph, "tensor ids are dense")
    for position, op in enumerate(graph.ops):
        _require(op.id == position, graph, "op ids are dense", op)
        _require(defined.issuperset(op.inputs), graph, "operands exist before their use", op)
        _require(defined.isdisjoint(op.outputs), graph, "a tensor has one producer", op)
        _require(all(tensors[o].producer == op.id for o in op.outputs), graph, "producers agree", op)
        defined.update(op.outputs)
        if op.op == "call":
            key = op.attrs["template"]
            if key not in formal:
                inside = graph.templates[key]
                formal[key] = [inside.graph.spec(a).form[:2] for a in inside.arguments]
            actual = [tensors[i].spec.form[:2] for i in op.inputs if i is not None]
            _require(formal[key] == actual, graph, "arguments fit", op)
            count = len(graph.templates[key].results) + len(op.attrs["saved"])
            _require(len(op.outputs) == count, graph, "results fit", op)
        else:
            operands = [None if i is None else graph.spec(i) for i in op.inputs]
            specs = results_of_call(op.op, operands, op.attrs)
            same = [s.form[:2] for s in specs] == [graph.spec(o).form[:2] for o in op.outputs]
            _require(same, graph, "results have the specs their op infers", op)
    _require(all(t in defined for t in graph.outputs.values()), graph, "outputs exist")


def _require(holds: bool, graph: Graph, rule: str, op: OpNode | None = None) -> None:
    if not holds:
        where = "" if op is None else f", at op {op.id} ({op.op} {op.label!r})"
        raise InternalError(
            f"[ir.validate] {rule}{where}; it does not hold in {graph.name!r}; please report the graph's print"
        )
