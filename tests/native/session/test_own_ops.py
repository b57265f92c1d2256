"""What an own op may leave out or offer twice does not change a bit of what it computes."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise as tw
from tilewise.graph.ops.common import Elementwise
from tilewise.ir import op as op_table
from tilewise.ir.op import register
from tilewise.nn import linear

PAIRS = [(), ((0, 0),), ((0, 1),), ((0, 0), (0, 1)), ((0, 1), (0, 0))]


@pytest.fixture(autouse=True)
def same_ops():
    """Ops that a test registers are gone after it."""
    before = dict(op_table._OPS)
    yield
    op_table._OPS.clear()
    op_table._OPS.update(before)


def lower(self, low, op):
    """A sum, by the kernel of another op."""
    names = {"out": op.outputs[0], "a": op.given[0], "b": op.given[1]}
    x = low.tensor(op.given[0])
    low.emit("add", op, over=x, dtype=x.dtype, tiles={name: low.row(t) for name, t in names.items()})


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("axes", [{}, {"dp": 2}], ids=["one", "dp"])
def test_a_result_that_may_lie_in_two_operands(pairs, axes):
    """Whichever memory a named result may have, it is the sum of both operands, equal to the bit."""
    register(
        type("Total", (Elementwise,), {"name": "total", "num_inputs": 2, "in_place": pairs, "lower": lower})
    )
    graph = tw.ComputeGraph("g")
    x = graph.input([8, 4], name="x", labels=[tw.BATCH, None])
    a, b = linear(graph, x, "a", 6), linear(graph, x, "b", 6)
    (y,) = graph.op("total", [a, b])
    graph.output(y, "y")
    graph.output(graph.add(linear(graph, x, "a2", 6), linear(graph, x, "b2", 6)), "z")
    values = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    with graph.instantiate(graph.plan(axes)) as model:
        model.initialize(0, 0.5)
        for name in ("a", "b"):
            model.set_tensor(f"{name}2", model.get_tensor(name))
        model.forward(x=values)
        assert np.array_equal(model.get_tensor("y"), model.get_tensor("z"))
