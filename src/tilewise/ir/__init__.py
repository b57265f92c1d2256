"""The frozen data that one stage passes to the next (graph, layout, tile program), and the
interface of ops.
"""

from tilewise.ir.graph import Graph, OpNode, Template, TensorNode, TensorSpec
from tilewise.ir.layout import GraphLayout, TensorLayout

__all__ = [
    "Graph",
    "GraphLayout",
    "OpNode",
    "Template",
    "TensorLayout",
    "TensorNode",
    "TensorSpec",
]
