"""Signals count epochs: a second use of a template must not be mistaken for the first, whatever
finishes first.

Weight gradients of different layers are independent, so with several workers per device a later
layer's may be complete before an earlier one's. A peer that waits for the earlier one must not be
released by the later.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from support.faults import inject

sys.path.insert(0, str(Path(__file__).parents[2] / "ranks"))
from small_llama import change_first, drop_partial

import tilewise as tw
from tilewise.core import CommTimeout
from tilewise.nn import linear

BATCH, SEQ, WIDTH, CLASSES, DEPTH = 16, 32, 256, 16, 6
ROWS = tw.BATCH


@tw.layer
def block(graph, x):
    """A layer whose weight gradient needs only the callers' values."""
    return graph.add(x, linear(graph, graph.silu(x), "weight", WIDTH))


def build():
    graph = tw.ComputeGraph("stack")
    x = graph.input([BATCH, SEQ, WIDTH], name="x", labels=[ROWS, None, None])
    labels = graph.input([BATCH, SEQ], "i32", name="labels", labels=[ROWS, None], storage="scalars")
    y = x
    for i in range(DEPTH):
        y = block(graph, y, path=f"layers.{i}")
    loss, _ = graph.mean_cross_entropy(linear(graph, y, "head", CLASSES), labels)
    graph.loss(loss)
    return graph


def data():
    generator = np.random.default_rng(0)
    return {
        "x": generator.standard_normal((BATCH, SEQ, WIDTH), np.float32),
        "labels": generator.integers(0, CLASSES, (BATCH, SEQ)).astype(np.int32),
    }


def running(axes, workers, **options):
    graph = build()
    model = graph.instantiate(graph.plan(axes, workers_per_device=workers), **options)
    model.initialize(0)
    return model


def test_a_late_gradient_is_waited_for():
    """Device 1 does not reduce a delayed gradient of device 0, although later ones are complete."""
    with running({"dp": 2}, 2, deadline_s=1.0) as model:
        model.forward(**data())
        inject(model, "stall", 0, "linear_dw:weight", 0)
        with pytest.raises(CommTimeout, match=r"device 1 waits in 'linear_dw:weight/reduce_scatter'"):
            model.backward()


def test_a_missing_reduction_is_detected():
    """The twin: a device that takes its own partial value for its peer's gives other gradients."""
    graph = build()
    drop = change_first("linear_dw:weight/reduce_scatter", drop_partial, program="backward")
    plan = drop(graph.plan({"dp": 2}, workers_per_device=2))
    with running({}, 1) as one, graph.instantiate(plan) as two:
        two.initialize(0)
        for model in (one, two):
            model.forward(**data())
            model.backward()
        name = f"layers.{DEPTH - 1}.weight.grad"  # layer 0 has a template of its own: its x has no gradient
        assert one.get_tensor(name).tobytes() != two.get_tensor(name).tobytes()


@pytest.mark.parametrize("workers", [2, 4])
def test_gradients_with_several_workers(workers):
    """Thirty passes over two devices: every gradient equals one device's to the bit."""
    with running({}, 1) as one, running({"dp": 2}, workers) as two:
        one.forward(**data())
        one.backward()
        names = one.parameter_names()
        expected = {n: one.get_tensor(f"{n}.grad") for n in names}
        for number in range(30):
            for n in names:
                two._tensors.store.write(
                    two.plan.graph.outputs[f"{n}.grad"], np.full_like(expected[n], np.nan)
                )
            two.forward(**data())
            two.backward()
            wrong = [n for n in names if two.get_tensor(f"{n}.grad").tobytes() != expected[n].tobytes()]
            assert not wrong, (number, wrong)
