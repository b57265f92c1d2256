"""The rules of a graph. They are checked between passes, and a violation is a defect of the pass
that ran last.
"""

from __future__ import annotations

from tilewise.core.errors import InternalError
from tilewise.ir.graph import Graph, OpNode, TensorFamily, TensorSpec
from tilewise.ir.op import results_of_call

__all__ = ["validate_graph"]


def validate_graph(graph: Graph, seen: set[int] | None = None) -> None:
    """Check the rules of a graph: ids are dense; every operand exists before its use; every result
    has one producer; outputs of ops have the specs that their op infers; calls fit their templates;
    outputs exist.

    Args:
        graph: its layers are checked too, each once.
        seen: identities of the layers' graphs that have been checked.

    Raises:
        InternalError: names the first rule that is violated.
    """
    tensors = graph.tensors
    defined: set[int | None] = {t.id for t in tensors if t.kind != "result"}
    defined.add(None)
    formal: dict[str, list[int]] = {}  # by template
    forms = _Forms()
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
                formal[key] = [forms.number(inside.graph.spec(a)) for a in inside.arguments]
            actual = [forms.number(tensors[i].spec) for i in op.inputs if i is not None]
            _require(formal[key] == actual, graph, "arguments fit", op)
            count = len(graph.templates[key].results) + len(op.attrs["saved"])
            _require(len(op.outputs) == count, graph, "results fit", op)
        else:
            operands = [None if i is None else graph.spec(i) for i in op.inputs]
            specs = results_of_call(op.op, operands, op.attrs)
            same = [(s.shape, s.dtype) for s in specs] == [
                (s.shape, s.dtype) for s in map(graph.spec, op.outputs)
            ]
            _require(same, graph, "results have the specs their op infers", op)
    _require(all(t in defined for t in graph.outputs.values()), graph, "outputs exist")
    done: set[int] = set() if seen is None else seen
    for template in graph.templates.values():
        if id(template.graph) not in done:
            done.add(id(template.graph))
            validate_graph(template.graph, done)


class _Forms:
    """Gives each distinct pair of shape and dtype a number. Specs of one family share it as an
    object, so each family is compared once.
    """

    def __init__(self) -> None:
        self._by_family: dict[TensorFamily, int] = {}
        self._by_value: dict[object, int] = {}

    def number(self, spec: TensorSpec) -> int:
        """The number of a tensor's shape and dtype."""
        number = self._by_family.get(spec.family)
        if number is None:
            number = self._by_value.setdefault((spec.shape, spec.dtype), len(self._by_value))
            self._by_family[spec.family] = number
        return number


def _require(holds: bool, graph: Graph, rule: str, op: OpNode | None = None) -> None:
    if not holds:
        where = "" if op is None else f", at op {op.id} ({op.op} {op.label!r})"
        raise InternalError(
            f"[ir.validate] {rule}{where}; it does not hold in {graph.name!r}; please report the graph's print"
        )
