"""What is derived from the records of a run: idle time by cause, critical path, fill levels, time per kernel."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure.observe.records import span, stall
from tilewise.observe.trace import IDLE_CAUSES, Trace


def test_idle_time_has_one_cause_at_every_moment():
    """Nothing submitted, waiting for others, ready but not taken, and the tail are distinguished."""
    trace = Trace(
        (
            span(1, (100, 100, 110, 200), worker=0),  # 100-110: ready and not taken
            span(2, (120, 200, 220, 300), worker=0),  # 120-200: depends on 1; 200-220: ready
            span(
                3, (400, 400, 400, 500), worker=1
            ),  # 300-400: nothing is there; 400-500: the tail of worker 0
        ),
        (),
        num_workers=2,
    )
    first, second = trace.workers()
    assert first.idle_ns == {"scheduling": 10 + 20, "dependencies": 0, "submission": 100, "tail": 100}
    assert second.idle_ns == {
        "scheduling": 10 + 20,
        "dependencies": 80,
        "submission": 10 + 80 + 100,
        "tail": 0,
    }
    assert (first.busy_ns, second.busy_ns, trace.utilisation) == (170, 100, 270 / 800)


@pytest.mark.parametrize(
    ("tasks", "share"),
    [
        ([], 0.0),
        ([(0, 0, 10)], 1.0),
        ([(0, 0, 10), (1, 0, 10)], 1.0),
        ([(0, 0, 5), (1, 5, 10)], 0.0),
        ([(0, 0, 8), (1, 4, 10)], 0.4),
        ([(0, 0, 6), (0, 2, 8), (1, 0, 4), (1, 6, 10)], 0.6),
    ],
)
def test_share_of_time_in_which_all_devices_work(tasks, share):
    """From the first start to the last end."""
    rows = [(device, 0, "task", 0, *([100 + begin] * 3), 100 + end) for device, begin, end in tasks]
    assert Trace.of_program(rows, 1).all_busy_share == pytest.approx(share)


@st.composite
def traces(draw):
    """Tasks of two devices with two workers each, whose spans on a worker may nest, and helping submitters."""
    tasks = []
    for id in range(1, draw(st.integers(1, 9)) + 1):
        times = np.cumsum([draw(st.integers(1, 20)), *(draw(st.integers(0, 9)) for _ in range(3))]).tolist()
        tasks.append(span(id, times, worker=draw(st.integers(-1, 1)), device=draw(st.integers(0, 1))))
    stalls = [stall(b, b + 5) for b in draw(st.lists(st.integers(1, 40), max_size=2))]
    return Trace(tuple(tasks), tuple(stalls), num_workers=2)


def cause_at(trace, device, moment):
    """What an idle worker waits for at one moment, from the definition."""
    mine = [t for t in trace.tasks if t.device == device]
    if any(t.ready_ns <= moment < t.start_ns for t in mine):
        return "scheduling"
    if any(t.submit_ns <= moment < t.ready_ns for t in mine):
        return "dependencies"
    return "submission" if any(t.submit_ns > moment for t in mine) else "tail"


@given(traces())
@settings(max_examples=100)
def test_idle_time_equals_a_count_of_moments(trace):
    """Every nanosecond of every worker is either busy or has exactly the cause that its definition gives."""
    for row in trace.workers():
        mine = [t for t in trace.tasks if (t.device, t.worker) == (row.device, row.worker)]
        moments = [
            m
            for m in range(trace.begin_ns, trace.end_ns)
            if not any(t.start_ns <= m < t.end_ns for t in mine)
        ]
        causes = [cause_at(trace, row.device, m) for m in moments]
        assert row.idle_ns == {cause: causes.count(cause) for cause in IDLE_CAUSES}
        assert row.busy_ns == trace.span_ns - len(moments)


@given(traces())
@settings(max_examples=50)
def test_fill_levels_equal_a_count_of_tasks(trace):
    """At every moment the curves say how many tasks are live and ready."""
    moments = np.arange(trace.begin_ns - 1, trace.end_ns + 2)
    live = [sum(t.submit_ns <= m < t.end_ns for t in trace.tasks) for m in moments]
    ready = [sum(t.ready_ns <= m < t.start_ns for t in trace.tasks) for m in moments]
    assert trace.live_tasks().at(moments).tolist() == live
    assert trace.ready_tasks().at(moments).tolist() == ready


def test_critical_path_follows_the_longest_sum_of_producers():
    """With edges the chain that ran longest wins, not the one that ended last."""
    trace = Trace(
        (
            span(1, (1, 1, 1, 100), worker=0),
            span(2, (1, 1, 1, 20), worker=1),
            span(3, (1, 100, 100, 150), worker=0, producers=(1, 2)),
            span(4, (1, 20, 190, 200), worker=1, producers=(2,)),
        ),
        (),
        num_workers=2,
    )
    path = trace.critical_path
    assert [t.task for t in path.tasks] == [1, 3]
    assert (path.run_ns, path.span_ns, path.is_from_edges) == (149, 149, True)


def test_critical_path_is_reconstructed_from_times():
    """Without edges a task that waited was released by the latest end before it became ready."""
    trace = Trace(
        (
            span(1, (1, 1, 2, 50), worker=0),
            span(2, (1, 1, 3, 60), worker=1),
            span(3, (5, 62, 65, 90), worker=0),  # released by 2
            span(4, (6, 91, 92, 120), worker=1),  # released by 3
            span(5, (70, 70, 70, 80), worker=1),  # was ready at once
        ),
        (),
        num_workers=2,
    )
    path = trace.critical_path
    assert [t.task for t in path.tasks] == [2, 3, 4]
    assert (path.run_ns, path.span_ns, path.is_from_edges) == (57 + 25 + 28, 117, False)


@given(traces())
@settings(max_examples=50)
def test_reconstructed_path_goes_forward_in_time(trace):
    """Whatever the times, the chain ends with the last end and each task starts after the one before ended."""
    tasks = trace.critical_path.tasks
    assert tasks[-1].end_ns == max(t.end_ns for t in trace.tasks)
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(tasks))


def test_producers_in_a_circle_do_not_hang():
    """Damaged records give a path without the damaged part."""
    tasks = (
        span(1, (1, 1, 1, 5), producers=(2,)),
        span(2, (1, 1, 1, 5), producers=(1,)),
        span(3, (1, 1, 1, 2)),
    )
    assert [t.task for t in Trace(tasks, (), 1).critical_path.tasks] == [3]


def test_time_per_kernel():
    """Count, sum, median and share, the longest first."""
    tasks = (
        span(1, (1, 1, 10, 20), kernel="add"),
        span(2, (1, 1, 20, 50), kernel="gemm"),
        span(3, (1, 1, 50, 110), kernel="gemm"),
    )
    rows = Trace(tasks, (), 1).kernels()
    assert [(r.kernel, r.count, r.total_ns, r.median_ns, r.share) for r in rows] == [
        ("gemm", 2, 90, 45, 0.9),
        ("add", 1, 10, 10, 0.1),
    ]


def test_scheduling_delay():
    """Median and 99th percentile of the time from ready to start."""
    tasks = tuple(span(i + 1, (1, 100, 100 + i, 400)) for i in range(100))
    assert Trace(tasks, (), 1).scheduling_delay_ns() == (49, 98)


def test_unknown_times_count_as_the_next_known():
    """A task that was skipped has no ready and no start; one that stands out of order is put in order."""
    trace = Trace((span(1, (10, 0, 0, 30)), span(2, (20, 18, 25, 30))), (), 1)
    assert trace.times_ns.tolist() == [[10, 30, 30, 30], [20, 20, 25, 30]]


def test_a_run_without_records():
    """Nothing recorded gives zeros."""
    trace = Trace((), (), 2)
    assert (trace.begin_ns, trace.end_ns, trace.devices) == (0, 0, (0,))
    assert (trace.span_ns, trace.utilisation, trace.kernels(), trace.scheduling_delay_ns()) == (
        0,
        0.0,
        (),
        (0, 0),
    )
    assert trace.critical_path.tasks == () and trace.live_tasks().peak == 0 and len(trace.workers()) == 2


def test_heap_levels_stand_where_submitters_stalled():
    """The heap's fill level is known at stalls, in order of time."""
    curve = Trace(
        (), (stall(20, 30, heap_used_bytes=5), stall(10, 15, heap_used_bytes=9)), 1
    ).heap_used_bytes()
    assert (curve.times_ns.tolist(), curve.values.tolist(), curve.peak) == ([10, 20], [9, 5], 9)
