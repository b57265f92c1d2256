"""The segment and the microbatch of each call of a frozen plan.

Both follow from the tensors to which a call is bound, so this works for any schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tilewise.ir.program import Call, DeviceClass
from tilewise.plan.schedule import Segment, cut_segments

if TYPE_CHECKING:
    from tilewise.plan.tables import PlanTables

__all__ = ["PlannedCall", "planned_calls"]


class PlannedCall(NamedTuple):
    """A call with its segment and its microbatch."""

    call: Call
    segment: Segment
    microbatch: int


def planned_calls(plan: PlanTables, device: int, program: str) -> list[PlannedCall]:
    """The calls of a list on a device, in order."""
    of, last = plan.class_of(device), plan.settings.accumulation - 1
    find = _Segments(plan, cut_segments(plan.graph, plan.layout.stages))
    seen: dict[int, int] = {}
    planned = []
    for call in of.calls[program]:
        segment = find.segment(of, call)
        microbatch = seen.get(segment.index, 0)
        seen[segment.index] = microbatch + 1
        if segment.is_move:
            microbatch = call.numbers[0]
        elif segment.phase == "update":
            microbatch = last
        planned.append(PlannedCall(call, segment, microbatch))
    return planned


class _Segments:
    """Finds the segment of a call: the one of the call's template that uses the tensors to which the
    call is bound.
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
        """The segment that uses most of the call's tensors; the first of several."""
        named = self.by_name[of.templates[call.template].name]
        if len(named) == 1:
            return self.segments[named[0]]
        bound = {of.entries[number].key for number in call.binding}
        tensors = [key[1] for key in bound if key[0] in ("tensor", "flat")]
        # memory that several results use in turn is bound by the name of one of them, so some tensors may be
        # another segment's: most are the call's own
        votes = Counter(user for t in tensors if t in self.users for user in self.users[t])
        return self.segments[max(named, key=lambda index: (votes[index], -index))]
