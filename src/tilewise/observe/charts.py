"""Drawings of the run report as inline SVG: timelines, stacked bars, fill levels.

A drawing has a few thousand shapes for any number of tasks, because adjacent bars that are narrower
than a cell are drawn as one bar. Times are in ns, colours are CSS classes of `page.STYLE`, and all
text is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tilewise.observe.page import duration, text
from tilewise.observe.trace import Curve

__all__ = ["Bar", "Row", "area_chart", "merge_bars", "stacked_bars", "timeline_chart"]

WIDTH, MARGIN = 1200, 120  # of a drawing, and of its labels on the left
PLOT = WIDTH - MARGIN - 10
ROW_HEIGHT, BAR_HEIGHT = 24, 16
MAX_SHAPES = 4000


class Bar(NamedTuple):
    """A bar of the timeline, with its CSS class and its tooltip."""

    begin_ns: int
    end_ns: int
    style: str
    label: str


class Row(NamedTuple):
    """A row of the timeline: bars, thin bars above them (stalls), and marked bars."""

    label: str
    bars: Sequence[Bar]
    thin: Sequence[Bar] = ()
    marked: Sequence[Bar] = ()


class _Group(NamedTuple):
    bars: list[Bar]
    end_ns: int


def merge_bars(bars: Sequence[Bar], cell_ns: float) -> list[Bar]:
    """Merge bars that begin in the same cell and are narrower than a cell. The bars must be ordered
    by begin.
    """
    groups: list[_Group] = []
    cell = -1
    for bar in sorted(bars, key=lambda b: (b.begin_ns, -b.end_ns)):
        is_narrow = bar.end_ns - bar.begin_ns < cell_ns
        my_cell = int(bar.begin_ns // cell_ns) if is_narrow else -1
        if is_narrow and my_cell == cell:
            groups[-1].bars.append(bar)
            groups[-1] = groups[-1]._replace(end_ns=max(groups[-1].end_ns, bar.end_ns))
        else:
            groups.append(_Group([bar], bar.end_ns))
        cell = my_cell
    return [_joined(group) for group in groups]


def _joined(group: _Group) -> Bar:
    if len(group.bars) == 1:
        return group.bars[0]
    time: Counter[str] = Counter()
    for bar in group.bars:
        time[bar.style] += bar.end_ns - bar.begin_ns
    most = time.most_common(1)[0][0]
    example = next(bar.label for bar in group.bars if bar.style == most)
    label = f"{len(group.bars)} in {duration(group.end_ns - group.bars[0].begin_ns)}, such as {example}"
    return Bar(group.bars[0].begin_ns, group.end_ns, most, label)


class _Scale(NamedTuple):
    begin_ns: int
    span_ns: int

    def x(self, moment_ns: float) -> float:
        return MARGIN + PLOT * (moment_ns - self.begin_ns) / self.span_ns


def timeline_chart(rows: Sequence[Row], begin_ns: int, end_ns: int) -> str:
    """Rows of bars under one axis of time."""
    scale = _Scale(begin_ns, max(1, end_ns - begin_ns))
    num_cells = min(PLOT, max(40, MAX_SHAPES // max(1, len(rows))))
    height = 22 + ROW_HEIGHT * len(rows)
    parts = [_axis(scale, height)]
    for place, row in enumerate(rows):
        parts.append(_row(row, 20 + ROW_HEIGHT * place, scale, scale.span_ns / num_cells))
    return _svg(height, parts)


def _row(row: Row, top: int, scale: _Scale, cell_ns: float) -> str:
    parts = [
        f'<text x="{MARGIN - 8}" y="{top + 13}" text-anchor="end">{text(row.label)}</text>',
        f'<rect class="rail" x="{MARGIN}" y="{top}" width="{PLOT}" height="{BAR_HEIGHT}"/>',
    ]
    parts += [_rect(bar, top, BAR_HEIGHT, scale) for bar in merge_bars(row.bars, cell_ns)]
    parts += [_rect(bar, top, 5, scale) for bar in merge_bars(row.thin, cell_ns)]
    parts += [_rect(bar, top + BAR_HEIGHT, 3, scale) for bar in merge_bars(row.marked, cell_ns)]
    return "".join(parts)


def _rect(bar: Bar, top: int, height: int, scale: _Scale) -> str:
    left, right = scale.x(bar.begin_ns), scale.x(bar.end_ns)
    return (
        f'<rect class="{bar.style}" x="{left:.1f}" y="{top}" width="{max(0.7, right - left - 0.2):.1f}" '
        f'height="{height}"><title>{text(bar.label)}</title></rect>'
    )


def _axis(scale: _Scale, height: int) -> str:
    """About eight lines at round times since the beginning."""
    step = 10 ** np.floor(np.log10(scale.span_ns / 8))
    step *= min((1, 2, 5, 10), key=lambda factor: abs(scale.span_ns / (step * factor) - 8))
    parts = []
    for place in range(int(scale.span_ns // step) + 1):
        x = scale.x(scale.begin_ns + place * step)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height}"/>')
        if x < WIDTH - 40:
            parts.append(f'<text class="soft" x="{x + 3:.1f}" y="11">{duration(place * step)}</text>')
    return "".join(parts)


def stacked_bars(rows: Sequence[tuple[str, Sequence[Bar]]], whole: int) -> str:
    """One bar per row. It consists of adjacent parts, whose lengths are their times from `begin_ns`
    to `end_ns`. `whole` is the full width.
    """
    scale = _Scale(0, max(1, whole))
    parts = []
    for place, (label, bars) in enumerate(rows):
        top = ROW_HEIGHT * place
        parts.append(f'<text x="{MARGIN - 8}" y="{top + 13}" text-anchor="end">{text(label)}</text>')
        parts += [_rect(bar, top, BAR_HEIGHT, scale) for bar in bars if bar.end_ns > bar.begin_ns]
    return _svg(ROW_HEIGHT * max(1, len(rows)), parts)


def area_chart(label: str, curve: Curve, begin_ns: int, end_ns: int, style: str, peak_text: str) -> str:
    """A step function over the run. Where the function changes faster than the drawing can show,
    its highest values are drawn.
    """
    columns, height = 600, 64
    scale = _Scale(begin_ns, max(1, end_ns - begin_ns))
    edges = begin_ns + np.arange(columns, dtype=np.int64) * scale.span_ns // columns
    highest = curve.at(edges)
    column = np.clip((curve.times_ns - begin_ns) * columns // scale.span_ns, 0, columns - 1)
    np.maximum.at(highest, column, curve.values)
    base, peak = height - 4, max(1, curve.peak)
    tops = (base - (base - 6) * highest / peak).tolist()
    path = [f"M{MARGIN} {base}"]
    last = float(base)
    for place, top in enumerate(tops):
        if top != last:
            path.append(f"H{scale.x(edges[place]):.1f}V{top:.1f}")
            last = top
    path.append(f"H{MARGIN + PLOT}V{base}Z")
    return _svg(
        height,
        [
            f'<text x="{MARGIN - 8}" y="20" text-anchor="end">{text(label)}</text>',
            f'<text class="soft" x="{MARGIN - 8}" y="36" text-anchor="end">{text(peak_text)}</text>',
            f'<line class="grid" x1="{MARGIN}" x2="{MARGIN + PLOT}" y1="{base}" y2="{base}"/>',
            f'<path class="{style}" fill-opacity="0.75" d="{"".join(path)}"><title>{text(label)}</title></path>',
        ],
    )


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
