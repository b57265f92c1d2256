"""A traced run as one HTML page: what it did, what limited it, and where the time went.

The figures come from a `Trace`, the drawings from `charts`. The page is one file without scripts
and loads nothing. It has at most about a megabyte for any number of tasks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from tilewise.core.sizes import format_bytes
from tilewise.observe.charts import Bar, Row, area_chart, stacked_bars, timeline_chart
from tilewise.observe.page import duration, html_page, html_table, kernel_classes, plural, text
from tilewise.observe.trace import IDLE_CAUSES, STALL_CAUSES, Stall, TaskSpan, Trace

__all__ = ["write_report"]

MAX_ROWS = 64  # of the timeline
MAX_KERNELS = 16
IDLE_STYLES = dict(zip(IDLE_CAUSES, ("alarm", "c1", "c5", "idle")))
STALL_STYLES = dict(zip(STALL_CAUSES, ("c3", "c1", "c6", "c7", "idle")))


def write_report(path: str | Path, trace: Trace) -> None:
    """Write the report of a traced run.

    Args:
        path: file to write; any browser opens it.
        trace: what the runtime recorded.
    """
    sections = [_headline(trace)]
    if trace.tasks:
        sections += [_timeline(trace), _idle(trace), _kernels(trace)]
    if trace.stalls:
        sections.append(_stalls(trace))
    if trace.tasks:
        sections.append(_levels(trace))
    Path(path).write_text(html_page("Run of the task runtime", sections), encoding="utf-8")


def _headline(trace: Trace) -> str:
    if not trace.tasks:
        return "<p>No tasks were recorded. Switch tracing on before the run.</p>"
    sentences = [_size_sentence(trace), _idle_sentence(trace), *_path_sentences(trace)]
    median, p99 = trace.scheduling_delay_ns()
    sentences.append(
        f"From ready to start a task took {duration(median)} in the median and {duration(p99)} at the 99th percentile."
    )
    sentences.append(
        f"At most {trace.live_tasks().peak:,} tasks were submitted and not complete, and {trace.ready_tasks().peak:,} "
        "ready and not started."
    )
    if trace.stalls:
        stalled = sum(s.end_ns - s.begin_ns for s in trace.stalls)
        sentences.append(
            f"Submitters stalled {plural(len(trace.stalls), 'time')} for {duration(stalled)} together and ran "
            f"{plural(trace.num_helped, 'task')} meanwhile."
        )
    failed = sum(t.status != 0 for t in trace.tasks)
    if failed:
        sentences.append(
            f"{plural(failed, 'task')} failed, or did not run because of a failure or a cancellation."
        )
    if trace.dropped:
        sentences.append(
            f"{plural(trace.dropped, 'record')} did not fit: every figure here is of the others."
        )
    return "".join(f"<p>{text(sentence)}</p>" for sentence in sentences)


def _size_sentence(trace: Trace) -> str:
    kernels = len({t.kernel for t in trace.tasks})
    workers = plural(trace.num_workers * len(trace.devices), "worker")
    return (
        f"{plural(len(trace.tasks), 'task')} of {plural(kernels, 'kernel')} took {duration(trace.span_ns)} "
        f"on {workers}."
    )


def _idle_sentence(trace: Trace) -> str:
    idle: Counter[str] = Counter()
    for worker in trace.workers():
        idle.update(worker.idle_ns)
    busy = f"The workers were busy for {trace.utilisation:.0%} of that time"
    cause, most = max(idle.items(), key=lambda item: item[1], default=("tail", 0))
    if most == 0:
        return f"{busy}."
    return f"{busy}; {most / sum(idle.values()):.0%} of the idle time has this cause: {IDLE_CAUSES[cause]}."


def _path_sentences(trace: Trace) -> list[str]:
    path = trace.critical_path
    share = path.run_ns / max(1, trace.span_ns)
    start = (
        f"The critical path runs through {plural(len(path.tasks), 'task')}, which took {duration(path.run_ns)} "
        f"({share:.0%} of the run)"
    )
    if path.is_from_edges:
        return [f"{start}: no number of workers can be faster than that with these kernels."]
    return [f"{start}. It is reconstructed from the times at which tasks became ready."]


def _timeline(trace: Trace) -> str:
    classes = kernel_classes(row.kernel for row in trace.kernels())
    rows = _rows(trace, classes)
    legend = _legend((kernel, style) for kernel, style in classes.items() if style != "cx")
    if "cx" in classes.values():
        legend += _legend([("other kernels", "cx")])
    legend += _legend([("critical path", "alarm")])
    hidden = len(rows) - MAX_ROWS
    note = f"<p class='soft'>{plural(hidden, 'further row')} not drawn.</p>" if hidden > 0 else ""
    return (
        "<h2>Timeline</h2><p class='soft'>Point at a bar for its task. Bars that are too narrow are drawn as one. Thin "
        "bars on top of a submitter are stalls of its submitter, red lines below mark the critical path.</p>"
        f"<p class='legend'>{legend}</p>"
        f"{timeline_chart(rows[:MAX_ROWS], trace.begin_ns, trace.end_ns)}{note}"
    )


def _rows(trace: Trace, classes: dict[str, str]) -> list[Row]:
    """The rows of each device: the critical path, the workers, and the submitters that helped or
    stalled.
    """
    critical = {id(task) for task in trace.critical_path.tasks}
    bars: defaultdict[tuple[int, int], list[Bar]] = defaultdict(list)
    marked: defaultdict[tuple[int, int], list[Bar]] = defaultdict(list)
    path: list[Bar] = []
    for task, times in zip(trace.tasks, trace.times_ns.tolist()):
        bar = _bar(task, times, classes)
        bars[task.device, task.worker].append(bar)
        if id(task) in critical:
            path.append(bar)
            marked[task.device, task.worker].append(bar._replace(style="alarm"))
    thin: defaultdict[tuple[int, int], list[Bar]] = defaultdict(list)
    for stall in trace.stalls:
        label = (
            f"stall: {stall.cause}, {duration(stall.end_ns - stall.begin_ns)}, {stall.live_tasks} live tasks"
        )
        style = STALL_STYLES.get(stall.cause, "cx")
        thin[stall.device, -1 - stall.submitter].append(Bar(stall.begin_ns, stall.end_ns, style, label))
    places = {(d, w) for d in trace.devices for w in range(trace.num_workers)} | set(bars) | set(thin)
    rows = [Row("critical path", path)]
    for device, worker in sorted(places, key=lambda p: (p[0], p[1] < 0, abs(p[1]))):
        name = f"worker {worker}" if worker >= 0 else f"submitter {-1 - worker}"
        label = name if len(trace.devices) == 1 else f"device {device} {name}"
        key = device, worker
        rows.append(Row(label, bars[key], thin[key], marked[key]))
    return rows


def _bar(task: TaskSpan, times: list[int], classes: dict[str, str]) -> Bar:
    _, ready, start, end = times
    name = task.kernel if task.name is None else f"{task.name} ({task.kernel})"
    label = f"{name}, task {task.task}: {duration(end - start)}, ready {duration(start - ready)} before"
    return Bar(start, end, classes[task.kernel], label + (f", status {task.status}" if task.status else ""))


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f"<span class='entry'><i class='key {style}'></i>{text(name)}</span>" for name, style in entries
    )


def _idle(trace: Trace) -> str:
    """Stacked bars and a table of how each worker spent the run."""
    bars, table = [], []
    for row in trace.workers()[:MAX_ROWS]:
        name = (
            f"worker {row.worker}" if len(trace.devices) == 1 else f"device {row.device} worker {row.worker}"
        )
        parts, at = [Bar(0, row.busy_ns, "c0", f"busy: {duration(row.busy_ns)}")], row.busy_ns
        for cause, idle_ns in row.idle_ns.items():
            label = f"{IDLE_CAUSES[cause]}: {duration(idle_ns)}"
            parts.append(Bar(at, at + idle_ns, IDLE_STYLES[cause], label))
            at += idle_ns
        bars.append((name, parts))
        shares = (f"{ns / max(1, trace.span_ns):.1%}" for ns in (row.busy_ns, *row.idle_ns.values()))
        table.append((name, *shares))
    legend = _legend([("busy", "c0"), *((IDLE_CAUSES[cause], style) for cause, style in IDLE_STYLES.items())])
    return (
        f"<h2>Idle time by cause</h2><p class='legend'>{legend}</p>{stacked_bars(bars, trace.span_ns)}"
        f"<div class='scroll'>{html_table(('', 'busy', *IDLE_CAUSES), table)}</div>"
    )


def _kernels(trace: Trace) -> str:
    """The kernels with the longest total time: bars and a table."""
    rows = trace.kernels()
    classes = kernel_classes(row.kernel for row in rows)
    shown = rows[:MAX_KERNELS]
    bars = [
        (_shortened(r.kernel), [Bar(0, r.total_ns, classes[r.kernel], f"{r.kernel}: {duration(r.total_ns)}")])
        for r in shown
    ]
    table = [
        (r.kernel, f"{r.count:,}", duration(r.total_ns), f"{r.share:.1%}", duration(r.median_ns))
        for r in shown
    ]
    rest = rows[MAX_KERNELS:]
    if rest:
        share = sum(r.share for r in rest)
        total = duration(sum(r.total_ns for r in rest))
        table.append((f"{len(rest)} others", f"{sum(r.count for r in rest):,}", total, f"{share:.1%}", ""))
    head = ("kernel", "tasks", "time", "share", "median")
    return (
        "<h2>Time per kernel</h2><p class='soft'>A kernel that waits for tasks counts what it waits for.</p>"
        f"{stacked_bars(bars, rows[0].total_ns)}<div class='scroll'>{html_table(head, table)}</div>"
    )


def _shortened(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "\N{HORIZONTAL ELLIPSIS}"


def _stalls(trace: Trace) -> str:
    """What submitters waited for, per submitter and cause."""
    groups: defaultdict[tuple[int, int, str], list[Stall]] = defaultdict(list)
    for stall in trace.stalls:
        groups[stall.device, stall.submitter, stall.cause].append(stall)
    ordered = sorted(groups.items(), key=lambda item: -sum(s.end_ns - s.begin_ns for s in item[1]))
    table = []
    for (device, submitter, cause), stalls in ordered[:MAX_ROWS]:
        times = [s.end_ns - s.begin_ns for s in stalls]
        name = (
            f"submitter {submitter}" if len(trace.devices) == 1 else f"device {device} submitter {submitter}"
        )
        live, heap = max(s.live_tasks for s in stalls), max(s.heap_used_bytes for s in stalls)
        sizes = f"{live:,}", format_bytes(heap)
        table.append((name, cause, f"{len(times):,}", duration(sum(times)), duration(max(times)), *sizes))
    head = ("submitter", "cause", "stalls", "time", "longest", "most live tasks", "most heap used")
    return (
        "<h2>Stalls of submitters</h2><p class='soft'>A stall for the window, the heap, handles or regions means that "
        "more of it would let the submitter run ahead further.</p>"
        f"<p class='legend'>{_legend(STALL_STYLES.items())}</p>"
        f"<div class='scroll'>{html_table(head, table)}</div>"
    )


def _levels(trace: Trace) -> str:
    """Fill levels over time."""
    live, ready, heap = trace.live_tasks(), trace.ready_tasks(), trace.heap_used_bytes()
    begin, end = trace.begin_ns, trace.end_ns
    charts = [
        area_chart("live tasks", live, begin, end, "c0", f"at most {live.peak:,}"),
        area_chart("ready tasks", ready, begin, end, "c1", f"at most {ready.peak:,}"),
    ]
    if heap.peak:
        charts.append(area_chart("heap, at stalls", heap, begin, end, "c2", format_bytes(heap.peak)))
    return "<h2>Fill levels</h2>" + "".join(charts)
