"""`Profile`: one traced run of tile programs as a few sentences, a page, and a file for Perfetto.

The figures are those of `observe.overlap`. The page is one file that loads nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tilewise.observe.charts import Bar, Row, stacked_bars, timeline_chart
from tilewise.observe.overlap import KINDS, WAIT_CAUSES, Overlap, PathStep, kind_of, measure_overlap
from tilewise.observe.page import duration, html_page, html_table, plural, text
from tilewise.observe.perfetto import write_perfetto
from tilewise.observe.trace import Trace

__all__ = ["Profile"]

_MAX_ROWS = 64  # of a chart
_MAX_LINES = 20  # of a table
_MAX_STEPS = 2_000  # of the list of the critical path
_KIND_STYLES = dict(zip(KINDS, ("c0", "c1", "c4", "c5")))
_KIND_WORDS = {"compute": "computation", "transfer": "transfers", "signal": "signals", "file": "device files"}
_CAUSE_STYLES = dict(zip(WAIT_CAUSES, ("alarm", "c3", "c6", "c7", "idle")))
_DEVICE_STYLE = "cx"  # waiting for another device
_REASONS = {
    "begin": "the first",
    "worker": "its worker was busy until then",
    "release": "it became ready then",
    "submission": "it was submitted after that",
}


@dataclass(frozen=True)
class Profile:
    """What one run of tile programs did: transfers hidden behind computation, idle time by cause,
    the critical path.

    Attributes:
        trace: the records of the run.
        title: what ran, for people.
    """

    trace: Trace
    title: str = "One run"

    @cached_property
    def overlap(self) -> Overlap:
        """The figures (see `observe.overlap.measure_overlap`)."""
        return measure_overlap(self.trace)

    def summary(self) -> list[str]:
        """A few sentences: the run, its transfers, what workers waited for, the critical path, and
        the error of the clocks.
        """
        overlap = self.overlap
        if not self.trace.tasks:
            return ["No tasks were recorded."]
        devices = plural(len(overlap.devices), "device")
        lines = [
            f"{self.title}: {plural(len(self.trace.tasks), 'task')} in {duration(overlap.span_ns)} on {devices} "
            f"with {plural(self.trace.num_workers, 'worker')} each."
        ]
        lines += [f"{overlap.sentence().capitalize()}.", _idle_sentence(overlap), _path_sentence(overlap)]
        if self.trace.clock_error_ns:
            lines.append(f"The hosts' clocks agree within {duration(self.trace.clock_error_ns)}.")
        if self.trace.dropped:
            lines.append(
                f"{plural(self.trace.dropped, 'record')} did not fit; all figures are of the others."
            )
        return lines

    def save(self, path: str | Path) -> None:
        """Write the page.

        Args:
            path: file to write; any browser opens it.
        """
        sections = ["".join(f"<p>{text(line)}</p>" for line in self.summary())]
        if self.trace.tasks:
            sections += [_timeline(self.trace, self.overlap), _transfers(self.trace, self.overlap)]
            sections += [_idle(self.overlap), _path(self.trace, self.overlap)]
        Path(path).write_text(html_page(f"Profile: {self.title}", sections), encoding="utf-8")

    def perfetto(self, path: str | Path) -> None:
        """Write the tasks as a file for Perfetto (ui.perfetto.dev).

        Args:
            path: file to write.
        """
        write_perfetto(path, self.trace)


def _cause_words(cause: str) -> str:
    return WAIT_CAUSES.get(cause, f"{cause} was awaited")


def _idle_sentence(overlap: Overlap) -> str:
    shares = overlap.idle_shares
    busy = f"Workers were idle for {sum(shares.values()):.1%} of the run"
    parts = [f"{share:.1%} {_cause_words(cause)}" for cause, share in shares.items() if share >= 0.0005]
    return f"{busy}: {'; '.join(parts)}." if parts else f"{busy}."


def _path_sentence(overlap: Overlap) -> str:
    path, span = overlap.path, max(1, overlap.span_ns)
    time: Counter[str] = Counter()
    for step in path:
        time[step.kind] += step.run_ns
    parts = [f"{time[kind] / span:.0%} {_KIND_WORDS[kind]}" for kind in KINDS if time[kind]]
    gaps = sum(step.gap_ns for step in path)
    return (
        f"The critical path has {plural(len(path), 'task')}: {', '.join(parts)}, and {gaps / span:.0%} between tasks. "
        "It is reconstructed from times."
    )


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    spans = (f"<span class='entry'><i class='key {style}'></i>{text(name)}</span>" for name, style in entries)
    return f"<p class='legend'>{''.join(spans)}</p>"


def _place(trace: Trace, device: int, worker: int) -> str:
    host = f" host {trace.hosts[device]}" if device < len(trace.hosts) and len(set(trace.hosts)) > 1 else ""
    return f"device {device}{host} worker {worker}"


def _timeline(trace: Trace, overlap: Overlap) -> str:
    begin = int(trace.times_ns[:, 2].min())
    bars: defaultdict[tuple[int, int], list[Bar]] = defaultdict(list)
    for task, (_, ready, start, end) in zip(trace.tasks, trace.times_ns.tolist()):
        label = (
            f"{task.kernel}, row {task.row}: {duration(end - start)}, ready {duration(start - ready)} before"
        )
        bars[task.device, task.worker].append(Bar(start, end, _KIND_STYLES[kind_of(task.kernel)], label))
    marked: defaultdict[tuple[int, int], list[Bar]] = defaultdict(list)
    for step in overlap.path:
        bar = Bar(step.start_ns, step.start_ns + step.run_ns, "alarm", step.task.kernel)
        marked[step.task.device, step.task.worker].append(bar)
    places = sorted({*overlap.idle_ns, *bars})
    rows = [Row(_short_place(trace, *place), bars[place], (), marked[place]) for place in places[:_MAX_ROWS]]
    hidden = len(places) - len(rows)
    note = f"<p class='soft'>{plural(hidden, 'further worker')} not drawn.</p>" if hidden > 0 else ""
    legend = _legend([*((_KIND_WORDS[k], s) for k, s in _KIND_STYLES.items()), ("critical path", "alarm")])
    return (
        "<h2>Timeline</h2><p class='soft'>Point at a bar for its task. Narrow bars are drawn as one. Red lines below "
        f"the bars mark the critical path.</p>{legend}{timeline_chart(rows, begin, begin + overlap.span_ns)}{note}"
    )


def _short_place(trace: Trace, device: int, worker: int) -> str:
    return f"device {device}" if trace.num_workers == 1 else f"device {device} worker {worker}"


def _transfers(trace: Trace, overlap: Overlap) -> str:
    head = ("", "transfers", "time", "of the run", "hidden", "exposed", "hidden share")
    shown = overlap.labels[:_MAX_LINES]
    sections = []
    for prefix, rows in (("device ", overlap.devices), ("", shown)):
        table = [
            (
                f"{prefix}{row.name}",
                f"{row.count:,}",
                duration(row.total_ns),
                f"{row.total_ns / max(1, overlap.span_ns):.1%}",
                duration(row.hidden_ns),
                duration(row.exposed_ns),
                f"{row.hidden_ns / row.total_ns:.0%}" if row.total_ns else "",
            )
            for row in rows
        ]
        sections.append(f"<div class='scroll'>{html_table(head, table)}</div>" if table else "")
    more = len(overlap.labels) - len(shown)
    note = f"<p class='soft'>{plural(more, 'further label')} with less exposed time.</p>" if more > 0 else ""
    way = " or its bytes were on their way from another host" if len(set(trace.hosts)) > 1 else ""
    return (
        f"<h2>Transfers</h2><p class='soft'>A transfer is in progress while its task runs{way}. It is hidden while "
        "another worker of the same device computes, and exposed otherwise. The second table adds the times of a "
        f"label's tasks.</p>{''.join(sections)}{note}"
    )


def _idle(overlap: Overlap) -> str:
    causes = [*WAIT_CAUSES, *sorted({c for row in overlap.idle_ns.values() for c in row} - {*WAIT_CAUSES})]
    style = {cause: _CAUSE_STYLES.get(cause, _DEVICE_STYLE) for cause in causes}
    span, bars, table = max(1, overlap.span_ns), [], []
    for (device, worker), idle in list(overlap.idle_ns.items())[:_MAX_ROWS]:
        busy = span - sum(idle.values())
        parts, at = [Bar(0, busy, "c0", f"busy: {duration(busy)}")], busy
        for cause in causes:
            ns = idle.get(cause, 0)
            parts.append(Bar(at, at + ns, style[cause], f"{_cause_words(cause)}: {duration(ns)}"))
            at += ns
        name = f"device {device} w{worker}"
        bars.append((name, parts))
        table.append(
            (name, *(f"{ns / span:.1%}" for ns in (busy, *(idle.get(cause, 0) for cause in causes))))
        )
    words = [(_cause_words(cause), style[cause]) for cause in WAIT_CAUSES]
    words.append(("nothing ran here, and another device was awaited", _DEVICE_STYLE))
    return (
        f"<h2>Idle time of workers by cause</h2>{_legend([('busy', 'c0'), *words])}{stacked_bars(bars, span)}"
        f"<div class='scroll'>{html_table(('', 'busy', *causes), table)}</div>"
    )


def _path(trace: Trace, overlap: Overlap) -> str:
    """The critical path: time per label, the longest gaps, and all of its tasks."""
    span = max(1, overlap.span_ns)
    by_label: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for step in overlap.path:
        row = by_label[step.task.kernel]
        row[0], row[1], row[2] = row[0] + 1, row[1] + step.run_ns, row[2] + step.gap_ns
    longest = sorted(by_label.items(), key=lambda item: -item[1][1] - item[1][2])[:_MAX_LINES]
    labels = [
        (label, f"{count:,}", duration(run), f"{run / span:.1%}", duration(gap), f"{gap / span:.1%}")
        for label, (count, run, gap) in longest
    ]
    gaps = sorted((s for s in overlap.path if s.gap_ns), key=lambda s: -s.gap_ns)[:_MAX_LINES]
    begin = int(trace.times_ns[:, 2].min())
    head = ("task", "where", "starts at", "takes", "gap before", "of it ready", "why not earlier")
    steps = overlap.path[-_MAX_STEPS:]
    note = f"the last {len(steps):,} of {len(overlap.path):,}" if len(steps) < len(overlap.path) else "all"
    return (
        "<h2>Critical path</h2><p class='soft'>The chain of tasks back from the last end. A shorter task on it, or a "
        "shorter gap, makes the run shorter, until another chain is the longest. While a task is ready in a gap, "
        "no worker takes it.</p>"
        f"<div class='scroll'>{html_table(('label', 'tasks', 'time', '', 'gaps before', ''), labels)}</div>"
        f"<h2>Longest gaps on it</h2><div class='scroll'>{html_table(head, _step_rows(trace, gaps, begin))}</div>"
        f"<details><summary>Its tasks ({note})</summary><div class='scroll'>"
        f"{html_table(head, _step_rows(trace, steps, begin))}</div></details>"
    )


def _step_rows(trace: Trace, steps: Iterable[PathStep], begin_ns: int) -> list[tuple[str, ...]]:
    return [
        (
            f"{step.task.kernel}, row {step.task.row}",
            _place(trace, step.task.device, step.task.worker),
            duration(step.start_ns - begin_ns),
            duration(step.run_ns),
            duration(step.gap_ns),
            duration(min(step.gap_ns, step.start_ns - step.task.ready_ns)),
            _REASONS[step.reason],
        )
        for step in steps
    ]
