"""Graphs that can be planned and run, running instances, and the comparison of a strategy with one
device.
"""

from tilewise.session.compute_graph import ComputeGraph
from tilewise.session.context import ExecutionContext
from tilewise.session.instance import GraphInstance, StepResult
from tilewise.session.loading import LoadReport
from tilewise.session.plan import Plan
from tilewise.session.verify import VerifyReport, verify_strategy

__all__ = [
    "ComputeGraph",
    "ExecutionContext",
    "GraphInstance",
    "LoadReport",
    "Plan",
    "StepResult",
    "VerifyReport",
    "verify_strategy",
]
