"""Layers whose backward pass passes a gradient on unchanged: to one operand, to two, or of two results."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise as tw
from tilewise.core.dims import BATCH
from tilewise.nn import linear

WIDTH, ROWS = 32, 8


def residual(graph, x, other, *, name="weight"):
    """The gradient of the second operand is that of the result."""
    return graph.add(linear(graph, x, name, WIDTH), other)


def both(graph, x, other, *, name="weight"):
    """Both operands get the result's gradient, and nothing is computed."""
    return graph.add(x, other)


def chained(graph, x, other, *, name="weight"):
    """A sum that passes one computed gradient to two operands."""
    return graph.scale(graph.add(x, other), 0.5)


def gradients(body, is_layer, mesh, **options):
    """Gradients of all weights, with the body as a layer or inline."""
    graph = tw.ComputeGraph("sums")
    x = graph.input([ROWS, WIDTH], name="x", labels=[BATCH, None])
    layer = tw.layer(body)
    left, right = (linear(graph, x, f"{name}.weight", WIDTH) for name in ("left", "right"))
    for number in range(3):
        if is_layer:
            mixed = layer(graph, left, right, path=f"layers.{number}")
        else:
            mixed = body(graph, left, right, name=f"layers.{number}.weight")
        left, right = mixed, graph.scale(left, 2.0)
    graph.loss(graph.mean(graph.mul(left, right)))
    graph.optimize(tw.optim.SGD())
    values = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    with graph.instantiate(graph.plan(mesh, **options)) as model:
        model.initialize(seed=0)
        model.step({"x": values}, 1e-2)
        return {name: model.get_tensor(f"{name}.grad").tobytes() for name in model.parameter_names()}


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("body", [residual, both, chained], ids=lambda body: body.__name__)
def test_gradients_equal_those_without_layers(body, mesh):
    """To the bit; such a gradient once had no writer in a layer, and planning failed."""
    expected = gradients(body, False, mesh)
    assert gradients(body, True, mesh) == expected
    assert len(expected) == 2 + 3 * (body is residual)


def test_recomputed_layers_pass_gradients_on():
    """With recomputation."""
    assert gradients(residual, True, {}, recompute="full") == gradients(residual, False, {})


def test_other_operands_are_detected():
    """The twin: swapped operands give other gradients."""

    def swapped(graph, x, other, *, name="weight"):
        return residual(graph, other, x, name=name)

    assert gradients(residual, True, {}) != gradients(swapped, False, {})
