"""Graphs that can be planned and run, running instances, and the comparison of a strategy with one
device.
"""

from tilewise.plan import Plan
from tilewise.session.compute_graph import ComputeGraph
from tilewise.session.instance import GraphInstance, StepResult
from tilewise.session.loading import LoadReport
from tilewise.session.origin import require_origin
from tilewise.session.verify import VerifyReport, verify_strategy

__all__ = [
    "ComputeGraph",
    "GraphInstance",
    "LoadReport",
    "Plan",
    "StepResult",
    "VerifyReport",
    "require_origin",
    "verify_strategy",
]
