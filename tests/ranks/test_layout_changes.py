"""Users' layouts and odd labels change where things are computed and what moves, never a bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_llama import change_first, change_where, drop_partial

import tilewise as tw
from tilewise.core.errors import LayoutError, PlanError
from tilewise.ir.program import Mode
from tilewise.nn import linear, rms_norm
from tilewise.session import verify_strategy
from tilewise.strategy import ParallelismMode

A, B = tw.DimLabel("x"), tw.DimLabel("y", 4)
HEADS, SHARED_HEADS = tw.DimLabel("h", 8), tw.DimLabel("k", 8, 2)
AXIS_OF = {tw.BATCH.name: "a", A.name: "b", B.name: "b", HEADS.name: "b", SHARED_HEADS.name: "b"}
RNG = np.random.default_rng(3)
BATCH, SEQ, WIDTH = 4, 3, 32
X, Z = RNG.standard_normal((2, BATCH, SEQ, WIDTH)).astype(np.float32)
T = RNG.integers(0, WIDTH, (BATCH, SEQ)).astype(np.int32)
ANGLES = RNG.standard_normal((SEQ, 4))
TABLE = np.concatenate([np.cos(ANGLES), np.sin(ANGLES)], 1).astype(np.float32)


def run(graph, axes, microbatches=1, change=lambda plan: plan):
    graph.set_distribution(tw.DistributionStrategy(ParallelismMode.HYBRID, axes, AXIS_OF if axes else {}))
    plan = graph.plan(batch_splits=4, workers_per_device=1, accumulation=microbatches)
    with graph.instantiate(change(plan)) as model:
        model.initialize(1, 0.5)
        result = model.step({"x": X, "z": Z, "t": T}, 1e-2)
        seen = [np.float32([result.loss, result.grad_norm]).tobytes()]
        for name in model.parameter_names():
            seen += [model.get_tensor(f"{name}.grad").tobytes(), model.get_tensor(name).tobytes()]
    return seen


HINTS = st.sampled_from([None, None, ("a",), ("a", None, "b"), {"a": tw.Shard(0), "b": tw.Shard(2)}])
LABELS = st.sampled_from([None, A, B])
SIMPLE = ["add", "mul", "scale", "silu", "softmax", "cast"]
KINDS = st.sampled_from(["linear", "linear", "norm", "gate", "embedding", "attention", *SIMPLE])


@st.composite
def recipes(draw):
    """Recipes of a small trained graph: kinds, operands, labels and hints of its ops."""
    number = st.integers(0, 5)
    ops = st.tuples(KINDS, number, number, st.booleans(), LABELS, HINTS)
    return draw(LABELS), draw(LABELS), draw(st.lists(ops, min_size=1, max_size=4)), draw(st.booleans())


def attend(g, x, i, groups):
    """Attention with rotated heads, two query heads for a KV head or one."""
    label = SHARED_HEADS if groups == 2 else HEADS
    q = linear(g, x, f"q{i}", WIDTH, out_label=HEADS)
    k, v = (linear(g, x, f"{name}{i}", WIDTH // groups, out_label=label) for name in "kv")
    if not g.has("positions"):
        numbers = np.tile(np.arange(SEQ, dtype=np.int32), (BATCH, 1))
        g.constant(numbers, name="positions", labels=[tw.BATCH, None], storage="scalars")
        g.constant(TABLE, name="table")
    where = g.find("positions"), g.find("table")
    q, k = (g.rope(y, *where, head_dim=8) for y in (q, k))
    return g.scaled_dot_product_attention(q, k, v, head_dim=8, causal=True)


def apply(g, kind, one, other, i, is_cut, label, t):
    if kind == "linear":
        in_label = one.spec.labels[-1] if is_cut else None
        return linear(g, one, f"w{i}", WIDTH, in_label=in_label, out_label=None if in_label else label)
    if kind == "gate":
        return g.op("silu_gate", [one, other])[0]
    if kind == "cast":
        return g.cast(g.cast(one, "bf16"), "f32")
    if kind == "embedding":
        return g.embedding(t, g.parameter([WIDTH, WIDTH], name=f"e{i}", labels=[label, None]))
    if kind == "attention":
        return attend(g, one, i, 1 + is_cut)
    if kind == "norm":
        return rms_norm(g, one, f"gamma{i}", eps=1e-5)
    if kind in ("add", "mul"):
        return getattr(g, kind)(one, other)
    return g.scale(one, 0.75) if kind == "scale" else getattr(g, kind)(one)


def build(recipe):
    """The graph of a recipe: all results added, a head, and a loss; some with a term of another kind."""
    first, second, ops, has_mean = recipe
    g = tw.ComputeGraph("net")
    x = g.input([BATCH, SEQ, WIDTH], name="x", labels=[tw.BATCH, None, first])
    z = g.input([BATCH, SEQ, WIDTH], name="z", labels=[tw.BATCH, None, second])
    t = g.input([BATCH, SEQ], "i32", name="t", labels=[tw.BATCH, None], storage="scalars")
    tensors = [linear(g, x, "first", WIDTH, in_label=first), linear(g, z, "second", WIDTH)]
    for i, (kind, a, b, is_cut, label, hint) in enumerate(ops):
        y = apply(g, kind, tensors[a % len(tensors)], tensors[b % len(tensors)], i, is_cut, label, t)
        tensors.append(y if hint is None else g.constrain(y, hint))
    total = tensors[0]
    for y in tensors[1:]:
        total = g.add(total, y)
    loss = g.mean_cross_entropy(linear(g, total, "head", WIDTH), t)[0]
    g.loss(g.add(loss, g.scale(g.mean(g.mul(total, total)), 0.125)) if has_mean else loss)
    g.optimize(tw.optim.AdamW())
    return g


MESHES = st.sampled_from([{"a": 1, "b": 2}, {"a": 2, "b": 2}, {"a": 1, "b": 4}, {"a": 2, "b": 1}])


def hold_layouts(examples):
    """Counts of outcomes over many random graphs."""
    outcomes, kinds = Counter(), Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None)
    @given(recipes(), MESHES, st.sampled_from([1, 1, 2]))
    def hold(recipe, axes, microbatches):
        try:
            outputs = run(build(recipe), axes, microbatches)
        except (LayoutError, PlanError) as error:
            outcomes[str(error)[:400]] += 1
            return
        outcomes["equal"] += 1
        kinds.update(op[0] for op in recipe[2])
        assert outputs == run(build(recipe), {})

    hold()
    return outcomes, kinds


def test_any_layouts_equal_one_device_or_are_rejected():
    """Random graphs with labels that match and labels that do not, and hints: equal to one device, or rejected."""
    outcomes, kinds = hold_layouts(35)
    assert outcomes["equal"] >= 10, outcomes
    assert len(kinds) >= 8, kinds


@pytest.mark.slow
def test_any_layouts_of_all_ops_equal_one_device_or_are_rejected():
    """More of them; every kind of op runs at least once."""
    outcomes, kinds = hold_layouts(400)
    assert outcomes["equal"] >= 150, outcomes
    assert {"linear", "norm", "gate", "embedding", "attention", *SIMPLE} <= {*kinds}, kinds


def test_terms_with_and_without_a_label():
    """An input gradient of which some terms are cut into k splits and some are not loses none of them."""
    gradients = []
    for label in (A, None):
        g = tw.ComputeGraph("terms")
        x = g.input([BATCH, SEQ, WIDTH], name="x", labels=[tw.BATCH, None, None])
        z = g.input([BATCH, SEQ, WIDTH], name="z", labels=[tw.BATCH, None, None])
        t = g.input([BATCH, SEQ], "i32", name="t", labels=[tw.BATCH, None], storage="scalars")
        h = linear(g, g.add(x, z), "first", WIDTH)
        both = g.add(linear(g, h, "cut", WIDTH, out_label=label), linear(g, h, "whole", WIDTH))
        g.loss(g.mean_cross_entropy(both, t)[0])
        g.optimize(tw.optim.AdamW())
        with g.instantiate(g.plan(workers_per_device=1)) as model:
            model.initialize(1, 0.5)
            model.step({"x": X, "z": Z, "t": T}, 0.0)
            gradients.append(model.get_tensor("first.grad"))
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def in_shards(is_asked):
    """A graph in which the first op's sum is hinted to arrive in shards, or not."""
    g = tw.ComputeGraph("net")
    x = g.input([BATCH, SEQ, WIDTH], name="x", labels=[tw.BATCH, None, A])
    g.input([BATCH, SEQ, WIDTH], name="z", labels=[tw.BATCH, None, None])
    t = g.input([BATCH, SEQ], "i32", name="t", labels=[tw.BATCH, None], storage="scalars")
    y = linear(g, x, "first", WIDTH, in_label=A)
    y = g.silu(g.constrain(y, {"b": tw.Shard(2)}) if is_asked else y)
    g.loss(g.mean_cross_entropy(linear(g, y, "head", WIDTH), t)[0])
    g.optimize(tw.optim.AdamW())
    g.set_distribution(tw.DistributionStrategy(ParallelismMode.HYBRID, {"a": 1, "b": 4}, AXIS_OF))
    return g


def reductions(plan):
    """Elements that the forward reduction of the first op reads, and its gather."""
    moved = plan.traffic("forward")
    return [sum(moved.get(f"linear:first/{half}", [0])) for half in ("reduce_scatter", "all_gather")]


def test_sum_in_shards_moves_half():
    """A reduce-scatter reads three quarters of a tile on each of four devices; nothing is gathered after it."""
    rows = BATCH * SEQ * WIDTH
    assert reductions(in_shards(False).plan(batch_splits=4)) == [3 * rows, 3 * rows]
    assert reductions(in_shards(True).plan(batch_splits=4)) == [3 * rows, 0]
    explained = in_shards(True).plan(batch_splits=4, accumulation=2).explain().splitlines()
    assert "(mean) and microbatch" in explained[2] and [
        line.strip() for line in explained if "scatter" in line
    ] == [f"reduce_scatter:linear:first f32[4, 3, 32] to (micro, -, b): reads {3 * rows // 4 // 2} elements"]
    outputs = run(in_shards(True), {"a": 1, "b": 4})
    assert outputs == run(in_shards(True), {})
    fault = change_first("linear:first/reduce_scatter", drop_partial)
    assert outputs != run(in_shards(True), {"a": 1, "b": 4}, change=fault)


@pytest.mark.parametrize("kernel", ["tree_add", "copy_pairs"])
def test_wrong_columns_are_detected(kernel):
    """A reduction in shards, or a slice, of other columns than the device's own."""

    def shift(instruction):
        moved = [
            o._replace(part=0) if o.mode == Mode.ROWCOLS and not isinstance(o.part, int) else o
            for o in instruction.operands
        ]
        return replace(instruction, operands=tuple(moved))

    def graph():
        recipe = (None, None, [("silu", 0, 0, False, None, ("a", None, "b"))], False)
        return in_shards(True) if kernel == "tree_add" else build(recipe)

    axes = {"a": 1, "b": 4} if kernel == "tree_add" else {"a": 1, "b": 2}
    fault = change_where(lambda i: i.kernel.startswith(kernel), shift)
    assert run(graph(), axes) != run(graph(), axes, change=fault)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_axes_of_a_dim_in_any_order(order):
    """The layout's order is major first, not the mesh's; the batch and a contraction over both axes, each way."""
    recipe = (B, None, [("linear", 0, 0, False, B, None), ("linear", 1, 0, False, None, None)], False)
    alone = run(build(recipe), {})
    for name in (tw.BATCH.name, B.name):
        with mock.patch.dict(AXIS_OF, dict.fromkeys(AXIS_OF, ()) | {name: order}):
            assert run(build(recipe), {"a": 2, "b": 2}) == alone
            fault = change_first("/reduce_scatter", drop_partial, device=-1)
            assert run(build(recipe), {"a": 2, "b": 2}, change=fault) != alone


def test_tensor_may_be_read_in_two_layouts():
    """A gradient that is both contracted whole and added in shards: each reading has its pending reduction."""
    recipe = (None, None, [("linear", 0, 0, False, A, None), ("linear", 2, 0, True, None, None)], False)
    assert run(build(recipe), {"a": 1, "b": 2}) == run(build(recipe), {})


@pytest.mark.parametrize("term", ["bias", "residual"])
def test_terms_added_to_a_sharded_sum_are_cut_alike(term):
    """A hint on the last dim also cuts the added bias or residual; equal to one device to the bit."""

    def build(*, is_trained):
        label = tw.DimLabel("x", 2)
        graph = tw.ComputeGraph("g")
        x = graph.input([8, 16], name="x", labels=[tw.BATCH, label])
        t = linear(graph, x, "w", 12, in_label=label)
        if term == "bias":
            y = graph.add_bias(t, graph.parameter([12], name="b"))
        else:
            y = graph.add(t, graph.input([8, 12], name="z", labels=[tw.BATCH, None]))
        graph.constrain(y, (None, "a"))
        graph.output(y, "y")
        if is_trained:
            graph.loss(graph.sum(graph.mul(y, y)))
            graph.optimize(tw.optim.SGD())
        return graph

    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((8, 16)).astype(np.float32)}
    if term == "residual":
        data["z"] = rng.standard_normal((8, 12)).astype(np.float32)
    strategy = tw.DistributionStrategy(ParallelismMode.HYBRID, {"a": 2}, {"x": "a"})
    report = verify_strategy(build(is_trained=True), {"a": 2}, [data] * 2, strategy=strategy)
    assert report.equal, report.text
    graph = build(is_trained=False)
    graph.set_distribution(strategy)
    labels = [op.label for op in graph.plan(strict=True).graph.ops]
    assert any(label.startswith("slice:") for label in labels)


def test_sum_arrives_only_in_shards_of_its_last_dim():
    """A hint on another dim is rejected with a reason, before anything is lowered."""
    label = tw.DimLabel("v", 4)
    graph = tw.ComputeGraph("g")
    x = graph.input([4, 6, 32], name="x", labels=[tw.BATCH, None, None])
    w = graph.parameter([16, 32], name="w", labels=[label, None])
    y = graph.matmul(graph.matmul(x, w, trans_b=True), w)
    graph.loss(graph.sum(graph.constrain(y, (None, "a"))))
    graph.set_distribution(tw.DistributionStrategy(ParallelismMode.HYBRID, {"a": 2}, {"v": "a"}))
    with pytest.raises(
        PlanError, match=r"layouts may change only along the last dim .* from \(-, -, -\) to \(-, a, -\)"
    ):
        graph.plan()


READERS = {
    "linear": lambda g, x, t, w: g.matmul(x, w, trans_b=True),
    "embedding": lambda g, x, t, w: g.embedding(t, w),
    "add": lambda g, x, t, w: g.add(w, g.parameter([16, 16], name="v")),
}


@pytest.mark.parametrize(
    ("reader", "hint"),
    [
        *((reader, hint) for reader in READERS for hint in ((None, "a"), ("a", "b"))),
        *((reader, hint) for reader in ("embedding", "add") for hint in (("a",), (("a", "b"),))),
    ],
    ids=str,
)
def test_hint_that_would_gather_a_weight_is_rejected_by_name(reader, hint):
    """The error names the hint, the weight and its reader: no weight is cut or gathered on its way."""
    graph = tw.ComputeGraph("g")
    x = graph.input([4, 16], name="x", labels=[tw.BATCH, None])
    t = graph.input([4], "i32", name="t", labels=[tw.BATCH], storage="scalars")
    w = graph.parameter([16, 16], name="w", layout=hint)
    graph.output(graph.scale(READERS[reader](graph, x, t, w), 2.0), "y")
    graph.set_distribution(tw.DistributionStrategy(ParallelismMode.HYBRID, {"a": 2, "b": 2}))
    with pytest.raises(
        LayoutError,
        match=rf"must be read in its own layout.* of '{reader}:\w' .* the hint on w.*; drop the hint, or",
    ):
        graph.plan()


def test_strict_needs_only_the_hint_on_a_bias():
    """Its gradient is gathered for the norm of all gradients, where no hint is possible."""
    label = tw.DimLabel("mlp")

    def build():
        graph = tw.ComputeGraph("g")
        x = graph.input([8, 16], name="x", labels=[tw.BATCH, None])
        bias = graph.parameter([16], name="b", layout=("a",))
        y = graph.add_bias(linear(graph, x, "w", 16, out_label=label), bias)
        graph.loss(graph.mean(linear(graph, y, "v", 8, in_label=label)))
        graph.optimize(tw.optim.AdamW())
        return graph

    strategy = tw.DistributionStrategy(ParallelismMode.HYBRID, {"a": 2}, {"mlp": "a"})
    graph = build()
    graph.set_distribution(strategy)
    (gathered,) = [op for op in graph.plan(strict=True).graph.ops if op.op == "all_gather"]
    assert gathered.phase == "update"
    data = {"x": np.random.default_rng(0).standard_normal((8, 16), np.float32)}
    report = verify_strategy(build(), {"a": 2}, [data] * 2, strategy=strategy)
    assert report.equal, report.text


@pytest.mark.parametrize("op", ["add", "mul", "matmul"])
@pytest.mark.parametrize("atom", [1, None])
def test_shared_dims_must_be_cut_alike(op, atom):
    """Two labels that cut ten elements at different positions are rejected, with both named."""
    first, other = tw.DimLabel("x", 4), None if atom is None else tw.DimLabel("y", atom)
    graph = tw.ComputeGraph("g")
    x = graph.input([8, 10], name="x", labels=[tw.BATCH, first])
    if op == "matmul":
        graph.output(
            graph.matmul(x, graph.parameter([6, 10], name="w", labels=[None, other]), trans_b=True), "y"
        )
    else:
        z = graph.input([8, 10], name="z", labels=[tw.BATCH, other])
        graph.output(getattr(graph, op)(x, z), "y")
    rules = {"x": "a", "y": "a"}
    graph.set_distribution(tw.DistributionStrategy(ParallelismMode.HYBRID, {"a": 2}, rules))
    if atom is None:
        graph.plan()  # what has no label follows
        return
    with pytest.raises(LayoutError, match="'x' in pieces of 4 and 'y' in pieces of 1 for 10 elements"):
        graph.plan()
