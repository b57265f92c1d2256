"""`ParallelDebugger`: what each thread did and when, as a table and as a trace file for Perfetto."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.core.progress import Phase, Progress
from tilewise.core.validation import Validator
from tilewise.observe.perfetto import name_event, slice_event, write_events

if TYPE_CHECKING:
    from tilewise.observe.perfetto import Event

__all__ = ["LEVELS", "ParallelDebugger"]

LEVELS = ("off", "summary", "verbose")
_MAIN = "phases"
_validate = Validator("graph")


class ParallelDebugger(Progress):
    """Records the phases of a `ParallelGraphBuilder`, and at level `verbose` also every piece of
    work in a phase.

    Args:
        level: `off`, `summary` (phases, and how much each thread did) or `verbose` (also every layer).
        others: progress objects that also receive all phases, such as a `ProgressTracker`.

    Raises:
        ConfigError: `level` is invalid.
    """

    def __init__(self, level: str = "summary", *others: Progress) -> None:
        super().__init__(*others)
        self.level = _validate.choice("ParallelDebugger", "level", level, LEVELS)
        self.phases: list[Phase] = []

    @property
    def wants_spans(self) -> bool:
        """Whether single pieces of work are recorded: only at level `verbose`."""
        return self.level == "verbose" or super().wants_spans

    def seconds(self) -> dict[str, float]:
        """Wall time in seconds by phase, in the order in which phases began. Two entries follow:
        `unattributed`, the time between phases, and `total`, the time from the first begin to the
        last end. All entries but `total` add up to `total`: if phases overlap, the time counts for
        the phase that began first.
        """
        seconds_by_phase: dict[str, float] = defaultdict(float)
        first = counted_until = min((phase.begin_ns for phase in self.phases), default=0)
        for phase in sorted(self.phases, key=lambda p: (p.begin_ns, -_end_ns(p))):
            seconds_by_phase[phase.name] += max(0, _end_ns(phase) - max(phase.begin_ns, counted_until)) / 1e9
            counted_until = max(counted_until, _end_ns(phase))
        total = (counted_until - first) / 1e9
        return {**seconds_by_phase, "unattributed": total - sum(seconds_by_phase.values()), "total": total}

    def report(self) -> str:
        """A table of the phases and of each thread's work in a phase. At level `verbose` also the
        ten slowest pieces of work.
        """
        if self.level == "off":
            return ""
        seconds = self.seconds()
        whole = seconds["total"] or 1.0
        lines = [f"{'phase':24}{'ms':>10}{'share':>8}"]
        lines += [f"{name:24}{s * 1e3:10.1f}{s / whole:8.1%}" for name, s in seconds.items()]
        busy: dict[str, list[int]] = defaultdict(list)
        for phase in self.phases:
            for who, _, begin, end in phase.spans:
                busy[f"{who}: {phase.name}"].append(end - begin)
        if busy:
            lines += ["", f"{'thread':40}{'pieces':>8}{'busy ms':>10}"]
            lines += [
                f"{who:40}{len(times):8}{sum(times) / 1e6:10.1f}" for who, times in sorted(busy.items())
            ]
            slowest = sorted((s for p in self.phases for s in p.spans), key=lambda s: s[2] - s[3])[:10]
            lines += ["", f"{'slowest pieces':40}{'ms':>8}"]
            lines += [f"{what:40}{(end - begin) / 1e6:8.2f}" for _, what, begin, end in slowest]
        return "\n".join(lines)

    def save_trace(self, path: str | Path) -> None:
        """Write everything recorded as a trace for Perfetto (ui.perfetto.dev).

        Raises:
            OSError: the file cannot be written.
        """
        write_events(path, self._events())

    def _events(self) -> Iterator[Event]:
        if not self.phases:
            return
        zero = min(phase.begin_ns for phase in self.phases)
        rows: dict[str, int] = {_MAIN: 0}
        yield name_event("thread_name", 0, 0, _MAIN)
        for phase in self.phases:
            begin, end = phase.begin_ns - zero, _end_ns(phase) - zero
            yield slice_event(phase.name, "phase", 0, 0, begin, end, {"done": phase.done})
            for who, what, begin, end in phase.spans:
                if who not in rows:
                    rows[who] = len(rows)
                    yield name_event("thread_name", 0, rows[who], who)
                yield slice_event(what, phase.name, 0, rows[who], begin - zero, end - zero, {})

    def _began(self, phase: Phase) -> None:
        if self.level != "off":
            self.phases.append(phase)
        super()._began(phase)


def _end_ns(phase: Phase) -> int:
    """The end of a phase; its begin if it still runs."""
    return phase.begin_ns if phase.end_ns is None else phase.end_ns
