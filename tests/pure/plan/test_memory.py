"""Buffers alive at the same time never overlap; buffers that share bytes are listed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.graph import test_recompute
from pure.graph.test_recompute import planned
from tilewise.ir.program import memory_kind
from tilewise.plan.memory import (
    ALIGNMENT,
    Buffer,
    place_buffers,
    place_in_sequence,
    place_lingering,
    shared_bytes,
)

lifetimes = st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 6))


def buffers(specs):
    """Buffers from (bytes, first, length)."""
    return [
        Buffer((i,), size, "activations", first, first + length)
        for i, (size, first, length) in enumerate(specs)
    ]


@given(st.lists(lifetimes, max_size=40), st.integers(0, 3))
def test_no_overlap_in_time_and_space(specs, base):
    """Aligned, inside the region, disjoint where lifetimes meet."""
    made, end = place_buffers(buffers(specs), base * ALIGNMENT)
    for i, a in enumerate(made):
        assert a.offset % ALIGNMENT == 0 and base * ALIGNMENT <= a.offset and a.end <= end
        for b in made[:i]:
            meet = a.first <= b.last and b.first <= a.last
            assert not meet or a.end <= b.offset or b.end <= a.offset


@given(st.lists(lifetimes, max_size=40))
def test_shared_bytes_are_all_listed(specs):
    """Exactly the pairs whose ranges overlap, both ways."""
    made, _ = place_buffers(buffers(specs), 0)
    listed = {(i, j) for i, others in shared_bytes(made).items() for j in others}
    overlapping = {
        (i, j)
        for i, a in enumerate(made)
        for j, b in enumerate(made)
        if i != j and a.offset < b.end and b.offset < a.end
    }
    assert listed == overlapping


def test_reuse_saves_memory():
    """Ten buffers one after another need the memory of one."""
    made = buffers([(1000, i, 0) for i in range(10)])
    assert place_buffers(made, 0)[1] == 1024


def test_permanent_buffers_follow_each_other():
    """Without lifetimes nothing is shared."""
    placed, end = place_in_sequence([Buffer((i,), 100, "parameters") for i in range(3)], 64)
    assert end == 64 + 3 * 128 and [b.offset for b in placed] == [64, 192, 320]


@given(st.lists(st.tuples(lifetimes, st.booleans()), min_size=1, max_size=30), st.integers(0, 40_000))
def test_buffers_read_by_peers_live_longer_where_memory_permits(specs, more):
    """Lifetimes stay separate and no buffer ends beyond the region; with memory for all, none shares."""
    tight, end = place_buffers(buffers([spec for spec, _ in specs]), 0)
    room, lingering = end + more, {b.key for b, (_, is_read) in zip(tight, specs) if is_read}
    made = place_lingering(tight, lingering, room)
    assert all(b.end <= room for b in made)
    for i, a in enumerate(made):
        for b in made[:i]:
            meet = a.first <= b.last and b.first <= a.last
            assert not meet or a.end <= b.offset or b.end <= a.offset
    if not lingering:
        assert made == tight
    made = place_lingering(tight, lingering, sum(b.end - b.offset for b in made))
    shared = shared_bytes(made)
    assert not any(shared.get(i) for i, b in enumerate(made) if b.key in lingering)


def test_lifetimes_grow_as_far_as_memory_permits():
    """In the memory of two buffers, each of three lives one position longer, a single one permanently."""
    made, _ = place_buffers(buffers([(1000, at, 0) for at in range(4)]), 0)
    three, one = {(0,), (1,), (2,)}, {(0,)}
    assert [b.offset for b in place_lingering(made, three, 1024)] == [0, 0, 0, 0]
    assert [b.offset for b in place_lingering(made, three, 2048)] == [0, 1024, 0, 1024]
    first, *others = [b.offset for b in place_lingering(made, one, 2048)]
    assert len({*others}) == 1 and first not in others


def read_and_shared(plan):
    """Temporaries of a layer's backward pass that other devices read, and those of them that share bytes there."""
    templates = plan.program.classes[0].templates
    number, template = next(
        (n, t) for n, t in enumerate(templates) if "layer" in t.name and ".backward" in t.name
    )
    own = [b for b in plan.placement(0).buffers if b.category == "temporaries" and b.key[1] == number]
    slots = [template.slots[o.slot] for i in template.instructions for o in i.operands if o.group >= 0]
    kinds = {"temp": "temp", "tensor": "inner"}
    seen = {(kinds.get(memory_kind(slot.kind)), slot.id) for slot in slots}
    keys = [(b.key[0], b.key[2]) for b in own]
    shared = shared_bytes(own)
    return seen & {*keys}, {key for i, key in enumerate(keys) if shared.get(i)}


@pytest.mark.parametrize(
    ("axes", "kinds"), [({"fsdp": 2}, {"temp"}), ({"fsdp": 2, "tp": 2}, {"temp", "inner"})]
)
def test_buffers_read_by_peers_use_memory_of_another_template(monkeypatch, axes, kinds):
    """Where a large embedding's gradient leaves room, nothing that peers read is overwritten in one use."""
    monkeypatch.setitem(test_recompute.SIZES, "vocab_size", 8192)
    plan = planned("full", axes)
    read, shared = read_and_shared(plan)
    assert {kind for kind, _ in read} == kinds and not read & shared and shared
    monkeypatch.setattr("tilewise.plan.place.place_lingering", lambda buffers, *_: buffers)
    tight = planned("full", axes)
    assert {kind for kind, _ in read & read_and_shared(tight)[1]} == kinds
    assert tight.placement(0).regions == plan.placement(0).regions
