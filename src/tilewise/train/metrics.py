"""What a run leaves to look at: one JSON line per step, and the loss curve as a picture.

Lines after the step that a run resumes from are dropped, so a file never tells of steps twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["MetricsFile", "draw_loss_curve", "read_metrics"]


class MetricsFile:
    """Appends a line per step to a JSONL file; each line is whole when it is visible.

    Args:
        path: of the file; its directory must exist.
        first_step: of this run; older lines from this step on are dropped.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        kept = [line for line in read_metrics(path) if line["step"] < first_step]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def add(self, **values: float | int) -> None:
        """Write one line; every value must be finite, for JSON knows no others."""
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; none when it does not exist."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    parsed = []
    for line in lines:
        try:
            parsed.append(json.loads(line))
        except ValueError:  # a killed run may leave half a line at the end
            break
    return parsed


def draw_loss_curve(path: Path, losses: Sequence[float], title: str) -> None:
    """Save the loss per step, and its running mean, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(losses, color="#9ecae1", linewidth=0.8, label="per step")
    axes.plot(_running_mean(losses, 0.95), color="#08519c", linewidth=1.8, label="running mean")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _running_mean(values: Sequence[float], keep: float) -> list[float]:
    """Exponential mean, corrected for its start."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        means.append(total / weight)
    return means
