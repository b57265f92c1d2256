"""A model's graph as one HTML page: a picture and tables of the graph, and of each layer in a
collapsed section.

Repeated calls are one row and one box (`ir.outline`), so the page of ten thousand equal layers is
as long as the page of one layer. The page has no scripts and loads nothing. Every name is escaped
by `text`. A picture has at most 200 boxes and a table at most 2,000 rows. The page says if
something is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from tilewise.core.dims import upper_bound
from tilewise.ir.graph import Graph, OpNode, TensorNode
from tilewise.ir.outline import Layers, Outline, Stretch, layers_in, outline_graph, stretch_title
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
    """The page as text.

    Args:
        graph: the graph, of any size.
        title: title of the page.
        note: a sentence below the title, about the origin of the graph.
    """
    layers = layers_in(graph)
    uses = _uses(graph, layers)
    head = f"<style>{MODEL_STYLE}</style><p>{text(note)}</p><p>{_counts(graph, layers, uses)}</p>"
    sections = [head + _graph_part(graph, layers)]
    sections += [_layer(number, uses[number], layers) for number in range(len(layers.templates))]
    return html_page(title, sections)


def _layer(number: int, uses: int, layers: Layers) -> str:
    template, title = layers.templates[number], text(_short(layers.titles[number]))
    ops, size = len(template.graph.ops), _elements(template.graph.of_kind("parameter"))
    summary = f"{title}: {_many(uses, 'call')}, {_many(ops, 'op')}, {_many(size, 'parameter')} each"
    # the mark stands inside, so that a browser that follows a link to it unfolds the layer
    inside = f"<p id='layer-{number}' class='soft'>{text(_short(template.key))}</p>"
    return f"<details><summary>{summary}</summary>{inside}{_graph_part(template.graph, layers)}</details>"


def _graph_part(graph: Graph, layers: Layers) -> str:
    """Picture, ops and tensors of one graph."""
    outline = outline_graph(graph)
    boxes = [_short(stretch_title(graph, s, layers), BOX_LETTERS) for s in outline.stretches[: MAX_DRAWN + 1]]
    parts = [_picture(graph, outline, boxes), "<h2>Ops</h2>", _ops(graph, outline, layers)]
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


def _counts(graph: Graph, layers: Layers, uses: Sequence[int]) -> str:
    num_ops = sum(op.op != "call" for op in graph.ops)
    num_ops += sum(n * sum(op.op != "call" for op in t.graph.ops) for n, t in zip(uses, layers.templates))
    size, state = (_elements(graph.of_kind(kind)) for kind in ("parameter", "state"))
    words = [_many(num_ops, "op"), f"{_many(len(uses), 'kind')} of layers", _many(size, "parameter")]
    return text(", ".join([*words, f"{state:,} elements of state"] if state else words)) + "."


def _uses(graph: Graph, layers: Layers) -> list[int]:
    """How often each layer is computed in one run. A layer is counted after all layers that call it."""
    graphs = [graph, *(t.graph for t in layers.templates)]
    calls = [_calls(of, layers) for of in graphs]
    callers = Counter(layer for of in calls for layer in of)
    uses = [0] * len(layers.templates)
    ahead = [(1, 0), *((0, n + 1) for n in range(len(uses)) if not callers[n])]  # runs, place in graphs
    while ahead:
        runs, of = ahead.pop()
        for layer, count in calls[of].items():
            uses[layer] += runs * count
            callers[layer] -= 1
            if callers[layer] == 0:
                ahead.append((uses[layer], layer + 1))
    return uses


def _calls(graph: Graph, layers: Layers) -> Counter[int]:
    keys = Counter(op.attrs["template"] for op in graph.ops if op.op == "call")
    calls: Counter[int] = Counter()
    for key, count in keys.items():
        calls[layers.number[id(graph.templates[key])]] += count
    return calls


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


def _ops(graph: Graph, outline: Outline, layers: Layers) -> str:
    head = ("op", "reads", "makes", "attributes", "parameters each")
    lines = ["<div class='scroll'><table><tr>", *(f"<th>{cell}</th>" for cell in head), "</tr>"]
    for stretch in outline.stretches[:MAX_ROWS]:
        first, last = stretch.ops[0], stretch.ops[-1]
        cells = (
            _title(graph, stretch, layers),
            text(", ".join(_operands(graph, outline, first))),
            text(", ".join(f"%{o} {graph.spec(o)}" for o in last.outputs)),
            text(", ".join(_attributes(first))),
            f"{stretch.num_parameters:,}" if stretch.num_parameters else "",
        )
        lines.append("<tr>" + "".join(f"<td class='wide'>{cell}</td>" for cell in cells) + "</tr>")
    return "".join([*lines, "</table></div>", _more(len(outline.stretches))])


def _title(graph: Graph, stretch: Stretch, layers: Layers) -> str:
    """The title of a row, with links to the layers that it calls."""
    words = text(_short(stretch_title(graph, stretch, layers)))
    called = dict.fromkeys(layers.called(graph, stretch))
    links = (f"<a href='#layer-{number}'>{text(_short(layers.titles[number]))}</a>" for number in called)
    return f"{words}<br>{', '.join(links)}" if called else words


def _operands(graph: Graph, outline: Outline, op: OpNode) -> Iterator[str]:
    """Names of inputs, parameters and states, and numbers of results; a layer's own tensors are
    only counted.
    """
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
    """Boxes from top to bottom: inputs, ops, outputs."""
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
