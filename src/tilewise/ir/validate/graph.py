"""The rules of a graph, checked between passes. A broken rule is a defect of the pass before it."""

from __future__ import annotations

from tilewise.core.errors import InternalError
from tilewise.ir.graph import Graph
from tilewise.ir.op import op_named

__all__ = ["validate_graph"]


def validate_graph(graph: Graph, seen: set[int] | None = None) -> None:
    """Dense ids; every operand exists before its use; every result has one producer, which agrees; op outputs have the
    specs their op infers; calls fit their templates; outputs exist.

    Args:
        graph: its layers are looked at as well, each once, whatever leads to them.
        seen: graphs of layers that have been looked at, by identity.

    Raises:
        InternalError: names the first rule that does not hold.
    """
    known = {t.id for t in graph.tensors if t.kind != "result"}
    _hold(all(t.id == i for i, t in enumerate(graph.tensors)), graph, "tensor ids are dense")
    for position, op in enumerate(graph.ops):
        where = f"op {op.id} ({op.op} {op.label!r})"
        _hold(op.id == position, graph, f"op ids are dense, at {where}")
        _hold(
            all(i is None or i in known for i in op.inputs),
            graph,
            f"operands exist before their use, at {where}",
        )
        _hold(not known.intersection(op.outputs), graph, f"a tensor has one producer, at {where}")
        _hold(
            all(graph.tensors[o].producer == op.id for o in op.outputs), graph, f"producers agree, at {where}"
        )
        known.update(op.outputs)
        if op.op == "call":
            _validate_call(graph, where, op.inputs, op.outputs, op.attrs["template"], op.attrs["saved"])
        else:
            specs = op_named(op.op).infer([None if i is None else graph.spec(i) for i in op.inputs], op.attrs)
            same = [(s.shape, s.dtype) for s in specs] == [
                (graph.spec(o).shape, graph.spec(o).dtype) for o in op.outputs
            ]
            _hold(same, graph, f"results have the specs their op infers, at {where}")
    _hold(all(t in known for t in graph.outputs.values()), graph, "outputs exist")
    done: set[int] = set() if seen is None else seen
    for template in graph.templates.values():
        if id(template.graph) not in done:
            done.add(id(template.graph))
            validate_graph(template.graph, done)


def _validate_call(
    graph: Graph,
    where: str,
    inputs: tuple[int | None, ...],
    outputs: tuple[int, ...],
    key: str,
    saved: tuple[int, ...],
) -> None:
    template = graph.templates[key]
    formal = [template.graph.spec(a) for a in template.arguments]
    actual = [graph.spec(i) for i in inputs if i is not None]
    _hold(
        [(s.shape, s.dtype) for s in formal] == [(s.shape, s.dtype) for s in actual],
        graph,
        f"arguments fit, at {where}",
    )
    _hold(len(outputs) == len(template.results) + len(saved), graph, f"results fit, at {where}")


def _hold(holds: bool, graph: Graph, rule: str) -> None:
    if not holds:
        raise InternalError(
            f"[ir.validate] {rule}; it does not hold in {graph.name!r}; please report the graph's print"
        )
