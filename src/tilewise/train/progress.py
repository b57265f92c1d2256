"""The progress line of a training run: loss, tokens per second, time left.

On a terminal it is one line that is updated in place. Elsewhere a line is printed now and then, so
that a log stays readable.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["StepProgress", "describe_step", "format_duration", "track_work"]

_PLAIN_EVERY_S = 10.0


class StepProgress:
    """Shows the progress of training steps. Use it with `with`.

    Args:
        console: console to write to.
        num_steps: number of steps of the whole run.
        first_step: first step of this run.
    """

    def __init__(self, console: Console, num_steps: int, first_step: int) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._console = console
        self._num_steps = num_steps
        self._first = first_step
        self._num_tokens = 0
        self._held_out: float | None = None
        self._started = self._last_plain = time.monotonic()
        self._bar = (
            Progress(
                TextColumn("training"),
                BarColumn(bar_width=30),
                TaskProgressColumn(),
                TextColumn("{task.fields[line]}"),
                console=console,
            )
            if console.is_terminal
            else None
        )
        self._task = (
            None
            if self._bar is None
            else self._bar.add_task("", total=num_steps, completed=first_step, line="")
        )

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop updating the line. Another progress bar may follow."""
        if self._bar is not None:
            self._bar.stop()

    def set_num_steps(self, num_steps: int) -> None:
        """Change the length of the run."""
        self._num_steps = num_steps
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=num_steps)

    def evaluated(self, loss: float) -> None:
        """Show the held-out loss from the next step on."""
        self._held_out = loss

    def step_done(self, step: int, loss: float, num_tokens: int) -> None:
        """Show that a step with this many tokens is done. `step` is 0 for the first step."""
        now = time.monotonic()
        done = step + 1 - self._first
        elapsed_s = now - self._started
        self._num_tokens += num_tokens
        line = describe_step(
            step + 1,
            self._num_steps,
            loss,
            self._num_tokens / elapsed_s,
            elapsed_s / done * (self._num_steps - step - 1),
            self._held_out,
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step + 1, line=line)
        elif now - self._last_plain >= _PLAIN_EVERY_S or done == 1 or step + 1 == self._num_steps:
            self._last_plain = now
            self._console.print(line, highlight=False)


def describe_step(
    step: int,
    num_steps: int,
    loss: float,
    tokens_per_s: float,
    left_s: float,
    held_out_loss: float | None = None,
) -> str:
    """The text of the progress line, with the held-out loss if it was evaluated."""
    held_out = "" if held_out_loss is None else f"  held-out loss {held_out_loss:.3f}"
    return (
        f"step {step}/{num_steps}  loss {loss:.3f}{held_out}  {tokens_per_s:,.0f} tokens/s  "
        f"{format_duration(left_s)} left"
    )


def format_duration(seconds: float) -> str:
    """A duration as text: `1:05` for 65 seconds. Hours are shown only if there are any."""
    total = max(0, round(seconds))
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"


def track_work(console: Console, label: str) -> _WorkProgress:
    """A progress bar over pieces of work, as a `with` block. `show(done, total)` updates it.
    Nothing is shown if the output is not a terminal.
    """
    return _WorkProgress(console, label)


class _WorkProgress:
    def __init__(self, console: Console, label: str) -> None:
        from rich.progress import Progress

        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=None)

    def __enter__(self) -> _WorkProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """Update the bar."""
        self._bar.update(self._task, completed=done, total=total)
