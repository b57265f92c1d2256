"""Timelines of tile programs: the file, and the share of a step in which all devices work."""

from __future__ import annotations

import json

import pytest

from tilewise.observe import busy_overlap, write_trace


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


def test_a_slice_says_what_its_task_waited_for(tmp_path):
    """Times are microseconds since the first start; a task is blocked until it is ready, and then queued."""
    write_trace(tmp_path / "t.json", [(1, 2, "late", 32, 5000, 7000, 9500, 12000), record(0, 4000, 6000)])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    late, first = (e for e in events if e["ph"] == "X")
    assert late == {
        "name": "late", "cat": "task", "ph": "X", "pid": 1, "tid": 2, "ts": 5.5, "dur": 2.5,
        "args": {"row_begin": 32, "blocked_us": 2.0, "queued_us": 2.5},
    }  # fmt: skip
    assert (first["name"], first["ts"], first["dur"]) == ("task", 0.0, 2.0)
    assert {(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"} == {
        (0, 0, "worker 0"),
        (1, 2, "worker 2"),
    }


def test_a_run_without_records_has_a_file(tmp_path):
    """Nothing recorded: a file without events."""
    write_trace(tmp_path / "t.json", [])
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
