"""Timelines of tile programs: the recorded tasks, and the trace file."""

from __future__ import annotations

import json

from native.programs.sample_programs import TILES, all_reduce_program
from tilewise.observe import Trace, write_perfetto


def test_a_traced_run_records_every_task(make_executor):
    """Off by default; then one record per task of the last run, with ordered times."""
    program = all_reduce_program(4)
    executor = make_executor(program, 2, workers=2)
    executor.run(program, [])
    assert executor.timeline() == []
    executor.trace(True)
    executor.run(program, [])
    executor.run(program, [])
    records = Trace.of_program(executor.timeline(), 1).tasks
    assert len(records) == program.num_tasks(0, []) + program.num_tasks(1, []) == 2 * 4 * 5 * TILES
    assert {r.kernel for r in records} == {"produce", "reduce", "gather", "partial read", "share read"}
    assert {r.device for r in records} == {0, 1}
    assert all(r.submit_ns <= r.ready_ns <= r.start_ns <= r.end_ns for r in records)
    assert executor.stats()["timeline_dropped"] == 0
    executor.trace(False)
    assert executor.timeline() == []


def test_trace_file(make_executor, tmp_path):
    """Chrome trace JSON: a process per device, a thread per worker, a slice per task."""
    program = all_reduce_program(2)
    executor = make_executor(program, 2)
    executor.trace(True)
    executor.run(program, [])
    path = tmp_path / "trace.json"
    write_perfetto(path, Trace.of_program(executor.timeline(), 1))
    events = json.loads(path.read_text())["traceEvents"]
    records = Trace.of_program(executor.timeline(), 1).tasks
    first = min(r.submit_ns for r in records)
    slices = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert len(slices) == program.num_tasks(0, []) + program.num_tasks(1, [])
    assert sorted(slices) == sorted(
        (r.kernel, r.device, r.worker, (r.start_ns - first) / 1e3, (r.end_ns - r.start_ns) / 1e3)
        for r in records
    )
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert (
        names.items()
        >= {
            (f"{kind}_name", device, 0): f"{called} {device if kind == 'process' else 0}"
            for device in (0, 1)
            for kind, called in (("process", "device"), ("thread", "worker"))
        }.items()
    )
