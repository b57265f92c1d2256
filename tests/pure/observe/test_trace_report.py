"""The report of a run as one HTML page: complete, escaped, self-contained, small."""

import random

import pytest

from pure.observe.records import span, stall
from pure.pages import Page
from tilewise.observe.charts import Bar, merge_bars
from tilewise.observe.trace import Trace
from tilewise.observe.trace_report import write_report


def page_of(tmp_path, trace):
    """The page as written, and its text."""
    write_report(tmp_path / "report.html", trace)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    return html, Page(html).text


def random_run(num_tasks, num_workers, **fields):
    """A run in which each worker takes tasks one after the other."""
    draw, free, tasks = random.Random(0), [1000] * num_workers, []
    for id in range(1, num_tasks + 1):
        worker = draw.randrange(num_workers)
        start = free[worker] + draw.randrange(50)
        free[worker] = start + draw.randrange(1, 900)
        times = (start // 2, start - draw.randrange(20), start, free[worker])
        tasks.append(span(id, times, worker, f"kernel {draw.randrange(30)}", **fields))
    return Trace(tuple(tasks), (stall(900, 1000, cause="heap", heap_used_bytes=1 << 20),), num_workers)


def test_page_shows_the_figures_of_a_run(tmp_path):
    """Figures in words, the critical path, idle time by cause, kernels, stalls and fill levels all appear."""
    tasks = (
        span(1, (1000, 1000, 1000, 2000), worker=0, kernel="load"),
        span(2, (1100, 2000, 2000, 5000), worker=1, kernel="gemm", producers=(1,)),
        span(3, (1200, 1200, 1300, 1400), worker=-1, kernel="load", status=-2),
    )
    stalls = (stall(1250, 1500, cause="heap", heap_used_bytes=3 << 20, live_tasks=3),)
    html, words = page_of(tmp_path, Trace(tasks, stalls, num_workers=2, dropped=7))
    assert "<title>Run of the task runtime</title>" in html and "prefers-color-scheme: dark" in html
    for sentence in (
        "3 tasks of 2 kernels took 4 µs on 2 workers.",
        "The workers were busy for 50% of that time",
        "The critical path runs through 2 tasks, which took 4 µs (100% of the run): no number of workers",
        "Submitters stalled 1 time for 250 ns together and ran 1 task meanwhile.",
        "1 task failed",
        "7 records did not fit",
        "Time per kernel",
        "Stalls of submitters",
        "3.00 MiB",
        "live tasks",
        "task 2: 3 µs, ready 0 ns before",
    ):
        assert sentence in words


def test_names_are_escaped(tmp_path):
    """Whatever a kernel or a task is called, it stays text."""
    name = "<script>alert('x')</script>\"&\x00"
    html, words = page_of(tmp_path, Trace((span(1, (1, 1, 1, 9), kernel=name, name=name),), (), 1))
    assert "<script" not in html and "\x00" not in html
    assert "<script>alert('x')</script>\"&" in words


@pytest.mark.slow
def test_the_page_of_a_long_run_stays_small(tmp_path):
    """A hundred thousand tasks, and as many on many workers, are drawn in at most two megabytes."""
    for num_workers in (2, 100):
        html, words = page_of(tmp_path, random_run(100_000, num_workers))
        assert len(html.encode()) < 2_000_000
        assert "100,000 tasks of 30 kernels" in words
    assert "38 further rows not drawn" in words


def test_a_run_without_records_has_a_page(tmp_path):
    """Nothing recorded: the page says so."""
    _, words = page_of(tmp_path, Trace((), (), 2))
    assert "No tasks were recorded" in words
    page_of(tmp_path, Trace((), (stall(1, 2),), 2))
    page_of(tmp_path, Trace((span(1, (5, 5, 5, 5)),), (), 1))  # all times are equal: no division by zero


def test_narrow_neighbours_are_drawn_as_one():
    """Bars narrower than a cell that begin in one cell are joined, under the style that lasted longest."""
    bars = [Bar(0, 2, "c0", "a"), Bar(3, 8, "c1", "b"), Bar(9, 40, "c0", "wide"), Bar(41, 42, "c2", "c")]
    assert merge_bars(bars, 10) == [Bar(0, 8, "c1", "2 in 8 ns, such as b"), bars[2], bars[3]]
