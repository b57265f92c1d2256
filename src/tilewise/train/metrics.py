"""Metrics of a run: a file with one JSON line per step, and the loss curve as a picture.

A line has `step`, `loss`, `grad_norm`, `learning_rate` and `seconds` since the run began. After an
evaluation it also has `held_out_loss` and `held_out_perplexity`. A run on pairs has `reward_margin`
and `reward_accuracy` instead of perplexities. A resumed run removes the lines from its first step
on, so a file has each step once. A damaged file does not stop a run: the file is cut at its first
wrong line, with a warning.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from tilewise.core import ConfigError, get_logger
from tilewise.files.reading import Unreadable, open_regular, parse_json
from tilewise.files.writing import replace_file, replace_text, writing

__all__ = ["MetricsFile", "draw_loss_curve", "read_metrics"]

_MAX_LINE_BYTES = 1 << 16


class _Line(BaseModel):
    """A step and its figures. A skipped step has no loss."""

    model_config = ConfigDict(strict=True, extra="allow")

    step: Annotated[int, Field(ge=0)]
    loss: FiniteFloat | None
    __pydantic_extra__: dict[str, FiniteFloat]  # an integer of 400 digits is an infinite float


class MetricsFile:
    """Appends a line per step to a JSONL file. Each line is written in one piece.

    Args:
        path: path of the file, whose directory must exist.
        first_step: first step of this run. Existing lines from this step on are removed.

    Raises:
        ResourceError: the file cannot be written.
    """

    def __init__(self, path: Path, first_step: int = 0) -> None:
        self._path = path
        earlier = [line for line in read_metrics(path) if line["step"] < first_step]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in earlier))
        with writing(path):
            self._file: IO[bytes] = path.open("ab", buffering=0)

    def add(self, **values: float | int | None) -> None:
        """Write one line. Every number must be finite, as JSON requires.

        Raises:
            ResourceError: the file cannot be written.
        """
        line = (json.dumps(values, allow_nan=False) + "\n").encode("utf-8")
        with writing(self._path):
            if self._file.write(line) < len(line):  # a full disk truncates the last write
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; an empty list if the file does not exist.

    Lines from the first invalid one on are ignored with a warning. Half a line at the end, which a
    killed run may leave, is ignored silently.

    Raises:
        ConfigError: the path is not a regular file, or the file cannot be read.
    """
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(_lines(path), 1):
        try:
            lines.append(parse_json(line, _Line).model_dump())
        except Unreadable as error:
            if line.endswith(b"\n"):
                get_logger("train").warning("%s is ignored from line %d on: %s", path, number, error)
            break
    return lines


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; a line that is too long is cut off."""
    if not path.exists():
        return
    try:
        with open_regular(path) as file:
            while line := file.readline(_MAX_LINE_BYTES):
                yield line
    except (Unreadable, OSError) as error:
        raise ConfigError(
            f"[train.read_metrics] metrics must be a readable file; got {str(path)!r}: {error}; move it away"
        ) from None


def draw_loss_curve(
    path: Path,
    losses: Sequence[float],
    title: str,
    held_out: Sequence[tuple[int, float]] = (),
    rates: Sequence[float] = (),
) -> None:
    """Save the loss per step, its running mean, the held-out losses and, below them, the learning
    rate as a PNG file.

    Args:
        path: path of the picture.
        losses: loss per step, in nats per token or per pair.
        title: title of the picture.
        held_out: per evaluated step, its index in `losses` and its held-out loss.
        rates: learning rate per step; empty to draw none.

    Raises:
        ResourceError: the picture cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ratios = [3, 1] if rates else [1]
    figure, grid = pyplot.subplots(
        len(ratios),
        figsize=(8, 4.5 + 1.5 * len(ratios) - 1.5),
        dpi=120,
        sharex=True,
        squeeze=False,
        height_ratios=ratios,
    )
    axes = grid[0, 0]
    axes.plot(losses, color="#9ecae1", linewidth=0.8, label="per step")
    axes.plot(_running_mean(losses, 0.95), color="#08519c", linewidth=1.8, label="running mean")
    if held_out:
        axes.plot(*zip(*held_out), color="#d94801", marker="o", markersize=3, label="held-out data")
    if rates:
        grid[1, 0].plot(rates, color="#238b45", linewidth=1.2)
        grid[1, 0].set_ylabel("learning rate")
        grid[1, 0].grid(alpha=0.3)
    grid[-1, 0].set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    try:
        replace_file(path, lambda temporary: figure.savefig(temporary, format="png"))
    finally:
        pyplot.close(figure)


def _running_mean(values: Sequence[float], keep: float) -> list[float]:
    """Exponential moving mean with bias correction."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        means.append(total / weight)
    return means
