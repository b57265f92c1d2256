"""Graphs as Mermaid text: a strict grammar parses them, whatever names contain; equal layers are one box."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.dims import Dim
from tilewise.graph import GraphBuilder, layer
from tilewise.ir import mermaid
from tilewise.ir.mermaid import to_mermaid
from tilewise.ir.outline import outline_graph
from tilewise.nn import linear

ID = r"((?:s\d+)?(?:t|o|out)\d+)"
TEXT = r"((?:[A-Za-z0-9 .,:/()\[\]_-]|#\d+;)*)"
OUTPUT = rf'\(\["{TEXT}"\]\)'


@dataclass
class Chart:
    """The content of a chart."""

    boxes: dict = field(default_factory=dict)
    layers: dict = field(default_factory=dict)
    arrows: list = field(default_factory=list)
    calls: list = field(default_factory=list)


def read_chart(text):
    """The whole grammar; any other line is an error."""
    lines = text.split("\n")
    assert lines[0] == "flowchart TD"
    chart, is_inside = Chart(), False
    for line in lines[1:]:
        if m := re.fullmatch(rf'  subgraph (s\d+)\["{TEXT}"\]', line):
            assert not is_inside and m[1] not in chart.layers
            chart.layers[m[1]], is_inside = decoded(m[2]), m[1]
            continue
        if line == "  end":
            assert is_inside
            is_inside = False
            continue
        if m := re.fullmatch(rf'\s+{ID}(?:\("{TEXT}"\)|\["{TEXT}"\])', line):
            add_box(chart, m[1], m[2] if m[2] is not None else m[3])
        elif m := re.fullmatch(rf"\s+{ID} --> {ID}(?:{OUTPUT})?", line):
            if m[3] is not None:
                add_box(chart, m[2], m[3])
            chart.arrows.append((m[1], m[2]))
        elif m := re.fullmatch(rf"\s+{ID} -\.-> (s\d+)", line):
            chart.calls.append((m[1], m[2]))
        else:
            raise AssertionError(f"no line of a chart: {line!r}")
        name = m[1]
        assert name.startswith(is_inside) if is_inside else not name.startswith("s")
    assert not is_inside and {end for arrow in chart.arrows for end in arrow} <= chart.boxes.keys()
    assert all(box in chart.boxes and of in chart.layers for box, of in chart.calls)
    return chart


def add_box(chart, name, text):
    """A box has one text."""
    assert name not in chart.boxes
    chart.boxes[name] = decoded(text)


def decoded(text):
    """The text as Mermaid shows it; nothing in it is a list, a heading, bold or an icon."""
    assert not re.search(r":(?! )|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", text)
    assert not text or text[0].isalpha() or text[0] == "#"
    return re.sub(r"#(\d+);", lambda m: chr(int(m[1])), text)


@layer
def block(graph, x, *, factor):
    """A layer with a parameter and a constant."""
    table = graph.constant(np.ones((4, 8), np.float32), name="table")
    return graph.scale(graph.add(linear(graph, x, "weight", 8), table), factor)


@layer
def pair(graph, x):
    """Layers in a layer."""
    return block(graph, block(graph, x, path="a", factor=2.0), path="b", factor=3.0)


def layered(factors, name="layers"):
    """A block per factor."""
    graph = GraphBuilder("g")
    x = graph.silu(graph.input([4, 8], name="x"))
    for i, factor in enumerate(factors):
        x = block(graph, x, path=f"{name}.{i}", factor=float(factor))
    graph.output(graph.relu(x), "y")
    return graph.freeze()


def titles(graph):
    """Texts of the main graph's boxes for ops."""
    boxes = read_chart(to_mermaid(graph)).boxes
    return [text for name, text in boxes.items() if re.fullmatch(r"o\d+", name)]


def test_equal_layers_are_one_box():
    """Shared tensors are drawn; the call points to the layer, which is drawn once."""
    chart = read_chart(to_mermaid(layered([2] * 36)))
    assert chart.layers == {"s0": "block"} and chart.calls == [("o1", "s0")]
    assert [text for name, text in chart.boxes.items() if name[0] != "s"] == [
        "x: f32[4, 8]", "block0.table: f32[4, 8]", "silu", "layers.0 … layers.35: 36 × block", "relu", "y",
    ]  # fmt: skip
    assert [a for a in chart.arrows if a[0][0] != "s"] == [
        ("t0", "o0"), ("t2", "o1"), ("o0", "o1"), ("o1", "o2"), ("o2", "out0"),
    ]  # fmt: skip


def test_alternating_layers_are_one_box():
    """Of two kinds, of six with one of another kind among them; the remainder follows."""
    assert titles(layered([1, 2] * 5))[1:-1] == ["layers.0 … layers.9: 5 × (block + block#2)"]
    (six, rest) = titles(layered(([1] * 5 + [2]) * 3 + [1, 1]))[1:-1]
    assert six == "layers.0 … layers.17: 3 × (" + "block + " * 5 + "block#2)"
    assert rest == "layers.18 … layers.19: 2 × block"


def test_different_layers_are_separate_boxes():
    """Without repetition, a box each; otherwise the longest run is taken."""
    assert titles(layered([1, 2, 3]))[1:-1] == ["layers.0: block", "layers.1: block#2", "layers.2: block#3"]
    assert titles(layered([1, 2, 2, 2, 3]))[1:-1] == [
        "layers.0: block", "layers.1 … layers.3: 3 × block#2", "layers.4: block#3",
    ]  # fmt: skip


def test_calls_with_other_operands_are_not_repetitions():
    """Each reads the first one's result instead of the previous one; two outputs show the contents of a weight."""
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    first = block(graph, x, path="a", factor=1.0)
    second = block(graph, first, path="b", factor=1.0)
    for i, operand in enumerate((x, first, x)):
        second = block(graph, graph.add(second, operand), path=f"c{i}", factor=1.0)
    block(graph, first, path="d", factor=1.0)
    assert titles(graph.freeze())[0] == "a … b: 2 × block"
    assert titles(graph.freeze())[1:] == [
        "add",
        "c0: block",
        "add",
        "c1: block",
        "add",
        "c2: block",
        "d: block",
    ]


def test_weights_of_two_readers_are_drawn():
    """A weight that an op reads as well as the call belongs to no call."""
    graph = GraphBuilder("g")
    x = block(graph, graph.input([4, 8], name="x"), path="a", factor=1.0)
    graph.matmul(x, graph.find("a.weight"), trans_b=True)
    boxes = read_chart(to_mermaid(graph.freeze())).boxes
    assert "a.weight: f32[8, 8]" in boxes.values()


def test_layers_in_layers_are_drawn_once():
    """Calls in a layer point to layers as well."""
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    for i in range(5):
        x = pair(graph, x, path=f"layers.{i}")
    chart = read_chart(to_mermaid(graph.freeze()))
    assert sorted(chart.layers.values()) == ["block", "block#2", "pair"]
    assert chart.calls == [("s0o0", "s1"), ("s0o1", "s2"), ("o0", "s0")]
    assert chart.boxes["o0"] == "layers.0 … layers.4: 5 × pair"


def test_equal_layers_of_two_objects_are_one():
    """Two layers each call a layer of their own; these are equal but not the same object."""

    @layer
    def other(graph, x):
        return graph.silu(block(graph, x, path="a", factor=2.0))

    graph = GraphBuilder("g")
    x = pair(graph, graph.input([4, 8], name="x"), path="p")
    other(graph, x, path="q")
    chart = read_chart(to_mermaid(graph.freeze()))
    assert sorted(chart.layers.values()) == ["block", "block#2", "other", "pair"]
    assert [of for box, of in chart.calls if box.startswith("s")].count("s2") == 2


def test_elements_of_a_repetition_are_counted():
    """Elements of the parameters and states of one repetition."""
    (_, stretch, _) = outline_graph(layered([1, 2] * 4)).stretches
    assert (stretch.repeats, stretch.num_parameters, stretch.num_state) == (4, 128, 0)
    assert stretch.last.label == "layers.7"


def test_chart_does_not_grow_with_layers():
    """A thousand layers differ from three only in a few digits."""
    sizes = [len(to_mermaid(layered([1] * n))) for n in (3, 1_000)]
    assert 0 <= sizes[1] - sizes[0] < 20


HOSTILE = [
    'a"]', "a[b]", '"', "end", "a\u2028b", "#quot;", "#35;", "`x`", '"`md`"', "<script>alert(1)</script>", "&lt;",
    "%%{init: {}}%%", "1. one", "- one", "# one", "a --> b", "a;b", "__x__", "_x", "x_", "a|b|", "(((", "{x}", "日本",
    "\U0001f600", "click o0 href", "subgraph", "é" * 1000, "=", "@{shape: x}", ":::class", "~~~", "\\", "$$x$$", " ",
    "fa:fa-car", "*x*",
]  # fmt: skip
NAMES = st.one_of(
    st.sampled_from([n for n in HOSTILE if n.isprintable()]),
    st.text(st.characters(), min_size=1, max_size=12).filter(str.isprintable),
)


@given(st.lists(NAMES, min_size=6, max_size=6, unique=True))
@pytest.mark.slow
def test_names_are_escaped(names):
    """The grammar holds for any names, and the texts are the names."""
    named, weight, path, output, symbol, title = names
    graph = GraphBuilder(title)
    x = graph.input([Dim(symbol), 8], name="in" + named)
    y = linear(graph, graph.silu(x), "w" + weight, 8)
    graph.output(y, "out" + output)
    block(graph, graph.input([4, 8], name="z"), path=path, factor=1.0)
    chart = read_chart(to_mermaid(graph.freeze()))
    assert chart.boxes["out0"] == shortened("out" + output)
    assert chart.boxes["t0"] == shortened(f"in{named}: f32[{symbol}, 8]")
    assert chart.boxes["o2"] == shortened(f"{path}: block")


def shortened(text):
    """As charts show it."""
    return text if len(text) <= 200 else text[:200] + "…"


@pytest.mark.parametrize("name", [n for n in HOSTILE if n.isprintable()])
def test_hostile_names_one_by_one(name):
    """As a layer's path, which begins a text."""
    chart = read_chart(to_mermaid(layered([1, 2], name)))
    assert shortened(f"{name}.0: block") in chart.boxes.values()


def test_unescaped_name_is_detected(monkeypatch):
    """The twin: the grammar rejects a chart with a bare quote."""
    monkeypatch.setattr(mermaid, "_quoted", lambda text: text)
    with pytest.raises(AssertionError, match="no line"):
        titles(layered([1, 2], 'a"b'))
