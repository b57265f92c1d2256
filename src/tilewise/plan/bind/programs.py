"""Binds every use of a template to memory, and lists the calls of each program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewise.ir.program import NO_FILE, Call, DeviceClass, TileProgram
from tilewise.plan.bind.binder import Binder
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.lower import Variants
from tilewise.plan.memory import OFFLOADED
from tilewise.plan.place import Placement
from tilewise.plan.policy import PolicyRules
from tilewise.plan.schedule import Scheduled

__all__ = ["Bound", "bind", "phases_of_programs"]

_PASSED = ("gradients", "gathered", "activations", OFFLOADED)  # categories of results


@dataclass(frozen=True)
class Bound:
    """Programs whose templates refer to memory.

    Attributes:
        program: templates, entries and calls per class, and each device's numbers.
        outside: per tensor that users read or write, its entries: one, or one per microbatch.
        num_handles: handles of the entries' tiles.
    """

    program: TileProgram
    outside: Mapping[int, tuple[int, ...]]
    num_handles: int


def bind(scheduled: Scheduled, lowered: Variants, placements: Sequence[Placement]) -> Bound:
    """Make an entry for each way in which a program views a buffer, and a call for each use of a
    template. On several devices there is also the program `broadcast`.
    """
    binder = Binder(scheduled.tensors, lowered.variants, [placement.buffers for placement in placements])
    outside = binder.outside()
    rules = PolicyRules(scheduled.shapes.settings.policy, scheduled.shapes.settings.workers_per_device)
    calls = [[rules.placed(binder.use(use), use.segment) for use in uses] for uses in lowered.uses]
    runs = [lowered.uses]
    # all microbatches' forward passes in a row, an order that no step has
    if scheduled.shapes.settings.accumulation > 1:
        runs.append(lowered.uses_alone("forward"))
    programs = [_programs(scheduled, stage, lowered, calls[stage]) for stage in range(len(placements))]
    numbers, classes = DeviceNumbers(scheduled.shapes), scheduled.classes
    numbers.take(lowered.numbers)
    templates = [[rules.hinted(v.templates[c]) for v in lowered.variants] for c in range(len(classes))]
    rules.require_matches()
    if scheduled.shapes.mesh.num_devices > 1:
        copies, call = binder.broadcast(numbers)
        programs = [{**of_stage, "broadcast": (call,)} for of_stage in programs]
        templates = [[*of, copy] for of, copy in zip(templates, copies)]
    aliases = []
    for stage, placement in enumerate(placements):
        first = {use.variant: (use, call) for use, call in zip(lowered.uses[stage][::-1], calls[stage][::-1])}
        intervals = {number: binder.live_intervals(stage, *of) for number, of in first.items()}
        aliases.append(
            binder.table.aliases(
                stage,
                [b for b in placement.buffers if b.category in _PASSED],
                [[intervals[use.variant] for use in of[stage]] for of in runs],
            )
        )
    class_of = {device: c for c, devices in enumerate(classes) for device in devices}
    program = TileProgram(
        tuple(
            DeviceClass(
                tuple(of),
                tuple(entries),
                aliases[stage],
                programs[stage],
                placements[stage].file_begin if placements[stage].file_bytes else NO_FILE,
            )
            for of, entries, stage in zip(templates, binder.table.tables, binder.stages)
        ),
        numbers.bindings(class_of),
    )
    return Bound(program, outside, binder.table.num_handles)


def _programs(
    scheduled: Scheduled, stage: int, lowered: Variants, calls: Sequence[Call]
) -> dict[str, tuple[Call, ...]]:
    """The lists of calls of a stage, from those of a step."""
    programs = {}
    for name, phases in phases_of_programs(scheduled).items():
        own = [call for use, call in zip(lowered.uses[stage], calls) if use.segment.phase in phases]
        uses = lowered.uses[stage] if name == "step" else lowered.uses_alone(name)[stage]
        programs[name] = tuple(
            call if call.numbers == use.numbers else replace(call, numbers=use.numbers)
            for call, use in zip(own, uses)
        )
    return programs


def phases_of_programs(scheduled: Scheduled) -> Mapping[str, tuple[str, ...]]:
    """The programs of a graph, and the phases that each runs: `forward`, and with a loss `backward`
    and `step`.

    With several microbatches, a separate backward pass would have only the activations of the last
    one, so there is no program `backward`.
    """
    programs: dict[str, tuple[str, ...]] = {"forward": ("forward",)}
    if any(segment.phase == "backward" for segment in scheduled.segments):
        if scheduled.shapes.settings.accumulation == 1:
            programs["backward"] = ("backward",)
        programs["step"] = ("forward", "backward", "update")
    return programs
