"""Templates that reuse the same bytes: every write comes after the last use of the previous content."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tilewise as tw
from support.task_order import validate_order
from tilewise.core.errors import InternalError
from tilewise.graph import GraphBuilder, layer
from tilewise.nn import linear, rms_norm
from tilewise.session.assemble import native_program

WIDTHS = (96, 32, 160, 64, 32, 128)


@layer
def block(graph: GraphBuilder, x, *, width: int, hidden: int):
    h = rms_norm(graph, x, "norm.weight", eps=1e-5)
    up = linear(graph, h, "up.weight", width, out_label=tw.DimLabel("mlp"))
    return graph.add(x, linear(graph, graph.silu(up), "down.weight", hidden, in_label=tw.DimLabel("mlp")))


def unlike_layers(seq) -> tw.ComputeGraph:
    """Layers of which no two neighbours have equal templates; the third width occurs twice."""
    graph = tw.ComputeGraph("unlike", k_splits=4)
    x = graph.input([4, seq, 32], "f32", name="x", labels=[tw.BATCH, None, None])
    for i, width in enumerate(WIDTHS):
        x = block(graph, x, path=f"layers.{i}", width=width, hidden=32)
    labels = graph.input([4, seq], "i32", name="labels", labels=[tw.BATCH, None], storage="scalars")
    graph.loss(graph.mean_cross_entropy(linear(graph, x, "head.weight", 16), labels)[0])
    graph.optimize(tw.optim.AdamW())
    return graph


CASES = {
    "alone": ({}, {}, 8),
    "dp2": ({"dp": 2}, {}, 8),
    "tp2": ({"tp": 2}, {}, 8),
    "accumulated": ({}, {"accumulation": 2}, 8),
    "any length": ({}, {}, tw.Dim("seq", 1, 40)),
}


def order_of(plan: tw.Plan, program, symbols) -> None:
    native = native_program(program, plan.symbol_bounds)
    for name in plan.programs:
        validate_order([native.tasks(d, symbols, name) for d in range(plan.mesh.num_devices)])


@pytest.mark.parametrize("name", CASES)
def test_templates_that_share_bytes_are_ordered(name):
    """Also with symbolic sizes, long or short, and if a short one does not write all bytes of a long one."""
    axes, options, seq = CASES[name]
    plan = unlike_layers(seq).plan(axes, batch_splits=4, workers_per_device=1, **options)
    for symbols in [[1], [9], [40]] if isinstance(seq, tw.Dim) else [[]]:
        order_of(plan, plan.program, symbols)


def test_a_missing_conflict_is_found():
    """Each alias of a temporary is needed: without those of one template, some write is not ordered."""
    plan = unlike_layers(8).plan({}, batch_splits=4, workers_per_device=1)
    (of,) = plan.program.classes
    count = 0
    for number in {of.entries[e].key[1] for e in of.aliases if of.entries[e].key[0] in ("inner", "temp")}:
        aliases = {
            entry: others
            for entry, others in of.aliases.items()
            if of.entries[entry].key[1] != number and all(of.entries[o].key[1] != number for o in others)
        }
        program = replace(plan.program, classes=(replace(of, aliases=aliases),))
        try:
            order_of(plan, program, [])
        except InternalError as error:
            assert "two uses of the same bytes" in str(error)
            count += 1
    assert count >= 4
