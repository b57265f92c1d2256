"""Signals have one number on all devices, whatever their shards' sizes."""

from __future__ import annotations

from tilewise.ir.program import Extent, Instruction, LoweredTemplate, Notify, Wait
from tilewise.plan.collectives import place_signals


def template(sites):
    """A template that raises the last signal of every site and waits for the first."""
    starts = [i << 24 for i in range(len(sites))]
    waits = [Wait(s, True, 1) for s in starts]
    notifies = [Notify(0, s + n - 1, True) for s, n in zip(starts, sites)]
    instruction = Instruction("", "x", Extent(1), 0, [], waits=waits, notifies=notifies)
    return LoweredTemplate("t", (instruction,), (), (), tuple(sites))


def test_sites_begin_at_the_same_signal():
    """A site is as large as its largest need; numbers within it stay."""
    placed = place_signals([template([3, 1, 4]), template([1, 5, 2])])
    for t, sites in zip(placed, ([3, 1, 4], [1, 5, 2])):
        (i,) = t.instructions
        assert [w.signal_base for w in i.waits] == [0, 3, 8]
        assert [n.signal_base for n in i.notifies] == [sites[0] - 1, 3 + sites[1] - 1, 8 + sites[2] - 1]
        assert t.num_signals == 12
