"""Digest, text and picture of a graph: equal for equal graphs, different for any difference."""

from __future__ import annotations

import re

import numpy as np

import tilewise as tw
from tilewise.nn import linear

BASE = {"name": "mlp", "k_splits": 8, "rows": 6, "inner": 32, "first": "gate", "swap": False, "factor": 2.0}


@tw.layer
def scaled_block(graph, x, *, factor):
    return graph.scale(linear(graph, x, "weight", 8), factor)


def build(**changes):
    """Two independent branches from one input, mixed, then a layer used twice."""
    c = {**BASE, **changes}
    graph = tw.ComputeGraph(c["name"], k_splits=c["k_splits"])
    role = c.get("role", True)
    label = tw.DimLabel(c.get("label", "batch"), group=c.get("group", 1), is_summed_by_batch_splits=role)
    x = graph.input([c["rows"], 8], name="x", labels=[label, None])
    names = [c["first"], "up"]
    branches = {n: linear(graph, x, n, c["inner"]) for n in (names[::-1] if c["swap"] else names)}
    y = linear(graph, graph.multiply(graph.silu(branches[names[0]]), branches[names[1]]), "down", 8)
    for i in range(2):
        y = scaled_block(graph, y, path=f"blocks.{i}", factor=c["factor"])
    graph.output(y, c.get("output", "y"))
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


CHANGES = {
    "k split count": {"k_splits": 4},
    "rows": {"rows": 12},
    "what is summed by batch splits": {"role": False},
    "inner size": {"inner": 64},
    "graph name": {"name": "other"},
    "parameter name": {"first": "gating"},
    "output name": {"output": "z"},
    "order of independent layers": {"swap": True},
    "attribute inside a layer": {"factor": 3.0},
    "label": {"label": "mlp"},
    "group of a label": {"group": 2},
}


def with_symbol(bound):
    graph = tw.ComputeGraph("symbols")
    x = graph.input([tw.Dim("rows", max=bound), 8], name="x")
    graph.output(graph.scale(x, 2.0), "y")
    return graph


def with_constant(value):
    graph = tw.ComputeGraph("constants")
    x = graph.input([4, 8], name="x")
    graph.output(graph.add(x, graph.constant(np.full((4, 8), value, np.float32), name="c")), "y")
    return graph


def test_every_difference_changes_the_digest():
    """Every property that affects bits, names or layouts, bounds of symbols and values of constants included."""
    graphs = {what: build(**change) for what, change in {"no change": {}, **CHANGES}.items()}
    graphs |= {f"rows up to {n}": with_symbol(n) for n in (64, 128)}
    graphs |= {f"constant {value}": with_constant(value) for value in (1.0, 2.0)}
    names = {}
    for what, graph in graphs.items():
        assert names.setdefault(graph.digest(), what) == what


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


def test_mermaid_draws_every_op_and_tensor():
    """Inputs, ops, and the two calls of a layer as one."""
    text = build().to_mermaid()
    for part in (
        '("x: f32[6, 8]")',
        '["linear: gate"]',
        '["silu"]',
        '["multiply"]',
        '["scaled_block"]',
        '(["y"])',
    ):
        assert text.count(part) == 1, part
    assert "blocks.0 #8230; blocks.1: 2 #215; scaled_block" in text
