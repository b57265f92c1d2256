"""A graph as a Mermaid flow chart: a box per stretch of ops, a subgraph per layer, to which its calls point.

Names come from users and files. In the text that Mermaid reads, all of a name but letters, digits and a few plain
marks stands as the number of the character, so no name can end its box, begin a directive or become HTML. Boxes are
known by numbers, never by names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tilewise.ir.graph import Graph
from tilewise.ir.outline import Outline, Stretch, outline_graph, templates_in

__all__ = ["stretch_title", "template_titles", "to_mermaid"]

_LONGEST = 200  # of a box's text
# a first mark could begin a list, an outer underscore bold text, a colon an icon
_ODD = re.compile(r"[^A-Za-z0-9 .,:/()\[\]_-]|^[^A-Za-z]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?! )")


def to_mermaid(graph: Graph) -> str:
    """One box per op, or per stretch of calls that repeat each other; one rounded box per tensor from outside that no
    layer alone reads. Layers are subgraphs, each once."""
    titles = template_titles(graph)
    numbers = {id(t): k for k, t in enumerate(templates_in(graph))}
    lines = ["flowchart TD"]
    for template in templates_in(graph):
        name = f"s{numbers[id(template)]}"
        lines.append(f'  subgraph {name}["{_quoted(titles[id(template)])}"]')
        lines += [f"  {line}" for line in _lines(template.graph, name, titles, numbers)]
        lines.append("  end")
    lines += _lines(graph, "", titles, numbers)
    return "\n".join(lines)


def _lines(graph: Graph, prefix: str, titles: Mapping[int, str], numbers: Mapping[int, int]) -> Iterator[str]:
    outline = outline_graph(graph)
    for t in outline.drawn:
        yield f'  {prefix}t{t.id}("{_quoted(f"{t.spec.name}: {t.spec}")}")'
    for number, stretch in enumerate(outline.stretches):
        yield f'  {prefix}o{number}["{_quoted(stretch_title(graph, stretch, titles))}"]'
    for tensor, stretch_number in outline.feeds:
        yield f"  {prefix}t{tensor} --> {prefix}o{stretch_number}"
    for producer, reader in outline.edges:
        yield f"  {prefix}o{producer} --> {prefix}o{reader}"
    for number, stretch in enumerate(outline.stretches):
        called = dict.fromkeys(op.attrs["template"] for op in stretch.ops if op.op == "call")
        for key in called:
            yield f"  {prefix}o{number} -.-> s{numbers[id(graph.templates[key])]}"
    for number, (name, tensor) in enumerate(graph.outputs.items()):
        yield f'  {_source(graph, outline, prefix, tensor)} --> {prefix}out{number}(["{_quoted(name)}"])'


def _source(graph: Graph, outline: Outline, prefix: str, tensor: int) -> str:
    producer = graph.tensors[tensor].producer
    return f"{prefix}t{tensor}" if producer is None else f"{prefix}o{outline.of_op[producer]}"


def stretch_title(graph: Graph, stretch: Stretch, titles: Mapping[int, str]) -> str:
    """What a box says: op and label, or `layers.0 … layers.35: 36 × decoder_layer`."""
    first = stretch.ops[0]
    if first.op != "call":
        return (
            first.op
            if first.label in ("", first.op)
            else f"{first.op}: {first.label.removeprefix(first.op + ':')}"
        )
    called = " + ".join(titles[id(graph.templates[op.attrs["template"]])] for op in stretch.ops)
    if stretch.repeats == 1:
        return f"{first.label}: {called}"
    called = called if len(stretch.ops) == 1 else f"({called})"
    return f"{first.label} … {stretch.last.label}: {stretch.repeats} × {called}"


def template_titles(graph: Graph) -> dict[int, str]:
    """What to call each template, by its identity: its function's name, with a number where two have one."""
    taken: dict[str, int] = {}
    titles = {}
    for template in templates_in(graph):
        name = template.key.rpartition(".")[2] or template.key
        taken[name] = taken.get(name, 0) + 1
        titles[id(template)] = name if taken[name] == 1 else f"{name} ({taken[name]})"
    return titles


def _quoted(text: str) -> str:
    """Text between a box's quotes."""
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return _ODD.sub(lambda match: "".join(f"#{ord(c)};" for c in match[0]), short)
