"""Defining graphs on several threads.

`ParallelGraphBuilder` calls functions that describe layers on several threads, then writes the layers
into a graph in one order. The graph equals the one that the same calls make on one thread.
`ProgressTracker` and `ParallelDebugger` display the progress.
"""

from tilewise.graph.parallel.builder import ParallelGraphBuilder
from tilewise.graph.parallel.debugger import LEVELS, ParallelDebugger
from tilewise.graph.parallel.handle import SpecHandle
from tilewise.graph.parallel.progress import ProgressTracker

__all__ = ["LEVELS", "ParallelDebugger", "ParallelGraphBuilder", "ProgressTracker", "SpecHandle"]
