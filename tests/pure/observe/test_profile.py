"""The profile of a run: sentences, the page, the file for Perfetto; and which run is collected."""

import json

import pytest

from pure.pages import Page
from tilewise.observe import Profile, Trace
from tilewise.observe.collector import active_collector, collect_traces

ROWS = [
    (0, 0, "linear:<w>", 0, 1_000, 1_000, 1_000, 41_000),
    (1, 0, "linear:<w>", 0, 1_000, 1_000, 1_000, 91_000),
    (0, 0, "linear:<w>/reduce_scatter", 8, 1_000, 91_500, 92_000, 101_000),
]


def test_the_page_shows_the_figures(tmp_path):
    """Sentences, tables and the steps of the critical path; names are escaped, and nothing is loaded."""
    profile = Profile(Trace.of_program(ROWS, 1, hosts=(0, 1), clock_error_ns=2_500), "step, run 3 of 4")
    profile.save(tmp_path / "trace.html")
    html = (tmp_path / "trace.html").read_text(encoding="utf-8")
    words = Page(html).text
    assert "http" not in html and "<script" not in html and "linear:<w>" not in html
    for sentence in (
        *profile.summary(),
        "step, run 3 of 4: 3 tasks in 100 µs on 2 devices with 1 worker each.",
        "The hosts' clocks agree within 2.5 µs.",
        "linear:<w>/reduce_scatter, row 8",
        "device 0 host 0 worker 0",
        "it became ready then",
    ):
        assert sentence in words, sentence


def test_the_summary_says_what_communication_cost():
    """Transfers, hidden share, idle time by cause and the critical path, of known times."""
    _, transfers, idle, path = Profile(Trace.of_program(ROWS, 1)).summary()
    assert transfers == (
        "Transfers took 4.5 µs per device (4.5% of the time), 0% of it hidden behind computation; workers waited for "
        "other devices for 25.2% of the time."
    )
    assert idle.startswith(
        "Workers were idle for 30.5% of the run: 25.2% device 1 was awaited; 5.0% after the last"
    )
    assert path.startswith(
        "The critical path has 2 tasks: 90% computation, 9% transfers, and 1% between tasks."
    )


def test_a_run_without_records(tmp_path):
    """A page that says so."""
    profile = Profile(Trace((), (), 1))
    profile.save(tmp_path / "trace.html")
    profile.perfetto(tmp_path / "trace.json")
    assert "No tasks were recorded." in Page((tmp_path / "trace.html").read_text(encoding="utf-8")).text


@pytest.mark.parametrize(("hosts", "error_ns"), [((), 0), ((0, 1), 2_500)])
def test_the_perfetto_file_states_the_error_of_the_clocks(tmp_path, hosts, error_ns):
    """Devices of several hosts are named with their host; the kind of a task is its category."""
    trace = Trace.of_program(ROWS, 1, hosts=hosts, clock_error_ns=error_ns)
    Profile(trace).perfetto(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    names = [e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"]
    about = " (host 1, clocks agree within 2.5 µs)" if hosts else ""
    assert names[1] == f"device 1{about}"
    assert content.get("otherData", {}) == ({"clock_error_us": 2.5} if hosts else {})
    slices = [(e["name"], e["cat"]) for e in content["traceEvents"] if e["ph"] == "X"]
    assert slices[1:] == [("linear:<w>", "task"), ("linear:<w>/reduce_scatter", "transfer")]


class Source:
    """Records runs as an executor does: it has the timeline of its last run only."""

    def __init__(self):
        self.is_recording, self.last, self.num_reads = False, None, 0

    def record(self, enable):
        self.is_recording = enable

    def start(self, number):
        self.last = number if self.is_recording else None

    def read(self):
        self.num_reads += 1
        rows = [] if self.last is None else [(0, 0, f"run {self.last}", 0, 1, 1, 1, 2)]
        return Trace.of_program(rows, 1)


def collect(monkeypatch, wanted, runs):
    """The titles and labels of the chosen run. Each run is a source, a program and its seconds."""
    now = 0.0
    monkeypatch.setattr("tilewise.observe.collector.time.monotonic", lambda: now)
    with collect_traces(wanted) as collector:
        assert active_collector() is collector
        for number, (source, name, seconds) in enumerate(runs, 1):

            def start(source=source, seconds=seconds, number=number):
                nonlocal now
                source.start(number)
                now += seconds

            collector.run(source, name, start)
        profile = collector.profile()
    assert active_collector() is None
    return profile and (profile.title, [task.kernel for task in profile.trace.tasks])


def test_the_last_run_of_the_longest_program_is_collected(monkeypatch):
    """Timelines are read only when another program would replace them, and at the end."""
    training, evaluation = Source(), Source()
    runs = [
        (training, "step", 2.0),
        (training, "step", 2.0),
        (training, "forward", 1.0),
        (training, "step", 2.0),
        (training, "forward", 1.0),
        (evaluation, "forward", 5.0),
    ]
    assert collect(monkeypatch, None, runs) == ("step, run 4 of 6", ["run 4"])
    assert (training.num_reads, evaluation.num_reads) == (4, 1)


@pytest.mark.parametrize("wanted", [1, 3])
def test_a_wanted_run_is_collected(monkeypatch, wanted):
    """Only this run is recorded."""
    source = Source()
    runs = [(source, "step", 1.0), (source, "forward", 1.0), (source, "step", 1.0)]
    assert collect(monkeypatch, wanted, runs) == (f"step, run {wanted} of 3", [f"run {wanted}"])
    assert source.num_reads == 1 and not source.is_recording
    assert collect(monkeypatch, 4, runs) is None
