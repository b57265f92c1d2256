"""Defining computations: the graph builder, layer templates, gradients and passes.

A template is the structure of a repeated layer. It is traced once and used by many calls.
"""

from tilewise.graph.adapters import Adapter
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.gradients import Differentiated, differentiate
from tilewise.graph.passes import fix_sizes, fuse_into_table_gradients, simplify
from tilewise.graph.recomputation import Recomputation, recompute
from tilewise.graph.split_backward import split_backward
from tilewise.graph.templates import LayerFunction, layer

__all__ = [
    "Adapter",
    "Differentiated",
    "GraphBuilder",
    "LayerFunction",
    "Recomputation",
    "differentiate",
    "fix_sizes",
    "fuse_into_table_gradients",
    "layer",
    "recompute",
    "simplify",
    "split_backward",
]
