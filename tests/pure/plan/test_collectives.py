"""Signals have one number on all devices, whatever their shards' sizes; every read of a peer is acknowledged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pure.plan.test_templates import plan_llama
from tilewise.core.errors import InternalError
from tilewise.ir.program import Instruction, LoweredTemplate, Notify, Number, Wait
from tilewise.ir.validate import validate_acknowledgements
from tilewise.plan.collectives import place_signals
from tilewise.plan.rings import credits_of_uses, place_of_use
from tilewise.plan.traffic import peer_of


def template(ranges):
    """A template that posts the last signal of every range of signals and waits for the first."""
    starts = [i << 24 for i in range(len(ranges))]
    waits = [Wait(s, True, 1) for s in starts]
    notifies = [Notify(0, 0, s + n - 1, True) for s, n in zip(starts, ranges)]
    instruction = Instruction("", "x", Number(1), 0, (), waits=tuple(waits), notifies=tuple(notifies))
    return LoweredTemplate("t", (instruction,), (), (), tuple(ranges))


def test_signal_ranges_begin_at_the_same_number():
    """A range of signals is as large as its largest use; numbers within it stay."""
    placed = place_signals([template([3, 1, 4]), template([1, 5, 2])], 100, 0)
    for t, ranges in zip(placed, ([3, 1, 4], [1, 5, 2])):
        (i,) = t.instructions
        assert [w.signal_base for w in i.waits] == [0, 3, 8]
        assert [n.signal_base for n in i.notifies] == [ranges[0] - 1, 3 + ranges[1] - 1, 8 + ranges[2] - 1]
        assert t.num_signals == 12
        assert t.first_signal == 100


def test_signals_of_rings_are_the_same_in_all_variants():
    """A variant's own signals are elsewhere, those of its rings where the first variant has them."""
    ring = -2 << 24  # the second range of rings
    instruction = Instruction("", "x", Number(1), 0, (), waits=(Wait(ring + 2, True, 1), Wait(1, True, 1)))
    made = LoweredTemplate("t", (instruction,), (), (), (4,), (5, 3))
    for first_signal in (50, 70):
        (placed,) = place_signals([made], first_signal, 30)
        waits = placed.instructions[0].waits
        assert [first_signal + w.signal_base for w in waits] == [30 + 5 + 2, first_signal + 1]


def test_credits_of_a_ring():
    """A use waits for the previous one in its place; the last use waits for all that remain."""
    assert [place_of_use(u, 0) for u in range(4)] == [0, 1, 0, 1]
    assert place_of_use(0, 1) == 1
    numbers = credits_of_uses([7, 9, 12])
    assert numbers == [(0, 7, 0, 7, 0, 7), (0, 9, 0, 9, 0, 9), (1, 7, 1, 12, 1, 9)]
    assert sum(n[0] + n[2] + n[4] for n in numbers) == 3


def without(program, number, place, field):
    """The program whose instruction has no waits (or posts), in the first class."""
    first, *others = program.classes
    listed = list(first.templates[number].instructions)
    listed[place] = replace(listed[place], **{field: ()})
    changed = replace(first.templates[number], instructions=tuple(listed))
    templates = (*first.templates[:number], changed, *first.templates[number + 1 :])
    return replace(program, classes=(replace(first, templates=templates), *others))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_every_read_of_a_peer_is_acknowledged(axes):
    """The check fails without one acknowledgement, or with one that waits for nothing."""
    program = plan_llama(1, axes).program
    validate_acknowledgements(program)
    broken = unread = 0
    for number, template in enumerate(program.classes[0].templates):
        for place, instruction in enumerate(template.instructions if template.signal_ranges else ()):
            reads = any(peer_of(o, program.devices[0], 0) is not None for o in instruction.operands)
            if instruction.label.endswith("/ack"):
                with pytest.raises(InternalError, match="acknowledged"):
                    validate_acknowledgements(without(program, number, place, "waits"))
                broken += 1
            if reads and (len(axes) == 1 or "norm" not in instruction.label):
                with pytest.raises(InternalError, match="acknowledged"):
                    validate_acknowledgements(without(program, number, place, "notifies"))
                unread += 1
    assert broken > 3 and unread > 3
