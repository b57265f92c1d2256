"""Pages of models' graphs: well-formed, self-contained, small for any number of layers; names are text alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure.pages import Page
from tilewise.core.dims import Dim, DimLabel
from tilewise.graph import GraphBuilder, layer
from tilewise.nn import linear
from tilewise.observe import render_graph
from tilewise.observe.model_page import MAX_DRAWN, MAX_ROWS


@layer
def block(graph, x, *, factor):
    """A layer with a parameter, a constant and an attribute."""
    table = graph.constant(np.ones((4, 8), np.float32), name="table")
    return graph.scale(graph.add(linear(graph, x, "weight", 8), table), factor)


@layer
def pair(graph, x):
    """Layers in a layer."""
    return block(graph, block(graph, x, path="a", factor=2.0), path="b", factor=2.0)


def layered(count, function=block, **static):
    """So many layers."""
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x", labels=[DimLabel("batch", is_summed_by_batch_splits=True), None])
    for i in range(count):
        x = function(graph, x, path=f"layers.{i}", **static)
    graph.output(graph.relu(x), "y")
    return graph.freeze()


def test_page_shows_the_whole_graph():
    """Ops with shapes and attributes, tensors with what their dims count, layers with calls and parameters."""
    content = render_graph(layered(36, factor=2.5), "The title", "A note.")
    page = Page(content)
    text = page.text
    for words in (
        "The title", "A note.", "layers.0 … layers.35: 36 × block", "73 ops, 1 kind of layers, 2,304 parameters.",
        "block: 36 calls, 2 ops, 64 parameters each", "%", "factor=2.5", "f32[4, 8]", "batch, -", "linear: weight",
    ):  # fmt: skip
        assert words in text, words
    assert page.links == ["#layer-0"] and page.ids == ["layer-0"]
    assert page.tags.count("details") == 1 and page.tags.count("svg") == 2
    row = page.cells[page.cells.index("layers.0 … layers.35: 36 × blockblock") :]
    assert row[1:5] == ["x, block0.table, 1 of its own", "%3 f32[4, 8]", "", "64"]


def test_calls_are_counted_through_layers():
    """A layer in a layer is computed as often as both say."""
    text = Page(render_graph(layered(5, pair), "t")).text
    assert "pair: 5 calls, 2 ops, 128 parameters each" in text
    assert "block: 10 calls, 2 ops, 64 parameters each" in text
    assert "21 ops, 2 kinds of layers, 640 parameters." in text


def test_page_does_not_grow_with_layers():
    """A thousand layers differ from three only in a few digits."""
    sizes = [len(render_graph(layered(n, factor=1.0), "t")) for n in (3, 1_000)]
    assert 0 <= sizes[1] - sizes[0] < 100


def test_large_pictures_and_tables_say_what_they_leave_out():
    """Without layers to fold, boxes and rows have a limit."""
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    for i in range(MAX_ROWS + 7):
        x = graph.scale(x, float(i + 2))
    content = render_graph(graph.freeze(), "t")
    text = Page(content).text
    assert f"at most {MAX_DRAWN} boxes" in text and "and 7 more" in text
    assert "<svg" not in content and content.count("<tr>") < MAX_ROWS + 10


HOSTILE = [
    "<script>alert(1)</script>", "</style>", "</title>", "'><img src=x onerror=alert(1)>", '"', "&amp;", "&", "<!--",
    "]]>", "javascript:alert(1)", "</details>", "#layer-0", "日本", "é" * 500, "<", "${x}", "{{x}}", " ",
]  # fmt: skip
NAMES = st.one_of(
    st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories="CZ"), min_size=1, max_size=12)
)


@settings(max_examples=30)
@given(st.lists(NAMES, min_size=6, max_size=6, unique=True))
def test_names_are_text(names):
    """Of the graph, tensors, symbols, labels, paths, outputs: tags, attributes and links are those of other names."""
    pages = []
    for chosen in (names, list("abcdef")):
        named, label, symbol, path, output, title = chosen
        graph = GraphBuilder(title)
        x = graph.input([Dim(symbol), 8], name="in" + named, labels=[None, DimLabel(label)])
        graph.output(linear(graph, graph.silu(x), "w" + named, 8), "out" + output)
        block(graph, graph.input([4, 8], name="z"), path=path, factor=1.0)
        pages.append(Page(render_graph(graph.freeze(), title, path)))
    assert pages[0].tags == pages[1].tags and pages[0].links == pages[1].links
    if len(names[0]) < 100:
        assert "in" + names[0] in pages[0].cells


def test_a_name_that_is_not_escaped_is_found(monkeypatch):
    """The twin: without escaping, a name is a tag."""
    monkeypatch.setattr("tilewise.observe.page.text", str)
    graph = GraphBuilder("g")
    graph.output(graph.silu(graph.input([4, 8], name="<b>")), "y")
    with pytest.raises(KeyError, match="b"):
        Page(render_graph(graph.freeze(), "t"))
