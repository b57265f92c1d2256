"""Losses on pairs of sequences: result and gradient against PyTorch, equal bits on every mesh, whole pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.core.dims import Dim
from tilewise.core.errors import ConfigError, PlanError, ShapeError
from tilewise.nn import PreferenceLoss, linear, preference_loss

WIDTH, CLASSES, LONGEST = 12, 96, 9
VOCABULARY = tw.DimLabel("vocab", 32)
LOSSES = [
    PreferenceLoss(),
    PreferenceLoss(beta=0.5, label_smoothing=0.2),
    PreferenceLoss(beta=0.3, loss_type="hinge"),
    PreferenceLoss(beta=0.7, loss_type="ipo"),
]


def build(loss, sequences=8, dtype="f32"):
    """A linear classifier of rows of any length under a loss on pairs."""
    graph = tw.ComputeGraph("pairs")
    seq = Dim("seq", 1, LONGEST)
    x = graph.input([sequences, seq, WIDTH], dtype, name="x", labels=[tw.BATCH, None, None])
    labels = graph.input([sequences, seq], "i32", name="labels", labels=[tw.BATCH, None], storage="scalars")
    logits = linear(graph, x, "head", CLASSES, out_label=VOCABULARY)
    total, log_probs = preference_loss(graph, logits, labels, loss)
    graph.output(log_probs, "log_probs")
    graph.loss(total)
    return graph


def batch_of(loss, seed, sequences=8, length=LONGEST):
    """Random rows; a third of the labels is not counted, but one of each sequence is."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, (sequences, length)).astype(np.int32)
    labels[rng.random(labels.shape) < 0.3] = -100
    labels[:, 0] = 5
    batch = {
        "x": rng.standard_normal((sequences, length, WIDTH), np.float32),
        "labels": labels,
        "reference_log_probs": rng.standard_normal(sequences, np.float32) - 20,
    }
    if loss.loss_type == "ipo":
        batch["inverse_lengths"] = (1 / (labels != -100).sum(1)).astype(np.float32)
    return batch


def expected(loss, batch, head):
    """Loss, log-probabilities and the gradient of the head in PyTorch."""
    head = torch.tensor(head, requires_grad=True)
    rows = torch.tensor(batch["x"]) @ head.T
    labels = torch.tensor(batch["labels"]).long()
    losses = torch.nn.functional.cross_entropy(rows.mT, labels, reduction="none")
    log_probs = -losses.sum(1)
    scores = log_probs - torch.tensor(batch["reference_log_probs"])
    if loss.loss_type == "ipo":
        scores = scores / (labels != -100).sum(1)
    margins = scores[0::2] - scores[1::2]
    log_sigmoid, beta, share = torch.nn.functional.logsigmoid, loss.beta, loss.label_smoothing
    total = {
        "sigmoid": -(1 - share) * log_sigmoid(beta * margins) - share * log_sigmoid(-beta * margins),
        "hinge": torch.relu(1 - beta * margins),
        "ipo": (margins - 1 / (2 * beta)) ** 2,
    }[loss.loss_type].mean()
    total.backward()
    return total.item(), log_probs.detach().numpy(), head.grad.numpy()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.loss_type} {loss.label_smoothing}")
def test_loss_and_gradient_are_those_of_pytorch(loss):
    """Of sequences of several lengths; another beta gives another gradient."""
    with build(loss).instantiate() as model:
        model.initialize(seed=1, scale=0.3)
        head = model.get_tensor("head")
        for length in (LONGEST, 4):
            batch = batch_of(loss, length, length=length)
            model.forward(**batch)
            model.backward()
            value, log_probs, gradient = expected(loss, batch, head)
            assert float(model.get_tensor("loss")[0]) == pytest.approx(value, rel=1e-5)
            np.testing.assert_allclose(model.get_tensor("log_probs"), log_probs, rtol=1e-5)
            np.testing.assert_allclose(model.get_tensor("head.grad"), gradient, rtol=0, atol=1e-5)
            *_, other = expected(PreferenceLoss(loss.beta * 1.1, loss.loss_type), batch, head)
            assert np.abs(other - gradient).max() > 1e-4


def steps(loss, mesh, accumulation=1, dtype="f32", fault=0.0):
    graph = build(loss, dtype=dtype)
    graph.optimize(tw.optim.AdamW())
    with graph.instantiate(graph.plan(mesh, accumulation=accumulation, batch_splits=4)) as model:
        model.initialize(seed=1, scale=0.3)
        results = []
        for number, length in enumerate((LONGEST, 5, 1)):
            batch = batch_of(loss, number, length=length)
            batch["reference_log_probs"][2] += np.float32(fault)
            results.append(model.step(batch, lr=0.01))
        return results, model.get_tensor("head").tobytes()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("mesh", "accumulation"),
    [({"dp": 2}, 1), ({"tp": 2}, 2), ({"dp": 2, "tp": 2}, 2), ({"fsdp": 4}, 1)],
    ids=str,
)
def test_every_mesh_has_the_same_bits(mesh, accumulation, dtype):
    """Losses, gradient norms and weights; another reference of one sequence is noticed."""
    loss = LOSSES[len(mesh)]
    alone = steps(loss, {}, dtype=dtype)
    assert steps(loss, mesh, accumulation, dtype) == alone
    assert steps(loss, mesh, accumulation, dtype, fault=0.5) != alone


def test_half_pairs_are_rejected():
    """By a graph with an odd number of sequences, and by a plan whose devices share a pair."""
    with pytest.raises(ShapeError, match="sequences must be pairs"):
        build(LOSSES[0], sequences=5)
    graph = build(LOSSES[0], sequences=6)
    graph.optimize(tw.optim.AdamW())
    with pytest.raises(PlanError, match="must have whole pairs of sequences; got 3 sequences"):
        graph.plan({"dp": 2}, batch_splits=2)


def test_settings_are_checked():
    """Before a graph exists."""
    for settings, words in (
        ({"beta": 0.0}, "beta must"),
        ({"loss_type": "kto"}, "loss_type must be one of sigmoid, hinge, ipo"),
        ({"label_smoothing": 0.5}, "label_smoothing must"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "must be 0 unless loss_type is sigmoid"),
    ):
        with pytest.raises(ConfigError, match=words):
            PreferenceLoss(**settings)
