"""Reverse mode on the graph, template by template.

A template is differentiated once; its backward template takes the tensors saved between the two, the gradients of its
results and what it needs of its arguments, and yields the gradients of its arguments. Contributions to one tensor are
collected before anything is emitted, so that sums become one op in one fixed order (docs/numerics.md, rule 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewise.core.errors import PlanError
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.draft import GraphDraft
from tilewise.graph.ops.linear import EmbeddingTerm, LinearTerm, WeightTerm
from tilewise.graph.ops.norm import NormTerm
from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph, OpNode, Template
from tilewise.ir.op import op_named

__all__ = ["Tape", "differentiate"]


class Tape:
    """Where gradient rules write: `use` brings a forward tensor into the backward graph, `op` appends to it."""

    def __init__(self, draft: GraphDraft, use: Callable[[int], int]) -> None:
        self.draft = draft
        self.use = use

    def op(self, name: str, inputs: Sequence[int | None], **attrs: Any) -> list[int]:
        """Append an op; returns the ids of its outputs."""
        return list(self.draft.op(name, tuple(inputs), attrs))

    def add(self, a: int, b: int) -> int:
        """`a + b`."""
        return self.op("add", [a, b])[0]

    def multiply(self, a: int, b: int) -> int:
        """`a * b`."""
        return self.op("multiply", [a, b])[0]

    def scale(self, x: int, factor: float) -> int:
        """`factor * x`."""
        return self.op("scale", [x], factor=factor)[0]

    def matmul(self, a: int, b: int, transpose_a: bool, transpose_b: bool) -> int:
        """`a @ b`."""
        return self.op("matmul", [a, b], transpose_a=transpose_a, transpose_b=transpose_b)[0]


class _Contributions:
    """Gradient contributions per forward tensor, turned into one tensor when asked for."""

    def __init__(self, graph: Graph, tape: Tape) -> None:
        self.graph, self.tape = graph, tape
        self.lists: dict[int, list[Any]] = {}
        self.done: dict[int, int | None] = {}

    def add(self, tensor: int, contribution: Any) -> None:
        self.lists.setdefault(tensor, []).append(contribution)

    def total(self, tensor: int) -> int | None:
        """The gradient of a tensor; None when nothing flows there."""
        if tensor not in self.done:
            given = self.lists.get(tensor, [])
            weight = [c for c in given if isinstance(c, WeightTerm | EmbeddingTerm)]
            self.done[tensor] = self._weight(tensor, weight) if weight else self._sum(given)
        return self.done[tensor]

    def _sum(self, given: list[Any]) -> int | None:
        """Plain gradients first, then the contraction over all linear terms, then the norm: a fixed order."""
        total: int | None = None
        for c in given:
            if isinstance(c, int):
                total = c if total is None else self.tape.add(total, c)
        for transpose in (False, True):
            terms = [c for c in given if isinstance(c, LinearTerm) and c.transpose == transpose]
            if terms:
                inputs: list[int | None] = [v for t in terms for v in (t.dy, t.weight)]
                inputs += [] if total is None else [total]
                attrs = {"num_terms": len(terms), "transpose": transpose, "residual": total is not None}
                total = self.tape.op("linear", inputs, **attrs)[0]
        for c in given:
            if isinstance(c, NormTerm):
                total, dgamma = self.tape.op("rms_norm_backward", [c.dy, c.x, c.rstd, c.gamma, total])
                self.add(c.weight, dgamma)
        return total

    def _weight(self, tensor: int, terms: list[Any]) -> int:
        products = [t for t in terms if isinstance(t, WeightTerm)]
        lookups = [t for t in terms if isinstance(t, EmbeddingTerm)]
        if len(products) > 1 or len(lookups) > 1 or len(terms) != len(self.lists[tensor]):
            name = self.graph.spec(tensor).name
            raise PlanError(
                f"[graph.gradients] a weight may be used by one product and one embedding; got {len(products)} "
                f"products and {len(lookups)} embeddings of {name!r}; declare a second parameter"
            )
        rows, cols = (products[0].rows, products[0].cols) if products else (None, None)
        ids, grad = (lookups[0].ids, lookups[0].grad) if lookups else (None, None)
        return self.tape.op("linear_dw", [self.tape.use(tensor), rows, cols, ids, grad])[0]


def _run_backward(
    ops: Sequence[OpNode], flow: _Contributions, on_call: Callable[[OpNode, list[int | None]], Any]
) -> None:
    """Walk ops in reverse and collect what each contributes."""
    for op in reversed(ops):
        grads = [flow.total(o) for o in op.outputs]
        if all(g is None for g in grads):
            continue
        given = on_call(op, grads) if op.op == "call" else op_named(op.op).gradient(flow.tape, op, grads)
        for tensor, contribution in zip(op.inputs, given):
            if tensor is not None and contribution is not None:
                flow.add(tensor, contribution)


@dataclass(frozen=True)
class _Backward:
    """A backward template: forward tensors it takes (after the results' gradients), whose gradients it yields."""

    template: Template
    imports: tuple[int, ...]
    wanted: tuple[int, ...]


def _differentiate_template(forward: Template) -> _Backward:
    counts.differentiated += 1
    graph = forward.graph
    builder = GraphBuilder(f"{graph.name}.backward", reduction_chunks=graph.reduction_chunks)
    builder.draft.phase = "backward"
    seeds = {
        r: builder.draft.declare("input", replace(graph.spec(r), name=f"grad{i}")).id
        for i, r in enumerate(forward.results)
    }
    imported: dict[int, int] = {}

    def use(tensor: int) -> int:
        if tensor not in imported:
            node = graph.tensors[tensor]
            kind = node.kind if node.kind != "result" else "input"
            imported[tensor] = builder.draft.declare(
                kind, node.spec.renamed(node.spec.name or f"saved{tensor}")
            ).id
        return imported[tensor]

    flow = _Contributions(graph, Tape(builder.draft, use))
    for r, seed in seeds.items():
        flow.add(r, seed)
    _run_backward(graph.ops, flow, _no_nested_call)
    # inputs before parameters: a norm's dgamma appears when its input's gradient is emitted
    order = sorted(forward.arguments, key=lambda a: graph.tensors[a].kind == "parameter")
    totals = {a: flow.total(a) for a in order if graph.spec(a).dtype.name in ("f32", "bf16")}
    wanted = tuple(
        a for a in forward.arguments if totals.get(a) is not None and graph.tensors[a].kind != "constant"
    )
    results = tuple(t for t in (totals[a] for a in wanted) if t is not None)
    for a, r in zip(wanted, results):
        builder.output_id(r, f"grad.{graph.spec(a).name}")
    imports = tuple(imported)
    arguments = (*seeds.values(), *imported.values())
    return _Backward(
        Template(forward.key + ".backward", builder.freeze(), arguments, results), imports, wanted
    )


def _no_nested_call(op: OpNode, grads: list[int | None]) -> Any:
    raise PlanError(
        f"[graph.gradients] layers inside layers have no gradient; got {op.label!r}; inline the inner one"
    )


def differentiate(graph: Graph, loss: int) -> tuple[Graph, dict[str, int]]:
    """The graph with the backward pass of `loss` appended, and the gradient's id of every parameter by name.

    Raises:
        PlanError: a parameter does not influence the loss, or is used in a way that has no gradient.
    """
    builder = GraphBuilder.thaw(graph)
    builder.draft.phase = "backward"
    cache: dict[str, _Backward] = {}
    flow = _Contributions(graph, Tape(builder.draft, lambda tensor: tensor))

    def on_call(op: OpNode, grads: list[int | None]) -> list[int | None]:
        forward = graph.templates[op.attrs["template"]]
        if forward.key not in cache:
            cache[forward.key] = _differentiate_template(forward)
        return _call_backward(builder.draft, op, forward, cache[forward.key], grads)

    flow.add(loss, loss)  # the seed: a loss op computes the gradient of itself
    _run_backward(graph.ops, flow, on_call)
    for t in graph.of_kind("input"):
        if t.spec.dtype.name != "i32":
            flow.total(t.id)
    gradients = {}
    for t in graph.of_kind("parameter"):
        total = flow.total(t.id)
        if total is None:
            raise PlanError(
                f"[graph.gradients] every parameter must influence the loss; got {t.spec.name!r}; remove it"
            )
        gradients[t.spec.name] = total
        builder.output_id(total, f"{t.spec.name}.grad")
    return builder.freeze(), gradients


def _call_backward(
    draft: GraphDraft, op: OpNode, forward: Template, backward: _Backward, grads: list[int | None]
) -> list[int | None]:
    """Record the backward call of one layer; the forward call yields what it saves from now on."""
    saved = [t for t in backward.imports if t not in forward.arguments and t not in forward.results]
    known = {**dict(zip(forward.arguments, op.inputs)), **dict(zip(forward.results, op.outputs))}
    first = len(draft.tensors)
    for i, t in enumerate(saved):
        draft.tensors.append(replace(draft.tensors[op.outputs[0]], id=first + i, spec=forward.graph.spec(t)))
        known[t] = first + i
    outputs = (*op.outputs, *range(first, first + len(saved)))
    draft.ops[op.id] = replace(op, outputs=outputs, attrs={**op.attrs, "saved": tuple(saved)})
    draft.templates[backward.template.key] = backward.template
    arguments = (*grads, *(known[t] for t in backward.imports))
    specs = [backward.template.graph.spec(r) for r in backward.template.results]
    results = draft.append(
        "call",
        arguments,
        specs,
        {"template": backward.template.key, "saved": ()},
        label=f"{op.label}.backward",
    )
    by_argument = dict(zip(backward.wanted, results))
    return [by_argument.get(a) for a in forward.arguments]
