"""Places the boxes of a picture in levels. Each box is below all boxes that it depends on, and the
curves between boxes have few crossings.

Boxes are numbers and edges are pairs of numbers. Pictures of dependency graphs and of model graphs
use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["FLOW_STYLE", "Edge", "Place", "Sizes", "draw_curve", "draw_frame", "order_levels", "place_boxes"]

PER_LINE = 24  # wider levels are broken into several lines
SWEEPS = 6
Edge = tuple[int, int]

FLOW_STYLE = """
.box { stroke: var(--line); stroke-width: 1; } .edge { fill: none; stroke: var(--soft); stroke-opacity: 0.6; }
svg text.on { fill: #ffffff; font-weight: 600; paint-order: stroke; stroke: #00000059; stroke-width: 2px; }
"""


class Place(NamedTuple):
    """A box's upper left corner."""

    x: float
    y: float


class Sizes(NamedTuple):
    """Sizes of boxes, and of the gaps between them."""

    width: int
    height: int
    gap_x: int
    gap_y: int


def order_levels(num_boxes: int, edges: Sequence[Edge]) -> list[list[int]]:
    """The boxes of each level. A box's level is the length of the longest path to it. Within a
    level, boxes are ordered by the mean place of their neighbours, to avoid crossings.

    Edges from a higher to a lower number do not count for the levels.
    """
    level = [0] * num_boxes
    neighbours: defaultdict[int, list[int]] = defaultdict(list)
    for earlier, later in sorted(edges, key=lambda edge: edge[1]):
        neighbours[earlier].append(later)
        neighbours[later].append(earlier)
        if earlier < later:
            level[later] = max(level[later], level[earlier] + 1)
    levels: list[list[int]] = [[] for _ in range(max(level, default=-1) + 1)]
    for box, its_level in enumerate(level):
        levels[its_level].append(box)
    place = {box: i - (len(boxes) - 1) / 2 for boxes in levels for i, box in enumerate(boxes)}
    for sweep in range(SWEEPS):
        for boxes in levels if sweep % 2 == 0 else levels[::-1]:
            boxes.sort(key=lambda b: sum(place[n] for n in neighbours[b] or [b]) / len(neighbours[b] or [b]))
            place.update({box: i - (len(boxes) - 1) / 2 for i, box in enumerate(boxes)})
    return [boxes[i : i + PER_LINE] for boxes in levels for i in range(0, len(boxes), PER_LINE)]


def place_boxes(lines: Sequence[Sequence[int]], sizes: Sizes) -> dict[int, Place]:
    """The place of every box. Levels are centred below each other."""
    widest = max(map(len, lines), default=0)
    step_x, step_y = sizes.width + sizes.gap_x, sizes.height + sizes.gap_y
    return {
        box: Place(sizes.gap_x + step_x * (i + (widest - len(line)) / 2), sizes.gap_x + step_y * row)
        for row, line in enumerate(lines)
        for i, box in enumerate(line)
    }


def draw_curve(places: Mapping[int, Place], edge: Edge, style: str, sizes: Sizes, aside: float = 0.0) -> str:
    """An SVG path from the bottom of one box to the top of another box. `aside` moves the path
    sideways, past boxes in between.
    """
    a, b = places[edge[0]], places[edge[1]]
    x1, y1, x2, y2 = a.x + sizes.width / 2, a.y + sizes.height, b.x + sizes.width / 2, b.y
    bend = max(sizes.gap_y / 2, abs(y2 - y1) / 2)
    return (
        f'<path class="{style}" d="M{x1:.0f} {y1:.0f}C{x1 + aside:.0f} {y1 + bend:.0f} {x2 + aside:.0f} '
        f'{y2 - bend:.0f} {x2:.0f} {y2:.0f}"/>'
    )


def draw_frame(width: int, height: int, body: str) -> str:
    """An SVG picture with this body."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="max-width: {width}px" role="img">{body}</svg>\n'
    )
