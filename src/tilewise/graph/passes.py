"""Passes: pure functions that return an equivalent graph, or the graph with symbolic sizes replaced
by numbers. Tensor ids do not change, so inputs, parameters and outputs of a graph keep their ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from tilewise.core.dims import Dim
from tilewise.graph.ops.embedding import EmbeddingWeightGradient
from tilewise.graph.ops.linear import Linear
from tilewise.ir.graph import Graph, OpNode, TensorNode
from tilewise.ir.op import bind

__all__ = [
    "drop_dead_ops",
    "fix_sizes",
    "fuse_gates",
    "fuse_into_products",
    "fuse_into_table_gradients",
    "simplify",
]


def simplify(graph: Graph) -> Graph:
    """Runs all passes in order."""
    return drop_dead_ops(fuse_into_products(fuse_gates(graph)))


def _uses(graph: Graph) -> Counter[int | None]:
    uses: Counter[int | None] = Counter(i for op in graph.ops for i in op.inputs if i is not None)
    uses.update(graph.outputs.values())
    return uses


def _with_ops(graph: Graph, ops: list[OpNode], fused: Mapping[int | None, int] | None = None) -> Graph:
    """The graph with these ops, renumbered, with updated producers. `fused` maps a result that no
    longer exists to the result that replaces it. A layout hint of the old result applies to the new
    one, unless the new one has a hint of its own.
    """
    numbered = tuple(op if op.id == i else replace(op, id=i) for i, op in enumerate(ops))
    producer = {o: op.id for op in numbered for o in op.outputs}
    tensors = tuple(
        t if t.producer == producer.get(t.id) else replace(t, producer=producer.get(t.id))
        for t in graph.tensors
    )
    hints = dict(graph.hints)
    for gone, whole in (fused or {}).items():
        if gone is not None and gone in hints:
            hints.setdefault(whole, hints.pop(gone))
    return replace(graph, ops=numbered, tensors=tensors, hints=hints)


_GATES = {"silu": "silu_gate", "gelu_tanh": "gelu_tanh_gate"}


def fuse_gates(graph: Graph) -> Graph:
    """Replace `multiply(silu(g), u)` by `silu_gate(g, u)` if no other op reads `silu(g)`. The same
    is done for `gelu_tanh`.
    """
    uses, ops = _uses(graph), {op.id: op for op in graph.ops}
    result, gone = [], {}
    for op in graph.ops:
        if op.op == "multiply":
            for gate, up in (op.inputs, op.inputs[::-1]):
                producer = graph.tensors[gate].producer if gate is not None else None
                fused = _GATES.get(ops[producer].op) if producer is not None else None
                if producer is not None and fused is not None and uses[gate] == 1:
                    op = replace(op, op=fused, inputs=(ops[producer].inputs[0], up), label=fused)
                    gone[gate] = op.outputs[0]
                    break
        result.append(op)
    return _with_ops(graph, result, gone)


def fuse_into_products(graph: Graph) -> Graph:
    """Replace `add(linear(...), r)` by a `linear` that adds `r` while its tile is in cache. The
    same is done for `add_bias`; the bias is then added before the product is rounded. A product
    that adds a bias does not also add a residual. If the residual of a product is a product of its
    own, as that of an adapter, `r` is added there: a product that is zero then changes no bit.
    """
    uses = _uses(graph)
    result: list[tuple[OpNode, ...]] = []  # what stands in place of each op
    moved, gone = set(), {}
    for op in graph.ops:
        now: tuple[OpNode, ...] = (op,)
        if op.op in ("add", "add_bias"):
            for x, other in (op.inputs, op.inputs[::-1]) if op.op == "add" else (op.inputs,):
                node, linear = _only_product(graph, x, uses)
                if node is None or linear is None or linear.bias is not None:
                    continue
                if linear.residual is not None:
                    inner, first = _only_product(graph, linear.residual, uses)
                    if op.op != "add" or inner is None or first is None or not _adds_nothing(first):
                        continue
                    inner_now = replace(inner, inputs=replace(first, residual=other).inputs)
                    now = inner_now, replace(node, outputs=op.outputs)
                    moved |= {node.id, inner.id}
                else:
                    is_residual = op.op == "add"
                    fused = replace(linear, residual=other) if is_residual else replace(linear, bias=other)
                    now = (replace(node, inputs=fused.inputs, outputs=op.outputs),)
                    moved.add(node.id)
                gone[x] = op.outputs[0]
                break
        result.append(now)
    return _with_ops(graph, [op for i, ops in enumerate(result) if i not in moved for op in ops], gone)


def _only_product(
    graph: Graph, tensor: int | None, uses: Counter[int | None]
) -> tuple[OpNode | None, Linear | None]:
    """The product that computes a tensor that only one op reads."""
    node = _only_producer(graph, tensor, uses)
    linear = bind(node) if node is not None else None
    return (node, linear) if isinstance(linear, Linear) else (None, None)


def _adds_nothing(linear: Linear) -> bool:
    return linear.residual is None and linear.bias is None


def fuse_into_table_gradients(graph: Graph) -> Graph:
    """Replace `add(g, embedding_dw(...))` by an `embedding_dw` that adds `g` and overwrites it. The
    second gradient of a tied table then needs no memory of its own, or only memory for this
    device's part. Use this only for one microbatch: with several, `g` is complete only in the last
    one.
    """
    uses = _uses(graph)
    result, moved = [], set()
    for op in graph.ops:
        for x, other in (op.inputs, op.inputs[::-1]) if op.op == "add" else ():
            node = _only_producer(graph, x, uses)
            scattered = bind(node) if node is not None else None
            if node is None or not isinstance(scattered, EmbeddingWeightGradient):
                continue
            if scattered.added is not None:
                continue
            op = replace(node, inputs=replace(scattered, added=other).inputs, outputs=op.outputs)
            moved.add(node.id)
            break
        result.append(op)
    return _with_ops(graph, [op for i, op in enumerate(result) if i not in moved])


def _only_producer(graph: Graph, tensor: int | None, uses: Counter[int | None]) -> OpNode | None:
    """The op that computes a tensor that only one op reads; a call does not count."""
    producer = graph.tensors[tensor].producer if tensor is not None and uses[tensor] == 1 else None
    node = graph.ops[producer] if producer is not None else None
    return node if node is not None and node.op != "call" else None


def drop_dead_ops(graph: Graph) -> Graph:
    """Removes ops whose results no op and no output reads. Ops without outputs write state and stay."""
    needed, live = set(graph.outputs.values()), []
    for op in reversed(graph.ops):
        if not op.outputs or any(o in needed for o in op.outputs):
            live.append(op)
            needed.update(i for i in op.inputs if i is not None)
    return _with_ops(graph, live[::-1])


def fix_sizes(graph: Graph, sizes: Mapping[Dim, int]) -> Graph:
    """The graph with some of its symbolic sizes replaced by numbers, also in layers."""
    if not sizes:
        return graph

    def fixed(t: TensorNode) -> TensorNode:
        shape = tuple(sizes.get(s, s) if isinstance(s, Dim) else s for s in t.shape)
        return t if shape == t.shape else replace(t, spec=replace(t.spec, shape=shape))

    templates = {
        key: replace(template, graph=fix_sizes(template.graph, sizes))
        for key, template in graph.templates.items()
    }
    return replace(graph, tensors=tuple(fixed(t) for t in graph.tensors), templates=templates)
