"""The passes of a pipeline in time: a walk of the frozen plan's lists, without a clock.

Every stage runs its calls in order. A call takes the time that `cost` gives it. A stage that
receives waits until the sender has reached the same move. So the walk shows when each pass begins and
ends, and how long stages are idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from tilewise.core.errors import InternalError
from tilewise.plan.calls import PlannedCall, planned_calls
from tilewise.plan.costs import count_flops

if TYPE_CHECKING:
    from tilewise.plan.tables import PlanTables

__all__ = [
    "PassSpan",
    "bytes_in_flight",
    "first_devices",
    "idle_shares",
    "walk_by_flops",
    "walk_passes",
]

Time = Fraction | int


class PassSpan(NamedTuple):
    """A pass of a virtual stage for a microbatch.

    Attributes:
        kind: `F`, `B`, or the parts `I` and `W` of a backward pass (`strategy.schedules`).
        stage: the virtual stage.
        microbatch: the microbatch.
        begin, end: when it begins and ends; time spent waiting for another stage is not part of it.
        num_calls: its calls, without moves.
    """

    kind: str
    stage: int
    microbatch: int
    begin: Time
    end: Time
    num_calls: int = 1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def walk_passes(
    plan: PlanTables, cost: Callable[[PlannedCall], Time], program: str = "step"
) -> tuple[tuple[PassSpan, ...], ...]:
    """The passes of each stage, in order. The update is left out.

    Args:
        cost: the time that a call takes; moves take none.
    """
    stages = [_Walk(plan, device, program, cost) for device in first_devices(plan)]
    sent: dict[tuple[int, int], Time] = {}  # move and microbatch -> when the sender has reached it
    while any(stage.left for stage in stages):
        if not sum(stage.go_on(sent) for stage in stages):
            raise InternalError(
                "[plan.walk_passes] a plan must have no deadlock; got stages that wait for each other"
            )
    return tuple(tuple(stage.passes) for stage in stages)


def first_devices(plan: PlanTables) -> list[int]:
    """The first device of each stage of the pipeline; device 0 without a pipeline."""
    stages = plan.layout.stages
    return [0] if stages is None else plan.mesh.group(0, stages.axis)


class _Walk:
    """One stage, walked up to the call that waits."""

    def __init__(
        self, plan: PlanTables, device: int, program: str, cost: Callable[[PlannedCall], Time]
    ) -> None:
        self.stages, self.cost = plan.layout.stages, cost
        self.now: Time = 0
        self.left = [c for c in planned_calls(plan, device, program) if c.segment.phase != "update"][::-1]
        self.templates = plan.class_of(device).templates
        self.splits = self.stages is not None and bool(self.stages.weight_part)
        self.passes: list[PassSpan] = []

    def go_on(self, sent: dict[tuple[int, int], Time]) -> bool:
        """Walk until a call waits. Returns whether any call ran."""
        before = len(self.left)
        while self.left:
            planned = self.left[-1]
            if planned.segment.is_move:
                key = planned.segment.index, planned.microbatch
                records = self.templates[planned.call.template].collectives
                if any(record.source >= 0 for record in records):
                    sent[key] = self.now
                elif records:  # otherwise it only waits for its receivers
                    if key not in sent:
                        break
                    self.now = max(self.now, sent[key])
            else:
                self._run(planned)
            self.left.pop()
        return len(self.left) < before

    def _run(self, planned: PlannedCall) -> None:
        """Add a call to its pass."""
        first = planned.segment.ops[0].id
        kind = "F" if planned.segment.phase == "forward" else "I" if self.splits else "B"
        stage = 0
        if self.stages is not None:
            stage = self.stages.ops[first]
            kind = "W" if self.stages.is_weight_part(first) else kind
        begin, self.now = self.now, self.now + self.cost(planned)
        last = self.passes[-1] if self.passes else None
        if last is not None and last[:3] == (kind, stage, planned.microbatch) and last.end == begin:
            self.passes[-1] = last._replace(end=self.now, num_calls=last.num_calls + 1)
        else:
            self.passes.append(PassSpan(kind, stage, planned.microbatch, begin, self.now))


def walk_by_flops(plan: PlanTables, program: str = "step") -> tuple[tuple[PassSpan, ...], ...]:
    """The passes of each stage, if a call takes as long as its floating-point operations say."""
    flops = {
        device: count_flops(plan.program, device, program, plan.symbol_bounds)
        for device in first_devices(plan)
    }
    of_templates: dict[int, int] = {}
    for of_device in flops.values():
        of_templates |= of_device
    return walk_passes(plan, lambda planned: of_templates[planned.call.template], program)


def idle_shares(passes: Sequence[Sequence[PassSpan]]) -> tuple[Fraction, ...]:
    """The share of a step, up to the update, in which each stage runs no pass."""
    length = max((Fraction(of[-1].end) for of in passes if of), default=Fraction(0))
    busy = (sum((Fraction(p.end - p.begin) for p in of), Fraction(0)) for of in passes)
    return tuple(1 - b / length if length else Fraction(0) for b in busy)


def bytes_in_flight(plan: PlanTables) -> tuple[int, ...]:
    """Per stage, bytes of a device's memory and file for results of the forward pass that the
    backward pass reads, for all microbatches that are in flight at one time.
    """
    graph = plan.graph
    constant = {t.id for t in graph.tensors if t.kind in ("parameter", "state", "constant")}
    made: set[int] = set()  # from the batch, not copies of weights
    for op in graph.ops:
        if op.phase == "forward" and not constant.issuperset(op.given):
            made.update(op.outputs)
        elif op.phase == "forward":
            constant.update(op.outputs)
    read = {t for op in graph.ops if op.phase == "backward" for t in op.given}
    return tuple(
        sum(b.bytes for b in of.buffers if b.first >= 0 and b.key[0] == "tensor" and b.key[1] in made & read)
        for of in plan.placements
    )
