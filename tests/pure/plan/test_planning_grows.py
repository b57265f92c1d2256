"""Planning grows with what a graph has that is new: equal layers ask for nothing twice, and cost the same each."""

from __future__ import annotations

import sys

import pytest

from tilewise.core.mesh import DeviceMesh
from tilewise.graph import GraphBuilder, differentiate, simplify
from tilewise.ir.batch import cut_batch
from tilewise.ir.counts import counts
from tilewise.models import build_training_graph
from tilewise.models.llama import LlamaConfig
from tilewise.optim import AdamW
from tilewise.plan import make_plan, settings_for
from tilewise.plan.shapes import LocalShapes
from tilewise.strategy import DistributionStrategy, one_stage, propagate_layouts


def plan_layers(layers, axes):
    """A small Llama's plan, from the definition on, without native code."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    builder = GraphBuilder("llama")
    build_training_graph(builder, config, 16, 32, "bf16")
    graph, gradients = differentiate(simplify(builder.freeze()), builder.draft.loss_id)
    thawed = GraphBuilder.thaw(graph)
    AdamW().add_to(thawed, gradients)
    graph, mesh = thawed.freeze(), DeviceMesh(axes)
    batch = cut_batch(graph, 1)
    layout = propagate_layouts(graph, mesh, DistributionStrategy.for_mesh(mesh), batch)
    return make_plan(graph, layout, settings_for(graph, layout, batch, 1), one_stage)


def count_calls(work):
    """How many functions are called, Python's own among them, while `work` runs."""
    seen = 0

    def count(frame, event, argument):
        nonlocal seen
        seen += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return seen


def count_sizes(monkeypatch, layers, axes):
    """How often local sizes are worked out for a plan."""
    asked = []
    work_out = LocalShapes._sizes
    with monkeypatch.context() as patched:
        patched.setattr(LocalShapes, "_sizes", lambda self, *of: (asked.append(of), work_out(self, *of))[1])
        plan_layers(layers, axes)
    return len(asked)


@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}])
def test_more_layers_lower_nothing_more(axes):
    """Sixteen layers are traced, differentiated, laid out and lowered as often as eight."""
    found = []
    for layers in (8, 16):
        counts.reset()
        plan_layers(layers, axes)
        found.append((counts.traced, counts.differentiated, counts.sharded, counts.lowered))
    assert found[0] == found[1]


@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}])
def test_more_layers_ask_for_no_more_sizes(monkeypatch, axes):
    """Local sizes are worked out once per shape, layout and device: sixteen layers ask for what eight ask for."""
    assert count_sizes(monkeypatch, 16, axes) == count_sizes(monkeypatch, 8, axes)


def test_forgotten_sizes_are_noticed(monkeypatch):
    """The count of sizes can fail: where they are not kept, more layers work out more."""
    monkeypatch.setattr(LocalShapes, "sizes", lambda self, spec, layout: self._sizes(spec, layout))
    assert count_sizes(monkeypatch, 16, {}) > count_sizes(monkeypatch, 8, {})


@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}])
def test_calls_grow_linearly_in_layers(axes):
    """Eight layers more cost as many calls of functions behind sixteen as behind eight, within one in fifty."""
    plan_layers(8, axes)  # what is kept for the process is kept now
    calls = [count_calls(lambda n=n: plan_layers(n, axes)) for n in (8, 16, 24)]
    first, second = calls[1] - calls[0], calls[2] - calls[1]
    assert abs(second - first) <= first / 50
