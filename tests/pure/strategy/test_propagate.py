"""Layouts follow labels and factors; conflicts are named."""

from __future__ import annotations

import pytest

from tilewise.core.dims import BATCH, DimLabel
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import DeviceMesh
from tilewise.graph import GraphBuilder
from tilewise.ir.batch import cut_batch
from tilewise.strategy import DistributionStrategy, ParallelismMode, propagate_layouts

MESH = DeviceMesh({"dp": 2, "tp": 2})
BOTH = DistributionStrategy.hybrid(dp=2, tp=2)
MLP = DimLabel("mlp", 2)


def laid_out(builder, mesh, strategy, **cut):
    """Layouts of a builder's tensors."""
    graph = builder.freeze()
    return propagate_layouts(graph, mesh, strategy, cut_batch(graph, **cut)).compute


def spread(rules):
    """A strategy with rules of a test's own."""
    return DistributionStrategy(ParallelismMode.HYBRID, {"data": 2, "more": 3}, rules)


def test_sharded_columns_then_sharded_rows():
    """Megatron's pair: the result between them is sharded, the result after them is whole."""
    g = GraphBuilder()
    x = g.input([4, 8], name="x", labels=[BATCH, None])
    up, down = (
        g.parameter([6, 8], name="up", labels=[MLP, None]),
        g.parameter([8, 6], name="down", labels=[None, MLP]),
    )
    h = g.matmul(x, up, trans_b=True)
    y = g.matmul(h, down, trans_b=True, residual=x)
    layout = laid_out(g, MESH, BOTH)
    assert (layout[up.id], layout[down.id]) == ((("tp",), ()), ((), ("tp",)))
    assert (layout[h.id], layout[y.id]) == ((("dp",), ("tp",)), (("dp",), ()))


def test_axes_of_size_one_shard_nothing():
    """A mesh without an axis, or with one device on it, replicates."""
    g = GraphBuilder()
    g.input([4, 8], name="x", labels=[BATCH, MLP])
    assert laid_out(g, DeviceMesh({"dp": 2}), BOTH) == ((("dp",), ()),)
    assert laid_out(g, DeviceMesh({}), DistributionStrategy.single()) == (((), ()),)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DistributionStrategy.tensor_parallel(0), "the size of axis 'tp' must lie in"),
        (lambda: spread({"mlp": 3}), r"tuple of several; got 'mlp' to 3 over data=2,more=3; name its axes"),
        (
            lambda: spread({"mlp": ("data", "tp")}),
            r"several; got 'mlp' to \('data', 'tp'\) over data=2,more=3",
        ),
        (lambda: spread({"mlp": ("data", "data")}), "each once"),
        (
            lambda: DistributionStrategy.for_mesh(DeviceMesh({"x": 2})),
            "mesh axes are pp, dp, fsdp and tp; got x",
        ),
    ],
)
def test_impossible_strategies_are_rejected(make, words):
    """Sizes and axis names are checked when a strategy is declared."""
    with pytest.raises(LayoutError, match=words):
        make()


def test_unnamed_axis_has_one_device():
    """A hybrid over one axis leaves the other at one device."""
    assert DistributionStrategy.hybrid(tp=2).mesh() == DeviceMesh({"dp": 1, "tp": 2})
    assert DistributionStrategy.hybrid(dp=2).mesh() == DeviceMesh({"dp": 2, "tp": 1})
