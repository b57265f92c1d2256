"""Defining graphs on several threads.

`ParallelGraphBuilder` calls functions that describe layers on several threads, then writes the layers
into a graph in one order. The graph equals the one that the same calls make on one thread.
`ProgressTracker` and `ParallelDebugger` display the progress.
"""

from tilewise.graph.parallel.builder import ParallelGraphBuilder
from tilewise.graph.parallel.debugger import LEVELS, ParallelDebugger
from tilewise.graph.parallel.progress import ProgressTracker
from tilewise.graph.parallel.specs import LayerSpec, SpecHandle

__all__ = ["LEVELS", "LayerSpec", "ParallelDebugger", "ParallelGraphBuilder", "ProgressTracker", "SpecHandle"]
