"""Defining graphs in parallel: specifications made next to one another, put together in one order, and watched.

`ParallelGraphBuilder` has layers described on threads and writes them into a graph all at once;
`ProgressTracker` and `ParallelDebugger` show what happens meanwhile. The graph is that of the same calls made one after
the other.
"""

from tilewise.graph.parallel.builder import ParallelGraphBuilder
from tilewise.graph.parallel.debugger import LEVELS, ParallelDebugger
from tilewise.graph.parallel.handle import SpecHandle
from tilewise.graph.parallel.progress import ProgressTracker

__all__ = ["LEVELS", "ParallelDebugger", "ParallelGraphBuilder", "ProgressTracker", "SpecHandle"]
