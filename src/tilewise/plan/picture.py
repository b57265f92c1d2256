"""The data of a plan's page, from the plan's tables: what each call does and reads, and which
memory is in use.

The page shows the list with the most calls. `plan.calls` finds the layer and the microbatch of a
call, for any schedule. A traced run is shown next to
the calls if it has as many tasks as the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tilewise.core.errors import PlanError
from tilewise.core.validation import Validator, shown
from tilewise.observe import CallPicture, PassPicture, PlanPicture, StagePicture, TaskSpan, Trace
from tilewise.plan.calls import planned_calls
from tilewise.plan.explain import name_devices, num_tasks, short_name
from tilewise.plan.memory import ALIGNMENT, OFFLOADED, Buffer, most_at_one_time
from tilewise.plan.passes import bytes_in_flight, first_devices, walk_by_flops
from tilewise.plan.policy import show_hints
from tilewise.plan.schedule import cut_segments
from tilewise.plan.shapes import round_up
from tilewise.plan.traffic import TrafficCounter

if TYPE_CHECKING:
    from tilewise.plan.tables import PlanTables

__all__ = ["check_trace", "draw_plan"]

_validate = Validator("plan", PlanError)


def check_trace(plan: PlanTables, trace: Trace) -> None:
    """Raise PlanError if a trace has a task on a device or worker, or of an instruction, that the
    plan does not have.
    """
    templates = [template for of in plan.program.classes for template in of.templates]
    labels = {instruction.label for template in templates for instruction in template.instructions}
    for task in trace.tasks:
        is_placed = 0 <= task.device < plan.mesh.num_devices
        is_run = 0 <= task.worker < plan.settings.workers_per_device and task.start_ns <= task.end_ns
        if not (is_placed and is_run and task.kernel in labels):
            _validate.invalid(
                "save_picture",
                "a trace must have tasks of this plan's devices, workers and instructions",
                shown(task),
                "trace a run of this plan",
            )


def draw_plan(plan: PlanTables, timeline: Sequence[TaskSpan] = ()) -> PlanPicture:
    """The picture of a plan's longest list of calls.

    Args:
        plan: any plan.
        timeline: tasks of a traced run of the plan, if there was one.
    """
    of = plan.program.classes[0]
    program = max(of.calls, key=lambda name: (name != "broadcast", len(of.calls[name])))
    spans = _spans(plan, program, timeline)
    stages = tuple(
        _draw_stage(plan, program, stage, device) for stage, device in enumerate(first_devices(plan))
    )
    devices = f"{plan.mesh.num_devices} device" + ("" if plan.mesh.num_devices == 1 else "s")
    note = (
        f"{plan.mesh}: {devices} of {plan.settings.workers_per_device} workers, {plan.settings.accumulation} "
        f"microbatches, {plan.settings.batch_splits} batch splits."
    )
    passes: tuple[tuple[PassPicture, ...], ...] = ()
    if len(stages) > 1 and program == "step":
        passes = tuple(
            tuple(PassPicture(str(p), p.kind, float(p.begin), float(p.end), p.num_calls) for p in own)
            for own in walk_by_flops(plan)
        )
    stage_of_device = tuple(plan.layout.stage_of(device) for device in range(plan.mesh.num_devices))
    return PlanPicture(
        f"The plan of {plan.graph.name}", note, program, stages, stage_of_device, passes, spans
    )


def _draw_stage(plan: PlanTables, program: str, stage: int, device: int) -> StagePicture:
    """The picture of a stage's devices, of which `device` is the first."""
    buffers = plan.placements[stage].buffers
    lasting = dict.fromkeys((b.category for b in buffers if b.first < 0), 0)
    for b in buffers:
        if b.first < 0:
            lasting[b.category] += round_up(b.bytes, ALIGNMENT)
    usages = plan.estimate_memory_usage()
    of_stage = [usage for d, usage in enumerate(usages) if plan.layout.stage_of(d) == stage]
    usage = max(of_stage, key=lambda usage: usage["total"])
    lasting |= {name: usage[name] for name in ("checkpoints", *plan.overhead)}  # next to the planned buffers
    kinds = [kind for kind in plan.kinds if plan.layout.stage_of(kind) == stage]
    names = name_devices(plan)
    classes = tuple(names[plan.program.devices[kind].class_id] for kind in kinds)
    calls = tuple(_calls(plan, program, stage, device, kinds))
    name = f"stage {stage}" if len(plan.placements) > 1 else ""
    return StagePicture(name, lasting, usage, classes, calls, bytes_in_flight(plan)[stage])


def _calls(
    plan: PlanTables, program: str, stage: int, device: int, kinds: Sequence[int]
) -> Iterable[CallPicture]:
    of, live_bytes = plan.class_of(device), _LiveBytes(plan, stage)
    counters = [TrafficCounter(plan.program, [kind], plan.symbol_bounds) for kind in kinds]
    calls = [plan.class_of(kind).calls[program] for kind in kinds]
    planned = planned_calls(plan, device, program)
    last = max((p.segment.index for p in planned if p.segment.phase == "backward"), default=-1)
    for place, (call, segment, microbatch) in enumerate(planned):
        reads = tuple(
            {label: int(elements[0]) for label, elements in counter.count([own[place]]).items()}
            for counter, own in zip(counters, calls)
        )
        name = " to ".join(dict.fromkeys((segment.ops[0].label, segment.ops[-1].label)))
        workers = show_hints(call.hints)
        name += f" ({workers})" if workers else ""
        template = short_name(of.templates[call.template].name)
        alive = live_bytes.alive(segment.index, call.template)
        is_ahead = segment.phase == "update" and segment.index < last  # prefetched during the backward pass
        phase = "backward" if is_ahead else segment.phase
        yield CallPicture(name, template, phase, microbatch, alive, reads)


class _LiveBytes:
    """Bytes that are live while a segment runs, by category."""

    def __init__(self, plan: PlanTables, stage: int) -> None:
        self.changes: list[tuple[int, str, int]] = []
        own: dict[int, list[Buffer]] = {}
        for b in plan.placements[stage].buffers:
            if b.category == "temporaries":
                number = b.key[1]
                assert isinstance(number, int)
                own.setdefault(number, []).append(b)
            elif b.first >= 0 and b.category != OFFLOADED:
                size = round_up(b.bytes, ALIGNMENT)
                self.changes += [(b.first, b.category, size), (b.last + 1, b.category, -size)]
        self.temporaries = {number: most_at_one_time(of) for number, of in own.items()}
        self.at: list[dict[str, int]] = []
        now: dict[str, int] = dict.fromkeys((category for _, category, _ in self.changes), 0)
        self.changes.sort()
        done = 0
        for index in range(len(cut_segments(plan.graph, plan.layout.stages))):
            while done < len(self.changes) and self.changes[done][0] <= index:
                _, category, size = self.changes[done]
                now[category] += size
                done += 1
            self.at.append(dict(now))

    def alive(self, segment: int, template: int) -> dict[str, int]:
        """Live bytes while a template runs for a segment."""
        return {**self.at[segment], "temporaries": self.temporaries.get(template, 0)}


def _spans(
    plan: PlanTables, program: str, timeline: Sequence[TaskSpan]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per device, the start and end of each call's tasks; empty if the run had other tasks than the
    plan.
    """
    spans_of_devices = []
    for device in range(plan.mesh.num_devices):
        own = sorted((r for r in timeline if r.device == device), key=lambda r: r.submit_ns)
        of = plan.class_of(device)
        counts = [num_tasks(of.templates[call.template], plan.symbol_bounds) for call in of.calls[program]]
        if sum(counts) != len(own):
            return ()
        spans: list[tuple[int, int]] = []
        first = 0
        for count in counts:
            tasks = own[first : first + count]
            first += count
            at = spans[-1][1] if spans else min((r.start_ns for r in own), default=0)
            spans.append(
                (min((r.start_ns for r in tasks), default=at), max((r.end_ns for r in tasks), default=at))
            )
        spans_of_devices.append(tuple(spans))
    return tuple(spans_of_devices)
