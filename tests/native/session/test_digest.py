"""Digest, text and picture of a graph: equal for equal graphs, different for any difference."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tilewise as tw
from tilewise.nn import linear

BASE = {"name": "mlp", "k_splits": 8, "rows": 6, "inner": 32, "first": "gate", "swap": False, "factor": 2.0}


@tw.layer
def scaled_block(graph, x, *, factor):
    """A layer with a parameter and an attribute."""
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


def test_sequential_rebuilds_have_one_digest():
    """Building the same graph again, also after others, gives the same digest: it contains no global counter."""
    first = build().digest()
    build(inner=48)
    assert build().digest() == first == build().digest()
    assert re.fullmatch(r"[0-9a-f]{64}", first)


def test_planning_does_not_change_the_digest():
    """What is done with a graph does not change it."""
    graph = build()
    before = graph.digest()
    graph.set_distribution(tw.DistributionStrategy.ddp(2))
    graph.plan()
    assert graph.digest() == before


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


@pytest.mark.parametrize("what", CHANGES)
def test_every_difference_changes_the_digest(what):
    """Every property that affects bits, names or layouts."""
    assert build(**CHANGES[what]).digest() != build().digest()


def test_all_digests_differ():
    """All these changes give different digests."""
    digests = [build(**change).digest() for change in CHANGES.values()]
    assert len(set(digests)) == len(digests)


def test_bounds_of_symbols_are_part_of_the_digest():
    """Two graphs with different bounds of symbols are planned differently."""
    digests = set()
    for bound in (64, 128):
        graph = tw.ComputeGraph("symbols")
        x = graph.input([tw.Dim("rows", max=bound), 8], name="x")
        graph.output(graph.scale(x, 2.0), "y")
        digests.add(graph.digest())
    assert len(digests) == 2


def test_constants_are_part_of_the_digest():
    """Two graphs with different values of a constant compute different results."""
    digests = []
    for value in (1.0, 2.0):
        graph = tw.ComputeGraph("constants")
        x = graph.input([4, 8], name="x")
        graph.output(graph.add(x, graph.constant(np.full((4, 8), value, np.float32), name="c")), "y")
        digests.append(graph.digest())
    assert digests[0] != digests[1]


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
