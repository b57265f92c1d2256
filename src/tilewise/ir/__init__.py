"""The immutable data that the stages pass on (a graph, its layout, a tile program), and the
interface of ops.

docs/glossary.md explains the words; `ir.program` introduces those of a tile program.
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
