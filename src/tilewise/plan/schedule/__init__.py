"""The schedule stage: segments of a laid-out graph, the order in which a step uses them, and what later stages need to
know of the graph's tensors. It is computed once, as a `Scheduled`.
"""

from tilewise.plan.schedule.aliases import alias_roots
from tilewise.plan.schedule.prefetched_states import choose_prefetched, prefetched_apart
from tilewise.plan.schedule.root_tensors import RootTensors, result_buffers
from tilewise.plan.schedule.scheduled import Scheduled, schedule_graph
from tilewise.plan.schedule.segments import SeenTensors, Segment, cut_segments, tensors_seen

__all__ = [
    "RootTensors",
    "Scheduled",
    "SeenTensors",
    "Segment",
    "alias_roots",
    "choose_prefetched",
    "cut_segments",
    "prefetched_apart",
    "result_buffers",
    "schedule_graph",
    "tensors_seen",
]
