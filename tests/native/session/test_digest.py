"""Digest and text of a graph; `pure/ir/test_graph_digest.py` changes every field."""

from __future__ import annotations

import re

import tilewise as tw
from tilewise.nn import linear


@tw.layer
def scaled_block(graph, x, *, factor):
    return graph.scale(linear(graph, x, "weight", 8), factor)


def build(inner=32):
    """Two independent branches from one input, mixed, then a layer used twice."""
    graph, label = tw.ComputeGraph("mlp"), tw.DimLabel("batch", group=1, is_summed_by_batch_splits=True)
    x = graph.input([6, 8], name="x", labels=[label, None])
    gate, up = (linear(graph, x, name, inner) for name in ("gate", "up"))
    y = linear(graph, graph.mul(graph.silu(gate), up), "down", 8)
    for i in range(2):
        y = scaled_block(graph, y, path=f"blocks.{i}", factor=2.0)
    graph.output(y, "y")
    return graph


def test_a_digest_does_not_change():
    """Not with other graphs built before, nor with a strategy and a plan."""
    graph = build()
    digest = graph.digest()
    build(inner=48)
    graph.set_distribution(tw.DistributionStrategy.ddp(2))
    graph.plan()
    assert build().digest() == digest == graph.digest()
    assert re.fullmatch(r"[0-9a-f]{64}", digest)


def test_print_has_the_essentials():
    """Name, k splits, inputs with dtype and shape, ops with parameters, templates, outputs."""
    text = str(build())
    assert text.startswith("graph mlp k_splits=8\n")
    for part in (
        "input x f32[6, 8]",
        "(batch/2*, -)",
        "parameter gate f32[32, 8]",
        "parameter blocks.1.weight",
        "linear:down",
        "silu(",
        "call(",
        "template ",
        "factor=2.0",
        "output y = ",
    ):
        assert part in text, part
    assert text.count("\ntemplate ") == 1
