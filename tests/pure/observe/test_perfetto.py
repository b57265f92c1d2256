"""Trace files for Perfetto: what stands on which track."""

import json
from collections import Counter

from pure.observe.records import span, stall
from tilewise.observe import perfetto
from tilewise.observe.perfetto import SUBMITTER_THREADS, write_perfetto
from tilewise.observe.trace import Trace

TRACE = Trace(
    (
        span(1, (1000, 1000, 1100, 2000), worker=0, scope_depth=1, name="first"),
        span(2, (1050, 2000, 2300, 3000), worker=1, scope_depth=2, producers=(1,)),
        span(3, (1200, 1200, 1300, 1400), worker=-1, scope_depth=2),
    ),
    (stall(1250, 1500, heap_used_bytes=64, live_tasks=3),),
    num_workers=2,
)


def events_of(tmp_path, trace):
    write_perfetto(tmp_path / "trace.json", trace)
    return json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_every_record_has_its_track(tmp_path):
    """Workers and submitters are named threads; a task that a submitter ran lies on its submitter, inside the stall."""
    events = events_of(tmp_path, TRACE)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 0): "worker 0", (0, 1): "worker 1", (0, SUBMITTER_THREADS): "submitter 0 (submits)"}
    slices = {e["name"]: (e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["name"] != "k"}
    assert slices == {"first": (0, 0.1, 0.9), "stall: window": (SUBMITTER_THREADS, 0.25, 0.25)}
    (helped,) = [e for e in events if e["ph"] == "X" and e["args"].get("task") == 3]
    assert (helped["tid"], helped["ts"]) == (SUBMITTER_THREADS, 0.3)
    assert sorted(e["ts"] for e in events if e["ph"] == "i") == [0.0, 0.05, 0.2]


def test_slice_has_all_fields_of_its_task(tmp_path):
    """Its own name before its kernel's, when it was submitted, how long it was blocked and queued, its producers."""
    events = events_of(tmp_path, TRACE)
    (second,) = [e for e in events if e["ph"] == "X" and e["args"].get("task") == 2]
    assert second == {
        "name": "k", "cat": "task", "ph": "X", "pid": 0, "tid": 1, "ts": 1.3, "dur": 0.7,
        "args": {
            "task": 2, "kernel": "k", "submitter": 0, "scope_depth": 2, "status": 0, "priority": 0, "submit_us": 0.05,
            "blocked_us": 0.95, "queued_us": 0.3, "producers": [1],
        },
    }  # fmt: skip
    (first,) = [e for e in events if e["name"] == "first"]
    assert "producers" not in first["args"] and first["args"]["kernel"] == "k"
    (waited,) = [e for e in events if e.get("cat") == "stall"]
    assert waited["args"] == {"live_tasks": 3, "heap_used_bytes": 64}


def test_submitters_have_tracks_of_their_own(tmp_path):
    """Stalls and submissions of a second thread stand on its submitter."""
    trace = Trace((span(1, (1, 1, 1, 9), submitter=3),), (stall(2, 4, submitter=2),), num_workers=1)
    events = events_of(tmp_path, trace)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        0: "worker 0",
        SUBMITTER_THREADS + 2: "submitter 2 (submits)",
        SUBMITTER_THREADS + 3: "submitter 3 (submits)",
    }
    assert [e["tid"] for e in events if e.get("cat") == "stall"] == [SUBMITTER_THREADS + 2]
    assert [e["tid"] for e in events if e["ph"] == "i"] == [SUBMITTER_THREADS + 3]


def test_counters_follow_the_levels(tmp_path):
    """Live and ready tasks, heap bytes and scope depth have counter tracks."""
    counters = {}
    for event in events_of(tmp_path, TRACE):
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append((event["ts"], event["args"]["value"]))
    assert counters["live tasks"] == [(0.0, 1), (0.05, 2), (0.2, 3), (0.4, 2), (1.0, 1), (2.0, 0)]
    assert counters["ready tasks"] == [(0.0, 1), (0.1, 0), (0.2, 1), (0.3, 0), (1.0, 1), (1.3, 0)]
    assert counters["heap bytes"] == [(0.25, 64)]
    assert counters["scope depth, submitter 0"] == [(0.0, 1), (0.05, 2)]


def test_arrows_lead_from_producers_while_they_are_few(tmp_path, monkeypatch):
    """An arrow begins inside its producer and ends at its consumer's start; too many are left out."""
    arrows = [e for e in events_of(tmp_path, TRACE) if e.get("cat") == "dependency"]
    assert [(e["ph"], e["tid"], e["ts"]) for e in arrows] == [("s", 0, 0.999), ("f", 1, 1.3)]
    monkeypatch.setattr(perfetto, "MAX_ARROWS", 1)
    assert len([e for e in events_of(tmp_path, TRACE) if e.get("cat") == "dependency"]) == 2
    monkeypatch.setattr(perfetto, "MAX_ARROWS", 0)
    assert not [e for e in events_of(tmp_path, TRACE) if e.get("cat") == "dependency"]


def test_devices_are_processes(tmp_path):
    """Each device is a process with its workers, also those that ran nothing."""
    trace = Trace((span(1, (1, 1, 1, 2), device=0), span(2, (1, 1, 1, 2), device=3)), (), num_workers=2)
    events = events_of(tmp_path, trace)
    assert Counter(e["pid"] for e in events if e["name"] == "thread_name") == {0: 3, 3: 3}
