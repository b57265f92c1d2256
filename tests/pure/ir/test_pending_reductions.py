"""Pending reductions: every shared contraction has one, and validation detects wrong ones."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.dims import BATCH, DimLabel
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import MICRO, DeviceMesh
from tilewise.core.tree import allowed_widths
from tilewise.graph import GraphBuilder, differentiate
from tilewise.ir.batch import BatchCut, cut_batch, suggest_batch_splits
from tilewise.ir.layout import BATCH_SPLITS, GROUPS, K_SPLITS
from tilewise.ir.validate import validate_pending_reductions
from tilewise.nn import linear, rms_norm
from tilewise.strategy import DistributionStrategy, ParallelismMode, propagate_layouts

X, Y = DimLabel("x"), DimLabel("y", 64)
RULES = {BATCH.name: "a", X.name: "b", Y.name: "b", "q": "b", "kv": "b"}


def training(k_splits=8, batch=12, seq=4):
    """Norm, two products and a loss over shared classes, with gradients; labels and axes have arbitrary names."""
    g = GraphBuilder("net", k_splits=k_splits)
    x = g.input([batch, seq, 64], name="x", labels=[BATCH, None, None])
    y = g.input([batch, seq], "i32", name="y", labels=[BATCH, None], storage="scalars")
    h = linear(g, rms_norm(g, x, "gamma", eps=1e-5), "up", 192, out_label=X)
    logits = linear(g, g.silu(h), "down", 832, in_label=X, out_label=None)
    logits = linear(g, logits, "head", 1024, out_label=Y)
    g.loss(g.mean_cross_entropy(logits, y)[0])
    return differentiate(g.freeze(), g.draft.loss_id)[0]


def laid_out(graph, a, b, microbatches=1, batch_splits=None):
    """The layout of a graph over two axes."""
    strategy = DistributionStrategy(ParallelismMode.HYBRID, {"a": a, "b": b}, RULES)
    return propagate_layouts(graph, strategy.mesh(), strategy, cut_batch(graph, microbatches, batch_splits))


def pending_reductions_of(graph, layout):
    """(op, partial) -> pending reduction, for ops by name."""
    return [
        (graph.ops[op].op, name, r) for (op, name), group in layout.pending_reductions.items() for r in group
    ]


def test_each_partial_value_has_its_pending_reduction():
    """Products over shared k splits, the loss's three values, gradients over batch splits."""
    graph = training()
    layout = laid_out(graph, 2, 4, microbatches=2)
    by_name = {(op, name): r for op, name, r in pending_reductions_of(graph, layout)}
    product = by_name["linear", "product"]
    assert (product.tree, product.count, product.axes, product.combine) == (K_SPLITS, 8, ("b",), "sum")
    assert product.leaf_ranges == (((0, 2), (2, 4), (4, 6), (6, 8)),)
    assert product.arrives == ((("a", MICRO), (), ()),)
    assert (
        by_name["cross_entropy", "max"].combine == "max" and by_name["cross_entropy", "sums"].combine == "sum"
    )
    loss = by_name["cross_entropy", "loss"]
    assert (loss.tree, loss.count, loss.axes, loss.group) == (BATCH_SPLITS, 4, ("a", MICRO), ("a",))
    assert loss.leaf_ranges == (((0, 1), (1, 2), (2, 3), (3, 4)),) and not loss.is_completed_per_microbatch
    assert {op for op, name, r in pending_reductions_of(graph, layout) if r.tree == BATCH_SPLITS} == {
        "cross_entropy", "linear_dw", "rms_norm_backward"
    }  # fmt: skip
    validate_pending_reductions(graph, layout)


def test_microbatches_alone_share_sums_over_the_batch():
    """Microbatches of one device hold parts of the sums over the batch, and of nothing else."""
    graph = training()
    layout = laid_out(graph, 1, 1, microbatches=4)
    assert {(r.tree, r.axes, r.group) for _, _, r in pending_reductions_of(graph, layout)} == {
        (BATCH_SPLITS, (MICRO,), ())
    }
    validate_pending_reductions(graph, layout)


@pytest.mark.parametrize(
    ("a", "microbatches", "batch_splits", "axes"),
    [
        (3, 4, 12, ("a", MICRO)),  # nodes for the whole step: completed once
        (6, 2, 12, ("a", MICRO)),
        (2, 3, 12, (MICRO, "a")),  # shared in every microbatch
        (2, 2, 4, ("a", MICRO)),
    ],
)
def test_order_of_devices_and_microbatches(a, microbatches, batch_splits, axes):
    """Devices are the outer level where their part of a step is a node of the tree over batch splits."""
    graph = training()
    layout = laid_out(graph, a, 1, microbatches, batch_splits)
    loss = next(r for op, name, r in pending_reductions_of(graph, layout) if name == "loss")
    assert loss.axes == axes and loss.is_completed_per_microbatch == (axes[0] == MICRO)
    validate_pending_reductions(graph, layout)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            {"a": 3, "b": 1, "batch_splits": 4},
            "got 3 parts of 'loss' .* on a, for 4 batch splits; choose 1, 2, 4 dev.*, or set batch_splits to 3, 6, 12",
        ),
        (
            {"a": 1, "b": 3},
            "got 3 parts of 'product' .* on b, for 8 k splits; choose 1, 2, 4, 8, or set graph.k_splits to 3, 6",
        ),
        (
            {"a": 2, "b": 1, "batch_splits": 12},
            "got 2 parts of 'loss' .* for 12 batch splits; choose 1, 3, 6, 12 dev.* to 2, 4",
        ),
        (
            {"a": 2, "b": 1, "microbatches": 4},
            "got 8 parts .* on a.micro, .* a batch that is a multiple of 8",
        ),
    ],
)
def test_invalid_widths_are_rejected(case, words):
    """The error lists the widths, the k splits or the batch splits that would fit."""
    graph = training()
    with pytest.raises(LayoutError, match=words):
        validate_pending_reductions(graph, laid_out(graph, **case))


def test_advice_about_devices_and_microbatches_works():
    """Every accumulation, number of batch splits and batch in an error message is one that fits."""
    for size, batch_splits, devices, microbatches in product(
        (1, 8, 12, 60, 512), (1, 4, 8), (1, 2, 3), (1, 2, 3, 7, 16)
    ):
        blocks = devices * microbatches
        if size % batch_splits or blocks in allowed_widths(batch_splits):
            continue
        text = suggest_batch_splits(BatchCut(size, 1, batch_splits, microbatches), blocks)
        named = re.search(r"\(accumulation ([\d, ]+) on", text)
        for count in map(int, named[1].split(",")) if named else ():
            assert devices * count in allowed_widths(batch_splits), text
        if named := re.search(r"set batch_splits to ([\d, ]+)", text):
            for other in map(int, named[1].rstrip(", ").split(",")):
                assert size % other == 0 and blocks in allowed_widths(other), text
        else:
            batch, other = map(int, re.search(r"a batch of (\d+) and (\d+) batch splits", text).groups())
            assert batch >= size and batch % other == 0 and blocks in allowed_widths(other), text


def grouped(kv_heads, group, k_splits=8):
    """Attention with grouped heads, with its gradient."""
    g = GraphBuilder("attention", k_splits=k_splits)
    x = g.input([4, 8, 32], name="x", labels=[BATCH, None, None])
    y = g.input([4, 8], "i32", name="y", labels=[BATCH, None], storage="scalars")
    heads, kv = DimLabel("q", 16), DimLabel("kv", 16, group)
    q = linear(g, x, "q", 16 * kv_heads * group, out_label=heads)
    k, v = (linear(g, x, n, 16 * kv_heads, out_label=kv) for n in ("k", "v"))
    out = linear(
        g, g.scaled_dot_product_attention(q, k, v, head_dim=16, causal=True), "o", 64, in_label=heads
    )
    g.loss(g.mean_cross_entropy(out, y)[0])
    return differentiate(g.freeze(), g.draft.loss_id)[0]


@pytest.mark.parametrize(
    ("kv_heads", "group", "k_splits", "b", "leaf_ranges"),
    [
        (2, 4, 8, 4, (((0, 2), (2, 4)),) * 2),
        (3, 4, 12, 6, (((0, 2), (2, 4)),) * 3),
        (1, 8, 8, 8, (tuple((i, i + 1) for i in range(8)),)),
        (4, 2, 8, 4, None),
        (4, 2, 8, 2, None),
    ],
)
def test_shared_kv_heads_are_sums_over_their_query_heads(kv_heads, group, k_splits, b, leaf_ranges):
    """Holders of one KV head are a device group; where devices hold whole heads, nothing is partial."""
    graph = grouped(kv_heads, group, k_splits)
    layout = laid_out(graph, 1, b)
    reductions = [r for op, name, r in pending_reductions_of(graph, layout) if op == "attention_backward"]
    assert [r.leaf_ranges for r in reductions] == ([] if leaf_ranges is None else [leaf_ranges])
    assert all(r.tree == GROUPS and r.count == group and r.outputs == (1, 2) for r in reductions)
    validate_pending_reductions(graph, layout)
    if reductions:
        with pytest.raises(LayoutError, match="got none of 'group' of 'attention_backward'"):
            validate_pending_reductions(
                graph, replace(layout, pending_reductions=without(layout.pending_reductions, reductions[0]))
            )


def without(pending_reductions, dropped):
    """Pending reductions without one of them."""
    return {key: tuple(r for r in group if r is not dropped) for key, group in pending_reductions.items()}


@cache
def shared():
    """A graph whose sums are shared by devices and microbatches, its layout and its pending reductions."""
    graph = training(k_splits=12)
    layout = laid_out(graph, 3, 6, 2, 12)
    return graph, layout, [r for _, _, r in pending_reductions_of(graph, layout)]


def changed(layout, pending, leaf_ranges):
    """The layout with another pending reduction in place of one."""
    other = replace(pending, leaf_ranges=(tuple(leaf_ranges),))
    reductions = layout.pending_reductions.items()
    return replace(
        layout, pending_reductions={k: tuple(other if r is pending else r for r in v) for k, v in reductions}
    )


@given(st.data())
def test_faults_in_any_pending_reduction_are_detected(data):
    """One is dropped; a part is dropped, doubled, swapped, or moved by a batch split."""
    graph, original, reductions = shared()
    pending = data.draw(st.sampled_from(reductions))
    validate_pending_reductions(graph, original)
    (leaf_ranges,) = pending.leaf_ranges
    i = data.draw(st.integers(0, len(leaf_ranges) - 1))
    j = data.draw(st.integers(0, len(leaf_ranges) - 1).filter(lambda j: j != i))
    swapped = list(leaf_ranges)
    swapped[i], swapped[j] = leaf_ranges[j], leaf_ranges[i]
    doubled = list(leaf_ranges)
    doubled[i] = leaf_ranges[j]
    begin, end = leaf_ranges[i]
    moved = [*leaf_ranges[:i], (begin + 1, end + 1), *leaf_ranges[i + 1 :]]
    dropped = leaf_ranges[:i] + leaf_ranges[i + 1 :]
    faults = [changed(original, pending, ranges) for ranges in (dropped, swapped, doubled, moved)]
    for layout in (
        *faults,
        replace(original, pending_reductions=without(original.pending_reductions, pending)),
    ):
        with pytest.raises(LayoutError, match=rf"\[ir.validate\] .*{pending.partial}"):
            validate_pending_reductions(graph, layout)


def test_uncovered_sum_is_rejected():
    """Rows shared by devices under a gradient: the error names op, dim and what they count."""
    g = GraphBuilder("rows")
    x = g.input([4, 8, 16], name="x", labels=[BATCH, X, None])
    y = g.input([4, 8], "i32", name="y", labels=[BATCH, X], storage="scalars")
    g.loss(g.mean_cross_entropy(linear(g, x, "w", 32), y)[0])
    graph = differentiate(g.freeze(), g.draft.loss_id)[0]
    with pytest.raises(
        LayoutError,
        match=r"dim 1 .'x', as in x, y. .* on axes b, over which 'cross_entropy' .* sum over k_splits",
    ):
        validate_pending_reductions(graph, laid_out(graph, 1, 2))


def test_two_dims_of_one_sum_are_rejected():
    """A sum shared along two of its dims would be a tree within a tree, which no product completes."""
    g = GraphBuilder("two")
    x = g.input([4, 16], name="x", labels=[BATCH, X])
    g.output(linear(g, x, "w", 8, in_label=X), "y")
    graph = g.freeze()
    strategy = DistributionStrategy(ParallelismMode.HYBRID, {"a": 2, "b": 2}, {X.name: ("a", "b")})
    layout = propagate_layouts(graph, DeviceMesh({"a": 2, "b": 2}), strategy, cut_batch(graph))
    ((_, _, pending),) = pending_reductions_of(graph, layout)
    assert pending.axes == ("a", "b") and pending.leaf_ranges == (((0, 2), (2, 4), (4, 6), (6, 8)),)
    validate_pending_reductions(graph, layout)
