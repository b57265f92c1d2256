"""`Scheduled`: a laid-out graph, its tensors on the devices, and the order of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise.core.errors import PlanError
from tilewise.ir.batch_sums import BatchSums, find_batch_sums, require_whole_batch
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout
from tilewise.ir.schedule import MakeSchedules, Schedule
from tilewise.plan.classes import classes_of
from tilewise.plan.schedule.aliases import alias_roots
from tilewise.plan.schedule.root_tensors import RootTensors
from tilewise.plan.schedule.segments import Segment, cut_segments, places_of
from tilewise.plan.shapes import LocalShapes, PlanSettings, symbols_of

__all__ = ["Scheduled", "schedule_graph"]


@dataclass(frozen=True)
class Scheduled:
    """A laid-out graph in the order of a step.

    Attributes:
        tensors: the root graph's tensors: sizes, sums over the batch, shared memory.
        classes: the devices of each class; devices of a class run the same instructions.
        segments: layer calls, and runs of root ops between them.
        schedules: per stage of the pipeline, the segments of a step, each with its microbatch.
    """

    tensors: RootTensors
    classes: tuple[tuple[int, ...], ...]
    segments: tuple[Segment, ...]
    schedules: tuple[Schedule, ...]

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.tensors.graph

    @property
    def layout(self) -> GraphLayout:
        """The layouts of its tensors."""
        return self.tensors.layout

    @property
    def shapes(self) -> LocalShapes:
        """Local sizes; `kinds` are a device of each class."""
        return self.tensors.shapes

    @property
    def sums(self) -> BatchSums:
        """What is complete only after the last microbatch."""
        return self.tensors.sums

    def stage_of_class(self, number: int) -> int:
        """The stage of the devices of a class."""
        return self.layout.stage_of(self.classes[number][0])

    def segments_of(self, stage: int) -> tuple[Segment, ...]:
        """The segments that a stage runs, in graph order."""
        used = {turn.segment for turn in self.schedules[stage]}
        return tuple(segment for segment in self.segments if segment.index in used)


def schedule_graph(
    graph: Graph, layout: GraphLayout, settings: PlanSettings, schedule: MakeSchedules
) -> Scheduled:
    """Divide a laid-out graph into segments and order them.

    Raises:
        LayoutError: a device would get no part of a tensor, or sizes do not divide as the strategy needs.
        PlanError: the graph has no op, or a microbatch needs a total over the whole batch.
    """
    if not graph.ops:
        raise PlanError(f"[plan.schedule] a graph must contain an op; got none in {graph.name!r}; add one")
    shapes = LocalShapes(layout.mesh, settings, graph.k_splits, symbols_of(graph))
    classes = classes_of(graph, layout, shapes)
    shapes = replace(shapes, kinds=tuple(devices[0] for devices in classes), classes=tuple(classes))
    sums = find_batch_sums(graph)
    if settings.accumulation > 1:
        require_whole_batch(graph, sums)
    sent = (op.inputs[0] for op in graph.ops if op.op == "move")  # other stages read them later
    roots = alias_roots(graph, graph.ops, frozenset((*graph.outputs.values(), *sent)))  # type: ignore[arg-type]
    segments = cut_segments(graph, layout.stages)
    places = places_of(graph, layout.stages, segments, sums)
    schedules = schedule(places, settings.accumulation)
    tensors = RootTensors(graph, layout, shapes, sums, roots, segments, places, schedules)
    return Scheduled(tensors, classes, segments, schedules)
