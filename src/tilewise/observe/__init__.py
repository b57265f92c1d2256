"""Shows runs: figures and reports of traces, profiles of communication and computation, files for
Perfetto, dependency graphs, and pages of graphs and plans.

The functions are pure functions of graphs, and of records that the runtimes write. They do not use
the native module and start no tasks. `tilewise.runtime` exports `Trace`, `TaskSpan` and
`RuntimeStats`, which a `Runtime` returns.
"""

from tilewise.observe.dependency_graph import (
    DependencyGraph,
    GraphParam,
    GraphRegion,
    GraphTask,
    read_graph,
    write_graph,
)
from tilewise.observe.graph_picture import write_graph_html, write_graph_svg
from tilewise.observe.model_page import render_graph
from tilewise.observe.overlap import Overlap, PathStep, TransferTime, measure_overlap
from tilewise.observe.perfetto import write_perfetto
from tilewise.observe.plan_page import CallPicture, PassPicture, PlanPicture, StagePicture, render_plan
from tilewise.observe.profile import Profile
from tilewise.observe.trace import TaskSpan, Trace
from tilewise.observe.trace_report import write_report

__all__ = [
    "CallPicture",
    "DependencyGraph",
    "GraphParam",
    "GraphRegion",
    "GraphTask",
    "Overlap",
    "PassPicture",
    "PathStep",
    "PlanPicture",
    "Profile",
    "StagePicture",
    "TaskSpan",
    "Trace",
    "TransferTime",
    "measure_overlap",
    "read_graph",
    "render_graph",
    "render_plan",
    "write_graph",
    "write_graph_html",
    "write_graph_svg",
    "write_perfetto",
    "write_report",
]
