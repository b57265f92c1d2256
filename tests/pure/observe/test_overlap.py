"""Hidden and exposed transfers, idle time by cause and the critical path, of constructed traces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.observe.overlap import KINDS, WAIT_CAUSES, kind_of, measure_overlap, op_of
from tilewise.observe.trace import Trace

US = 1000


def trace_of(*tasks, workers=1, **about):
    """A trace of tasks (device, worker, label, submit, ready, start, end), in microseconds."""
    # a time of 0 would mean unknown
    rows = [(d, w, label, 0, *((1 + time) * US for time in times)) for d, w, label, *times in tasks]
    return Trace.of_program(rows, workers, **about)


@pytest.mark.parametrize(
    ("label", "kind", "op"),
    [
        ("linear:q_proj.weight", "compute", "linear:q_proj.weight"),
        ("linear:q_proj.weight/reduce_scatter", "transfer", "linear:q_proj.weight"),
        ("gather/all_gather", "transfer", "gather"),
        ("producer/put", "transfer", "producer"),
        ("producer/get", "transfer", "producer"),
        ("broadcast:q_proj.weight", "transfer", "broadcast:q_proj.weight"),
        ("gather/ack", "signal", "gather"),
        ("gather/offer", "signal", "gather"),
        ("fetch:exp_avg", "file", "fetch:exp_avg"),
        ("adamw:weight/store", "file", "adamw:weight"),
        ("global_norm/squares", "compute", "global_norm/squares"),
        ("/put", "compute", "/put"),
        ("gather_matmul:12/put", "transfer", "gather_matmul"),
        ("gather_matmul:12/put/fence", "signal", "gather_matmul"),
        ("gather_matmul:14/matmul", "compute", "gather_matmul"),
        ("gather_matmul/end", "signal", "gather_matmul"),
    ],
)
def test_labels_say_what_a_task_does(label, kind, op):
    """The part after the slash, or the op, tells transfers from computation."""
    assert (kind_of(label), op_of(label)) == (kind, op)


def test_a_transfer_is_hidden_while_another_worker_computes():
    """Of 10 µs of a transfer, 6 lie within a task that computes; simultaneous transfers count once."""
    trace = trace_of(
        (0, 0, "f", 0, 0, 4, 20),
        (0, 1, "f/put", 0, 0, 0, 10),
        (1, 0, "f", 0, 0, 0, 20),
        (1, 1, "f/put", 0, 0, 2, 8),
        (1, 0, "g/get", 0, 0, 20, 30),
        (1, 1, "h/get", 0, 0, 24, 34),
        workers=2,
    )
    figures = measure_overlap(trace)
    first, second = figures.devices
    assert (first.count, first.total_ns, first.hidden_ns, first.exposed_ns) == (1, 10 * US, 6 * US, 4 * US)
    assert (second.count, second.total_ns, second.hidden_ns) == (3, 20 * US, 6 * US)
    assert figures.hidden_share == pytest.approx(12 / 30)
    assert figures.transfer_share == pytest.approx(30 / 68)
    rows = [(row.name, row.count, row.total_ns // US, row.exposed_ns // US) for row in figures.labels]
    assert rows == [("g/get", 1, 10, 10), ("h/get", 1, 10, 10), ("f/put", 2, 16, 4)]
    assert figures.busy_ns == {"compute": 36 * US, "transfer": 36 * US, "signal": 0, "file": 0}


def test_bytes_from_another_host_are_on_their_way_until_the_task_is_ready():
    """From the end of the op's last task, on the other host, to ready; the computing device hides 30 of 40 µs."""
    tasks = (
        (1, 0, "f", 0, 0, 0, 10),
        (0, 0, "f", 0, 0, 0, 5),
        (0, 0, "h", 0, 5, 5, 40),
        (0, 0, "f/all_gather", 1, 50, 50, 52),
    )
    figures = measure_overlap(trace_of(*tasks, hosts=(0, 1)))
    assert (figures.devices[0].total_ns, figures.devices[0].hidden_ns) == (42 * US, 30 * US)
    assert figures.idle_ns[0, 0] == {"transfer": 10 * US}
    same_host = measure_overlap(trace_of(*tasks))
    assert (same_host.devices[0].total_ns, same_host.devices[0].hidden_ns) == (2 * US, 0)
    assert same_host.idle_ns[0, 0] == {"device 1": 10 * US}


def test_idle_time_names_its_cause():
    """Every cause occurs once, with a known length."""
    trace = trace_of(
        (0, 0, "f", 0, 0, 3, 10),  # 0-3: ready and not taken
        (0, 1, "g", 0, 10, 10, 30),  # worker 1, 0-10: depends on f
        (0, 0, "g/put", 10, 30, 30, 38),  # worker 0, 10-30: depends on g
        (0, 0, "h", 10, 38, 38, 40),  # worker 1, 30-38: a transfer is in progress
        (1, 0, "p", 0, 0, 0, 70),
        (0, 0, "p/ack", 10, 70, 70, 71),  # 40-70: nothing runs, device 1 is awaited
        (0, 0, "k", 80, 80, 80, 85),  # 71-80: nothing is submitted
        (1, 0, "q", 0, 70, 70, 95),
        workers=2,
    )
    figures = measure_overlap(trace)
    assert figures.idle_ns[0, 0] == {
        "scheduling": 3 * US,
        "dependencies": 20 * US,
        "device 1": 30 * US,
        "submission": 9 * US,
        "tail": 10 * US,
    }
    assert figures.idle_ns[0, 1] == {
        "scheduling": 3 * US,
        "dependencies": (7 + 2) * US,
        "transfer": 8 * US,
        "device 1": 30 * US,
        "submission": 10 * US,
        "tail": 15 * US,
    }
    assert figures.idle_ns[1, 0] == {}
    assert figures.awaited_share == pytest.approx((30 + 30 + 8) / (4 * 95))


def test_the_critical_path_crosses_devices():
    """Back from the last end: the busy worker, the peer's task of the same op, the late submission."""
    trace = trace_of(
        (1, 0, "a", 0, 0, 0, 20),
        (1, 0, "f", 0, 21, 21, 50),  # released by a
        (0, 0, "f", 0, 0, 0, 10),
        (0, 0, "f/reduce_scatter", 0, 51, 51, 55),  # released by device 1's f
        (0, 0, "b", 0, 56, 56, 70),
        (0, 0, "c", 0, 55, 71, 90),  # its worker was busy with b
        (0, 0, "d", 100, 100, 100, 130),  # submitted late
        (1, 0, "other", 0, 50, 50, 60),
    )
    path = measure_overlap(trace).path
    steps = [(s.task.device, s.task.kernel, s.reason, s.gap_ns // US, s.run_ns // US, s.kind) for s in path]
    assert steps == [
        (1, "a", "begin", 0, 20, "compute"),
        (1, "f", "release", 1, 29, "compute"),
        (0, "f/reduce_scatter", "release", 1, 4, "transfer"),
        (0, "b", "release", 1, 14, "compute"),
        (0, "c", "worker", 1, 19, "compute"),
        (0, "d", "submission", 10, 30, "compute"),
    ]


def test_a_run_without_records():
    """Nothing recorded gives zeros."""
    figures = measure_overlap(Trace((), (), 2))
    assert (figures.devices, figures.path, figures.span_ns) == ((), (), 0)
    assert (figures.hidden_share, figures.transfer_share, figures.idle_shares) == (1.0, 0.0, {})


@st.composite
def programs(draw):
    """Runs of up to three devices on one or two hosts, whose workers run one task at a time."""
    labels = [f"{op}{part}" for op in "fg" for part in ("", "/all_gather", "/ack", "/put", "/store")]
    workers, rows = draw(st.integers(1, 2)), []
    num_devices = draw(st.integers(1, 3))
    for place in range(num_devices * workers):
        now = 0
        for _ in range(draw(st.integers(0, 5))):
            start = now + draw(st.integers(0, 12_000))
            ready = draw(st.integers(0, start))
            now = start + draw(st.integers(0, 9_000))
            row = place // workers, place % workers, draw(st.sampled_from(labels)), 0
            rows.append((*row, draw(st.integers(0, ready)), ready, start, now))
    rows = [(*row[:4], *(time + 1 for time in row[4:8]), *row[8:]) for row in rows]
    hosts = draw(st.sampled_from([(), tuple(range(num_devices)), (0,) * num_devices]))
    return Trace.of_program(rows, workers, hosts=hosts, clock_error_ns=draw(st.sampled_from([0, 500])))


@given(programs())
def test_figures_of_any_run_are_consistent(trace):
    """Hidden and exposed time add up, every worker is busy or idle for a cause, and the path goes forward."""
    figures = measure_overlap(trace)
    for row in (*figures.devices, *figures.labels):
        assert 0 <= row.hidden_ns <= row.total_ns and row.hidden_ns + row.exposed_ns == row.total_ns
    for device, row in zip(trace.devices, figures.devices):
        running = [t for t in trace.tasks if t.device == device and kind_of(t.kernel) == "transfer"]
        longest = max((t.end_ns - t.start_ns for t in running), default=0)
        assert longest <= row.total_ns <= figures.span_ns and row.count == len(running)
    assert 0 <= figures.hidden_share <= 1 and 0 <= figures.transfer_share <= 1
    assert 0 <= figures.awaited_share <= 1
    assert sum(figures.busy_ns.values()) == sum(t.end_ns - t.start_ns for t in trace.tasks)
    assert set(figures.busy_ns) <= set(KINDS)
    for (device, worker), idle in figures.idle_ns.items():
        mine = [t for t in trace.tasks if (t.device, t.worker) == (device, worker)]
        busy = sum(t.end_ns - t.start_ns for t in mine)
        assert sum(idle.values()) + busy == figures.span_ns and min(idle.values(), default=1) > 0
        peers = {f"device {d}" for d in trace.devices if d != device}
        assert set(idle) <= set(WAIT_CAUSES) | peers
    starts = [step.start_ns for step in figures.path]
    assert starts == sorted(starts)
    if trace.tasks:
        assert figures.path[-1].task.end_ns == max(t.end_ns for t in trace.tasks)
