"""Losses of any graph (sums over the batch, scaled, added, multiplied), compared with PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_llama import change_first, halve_batch_splits

import tilewise as tw
from tilewise.core.errors import LayoutError, PlanError, ShapeError
from tilewise.core.mesh import DeviceMesh
from tilewise.nn import linear
from tilewise.session import verify_strategy

BATCH, SEQ, WIDTH, CLASSES = 8, 5, 18, 12
MESHES = [({}, 2), ({"dp": 2}, 1), ({"dp": 2}, 2), ({"tp": 2}, 1)]
batch = tw.BATCH


def test_graph_has_one_loss():
    """A second is rejected, and the first stays."""
    g = tw.ComputeGraph("n")
    y = linear(g, g.input([BATCH, WIDTH], name="x", labels=[batch, None]), "w", CLASSES)
    first = g.loss(g.mean(y))
    with pytest.raises(
        ShapeError, match=r"\[graph.loss\] a graph may have only one loss; got a second in 'n'"
    ):
        g.loss(g.sum(y))
    assert g.draft.loss_id == first.id == g.draft.outputs["loss"]


def test_graph_without_ops_is_rejected():
    """Also where an input is an output."""
    g = tw.ComputeGraph("n")
    g.output(g.input([BATCH, WIDTH], name="x", labels=[batch, None]), "y")
    with pytest.raises(PlanError, match=r"a graph must contain an op; got none in 'n'"):
        g.plan()
    with pytest.raises(
        PlanError, match=r"sizes must name symbols of the graph; got 'seq', and the graph has none"
    ):
        g.plan(sizes={"seq": 3})


def square(g, x):
    return g.mul(x, x)


def mean_squared_error(g, y, target, labels):
    return g.mean(square(g, g.add(y, g.scale(target, -1.0))))


def mixed(g, y, target, labels):
    head = linear(g, y, "head", CLASSES, out_label=tw.DimLabel("vocab"))
    loss, _ = g.mean_cross_entropy(head, labels)
    return g.add(g.scale(loss, 0.7), g.scale(g.mean(square(g, y)), 0.3))


@tw.layer
def penalty(graph, x):
    return graph.scale(graph.sum(graph.silu(x)), 0.01)


def in_layers(g, y, target, labels):
    error = mean_squared_error(g, y, target, labels)
    return g.add(g.add(error, penalty(g, y, path="one")), penalty(g, target, path="two"))


def product(g, y, target, labels):
    return g.mul(mean_squared_error(g, y, target, labels), g.sum(g.silu(y)))


def torch_square(y, t):
    return (y - t).square().mean()


silu = torch.nn.functional.silu
LOSSES = {
    "mean_squared_error": (mean_squared_error, lambda p, y, t, labels: torch_square(y, t)),
    "mixed": (
        mixed,
        lambda p, y, t, labels: (
            0.7 * torch.nn.functional.cross_entropy((y @ p["head"].T).flatten(0, 1), labels.flatten())
            + 0.3 * y.square().mean()
        ),
    ),
    "in_layers": (
        in_layers,
        lambda p, y, t, labels: torch_square(y, t) + 0.01 * silu(y).sum() + 0.01 * silu(t).sum(),
    ),
    "product": (product, lambda p, y, t, labels: torch_square(y, t) * silu(y).sum()),
}


def build(name, dtype="f32"):
    """Two products with something between them, and the loss of that name."""
    g = tw.ComputeGraph(name)
    x = g.input([BATCH, SEQ, WIDTH], dtype, name="x", labels=[batch, None, None])
    target = g.input([BATCH, SEQ, WIDTH], dtype, name="target", labels=[batch, None, None])
    labels = g.input([BATCH, SEQ], "i32", name="labels", labels=[batch, None], storage="scalars")
    h = g.silu(linear(g, x, "up", 32, out_label=tw.DimLabel("mlp")))
    y = linear(g, h, "down", WIDTH, in_label=tw.DimLabel("mlp"))
    g.loss(LOSSES[name][0](g, y, target, labels))
    g.optimize(tw.optim.AdamW())
    return g


def batches(steps):
    rng = np.random.default_rng(9)
    result = []
    for _ in range(steps):
        x, target = (rng.standard_normal((BATCH, SEQ, WIDTH), np.float32) for _ in range(2))
        labels = rng.integers(0, CLASSES, (BATCH, SEQ)).astype(np.int32)
        result.append({"x": x, "target": target, "labels": labels})
    return result


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_against_pytorch(name):
    """Loss within 1e-5, every gradient within 1e-5 of its largest element."""
    graph, (data,) = build(name), batches(1)
    with graph.instantiate() as model:
        model.initialize(seed=1, scale=0.5)
        p = {n: torch.tensor(model.get_tensor(n), requires_grad=True) for n in model.parameter_names()}
        x, t = torch.tensor(data["x"]), torch.tensor(data["target"])
        y = silu(x @ p["up"].T) @ p["down"].T
        loss = LOSSES[name][1](p, y, t, torch.tensor(data["labels"]).long())
        loss.backward()
        our_loss = model.step(data, 0.0).loss
        assert abs(our_loss - loss.item()) <= 1e-5 * max(1.0, abs(loss.item()))
        for n, split in p.items():
            expected = split.grad.numpy()
            assert np.abs(model.get_tensor(f"{n}.grad") - expected).max() <= 1e-5 * np.abs(expected).max(), n


@pytest.mark.parametrize(
    "name,dtype", [("mean_squared_error", "f32"), ("mixed", "bf16"), ("in_layers", "f32")]
)
@pytest.mark.parametrize("axes,accumulation", MESHES, ids=str)
def test_equal_to_one_device(name, axes, accumulation, dtype):
    """Three steps over meshes and microbatches equal one device to the bit."""
    report = verify_strategy(build(name, dtype), DeviceMesh(axes), batches(3), accumulation=accumulation)
    assert report.equal, report.text


@pytest.mark.parametrize("name", ["mean_squared_error", "in_layers"])
def test_other_tree_is_detected(name):
    """The twin: other batch splits of the sum on one device are detected, in a layer too."""

    fault = change_first("", halve_batch_splits, -1, kernel="row_sum_split_f32")
    assert not verify_strategy(build(name), DeviceMesh({"dp": 2}), batches(2), change=fault).equal


def test_loss_that_multiplies_totals():
    """Rejected with several microbatches, because its gradient needs a total before the last."""
    report = verify_strategy(build("product"), DeviceMesh({"dp": 2}), batches(2))
    assert report.equal, report.text
    with pytest.raises(
        PlanError, match=r"\[plan.schedule\].*a total over the whole batch.*got 'spread' \(spread\)"
    ):
        build("product").plan({}, accumulation=2)


def test_sums_of_one_number_per_row():
    """`sum` of a cross-entropy's rows equals its loss, to the bit."""
    g = tw.ComputeGraph("rows")
    logits = g.input([BATCH, SEQ, CLASSES], name="logits", labels=[batch, None, None])
    labels = g.input([BATCH, SEQ], "i32", name="labels", labels=[batch, None], storage="scalars")
    loss, rows = g.mean_cross_entropy(logits, labels)
    g.output(loss, "mean")
    g.output(g.sum(rows), "sum")
    rng = np.random.default_rng(0)
    with g.instantiate(g.plan({"dp": 2})) as model:
        model.forward(
            logits=rng.standard_normal((BATCH, SEQ, CLASSES), np.float32),
            labels=rng.integers(0, CLASSES, (BATCH, SEQ)).astype(np.int32),
        )
        assert model.get_tensor("mean").tobytes() == model.get_tensor("sum").tobytes()


def test_invalid_losses_are_rejected():
    """An input and several numbers are rejected; so are sums of weights. A dim that devices share is gathered."""
    g = tw.ComputeGraph("none")
    x = g.input([4, 6], name="x", labels=[batch, tw.DimLabel("mlp")])
    one = g.input([1], name="one", storage="vector")
    for bad in (one, x, g.scale(x, 2.0)):
        with pytest.raises(ShapeError, match="a loss must be one f32 computed by the graph"):
            g.loss(bad)
    with pytest.raises(ShapeError, match="not a weight"):
        g.sum(g.parameter([4, 6], name="w"))
    with pytest.raises(ShapeError, match=r"the name 'loss.seed' is reserved"):
        g.input([1], name="loss.seed", storage="vector")
    g.output(g.sum(x), "total")
    g.plan({"tp": 2})  # what the sum needs whole is gathered
    with pytest.raises(LayoutError):
        g.plan({"tp": 2}, strict=True)


def test_sum_over_rows_outside_the_batch_is_rejected():
    """In a graph with a batch, a sum over another dim would be added once per microbatch."""
    g = tw.ComputeGraph("other")
    g.output(g.scale(g.input([4, 6], name="x", labels=[batch, None]), 2.0), "y")
    g.output(g.sum(g.input([3, 6], name="other")), "total")
    with pytest.raises(LayoutError, match="whose rows do not count it; label dim 0 of its inputs"):
        g.plan()
