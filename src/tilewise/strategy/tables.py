"""Gradients of tables: where devices share a batch, each takes all its tokens, for the rows of a table that it has.

A token adds to one row of a table, so a table's gradient is mostly zeros. Summed over devices as other gradients are,
all of it crosses, and each device needs memory for its part. The ids and the rows that are added cross instead,
wherever those are fewer bytes. Each device then adds the rows of all tokens along the whole tree, as one device would,
so no bit changes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tilewise.core.dims import upper_bound
from tilewise.ir.batch import BatchCut
from tilewise.ir.graph import Graph, OpNode, TensorNode
from tilewise.ir.layout import GraphLayout, TensorLayout, in_space

__all__ = ["gather_table_rows"]

_ITEM = 4  # bytes of an element of a gradient


def gather_table_rows(graph: Graph, layout: GraphLayout, batch: BatchCut) -> tuple[Graph, GraphLayout]:
    """The graph with ids and rows gathered before the gradients of its tables, and its layout.

    With several microbatches there are several sums, of which none has all tokens; tables in layers stay as they are.
    """
    if batch.microbatches > 1 or not any(_is_gathered(graph, layout, op) for op in graph.ops):
        return graph, layout
    tensors, use = list(graph.tensors), list(layout.use)
    ops: list[OpNode] = []
    numbers: dict[int, int] = {}
    gathered: dict[tuple[int, str], int] = {}
    for op in graph.ops:
        inputs = op.inputs
        if _is_gathered(graph, layout, op):
            for tensor in op.inputs[1:3]:
                assert tensor is not None
                if (tensor, op.phase) in gathered:
                    continue
                spec = graph.spec(tensor)
                whole: TensorLayout = ((), *layout.use[tensor][1:])
                gathered[tensor, op.phase] = len(tensors)
                label = f"all_gather:{spec.name or op.label}"
                ops.append(OpNode(len(ops), "all_gather", (tensor,), (len(tensors),), {}, op.phase, label))
                tensors.append(TensorNode(len(tensors), replace(spec, name=""), "result", -1))
                use.append(whole)
            inputs = tuple(t if t is None else gathered.get((t, op.phase), t) for t in op.inputs)
        numbers[op.id] = len(ops)
        ops.append(replace(op, id=len(ops), inputs=inputs))
    producer = {o: op.id for op in ops for o in op.outputs}
    new = replace(
        graph, tensors=tuple(replace(t, producer=producer.get(t.id)) for t in tensors), ops=tuple(ops)
    )
    calls = {numbers[op]: inner for op, inner in layout.calls.items()}
    records = {
        (numbers[op], partial): tuple(replace(record, op=numbers[op]) for record in found)
        for (op, partial), found in layout.records.items()
        if not _is_gathered(graph, layout, graph.ops[op])
    }
    return new, replace(layout, home=tuple(use), use=tuple(use), calls=calls, records=records)


def _is_gathered(graph: Graph, layout: GraphLayout, op: OpNode) -> bool:
    """Whether an op is the gradient of a table whose batch devices share, with few tokens for its rows."""
    if op.op != "embedding_dw":
        return False
    table, ids, rows, *_ = op.inputs
    assert table is not None and ids is not None and rows is not None
    axes, spec = layout.use[ids][0], graph.spec(rows)
    shapes = (*graph.spec(ids).shape, *graph.spec(table).shape)
    if not in_space(axes) or not all(isinstance(size, int) for size in shapes):
        return False
    is_alone = not any(inner for t in (ids, rows) for inner in layout.use[t][1:])
    held = upper_bound(graph.spec(table).shape[0]) // layout.mesh.size(*layout.use[table][0])
    tokens = prod(map(upper_bound, graph.spec(ids).shape))
    return is_alone and layout.use[rows][0] == axes and tokens * spec.dtype.itemsize < held * _ITEM
