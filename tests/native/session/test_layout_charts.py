"""Charts with layouts: every box shows what the planner decides, and changes of layout are boxes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import config, training_graph

import tilewise as tw
from pure.ir.test_mermaid import read_chart
from tilewise.core import LayoutError
from tilewise.graph import layer
from tilewise.ir.layout import show_layout
from tilewise.nn import linear
from tilewise.session.planning import lay_out, request_for

MESHES = [{"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}, {"fsdp": 2, "tp": 2}, {"pp": 2}]


def shown_layouts(graph, mesh):
    """Per box of the main graph and of layers, the layouts at the end of its text."""
    boxes = read_chart(graph.to_mermaid(mesh)).boxes
    end = re.compile(r"(\([^()]*\)(?:, \([^()]*\))*)$")
    return {name: match[1] for name, text in boxes.items() if (match := end.search(text))}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_boxes_show_the_layouts_of_the_plan(mesh):
    """Inputs, weights and results of a Llama, in its layer too."""
    graph = training_graph(config(), "f32")
    laid_out = lay_out(graph.freeze(), request_for(graph.distribution, mesh))
    shown = shown_layouts(graph, mesh)
    plain = read_chart(graph.to_mermaid()).boxes
    assert [op.op for op in laid_out.graph.ops] == [op.op for op in graph.freeze().ops]  # no reshards
    assert {*shown} == {name for name in plain if "out" not in name}
    for prefix, of, layout in layers_of(laid_out):
        for name, text in shown.items():
            place = re.fullmatch(rf"{prefix}([to])(\d+)", name)
            if place and place[1] == "t":
                assert text == show_layout(layout.compute[int(place[2])])
            elif place and prefix:
                outputs = of.ops[int(place[2])].outputs
                assert text == ", ".join(show_layout(layout.compute[t]) for t in outputs)


def layers_of(laid_out):
    """The main graph and its one layer: how names of boxes begin, the graph, and its layouts."""
    graph, layout = laid_out.graph, laid_out.layout
    yield "", graph, layout
    call = next(op for op in graph.ops if op.op == "call")
    yield "s0", graph.templates[call.attrs["template"]].graph, layout.calls[call.id]


def test_the_layouts_of_another_mesh_are_detected():
    """The twin."""
    graph = training_graph(config(), "f32")
    assert shown_layouts(graph, {"dp": 2}) != shown_layouts(graph, {"tp": 2})


def hinted(before, after):
    """A scaled input in one layout and the result in another."""
    graph = tw.ComputeGraph("hinted")
    x = graph.input([8, 64], name="x", labels=[tw.BATCH, None], layout=before)
    y = graph.constrain(graph.scale(x, 2.0), after)
    graph.output(graph.relu(y), "y")
    return graph


def test_changes_of_layout_are_boxes():
    """With the layouts before and after; a strategy of the graph counts as a mesh."""
    graph = hinted((None, "tp"), (None, None))
    boxes = read_chart(graph.to_mermaid({"tp": 2})).boxes
    (change,) = (text for text in boxes.values() if "→" in text)
    assert change.startswith("all_gather") and change.endswith(": (-, tp) → (-, -)")
    graph.set_distribution(tw.DistributionStrategy.for_mesh(tw.DeviceMesh({"tp": 2})))
    assert read_chart(graph.to_mermaid()).boxes == boxes
    boxes = read_chart(hinted((None, None), (None, "tp")).to_mermaid({"tp": 2})).boxes
    assert any(text.startswith("slice") and text.endswith(": (-, -) → (-, tp)") for text in boxes.values())
    with pytest.raises(LayoutError, match="must be shared alike"):
        hinted(("dp",), (None,)).to_mermaid({"dp": 2})


@layer
def doubled(graph, x):
    """A layer without a layout of its own."""
    return graph.scale(x, 2.0)


def test_calls_of_one_layer_in_two_layouts_are_shown():
    """The layer is drawn once, with both."""
    graph = tw.ComputeGraph("two")
    for name, layout in (("a", ("dp", None)), ("b", (None, None))):
        x = graph.input([8, 64], name=name, layout=layout)
        graph.output(doubled(graph, x, path=f"layer_{name}"), f"y_{name}")
    texts = read_chart(graph.to_mermaid({"dp": 2})).boxes
    assert texts["s0o0"] == "scale: (dp, -) or (-, -)"
    assert texts["s0t0"].endswith("f32[8, 64] (dp, -) or (-, -)")


def test_a_chart_of_sharded_layers_does_not_grow():
    """Equal layers are one box, and their layouts one text."""
    lengths = []
    for number in (3, 300):
        graph = tw.ComputeGraph("deep")
        x = graph.input([8, 64], name="x", labels=[tw.BATCH, None])
        for i in range(number):
            x = square(graph, x, path=f"layers.{i}")
        graph.output(x, "y")
        lengths.append(len(graph.to_mermaid({"dp": 2})))
    assert 0 <= lengths[1] - lengths[0] < 20


@layer
def square(graph, x):
    """A layer with a weight."""
    return linear(graph, x, "w", 64)
