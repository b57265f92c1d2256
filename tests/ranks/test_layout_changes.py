"""Users' layouts and odd labels change where things are computed and what moves, never a bit."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import LayoutError, PlanError
from tilewise.nn import linear, rms_norm
from tilewise.strategy import ParallelismMode

A, B = tw.DimLabel("x"), tw.DimLabel("y", 4)
RNG = np.random.default_rng(3)
X, Z = RNG.standard_normal((2, 8, 32)).astype(np.float32)
T = RNG.integers(0, 32, 8).astype(np.int32)
WIDTH = 32


def run(graph, axes):
    """Output, loss and gradients of one step, as bytes."""
    graph.set_distribution(
        tw.DistributionStrategy(
            ParallelismMode.HYBRID, axes, {tw.BATCH.name: "a", A.name: "b", B.name: "b"} if axes else {}
        )
    )
    with graph.instantiate(graph.plan(leaves=4, workers_per_device=1)) as model:
        model.initialize(1, 0.5)
        result = model.step({"x": X, "z": Z, "t": T}, 1e-2)
        seen = [np.float32([result.loss, result.grad_norm]).tobytes()]
        for name in model.parameter_names():
            seen += [model.get_tensor(f"{name}.grad").tobytes(), model.get_tensor(name).tobytes()]
    return seen


HINTS = st.sampled_from([None, None, ("a",), ("a", "b"), {"a": tw.Shard(0), "b": tw.Shard(1)}])
LABELS = st.sampled_from([None, A, B])
KINDS = st.sampled_from(["linear", "linear", "add", "norm", "silu", "softmax"])


@st.composite
def recipes(draw):
    """What a small trained graph is made of: kinds, operands, labels and hints of its ops."""
    number = st.integers(0, 5)
    ops = st.tuples(KINDS, number, number, st.booleans(), LABELS, HINTS)
    return draw(LABELS), draw(LABELS), draw(st.lists(ops, min_size=1, max_size=4))


def build(recipe):
    """The graph of a recipe: the last result times a head, and a loss."""
    first, second, ops = recipe
    g = tw.ComputeGraph("net")
    x = g.input([8, WIDTH], name="x", labels=[tw.BATCH, first])
    z = g.input([8, WIDTH], name="z", labels=[tw.BATCH, second])
    t = g.input([8], "i32", name="t", labels=[tw.BATCH], storage="scalars")
    tensors = [linear(g, x, "first", WIDTH, in_label=first), linear(g, z, "second", WIDTH)]
    for i, (kind, a, b, is_cut, out_label, hint) in enumerate(ops):
        one, other = tensors[a % len(tensors)], tensors[b % len(tensors)]
        if kind == "linear":
            in_label = one.spec.labels[-1] if is_cut else None
            y = linear(g, one, f"w{i}", WIDTH, in_label=in_label, out_label=None if in_label else out_label)
            hint = None
        elif kind == "norm":
            y = rms_norm(g, one, f"gamma{i}", eps=1e-5)
        else:
            y = g.add(one, other) if kind == "add" else g.silu(one) if kind == "silu" else g.softmax(one)
        tensors.append(y if hint is None else g.constrain(y, hint))
    total = tensors[0]
    for y in tensors[1:]:
        total = g.add(total, y)
    g.loss(g.mean_cross_entropy(linear(g, total, "head", WIDTH), t)[0])
    g.optimize(tw.optim.AdamW())
    return g


def test_any_layouts_are_equal_or_refused():
    """Random graphs with labels that meet and labels that do not, and hints: equal to one device, or refused."""
    outcomes = Counter()

    @settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
    @given(recipes(), st.sampled_from([{"a": 1, "b": 2}, {"a": 2, "b": 2}, {"a": 1, "b": 4}]))
    def hold(recipe, axes):
        try:
            found = run(build(recipe), axes)
        except (LayoutError, PlanError) as error:
            outcomes[str(error)[:40]] += 1
            return
        outcomes["equal"] += 1
        assert found == run(build(recipe), {})

    hold()
    assert outcomes["equal"] >= 15, outcomes


def test_terms_with_and_without_a_label():
    """An input gradient of which some terms are cut into chunks and some are not loses none of them."""
    gradients = []
    for label in (A, None):
        g = tw.ComputeGraph("terms")
        x = g.input([8, WIDTH], name="x", labels=[tw.BATCH, None])
        z = g.input([8, WIDTH], name="z", labels=[tw.BATCH, None])
        t = g.input([8], "i32", name="t", labels=[tw.BATCH], storage="scalars")
        h = linear(g, g.add(x, z), "first", WIDTH)
        both = g.add(linear(g, h, "cut", WIDTH, out_label=label), linear(g, h, "whole", WIDTH))
        g.loss(g.mean_cross_entropy(both, t)[0])
        g.optimize(tw.optim.AdamW())
        with g.instantiate(g.plan(workers_per_device=1)) as model:
            model.initialize(1, 0.5)
            model.step({"x": X, "z": Z, "t": T}, 0.0)
            gradients.append(model.get_tensor("first.grad"))
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
