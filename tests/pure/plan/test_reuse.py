"""Templates in the same bytes: a write waits for all earlier uses of its bytes, and for no more than needed."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tilewise.plan.bind.reuse import LiveInterval, find_conflicts

SIZE = 24
live_intervals = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE), st.sampled_from([0.0, 0.5, 1.0]))


def templates_of(given_templates):
    """Live intervals from (begin, length, share that is always written); equal places have one handle."""
    handles, number, made = {}, 0, []
    for template in given_templates:
        own = []
        for begin, length, share in template:
            end = min(begin + length, SIZE)
            handle = handles.setdefault((begin, end), len(handles))
            own.append(LiveInterval((number,), handle, begin, end, begin + int((end - begin) * share)))
            number += 1
        made.append(own)
    return made


def unordered(uses, conflicts, seed):
    """A write and an earlier use of one of its bytes that are not ordered; None if all pairs are ordered."""
    generator, handle_of = random.Random(seed), {t.entries[0]: t.handle for use in uses for t in use}
    before: list[list[tuple[int, set[int]]]] = [
        [] for _ in range(SIZE)
    ]  # per byte: handle, and all handles before it
    for use in uses:
        for interval in use:
            waits = {handle_of[e] for e in conflicts.get(interval.entries, ())} | {interval.handle}
            for byte in range(interval.begin, interval.end):
                if byte >= interval.written and generator.random() < 0.5:
                    continue
                earlier = before[byte]
                behind = {i for i, (handle, _) in enumerate(earlier) if handle in waits}
                behind = behind.union(*(earlier[i][1] for i in behind))
                if len(behind) < len(earlier):
                    return interval, byte
                earlier.append((interval.handle, behind))
    return None


@given(
    st.lists(st.lists(live_intervals, max_size=4), min_size=1, max_size=5),
    st.lists(st.integers(0, 4), max_size=20),
    st.integers(0, 9),
)
def test_every_write_is_ordered_after_all_earlier_uses(drawn, order, seed):
    """Through its conflicts, whatever templates follow each other, however often."""
    templates = templates_of(drawn)
    uses = [templates[i % len(templates)] for i in order]
    assert unordered(uses, find_conflicts(uses), seed) is None


def test_missing_conflict_is_detected():
    """The twin: two templates without a conflict are not ordered."""
    uses = templates_of([[(0, 8, 1.0)], [(0, 9, 1.0)]])
    assert unordered(uses, find_conflicts(uses), 0) is None
    assert unordered(uses, {}, 0) is not None


def test_rewritten_bytes_separate_earlier_uses():
    """Of growing sizes each conflicts with the previous one; in the second round, the last one too."""
    uses = templates_of([[(0, 4, 1.0)], [(0, 8, 1.0)], [(0, 12, 1.0)]])
    assert find_conflicts(uses) == {(1,): {0}, (2,): {1}}
    assert find_conflicts([*uses, *uses]) == {(0,): {2}, (1,): {0, 2}, (2,): {1}}


def test_optional_writes_hide_nothing():
    """After memory that a use may leave unwritten, all earlier uses remain conflicts."""
    first, never, last = templates_of([[(0, 8, 1.0)], [(0, 9, 0.0)], [(0, 10, 1.0)]])
    assert find_conflicts([first, never, last])[last[0].entries] == {0, 1}
