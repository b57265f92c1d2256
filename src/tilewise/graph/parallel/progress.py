"""`ProgressTracker`: progress bars for long phases."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tilewise.core.progress import Phase, Progress
from tilewise.core.validation import Validator

if TYPE_CHECKING:
    from rich import progress as rich_progress
    from rich.console import Console

__all__ = ["ProgressTracker"]

_validate = Validator("graph")


class ProgressTracker(Progress):
    """Shows one bar per phase with its rate and the time left, on a terminal only.

    Args:
        console: where to write; by default standard error.
        delay_s: a phase is shown after this many seconds. A shorter phase is never shown.
    """

    def __init__(self, console: Console | None = None, *, delay_s: float = 0.5) -> None:
        super().__init__()
        self._delay_s = _validate.number("ProgressTracker", "delay_s", delay_s, 0.0, 3600.0)
        self._console = console
        self._lock = threading.RLock()
        self._bars: rich_progress.Progress | None = None
        self._shown: dict[Phase, Any] = {}  # rich's task of each phase that has a bar
        self._timers: dict[Phase, threading.Timer] = {}

    def _began(self, phase: Phase) -> None:
        if not self._terminal().is_terminal:
            return
        timer = threading.Timer(self._delay_s, self._show, (phase,))
        timer.daemon = True
        with self._lock:
            self._timers[phase] = timer
        timer.start()

    def _ended(self, phase: Phase) -> None:
        with self._lock:
            timer = self._timers.pop(phase, None)
            if timer is not None:
                timer.cancel()
            task = self._shown.pop(phase, None)
            if self._bars is None or task is None:
                return
            total = phase.total if phase.total is not None else max(phase.done, 1)
            self._bars.update(task, total=total, completed=phase.done or total)
            if not self._shown:
                self._bars.stop()
                self._bars = None

    def _show(self, phase: Phase) -> None:
        with self._lock:
            if phase not in self._timers:  # the phase has just ended
                return
            if self._bars is None:
                self._bars = _make_bars(self._terminal(), self._update)
                self._bars.start()
            self._shown[phase] = self._bars.add_task(phase.name, total=phase.total, completed=phase.done)

    def _update(self, bars: rich_progress.Progress) -> None:
        """Called before each redraw."""
        for phase, task in list(self._shown.items()):
            bars.update(task, completed=phase.done)

    def _terminal(self) -> Console:
        if self._console is None:
            from rich.console import Console

            self._console = Console(stderr=True)
        return self._console


def _make_bars(console: Console, update: Any) -> rich_progress.Progress:
    from rich import progress as rich_progress
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text("" if not task.speed else f"{task.speed:,.0f}/s")

    class Bars(rich_progress.Progress):
        def get_renderables(self) -> Any:
            update(self)
            return super().get_renderables()

    columns = ("{task.description}", BarColumn(30), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    return Bars(*columns, console=console)
