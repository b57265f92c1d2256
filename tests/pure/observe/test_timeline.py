"""Figures of timelines of tile programs: the share of a step in which all devices work."""

from __future__ import annotations

import pytest

from tilewise.observe import busy_overlap


def record(device: int, start: int, end: int, worker: int = 0) -> tuple[object, ...]:
    """A record of which only place and time matter."""
    return (device, worker, "task", 0, start, start, start, end)


@pytest.mark.parametrize(
    ("records", "share"),
    [
        ([], 0.0),
        ([record(0, 0, 10)], 1.0),
        ([record(0, 0, 10), record(1, 0, 10)], 1.0),
        ([record(0, 0, 5), record(1, 5, 10)], 0.0),
        ([record(0, 0, 8), record(1, 4, 10)], 0.4),
        ([record(0, 0, 6), record(0, 2, 8, 1), record(1, 0, 4), record(1, 6, 10)], 0.6),
    ],
)
def test_busy_overlap(records, share):
    """The overlap figure is the share of the step in which every device runs some task."""
    assert busy_overlap(records) == pytest.approx(share)
