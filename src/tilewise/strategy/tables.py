"""Gradients of embedding tables: devices that share a batch exchange token ids and gradient rows
instead of whole tables.

A token adds to one row of a table, so most of a table's gradient is zero. Summing it over devices
like other gradients would send the whole table. If the token ids and the added rows take fewer
bytes, devices exchange these instead. Each device then adds the rows of all tokens to its own part
of the table, along the tree over the whole batch, as one device would. So the bits stay the same.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tilewise.core.dims import Dim, upper_bound
from tilewise.ir.batch import BatchCut
from tilewise.ir.graph import Graph, OpNode, TensorNode
from tilewise.ir.layout import GraphLayout, in_space

__all__ = ["gather_table_rows"]

_ID_BYTES, _GRADIENT_BYTES = 4, 4  # of an id, and of an element of a gradient


def gather_table_rows(graph: Graph, layout: GraphLayout, batch: BatchCut) -> tuple[Graph, GraphLayout]:
    """Return the graph, in which ids and rows are gathered before the gradients of its tables, and
    its layout.

    With several microbatches no sum has all tokens, so the graph is not changed. Ops inside layers
    are not changed.
    """
    chosen = {op.id for op in graph.ops if batch.microbatches == 1 and _is_gathered(graph, layout, op)}
    if not chosen:
        return graph, layout
    tensors, compute = list(graph.tensors), list(layout.compute)
    ops: list[OpNode] = []
    numbers: dict[int, int] = {}
    gathered: dict[int, int] = {}  # tensor -> all devices' rows of it, in the backward pass
    for op in graph.ops:
        inputs = op.inputs
        if op.id in chosen:
            table, ids, rows = op.given[:3]
            for tensor in (ids, rows):
                if tensor in gathered:
                    continue
                spec = graph.spec(tensor)
                gathered[tensor] = len(tensors)
                label = f"all_gather:{spec.name or op.label}"
                ops.append(OpNode(len(ops), "all_gather", (tensor,), (len(tensors),), {}, op.phase, label))
                tensors.append(TensorNode(len(tensors), replace(spec, name=""), "result", -1))
                compute.append(((), *layout.compute[tensor][1:]))
            inputs = (table, gathered[ids], gathered[rows], op.inputs[3])
        numbers[op.id] = len(ops)
        ops.append(replace(op, id=len(ops), inputs=inputs))
    producer = {o: op.id for op in ops for o in op.outputs}
    made = tuple(replace(t, producer=producer.get(t.id)) for t in tensors)
    calls = {numbers[op]: inner for op, inner in layout.calls.items()}
    pending_reductions = {
        (numbers[op], partial): tuple(replace(pending, op=numbers[op]) for pending in group)
        for (op, partial), group in layout.pending_reductions.items()
        if op not in chosen
    }
    graph = replace(graph, tensors=made, ops=tuple(ops))
    return graph, replace(
        layout,
        storage=tuple(compute),
        compute=tuple(compute),
        calls=calls,
        pending_reductions=pending_reductions,
    )


def _is_gathered(graph: Graph, layout: GraphLayout, op: OpNode) -> bool:
    """Whether an op is the gradient of a table, devices share the batch, and the ids and rows of all tokens take fewer
    bytes than the device's part of the table."""
    if op.op != "embedding_dw":
        return False
    table, ids, rows = op.given[:3]
    sizes = (*graph.spec(ids).shape, *graph.spec(table).shape)
    if not in_space(layout.compute[ids][0]) or any(isinstance(size, Dim) for size in sizes):
        return False
    *tokens, height, width = map(upper_bound, sizes)  # none is symbolic here
    token_bytes = _ID_BYTES + width * graph.spec(rows).dtype.itemsize
    local_height = height / layout.mesh.size(*layout.compute[table][0])
    return prod(tokens) * token_bytes < local_height * width * _GRADIENT_BYTES
