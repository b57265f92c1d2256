"""A graph as a Mermaid flow chart: one box per stretch (an op, or calls of layers that repeat), one
subgraph per layer, and an arrow from each call to its layer.

Names come from users and files. All characters of a name except letters, digits and a few plain
marks are written as character codes, so a name cannot end its box, start a directive or become
HTML. Boxes are identified by numbers, never by names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tilewise.ir.graph import Graph
from tilewise.ir.outline import Layers, Outline, layers_in, outline_graph, stretch_title

__all__ = ["to_mermaid"]

_LONGEST = 200  # characters of a box's text
# a first mark could begin a list, an outer underscore bold text, a colon an icon
_ODD = re.compile(r"[^A-Za-z0-9 .,:/()\[\]_-]|^[^A-Za-z]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?! )")


def to_mermaid(graph: Graph) -> str:
    """The chart. It has a box per op or stretch of repeated calls, and a rounded box per input,
    parameter or state that does not belong to one layer only. Each layer is drawn once, as a
    subgraph.
    """
    layers = layers_in(graph)
    lines = ["flowchart TD"]
    for number, (template, title) in enumerate(zip(layers.templates, layers.titles)):
        lines.append(f'  subgraph s{number}["{_quoted(title)}"]')
        lines += [f"  {line}" for line in _lines(template.graph, f"s{number}", layers)]
        lines.append("  end")
    lines += _lines(graph, "", layers)
    return "\n".join(lines)


def _lines(graph: Graph, prefix: str, layers: Layers) -> Iterator[str]:
    outline = outline_graph(graph)
    for t in outline.drawn:
        yield f'  {prefix}t{t.id}("{_quoted(f"{t.spec.name}: {t.spec}")}")'
    for number, stretch in enumerate(outline.stretches):
        yield f'  {prefix}o{number}["{_quoted(stretch_title(graph, stretch, layers))}"]'
    for tensor, stretch_number in outline.feeds:
        yield f"  {prefix}t{tensor} --> {prefix}o{stretch_number}"
    for producer, reader in outline.edges:
        yield f"  {prefix}o{producer} --> {prefix}o{reader}"
    for number, stretch in enumerate(outline.stretches):
        for layer in dict.fromkeys(layers.called(graph, stretch)):
            yield f"  {prefix}o{number} -.-> s{layer}"
    for number, (name, tensor) in enumerate(graph.outputs.items()):
        yield f'  {_source(graph, outline, prefix, tensor)} --> {prefix}out{number}(["{_quoted(name)}"])'


def _source(graph: Graph, outline: Outline, prefix: str, tensor: int) -> str:
    producer = graph.tensors[tensor].producer
    return f"{prefix}t{tensor}" if producer is None else f"{prefix}o{outline.of_op[producer]}"


def _quoted(text: str) -> str:
    """Text between a box's quotes."""
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return _ODD.sub(lambda match: "".join(f"#{ord(c)};" for c in match[0]), short)
