"""A graph as a Mermaid flow chart: one box per stretch (an op, or calls of layers that repeat), one
subgraph per layer, and an arrow from each call to its layer. With the layouts of a mesh, each box
also says how its tensor is sharded, and changes of layout are boxes of their own.

Names come from users and files. All characters of a name except letters, digits and a few plain
marks are written as character codes, so a name cannot end its box, start a directive or become
HTML. Boxes are identified by numbers, never by names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tilewise.ir.graph import Graph, OpNode
from tilewise.ir.layout import GraphLayout, show_layout
from tilewise.ir.outline import Layers, Outline, Stretch, layers_in, outline_graph, stretch_title
from tilewise.ir.reshards import CHANGES

__all__ = ["to_mermaid"]

_LONGEST = 200  # characters of a box's text
# a first mark could begin a list, an outer underscore bold text, a colon an icon
_ODD = re.compile(r"[^A-Za-z0-9 .,:/()\[\]_-]|^[^A-Za-z]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?! )")


def to_mermaid(graph: Graph, layout: GraphLayout | None = None) -> str:
    """The chart. It has a box per op or stretch of repeated calls, and a rounded box per input,
    parameter or state that does not belong to one layer only. Each layer is drawn once, as a
    subgraph.

    Args:
        graph: the graph, with reshards as ops if there are layouts.
        layout: the layouts of its tensors. Boxes then show the layout of their tensor or result,
            such as `(dp, -, tp)`, and several if calls of one layer differ.
    """
    layers = layers_in(graph)
    layouts: list[list[GraphLayout]] = [[] for _ in layers.templates]
    if layout is not None:
        _collect_layouts(graph, layout, layers, layouts)
    lines = ["flowchart TD"]
    for number, (template, title) in enumerate(zip(layers.templates, layers.titles)):
        lines.append(f'  subgraph s{number}["{_quoted(title)}"]')
        lines += [f"  {line}" for line in _lines(template.graph, f"s{number}", layers, layouts[number])]
        lines.append("  end")
    lines += _lines(graph, "", layers, [] if layout is None else [layout])
    return "\n".join(lines)


def _collect_layouts(
    graph: Graph, layout: GraphLayout, layers: Layers, layouts: list[list[GraphLayout]]
) -> None:
    """Add the different layouts of each layer's calls, by the layer's number."""
    for op in graph.ops:
        if op.op == "call":
            template, inner = graph.templates[op.attrs["template"]], layout.calls[op.id]
            of_layer = layouts[layers.number[id(template)]]
            if all(inner.compute != other.compute for other in of_layer):
                of_layer.append(inner)
                _collect_layouts(template.graph, inner, layers, layouts)


def _lines(graph: Graph, prefix: str, layers: Layers, layouts: Sequence[GraphLayout]) -> Iterator[str]:
    outline = outline_graph(graph)
    for t in outline.drawn:
        text = " ".join([f"{t.spec.name}: {t.spec}", *_shown(layouts, [t.id])])
        yield f'  {prefix}t{t.id}("{_quoted(text)}")'
    for number, stretch in enumerate(outline.stretches):
        text = stretch_title(graph, stretch, layers) + _change(layouts, stretch)
        yield f'  {prefix}o{number}["{_quoted(text)}"]'
    for tensor, stretch_number in outline.feeds:
        yield f"  {prefix}t{tensor} --> {prefix}o{stretch_number}"
    for producer, reader in outline.edges:
        yield f"  {prefix}o{producer} --> {prefix}o{reader}"
    for number, stretch in enumerate(outline.stretches):
        for layer in dict.fromkeys(layers.called(graph, stretch)):
            yield f"  {prefix}o{number} -.-> s{layer}"
    for number, (name, tensor) in enumerate(graph.outputs.items()):
        yield f'  {_source(graph, outline, prefix, tensor)} --> {prefix}out{number}(["{_quoted(name)}"])'


def _shown(layouts: Sequence[GraphLayout], tensors: Sequence[int]) -> list[str]:
    """The layouts of some tensors as text, joined by commas; an entry for each of `layouts` that differs."""
    texts = (", ".join(show_layout(layout.compute[t]) for t in tensors) for layout in layouts)
    return [" or ".join(dict.fromkeys(texts))] if layouts else []


def _change(layouts: Sequence[GraphLayout], stretch: Stretch) -> str:
    """The layouts of a stretch's results; for a change of layout, also the one before."""
    op: OpNode = stretch.last
    if not layouts:
        return ""
    before = _shown(layouts, op.given[:1]) if op.op in CHANGES else []
    return ": " + " → ".join([*before, *_shown(layouts, op.outputs)])


def _source(graph: Graph, outline: Outline, prefix: str, tensor: int) -> str:
    producer = graph.tensors[tensor].producer
    return f"{prefix}t{tensor}" if producer is None else f"{prefix}o{outline.of_op[producer]}"


def _quoted(text: str) -> str:
    """Text between a box's quotes."""
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return _ODD.sub(lambda match: "".join(f"#{ord(c)};" for c in match[0]), short)
