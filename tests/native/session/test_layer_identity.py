"""When two uses of a layer share a template, and when they must not."""

from __future__ import annotations

import numpy as np

import tilewise as tw

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


def run(graph, **inputs):
    with graph.instantiate() as model:
        model.forward(**inputs)
        return {name: model.get_tensor(name) for name in graph.draft.outputs}


@tw.layer
def shifted(graph, x, *, value):
    """x plus a constant that depends on an attribute."""
    return graph.add(x, graph.constant(np.full((4, 8), value, np.float32), name="shift"))


def test_constants_follow_attributes():
    """Two uses with different attributes have their own constants."""
    graph = tw.ComputeGraph("shifts")
    x = graph.input([4, 8], name="x")
    graph.output(shifted(graph, x, path="a", value=1.0), "one")
    graph.output(shifted(graph, x, path="b", value=2.0), "two")
    outputs = run(graph, x=X)
    assert np.array_equal(outputs["one"], X + np.float32(1))
    assert np.array_equal(outputs["two"], X + np.float32(2))


def test_functions_with_one_name_are_different_layers():
    """A function that makes layers makes different ones."""

    def scaled_by(factor):
        @tw.layer
        def scaled(graph, x):
            return graph.scale(x, factor)

        return scaled

    graph = tw.ComputeGraph("scales")
    x = graph.input([4, 8], name="x")
    for factor in (2.0, 3.0):
        graph.output(scaled_by(factor)(graph, x, path=f"by{factor}"), f"y{factor}")
    outputs = run(graph, x=X)
    assert np.array_equal(outputs["y2.0"], X * np.float32(2))
    assert np.array_equal(outputs["y3.0"], X * np.float32(3))


@tw.layer
def passed(graph, x):
    return graph.scale(x, 1.0)


def test_storage_is_part_of_a_signature():
    """Operands of one shape with different storage are different templates."""
    graph = tw.ComputeGraph("storages")
    rows = graph.input([4, 8], name="rows")
    scalars = graph.input([4, 8], name="scalars", storage="scalars")
    passed(graph, rows, path="a")
    passed(graph, scalars, path="b")
    assert len(graph.draft.templates) == 2


def test_a_layer_with_and_without_a_gradient():
    """One template used on the way to the loss and next to it: only the first saves values for its gradient."""
    graph = tw.ComputeGraph("both")
    x = graph.input([4, 8], name="x")
    labels = graph.input([4], "i32", name="labels", storage="scalars")

    @tw.layer
    def gated(graph, x):
        return graph.mul(graph.silu(graph.matmul(x, graph.parameter([8, 8], name="w"))), x)

    @tw.layer
    def plain(graph, x):
        return graph.mul(graph.silu(x), graph.silu(graph.scale(x, 0.5)))

    h = plain(graph, gated(graph, x, path="a"), path="b")
    loss, _ = graph.mean_cross_entropy(graph.matmul(h, graph.parameter([8, 5], name="head")), labels)
    graph.output(plain(graph, x, path="other"), "other")
    graph.loss(loss)
    with graph.instantiate() as model:
        model.initialize(0)
        model.forward(x=X, labels=np.array([0, 1, 2, 3], np.int32))
        model.backward()
        silu = X / (1 + np.exp(-X)) * (X / 2 / (1 + np.exp(-X / 2)))
        assert np.allclose(model.get_tensor("other"), silu, atol=1e-6)
        assert np.abs(model.get_tensor("a.w.grad")).max() > 0
