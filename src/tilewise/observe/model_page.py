"""A model's graph as one HTML page: a picture and tables of the graph, then of each layer, folded.

Calls that repeat each other are one row and one box (`ir.outline`), so ten thousand equal layers are a page of the size
of one. No scripts, nothing loaded; every name goes through `text`. Draws at most 200 boxes a picture and 2,000 rows a
table; beyond that it says so. Reads graphs, changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from tilewise.core.dims import upper_bound
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode
from tilewise.ir.mermaid import stretch_title, template_titles
from tilewise.ir.outline import Outline, Stretch, outline_graph, templates_in
from tilewise.observe.flow import (
    FLOW_STYLE,
    Edge,
    Place,
    Sizes,
    draw_curve,
    draw_frame,
    order_levels,
    place_boxes,
)
from tilewise.observe.page import html_page, html_table, kernel_classes, text

__all__ = ["render_graph"]

MAX_DRAWN = 200
MAX_ROWS = 2000
MAX_SHOWN = 200  # letters of a name
BOXES = Sizes(230, 36, 20, 26)
BOX_LETTERS = 32
MODEL_STYLE = f"""{FLOW_STYLE}
.outside {{ fill: var(--rail); stroke: var(--line); }}
details > summary {{ cursor: pointer; font-weight: 600; }} td.wide {{ white-space: normal; }}
"""


def render_graph(graph: Graph, title: str, note: str = "") -> str:
    """The page, as text.

    Args:
        graph: of any size.
        title: of the page.
        note: a sentence below it: what the graph is of.
    """
    titles = template_titles(graph)
    numbers = {id(t): k for k, t in enumerate(templates_in(graph))}
    uses = _uses(graph)
    head = f"<style>{MODEL_STYLE}</style><p>{text(note)}</p><p>{_counts(graph, uses)}</p>"
    sections = [head + _graph_part(graph, titles, numbers)]
    for template in templates_in(graph):
        sections.append(_layer(template, uses[id(template)], titles, numbers))
    return html_page(title, sections)


def _layer(template: Template, uses: int, titles: Mapping[int, str], numbers: Mapping[int, int]) -> str:
    graph = template.graph
    size = _elements(graph.of_kind("parameter"))
    summary = (
        f"{text(_short(titles[id(template)]))}: {_many(uses, 'call')}, {_many(len(graph.ops), 'op')}, "
        f"{_many(size, 'parameter')} each"
    )
    # the mark stands inside, so that a browser that follows a link to it unfolds the layer
    inside = f"<p id='layer-{numbers[id(template)]}' class='soft'>{text(_short(template.key))}</p>"
    return f"<details><summary>{summary}</summary>{inside}{_graph_part(graph, titles, numbers)}</details>"


def _graph_part(graph: Graph, titles: Mapping[int, str], numbers: Mapping[int, int]) -> str:
    """Picture, ops and tensors of one graph."""
    outline = outline_graph(graph)
    boxes = [_short(stretch_title(graph, s, titles), BOX_LETTERS) for s in outline.stretches[: MAX_DRAWN + 1]]
    parts = [_picture(graph, outline, boxes), "<h2>Ops</h2>", _ops(graph, outline, titles, numbers)]
    tensors = [t for t in outline.drawn if t.producer is None]
    rows = [
        (t.kind, _short(t.spec.name), str(t.spec), _labels(t), f"{_elements([t]):,}")
        for t in tensors[:MAX_ROWS]
    ]
    head = ("kind", "name", "shape", "dims count", "elements")
    parts.append(f"<h2>Tensors from outside</h2><div class='scroll'>{html_table(head, rows)}</div>")
    parts.append(_more(len(tensors)))
    return "".join(parts)


# ---- words ----------------------------------------------------------------------------------------------------------


def _counts(graph: Graph, uses: Mapping[int, int]) -> str:
    layers = templates_in(graph)
    num_ops = sum(op.op != "call" for op in graph.ops)
    num_ops += sum(uses[id(t)] * sum(op.op != "call" for op in t.graph.ops) for t in layers)
    size, state = (_elements(graph.of_kind(kind)) for kind in ("parameter", "state"))
    words = [_many(num_ops, "op"), f"{_many(len(layers), 'kind')} of layers", _many(size, "parameter")]
    return text(", ".join([*words, f"{state:,} elements of state"] if state else words)) + "."


def _uses(graph: Graph) -> dict[int, int]:
    """How often each layer is computed in one run, by its template's identity; callers are counted before layers."""
    order: list[Graph] = []
    seen: set[int] = set()
    ahead: list[tuple[Graph, bool]] = [(graph, False)]
    while ahead:
        of, is_done = ahead.pop()
        if is_done:
            order.append(of)
        elif id(of) not in seen:
            seen.add(id(of))
            ahead.append((of, True))
            ahead += [(t.graph, False) for t in of.templates.values()]
    runs: Counter[int] = Counter({id(graph): 1})
    uses: dict[int, int] = {id(t): 0 for t in templates_in(graph)}
    for of in reversed(order):
        calls = Counter(op.attrs["template"] for op in of.ops if op.op == "call")
        for key, count in calls.items():
            template = of.templates[key]
            uses[id(template)] += count * runs[id(of)]
            runs[id(template.graph)] += count * runs[id(of)]
    return uses


def _elements(tensors: Iterable[TensorNode]) -> int:
    return sum(prod(upper_bound(s) for s in t.shape) for t in tensors)


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _short(name: str, limit: int = MAX_SHOWN) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _labels(tensor: TensorNode) -> str:
    return ", ".join("-" if label is None else _short(label.name) for label in tensor.spec.labels)


def _more(count: int) -> str:
    return f"<p class='soft'>and {count - MAX_ROWS:,} more</p>" if count > MAX_ROWS else ""


# ---- tables ---------------------------------------------------------------------------------------------------------


def _ops(graph: Graph, outline: Outline, titles: Mapping[int, str], numbers: Mapping[int, int]) -> str:
    head = ("op", "reads", "makes", "attributes", "parameters each")
    lines = ["<div class='scroll'><table><tr>", *(f"<th>{cell}</th>" for cell in head), "</tr>"]
    for stretch in outline.stretches[:MAX_ROWS]:
        first, last = stretch.ops[0], stretch.ops[-1]
        cells = (
            _title(graph, stretch, titles, numbers),
            text(", ".join(_operands(graph, outline, first))),
            text(", ".join(f"%{o} {graph.spec(o)}" for o in last.outputs)),
            text(", ".join(_attributes(first))),
            f"{stretch.num_parameters:,}" if stretch.num_parameters else "",
        )
        lines.append("<tr>" + "".join(f"<td class='wide'>{cell}</td>" for cell in cells) + "</tr>")
    return "".join([*lines, "</table></div>", _more(len(outline.stretches))])


def _title(graph: Graph, stretch: Stretch, titles: Mapping[int, str], numbers: Mapping[int, int]) -> str:
    """What a row is of; the layers that it calls are links."""
    words = text(_short(stretch_title(graph, stretch, titles)))
    called = {id(graph.templates[op.attrs["template"]]): None for op in stretch.ops if op.op == "call"}
    links = (f"<a href='#layer-{numbers[key]}'>{text(_short(titles[key]))}</a>" for key in called)
    return f"{words}<br>{', '.join(links)}" if called else words


def _operands(graph: Graph, outline: Outline, op: OpNode) -> Iterator[str]:
    """Names of what comes from outside, numbers of results; what is a layer's own is counted."""
    drawn = {t.id for t in outline.drawn} if op.op == "call" else set(op.given)
    num_own = 0
    for i in op.inputs:
        node = None if i is None else graph.tensors[i]
        if node is None:
            yield "-"
        elif node.kind == "result":
            yield f"%{i}"
        elif i in drawn:
            yield _short(node.spec.name)
        else:
            num_own += 1
    if num_own:
        yield f"{num_own} of its own"


def _attributes(op: OpNode) -> Iterator[str]:
    for name, value in sorted(op.attrs.items()):
        if op.op != "call":
            yield f"{name}={_short(str(value))}"


# ---- pictures -------------------------------------------------------------------------------------------------------


def _picture(graph: Graph, outline: Outline, titles: Sequence[str]) -> str:
    """Boxes from above: inputs, ops, outputs."""
    inputs = [t for t in outline.drawn if t.kind == "input"]
    first, last = len(inputs), len(inputs) + len(outline.stretches)
    if last + len(graph.outputs) > MAX_DRAWN:
        return f"<p class='soft'>A picture holds at most {MAX_DRAWN} boxes; the ops stand below.</p>"
    at = {t.id: n for n, t in enumerate(inputs)}
    edges: list[Edge] = [(at[t], first + s) for t, s in outline.feeds if t in at]
    edges += [(first + a, first + b) for a, b in outline.edges]
    words = [(f"{_short(t.spec.name, BOX_LETTERS)}", str(t.spec), "outside") for t in inputs]
    names = (s.ops[0].op for s in outline.stretches)
    colours = kernel_classes(name for name, _ in Counter(names).most_common())
    for title, s in zip(titles, outline.stretches):
        made = s.ops[-1].outputs
        words.append((title, str(graph.spec(made[0])) if made else "", colours[s.ops[0].op]))
    for number, (name, tensor) in enumerate(graph.outputs.items()):
        producer = graph.tensors[tensor].producer
        source = at.get(tensor) if producer is None else first + outline.of_op[producer]
        words.append((_short(name, BOX_LETTERS), str(graph.spec(tensor)), "outside"))
        if source is not None:
            edges.append((source, last + number))
    return f"<div class='scroll'>{_svg(words, edges)}</div>"


def _svg(words: Sequence[tuple[str, str, str]], edges: Sequence[Edge]) -> str:
    lines = order_levels(len(words), edges)
    level = {box: row for row, line in enumerate(lines) for box in line}
    places = place_boxes(lines, BOXES)
    parts = []
    for edge in dict.fromkeys(edges):
        is_long = level[edge[1]] > level[edge[0]] + 1  # past the boxes between, not behind them
        parts.append(draw_curve(places, edge, "edge", BOXES, 0.75 * BOXES.width if is_long else 0.0))
    parts += [_box(*box, places[number]) for number, box in enumerate(words)]
    width = max((p.x for p in places.values()), default=0) + 1.5 * BOXES.width
    height = max((p.y for p in places.values()), default=0) + BOXES.height + BOXES.gap_x
    return draw_frame(round(width), round(height), "".join(parts))


def _box(title: str, spec: str, style: str, place: Place) -> str:
    ink, centre = "soft" if style == "outside" else "on", place.x + BOXES.width / 2
    return (
        f'<g><rect class="box {style}" x="{place.x:.0f}" y="{place.y:.0f}" rx="5" width="{BOXES.width}" '
        f'height="{BOXES.height}"/>'
        f'<text class="{ink}" x="{centre:.0f}" y="{place.y + 15:.0f}" text-anchor="middle">{text(title)}</text>'
        f'<text class="{ink}" x="{centre:.0f}" y="{place.y + 29:.0f}" text-anchor="middle">'
        f"{text(_short(spec, BOX_LETTERS))}</text></g>"
    )
