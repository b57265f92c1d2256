"""Calls on tensors of any shape against PyTorch and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw
from support.tensor_calls import BATCH, CALLS, SEQ, WHOLE_BATCH, WIDTH, build

EVERY = {**CALLS, **WHOLE_BATCH}


def inputs():
    generator = np.random.default_rng(5)
    return {n: generator.standard_normal((BATCH, SEQ, WIDTH)).astype(np.float32) for n in "xt"}


@pytest.mark.parametrize("name", EVERY)
def test_result_and_gradient(name):
    """fp32: 2e-6 for results, 1e-5 for gradients, relative to the largest element. Along a gradient, the loss grows at
    the rate of its length.
    """
    data, graph = inputs(), build([name])
    generator = np.random.default_rng(7)
    with graph.instantiate() as model:
        names = model.parameter_names()
        values = {n: (generator.standard_normal(graph.find(n).shape) * 0.3).astype(np.float32) for n in names}
        tensors = {n: torch.tensor(v, requires_grad=True) for n, v in values.items()}
        tx, order = torch.tensor(data["x"]), ["a0", "b0", "0.vector", "0.weight"]
        own = [tensors[n] for n in order[2:] if n in tensors]
        b = tx @ tensors["b0"].T
        expected = EVERY[name][1](tx @ tensors["a0"].T, b, *own) + b
        (expected * torch.tensor(data["t"])).mean().backward()
        for n, value in values.items():
            model.set_tensor(n, value)
        model.forward(**data)
        y, want = model.get_tensor("y0"), expected.detach().numpy()
        assert np.abs(y - want).max() <= 2e-6 * np.abs(want).max()
        model.backward()
        gradients = {n: model.get_tensor(f"{n}.grad") for n in names}
        for n, gradient in gradients.items():
            wanted = tensors[n].grad
            wanted = np.zeros_like(gradient) if wanted is None else wanted.numpy()
            assert np.abs(gradient - wanted).max() <= 1e-5 * max(np.abs(wanted).max(), 1e-3), n
        length = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
        losses = []
        for step in (1e-2, -1e-2):
            for n, value in values.items():
                model.set_tensor(n, (value + step / length * gradients[n]).astype(np.float32))
            model.forward(**data)
            losses.append(float(model.get_tensor("loss")[0]))
        assert abs((losses[0] - losses[1]) / 2e-2 - length) <= 0.02 * length


def test_results_in_bf16():
    """All calls in one graph, close to fp32, with gradients that are finite."""
    data, graph = inputs(), build(list(CALLS), dtype="bf16")
    generator = np.random.default_rng(7)
    with graph.instantiate() as model:
        tensors = {}
        for name in model.parameter_names():
            value = torch.tensor(generator.standard_normal(graph.find(name).shape) * 0.3).bfloat16().float()
            model.set_tensor(name, value.numpy())
            tensors[name] = value
        x = torch.tensor(data["x"]).bfloat16().float()
        model.forward(x=x.numpy(), t=data["t"])
        for number, (name, (_, reference)) in enumerate(CALLS.items()):
            own = [tensors[n] for n in (f"{number}.vector", f"{number}.weight") if n in tensors]
            b = x @ tensors[f"b{number}"].T
            want = (reference(x @ tensors[f"a{number}"].T, b, *own) + b).numpy()
            y = np.asarray(model.get_tensor(f"y{number}"), np.float32)
            assert np.abs(y - want).max() <= 0.05 * np.abs(want).max(), name
        model.backward()
        for name in tensors:
            assert np.isfinite(np.asarray(model.get_tensor(f"{name}.grad"), np.float32)).all(), name


@pytest.mark.parametrize("ignored", [-100, 3])
def test_label_smoothing(ignored):
    """Loss, rows and gradient of smoothed cross-entropy, with labels that are not counted."""
    g = tw.ComputeGraph("smoothed")
    x = g.input([4, 5, 6], name="x", labels=[tw.BATCH, None, None])
    labels = g.input([4, 5], "i32", name="labels", labels=[tw.BATCH, None], storage="scalars")
    logits = g.matmul(x, g.parameter([6, 7], name="w"))
    loss, rows = g.mean_cross_entropy(logits, labels, ignore_index=ignored, label_smoothing=0.2)
    g.output(rows, "rows")
    g.loss(loss)
    generator = np.random.default_rng(0)
    data = {"x": generator.standard_normal((4, 5, 6)).astype(np.float32)}
    data["labels"] = generator.integers(0, 7, (4, 5)).astype(np.int32)
    data["labels"][1, 2:] = ignored
    w = torch.tensor(generator.standard_normal((6, 7)).astype(np.float32), requires_grad=True)
    target = torch.tensor(data["labels"]).long().flatten()
    options = {"ignore_index": ignored, "label_smoothing": 0.2}
    flat = (torch.tensor(data["x"]) @ w).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(flat, target, **options)
    expected.backward()
    each = torch.nn.functional.cross_entropy(flat, target, reduction="none", **options)
    with g.instantiate() as model:
        model.set_tensor("w", w.detach().numpy())
        model.forward(**data)
        assert abs(model.get_tensor("loss")[0] - expected.item()) <= 1e-6
        share = (each / (target != ignored).sum()).detach().numpy().reshape(4, 5)
        assert np.abs(model.get_tensor("rows") - share).max() <= 1e-6
        model.backward()
        assert np.abs(model.get_tensor("w.grad") - w.grad.numpy()).max() <= 1e-6


def test_dropout_in_training_and_evaluation():
    """Evaluation drops nothing; training drops a share, scales the rest, and has other masks in the next step and in
    another layer.
    """

    @tw.layer
    def dropped(graph, x):
        return graph.dropout(x, 0.25)

    g = tw.ComputeGraph("dropout")
    x = g.input([8, 50, 10], name="x", labels=[tw.BATCH, None, None])
    for path in ("a", "b"):
        g.output(dropped(g, x, path=path), path)
    ones = np.ones((8, 50, 10), np.float32)
    with g.instantiate() as model:
        model.forward(x=ones)
        assert np.array_equal(model.get_tensor("a"), ones)
        model.train(seed=4).forward(x=ones)
        a, b = model.get_tensor("a"), model.get_tensor("b")
        assert 0.2 < (a == 0).mean() < 0.3 and np.allclose(a[a != 0], 1 / 0.75)
        assert 0.3 < ((a == 0) != (b == 0)).mean() < 0.45
        model.forward(x=ones)
        assert np.array_equal(model.get_tensor("a"), a)
        model.step_count += 1
        model.forward(x=ones)
        assert not np.array_equal(model.get_tensor("a"), a)
        assert np.array_equal((model.eval().forward(x=ones), model.get_tensor("a"))[1], ones)
