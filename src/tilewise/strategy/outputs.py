"""Adds ops that gather sharded outputs on one device, which reads them."""

from __future__ import annotations

from dataclasses import replace

from tilewise.core.dims import counts_batch
from tilewise.ir.graph import Graph, OpNode, TensorNode
from tilewise.ir.layout import GraphLayout
from tilewise.ir.op import results_of_call

__all__ = ["gather_outputs"]


def gather_outputs(graph: Graph, layout: GraphLayout) -> tuple[Graph, GraphLayout]:
    """Add a `gather` after every output whose last dim is sharded. Sums over the batch are not
    changed.
    """
    tensors, ops, layouts = list(graph.tensors), list(graph.ops), list(layout.compute)
    outputs = dict(graph.outputs)
    for name, tensor in graph.outputs.items():
        node = graph.tensors[tensor]
        if node.kind != "result" or node.spec.storage != "rows" or not layouts[tensor][-1]:
            continue
        if len(node.spec.shape) == 1 and counts_batch(node.spec.labels[0]):
            continue  # rows of the batch are read where they are
        spec = results_of_call("gather", [node.spec], {})[0]
        tensors.append(TensorNode(len(tensors), spec, "result", len(ops)))
        phase = graph.ops[node.producer].phase if node.producer is not None else "forward"
        ops.append(OpNode(len(ops), "gather", (tensor,), (len(tensors) - 1,), {}, phase, f"gather:{name}"))
        layouts.append((*layouts[tensor][:-1], ()))
        outputs[name] = len(tensors) - 1
    gathered = replace(graph, tensors=tuple(tensors), ops=tuple(ops), outputs=outputs)
    return gathered, replace(layout, storage=tuple(layouts), compute=tuple(layouts))
