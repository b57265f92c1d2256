"""A dependency graph as a picture: an SVG file, or part of an HTML page.

Each task is drawn below all tasks that it waits for, and below the task that submitted it. Colours
show kernels, frames show scopes. At most 500 tasks are drawn. For a larger graph, tasks are counted
by kernel instead.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tilewise.observe.dependency_graph import DependencyGraph, GraphTask
from tilewise.observe.flow import (
    FLOW_STYLE,
    Place,
    Sizes,
    draw_curve,
    draw_frame,
    order_levels,
    place_boxes,
)
from tilewise.observe.page import STYLE, html_page, html_table, kernel_classes, text

__all__ = ["MAX_DRAWN", "write_graph_html", "write_graph_svg"]

MAX_DRAWN = 500
BOXES = Sizes(128, 34, 18, 46)

GRAPH_STYLE = f"""{FLOW_STYLE}
.child {{ fill: none; stroke: var(--soft); stroke-dasharray: 2 4; stroke-opacity: 0.7; }}
.s0 {{ stroke: none; }} .s1 {{ stroke: var(--c0); }} .s2 {{ stroke: var(--c1); }} .s3 {{ stroke: var(--c2); }}
.s4 {{ stroke: var(--c3); }} .s5 {{ stroke: var(--c4); }} .s6 {{ stroke: var(--c6); }}
.scope {{ fill: none; stroke-width: 2.5; }}
"""


def write_graph_html(path: str | Path, graph: DependencyGraph) -> None:
    """Write a page with the picture of a graph and its kernels.

    Args:
        path: file to write; any browser opens it.
        graph: the tasks, with the producers that the runtime recorded.
    """
    edges = sum(len(task.producers) for task in graph.tasks)
    sections = [f"<p>{len(graph.tasks):,} tasks, {edges:,} edges.</p>"]
    if len(graph.tasks) > MAX_DRAWN:
        sections.append(f"<p>{text(_too_many(graph))}</p>")
    else:
        legend = (
            "<p class='soft'>Each task stands below all that it waits for. Frames of one colour belong to one scope; "
            "dotted lines lead from a task to those that it submitted.</p>"
        )
        sections.append(f"<style>{GRAPH_STYLE}</style>{legend}<div class='scroll'>{_svg(graph)}</div>")
    sections.append(
        f"<h2>Tasks by kernel</h2>{html_table(('kernel', 'tasks', 'edges in'), _by_kernel(graph))}"
    )
    Path(path).write_text(html_page("Dependency graph", sections), encoding="utf-8")


def write_graph_svg(path: str | Path, graph: DependencyGraph) -> None:
    """Write the picture of a graph as an SVG file.

    Args:
        path: SVG file to write.
        graph: the tasks, with the producers that the runtime recorded.
    """
    if len(graph.tasks) > MAX_DRAWN:
        lines = [_too_many(graph), *(f"{kernel}: {count}" for kernel, count, _ in _by_kernel(graph)[:40])]
        body = "".join(f'<text x="10" y="{20 + 16 * i}">{text(line)}</text>' for i, line in enumerate(lines))
        svg = draw_frame(900, 20 + 16 * len(lines), body)
    else:
        svg = _svg(graph)
    style = f"<style>{STYLE}{GRAPH_STYLE}</style>"
    Path(path).write_text(svg.replace(">", f">{style}", 1), encoding="utf-8")


def _too_many(graph: DependencyGraph) -> str:
    return (
        f"A picture holds at most {MAX_DRAWN} tasks, and this graph has {len(graph.tasks):,}: record a shorter part "
        "of the program to see it. The kernels in it are counted instead."
    )


def _by_kernel(graph: DependencyGraph) -> list[tuple[str, int, int]]:
    edges: Counter[str] = Counter()
    for task in graph.tasks:
        edges[task.kernel] += len(task.producers)
    counts = Counter(task.kernel for task in graph.tasks)
    return [(kernel, count, edges[kernel]) for kernel, count in counts.most_common()]


def _svg(graph: DependencyGraph) -> str:
    index = {task.id: i for i, task in enumerate(graph.tasks)}
    edges = [(index[p], i) for i, task in enumerate(graph.tasks) for p in task.producers if p in index]
    children = [(index[task.domain], i) for i, task in enumerate(graph.tasks) if task.domain in index]
    places = place_boxes(order_levels(len(graph.tasks), edges + children), BOXES)
    parts = [draw_curve(places, edge, "edge", BOXES) for edge in edges]
    parts += [draw_curve(places, edge, "child", BOXES) for edge in children]
    kernels = kernel_classes(kernel for kernel, _, _ in _by_kernel(graph))
    scopes = {scope: i % 7 for i, scope in enumerate(dict.fromkeys(task.scope for task in graph.tasks))}
    parts += [
        _box(task, places[i], kernels[task.kernel], scopes[task.scope]) for i, task in enumerate(graph.tasks)
    ]
    width = max((p.x for p in places.values()), default=0) + BOXES.width + BOXES.gap_x
    height = max((p.y for p in places.values()), default=0) + BOXES.height + BOXES.gap_x
    return draw_frame(round(width), round(height), "".join(parts))


def _box(task: GraphTask, place: Place, kernel_style: str, scope: int) -> str:
    accesses = ", ".join(f"{p.mode} {p.buffer}" for p in task.params)
    called = f"{task.name} ({task.kernel})" if task.name else task.kernel
    title = f"task {task.id}: {called}; scope {task.scope}, depth {task.depth}, submitter {task.submitter}; {accesses}"
    x, y = place
    name = task.name or task.kernel
    name = name if len(name) <= 17 else name[:16] + "\N{HORIZONTAL ELLIPSIS}"
    return (
        f'<g><title>{text(title)}</title><rect class="box {kernel_style}" x="{x:.0f}" y="{y:.0f}" rx="5" '
        f'width="{BOXES.width}" height="{BOXES.height}"/>'
        f'<rect class="scope s{scope}" x="{x - 3:.0f}" y="{y - 3:.0f}" rx="7" width="{BOXES.width + 6}" '
        f'height="{BOXES.height + 6}"/>'
        f'<text class="on" x="{x + BOXES.width / 2:.0f}" y="{y + 15:.0f}" text-anchor="middle">{text(name)}</text>'
        f'<text class="on" x="{x + BOXES.width / 2:.0f}" y="{y + 28:.0f}" text-anchor="middle">{task.id}</text></g>'
    )
