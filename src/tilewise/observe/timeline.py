"""Timelines of runs: a file for Perfetto or chrome://tracing, and how much all devices worked at once.

Reads what `Executor.timeline()` returns; holds no state and starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tilewise.observe.perfetto import Event, name_event, slice_event, write_events

__all__ = ["TaskRecord", "busy_overlap", "write_trace"]


class TaskRecord(NamedTuple):
    """One task of a traced run; times in ns of the machine's steady clock."""

    device: int
    worker: int
    label: str
    row_begin: int
    submit_ns: int
    ready_ns: int
    start_ns: int
    end_ns: int


def write_trace(path: str | Path, timeline: Iterable[Sequence[object]]) -> None:
    """Write a timeline as Chrome trace events: a process per device, a thread per worker.

    Args:
        path: file to write; opens in Perfetto and chrome://tracing.
        timeline: what `Executor.timeline()` returned.
    """
    records = _records(timeline)
    origin_ns = min((r.start_ns for r in records), default=0)
    events: list[Event] = []
    for device in sorted({r.device for r in records}):
        events.append(name_event("process_name", device, 0, f"device {device}"))
    for device, worker in sorted({(r.device, r.worker) for r in records}):
        events.append(name_event("thread_name", device, worker, f"worker {worker}"))
    events.extend(_event(r, origin_ns) for r in records)
    write_events(path, events)


def busy_overlap(timeline: Iterable[Sequence[object]]) -> float:
    """Share of a step in which every device that took part runs at least one task, 0 to 1.

    The step lasts from the first task's start to the last task's end. With one device: how much it is busy.
    """
    records = _records(timeline)
    if not records:
        return 0.0
    edges: list[tuple[int, int, int]] = []
    for record in records:
        edges += [(record.start_ns, 1, record.device), (record.end_ns, -1, record.device)]
    edges.sort(key=lambda edge: edge[0])
    running = dict.fromkeys((r.device for r in records), 0)
    all_busy_ns, last_ns = 0, edges[0][0]
    for moment_ns, change, device in edges:
        if all(running.values()):
            all_busy_ns += moment_ns - last_ns
        running[device] += change
        last_ns = moment_ns
    return all_busy_ns / max(1, edges[-1][0] - edges[0][0])


def _records(timeline: Iterable[Sequence[object]]) -> list[TaskRecord]:
    return [TaskRecord(*entry) for entry in timeline]  # type: ignore[arg-type]


def _event(record: TaskRecord, origin_ns: int) -> Event:
    args: dict[str, object] = {
        "row_begin": record.row_begin,
        "blocked_us": (record.ready_ns - record.submit_ns) / 1e3,
        "queued_us": (record.start_ns - record.ready_ns) / 1e3,
    }
    begin_ns, end_ns = record.start_ns - origin_ns, record.end_ns - origin_ns
    return slice_event(record.label, "task", record.device, record.worker, begin_ns, end_ns, args)
