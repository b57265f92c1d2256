"""Groups of query heads on devices that they do not fit: the error says which do."""

from __future__ import annotations

import pytest

from tilewise.core.dims import BATCH, DimLabel
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import DeviceMesh
from tilewise.graph import GraphBuilder
from tilewise.graph.gradients import differentiate
from tilewise.ir.batch import cut_batch
from tilewise.nn import linear
from tilewise.strategy import DistributionStrategy, propagate_layouts


def plan_layouts(heads, kv_heads, k_splits, tp):
    """Layouts of attention over `tp` devices, and of its gradient."""
    graph = GraphBuilder("g", k_splits=k_splits)
    x = graph.input([2, 6, 8], name="x", labels=[BATCH, None, None])
    many, few = DimLabel("heads", 4), DimLabel("kv_heads", 4, heads // kv_heads)
    q = linear(graph, x, "q", heads * 4, out_label=many)
    k, v = (linear(graph, x, name, kv_heads * 4, out_label=few) for name in ("k", "v"))
    out = linear(
        graph, graph.scaled_dot_product_attention(q, k, v, head_dim=4, causal=True), "o", 8, in_label=many
    )
    graph.loss(graph.sum(out))
    trained, _, _ = differentiate(graph.freeze(), graph.draft.loss_id)
    mesh = DeviceMesh({"tp": tp})
    return propagate_layouts(trained, mesh, DistributionStrategy.tensor_parallel(tp), cut_batch(trained, 1))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "k_splits", "tp", "fitting", "other", "fitting_then"),
    [
        (12, 4, 8, 8, "1, 2, 4", None, ""),
        (8, 2, 12, 3, "1, 2", None, ""),
        (2, 1, 9, 3, "1", 2, "1, 2"),
    ],
)
def test_error_names_numbers_of_devices_that_fit(heads, kv_heads, k_splits, tp, fitting, other, fitting_then):
    """And those do fit, with the k splits in the message."""
    got = f"{tp} devices on tp for {kv_heads} groups of {heads // kv_heads} in .*"
    also = f", or set graph.k_splits to {other} for {fitting_then}" if other else ""
    with pytest.raises(
        LayoutError,
        match=rf"\[strategy.pending_reductions\] devices must hold whole groups .*; got {got}; choose {fitting}{also}$",
    ):
        plan_layouts(heads, kv_heads, k_splits, tp)
    for count, widths in ((k_splits, fitting), (other or k_splits, fitting_then or fitting)):
        for width in widths.split(", "):
            plan_layouts(heads, kv_heads, count, int(width))
