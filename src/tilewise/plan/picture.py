"""The data of a plan's page, from the plan's tables: what each call does and reads, and which
memory is in use.

The page shows the list with the most calls. The layer and the microbatch of a call follow from the
tensors to which the call is bound, so this works for any schedule. A traced run is shown next to
the calls if it has as many tasks as the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tilewise.core.errors import PlanError
from tilewise.core.validation import Validator, shown
from tilewise.ir.program import Call, DeviceClass
from tilewise.observe import CallPicture, PlanPicture, TaskSpan, Trace
from tilewise.plan.explain import name_devices, num_tasks, short_name
from tilewise.plan.memory import ALIGNMENT, OFFLOADED, Buffer, most_at_one_time
from tilewise.plan.schedule import Segment, cut_segments
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
    buffers = plan.placement(0).buffers
    lasting = dict.fromkeys((b.category for b in buffers if b.first < 0), 0)
    for b in buffers:
        if b.first < 0:
            lasting[b.category] += round_up(b.bytes, ALIGNMENT)
    usage = max(plan.estimate_memory_usage(), key=lambda device: device["total"])
    lasting |= {name: usage[name] for name in ("checkpoints", *plan.overhead)}  # next to the planned buffers
    calls = tuple(_calls(plan, of, program))
    devices = f"{plan.mesh.num_devices} device" + ("" if plan.mesh.num_devices == 1 else "s")
    note = (
        f"{plan.mesh}: {devices} of {plan.settings.workers_per_device} workers, {plan.settings.accumulation} "
        f"microbatches, {plan.settings.batch_splits} batch splits."
    )
    return PlanPicture(
        f"The plan of {plan.graph.name}",
        note,
        program,
        lasting,
        usage,
        tuple(name_devices(plan)),
        calls,
        _spans(plan, program, timeline),
    )


def _calls(plan: PlanTables, of: DeviceClass, program: str) -> Iterable[CallPicture]:
    segments = cut_segments(plan.graph)
    live_bytes = _LiveBytes(plan)
    find = _Segments(plan, segments)
    counters = [TrafficCounter(plan.program, [device], plan.symbol_bounds) for device in plan.kinds]
    calls = [of_kind.calls[program] for of_kind in plan.program.classes]
    seen: dict[int, int] = {}
    last = max((s.index for s in segments if s.phase == "backward"), default=-1)
    for place, call in enumerate(of.calls[program]):
        segment = find.segment(of, call)
        microbatch = seen.get(segment.index, 0)
        if segment.phase == "update":
            microbatch = plan.settings.accumulation - 1
        seen[segment.index] = microbatch + 1
        reads = tuple(
            {label: int(elements[0]) for label, elements in counter.count([own[place]]).items()}
            for counter, own in zip(counters, calls)
        )
        name = " to ".join(dict.fromkeys((segment.ops[0].label, segment.ops[-1].label)))
        template = short_name(of.templates[call.template].name)
        alive = live_bytes.alive(segment.index, call.template)
        is_ahead = segment.phase == "update" and segment.index < last  # prefetched during the backward pass
        phase = "backward" if is_ahead else segment.phase
        yield CallPicture(name, template, phase, microbatch, alive, reads)


class _Segments:
    """Finds the segment of a call: a segment of the call's template that uses all tensors to which
    the call is bound.
    """

    def __init__(self, plan: PlanTables, segments: Sequence[Segment]) -> None:
        self.by_name: dict[str, list[int]] = {}
        self.users: dict[int, set[int]] = {}
        self.segments = segments
        for segment in segments:
            self.by_name.setdefault(segment.name(plan.graph), []).append(segment.index)
            for op in segment.ops:
                for tensor in (*op.inputs, *op.outputs):
                    if tensor is not None:
                        self.users.setdefault(tensor, set()).add(segment.index)

    def segment(self, of: DeviceClass, call: Call) -> Segment:
        """The first segment that fits."""
        bound = {of.entries[number].key for number in call.binding}
        tensors = [key[1] for key in bound if key[0] in ("tensor", "flat")]
        named = self.by_name[of.templates[call.template].name]
        if len(named) == 1:
            return self.segments[named[0]]
        sets = sorted((self.users[t] for t in tensors if t in self.users), key=len)
        fitting = set(named).intersection(*sets[:1])
        for users in sets[1:]:
            if len(fitting) > 1 and fitting & users:
                fitting &= users
        return self.segments[min(fitting or named)]


class _LiveBytes:
    """Bytes that are live while a segment runs, by category."""

    def __init__(self, plan: PlanTables) -> None:
        self.changes: list[tuple[int, str, int]] = []
        own: dict[int, list[Buffer]] = {}
        for b in plan.placement(0).buffers:
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
        for index in range(len(cut_segments(plan.graph))):
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
