"""Buffers alive at the same time never overlap; buffers that share bytes are listed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilewise.plan.memory import ALIGNMENT, Buffer, place_buffers, place_in_sequence, shared_bytes

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
    made = buffers(specs)
    end = place_buffers(made, base * ALIGNMENT)
    for i, a in enumerate(made):
        assert a.offset % ALIGNMENT == 0 and base * ALIGNMENT <= a.offset and a.end <= end
        for b in made[:i]:
            meet = a.first <= b.last and b.first <= a.last
            assert not meet or a.end <= b.offset or b.end <= a.offset


@given(st.lists(lifetimes, max_size=40))
def test_shared_bytes_are_all_listed(specs):
    """Exactly the pairs whose ranges overlap, both ways."""
    made = buffers(specs)
    place_buffers(made, 0)
    listed = {(i, j) for i, others in shared_bytes(made).items() for j in others}
    overlapping = {
        (i, j)
        for i, a in enumerate(made)
        for j, b in enumerate(made)
        if i != j and a.offset < b.end and b.offset < a.end
    }
    assert listed == overlapping


def test_reuse_saves_memory():
    """Ten buffers one after another need the room of one."""
    made = buffers([(1000, i, 0) for i in range(10)])
    assert place_buffers(made, 0) == 1024


def test_lasting_buffers_follow_each_other():
    """Without lifetimes nothing is shared."""
    made = [Buffer((i,), 100, "parameters") for i in range(3)]
    assert place_in_sequence(made, 64) == 64 + 3 * 128
    assert [b.offset for b in made] == [64, 192, 320]
