"""Progress bars and reports of definition: no output where none is useful, and phases account for all time."""

import io
import json
import threading
import time

import pytest
from rich.console import Console

from tilewise.core.progress import Progress
from tilewise.graph.parallel import ParallelDebugger, ProgressTracker


def console(is_terminal=True):
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100)


def test_long_phase_has_a_bar(monkeypatch):
    """With completed items, a rate, and the remaining time; the final bar shows all of it."""
    monkeypatch.setenv("TERM", "xterm")  # rich draws nothing before the end on a dumb terminal
    out, total = console(), 4000
    with ProgressTracker(out, delay_s=0.02).phase("specification", total) as phase:
        counter = phase.counter()
        while counter.count < total - 1 and "/s" not in out.file.getvalue():  # 20 s at most
            time.sleep(0.005)
            counter.count += 1
        counter.count = total
        time.sleep(0.1)
    text = out.file.getvalue()
    assert "specification" in text and "4000/4000" in text and "/s" in text


@pytest.mark.parametrize(
    ("is_terminal", "delay_s"), [(True, 0.5), (False, 0.0)], ids=["short", "no terminal"]
)
def test_short_phases_and_files_have_no_bar(is_terminal, delay_s):
    """Phases shorter than half a second, and output to files."""
    out = console(is_terminal)
    tracker = ProgressTracker(out, delay_s=delay_s)
    for name in ("specification", "validation"):
        with tracker.phase(name, 3) as phase:
            phase.counter().count += 3
            time.sleep(0.02)
    assert out.file.getvalue() == ""


def test_bars_end_with_their_phases_also_after_errors():
    """No thread continues to draw."""
    tracker = ProgressTracker(out := console(), delay_s=0.0)
    before = threading.active_count()
    with pytest.raises(KeyError), tracker.phase("assembly"):
        time.sleep(0.05)
        raise KeyError
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before and "assembly" in out.file.getvalue()


def test_report_sums_to_wall_time():
    """Sequential, nested and overlapping phases."""
    debugger = ParallelDebugger()
    begin = time.perf_counter()
    with debugger.phase("a"):
        time.sleep(0.02)
        with debugger.phase("inside"):
            time.sleep(0.01)
    time.sleep(0.03)
    first, second = debugger.phase("b"), debugger.phase("c")
    first.__enter__()
    time.sleep(0.01)
    second.__enter__()
    time.sleep(0.01)
    first.__exit__(None, None, None)
    time.sleep(0.01)
    second.__exit__(None, None, None)
    wall = time.perf_counter() - begin
    seconds = debugger.seconds()
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total) and total <= wall
    assert seconds["inside"] == 0 and seconds["a"] >= 0.03 and seconds["b"] >= 0.02 and seconds["c"] >= 0.01
    assert 0.03 <= seconds["unattributed"] <= total - 0.06
    assert "unattributed" in debugger.report() and ParallelDebugger().seconds()["total"] == 0


def test_pieces_are_recorded_only_at_level_verbose():
    """As a table of threads, of the slowest pieces, and an equal trace."""
    for level, has_spans in (("off", False), ("summary", False), ("verbose", True)):
        assert ParallelDebugger(level).wants_spans is has_spans
    assert Progress(ParallelDebugger("verbose")).wants_spans
    debugger = ParallelDebugger("verbose")
    with debugger.phase("templates", 2) as phase:
        counter = phase.counter()
        counter.spans += [("thread 1", "layers.3", 10, 5_000_010), ("thread 2", "layers.4", 20, 9_000_020)]
        counter.count += 2
    report = debugger.report()
    assert "thread 1: templates" in report and report.index("layers.4") < report.index("layers.3")


def test_trace_opens_in_perfetto(tmp_path):
    """A track for phases and one per thread."""
    debugger = ParallelDebugger("verbose")
    with debugger.phase("templates", 1) as phase:
        begin = time.perf_counter_ns()
        phase.counter().spans.append(("process 7", "layers.3", begin, begin + 1000))
    debugger.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["phases", "process 7"]
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert slices["layers.3"]["dur"] == 1.0 and slices["templates"]["args"] == {"done": 0}
    assert slices["templates"]["ts"] == 0 and slices["layers.3"]["ts"] >= 0


def test_level_off_records_nothing_and_forwards():
    """A following progress object still gets everything."""
    behind = ParallelDebugger()
    debugger = ParallelDebugger("off", behind)
    with debugger.phase("a"):
        pass
    assert debugger.report() == "" and not debugger.phases and [p.name for p in behind.phases] == ["a"]
