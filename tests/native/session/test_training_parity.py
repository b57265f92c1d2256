"""Training steps against PyTorch: loss, every gradient, twenty AdamW steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import tilewise as tw
from tilewise import models
from tilewise.models import llama

BATCH, SEQ = 8, 24


def sizes(**changes):
    """A small Llama with grouped heads and sizes that panels do not divide."""
    base = {
        "vocab_size": 330,
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return llama.LlamaConfig(**{**base, **changes})


def peers(model, dtype, seq=SEQ, accumulation=1, **optimizer):
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, model, BATCH, seq, dtype)
    graph.optimize(tw.optim.AdamW(**optimizer))
    ours = graph.instantiate(graph.plan(accumulation=accumulation))
    ours.initialize(3, scale=0.1)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**model.to_dict(), attn_implementation="eager")
    ).float()
    names = {n if n.startswith("lm_head") else f"model.{n}": n for n in ours.parameter_names()}
    theirs.load_state_dict({k: torch.tensor(ours.get_tensor(n)) for k, n in names.items()}, strict=False)
    theirs.tie_weights()
    return ours, theirs, names


def data(model, steps):
    """Token windows; a tenth of the labels is ignored."""
    generator = np.random.default_rng(11)
    for _ in range(steps):
        t = generator.integers(0, model.vocab_size, (BATCH, SEQ + 1)).astype(np.int32)
        labels = np.where(generator.random((BATCH, SEQ)) < 0.1, -100, t[:, 1:]).astype(np.int32)
        yield t[:, :-1].copy(), labels


def torch_loss(model, tokens, labels):
    logits = model(torch.tensor(tokens).long()).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).long().flatten())


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_every_gradient(tied):
    """fp32: relative error of every gradient below 5e-6 of its largest element."""
    model = sizes(tie_word_embeddings=tied)
    ours, theirs, names = peers(model, "f32", max_grad_norm=0.0)
    tokens, labels = next(data(model, 1))
    loss = torch_loss(theirs, tokens, labels)
    loss.backward()
    result = ours.step({"tokens": tokens, "labels": labels}, 1e-3)
    assert abs(result.loss - loss.item()) < 2e-6
    squares = 0.0
    for name, parameter in theirs.named_parameters():
        expected = parameter.grad.numpy()
        squares += float((expected.astype(np.float64) ** 2).sum())
        error = np.abs(ours.get_tensor(f"{names[name]}.grad") - expected).max() / np.abs(expected).max()
        assert error < 5e-6, (name, error)
    assert abs(result.grad_norm - squares**0.5) < 1e-5 * squares**0.5
    ours.close()


def test_microbatches_are_normalised_by_the_labels_of_the_whole_step():
    """fp32: with unequal numbers of counted labels, loss and gradient are those of one batch, not means of means."""
    model = sizes()
    ours, theirs, _ = peers(model, "f32", accumulation=4, max_grad_norm=0.0)
    tokens, labels = next(data(model, 1))
    for microbatch, count in enumerate((1, 2 * SEQ, 7, 0)):
        rows = labels[2 * microbatch : 2 * microbatch + 2].reshape(-1)
        rows[count:] = -100
    loss = torch_loss(theirs, tokens, labels)
    loss.backward()
    with ours:
        result = ours.step({"tokens": tokens, "labels": labels}, 0.0)
        assert abs(result.loss - loss.item()) < 2e-6
        squares = sum(parameter.grad.double().square().sum().item() for parameter in theirs.parameters())
        assert abs(result.grad_norm - squares**0.5) < 1e-5 * squares**0.5
    parts = [torch_loss(theirs, tokens[i : i + 2], labels[i : i + 2]).item() for i in (0, 2, 4)]
    assert abs(np.mean(parts) - loss.item()) > 1e-3


@pytest.mark.parametrize("width", [17, 31])
def test_padded_sequences(width):
    """fp32: a padded batch equals its sequences one by one in PyTorch, and PyTorch's batch with `ignore_index`."""
    model = sizes()
    ours, theirs, names = peers(model, "f32", tw.Dim("seq", 1, 40), max_grad_norm=0.0)
    lengths = (17, 1, 9, 16, 2, 11, 5, 17)
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, model.vocab_size, (BATCH, width)).astype(np.int32)
    labels = np.where(np.arange(width) < np.array(lengths)[:, None], np.roll(tokens, -1, 1), -100).astype(
        np.int32
    )
    batch_loss = torch_loss(theirs, tokens, labels)
    loss = sum(
        torch_loss(theirs, tokens[i : i + 1, :length], labels[i : i + 1, :length]) * length
        for i, length in enumerate(lengths)
    ) / sum(lengths)
    loss.backward()
    result = ours.step({"tokens": tokens, "labels": labels}, 1e-3)
    assert abs(result.loss - loss.item()) < 2e-6 and abs(result.loss - batch_loss.item()) < 2e-6
    for name, parameter in theirs.named_parameters():
        expected = parameter.grad.numpy()
        error = np.abs(ours.get_tensor(f"{names[name]}.grad") - expected).max() / np.abs(expected).max()
        assert error < 5e-6, (name, error)
    ours.close()


def test_twenty_adamw_steps():
    """Losses of twenty steps with clipping and decay equal PyTorch's within 1e-4."""
    model = sizes()
    ours, theirs, _ = peers(
        model, "f32", beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0
    )
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for step, (tokens, labels) in enumerate(data(model, 20)):
        optimizer.zero_grad()
        loss = torch_loss(theirs, tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        result = ours.step({"tokens": tokens, "labels": labels}, 1e-3)
        assert abs(result.loss - loss.item()) < 1e-4, step
    ours.close()


def test_bf16_errors_are_no_larger_than_pytorchs():
    """bf16 loss and gradients: mean error over all tensors at most 1.1 times, maximum twice, PyTorch's own."""
    model = sizes()
    ours, theirs, names = peers(model, "bf16", max_grad_norm=0.0)
    for n in ours.parameter_names():  # all three models start from the bf16 weights
        ours.set_tensor(n, torch.tensor(ours.get_tensor(n)).bfloat16().float().numpy())
    exact = transformers.LlamaForCausalLM(theirs.config).double()
    theirs = theirs.bfloat16()
    exact.load_state_dict({k: v.double() for k, v in theirs.state_dict().items()})
    tokens, labels = next(data(model, 1))
    torch_loss(theirs, tokens, labels).backward()
    logits = exact(torch.tensor(tokens).long()).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).long().flatten()).backward()
    ours.step({"tokens": tokens, "labels": labels}, 1e-3)
    errors = {"ours": [], "theirs": []}
    for (name, truth), parameter in zip(exact.named_parameters(), theirs.parameters(), strict=True):
        reference = truth.grad.numpy()
        scale = np.abs(reference).max()
        errors["ours"].append(np.abs(ours.get_tensor(f"{names[name]}.grad") - reference).ravel() / scale)
        errors["theirs"].append(np.abs(parameter.grad.double().numpy() - reference).ravel() / scale)
    flat = {k: np.concatenate(v) for k, v in errors.items()}
    assert flat["ours"].mean() <= 1.1 * flat["theirs"].mean()
    assert flat["ours"].max() <= 2.0 * flat["theirs"].max()
    ours.close()


def test_random_weights_scale_with_width_and_depth():
    """Weights whose outputs are added to the residual stream have a smaller deviation, by the number of layers."""
    model = sizes(num_hidden_layers=2)
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, model, BATCH, SEQ, "f32")
    with graph.instantiate() as running:
        running.initialize(0, model.initializer_range)
        for name in running.parameter_names():
            is_added = "o_proj" in name or "down_proj" in name
            deviation = 0.5 * model.initializer_range if is_added else model.initializer_range
            if "norm" in name:
                assert (running.get_tensor(name) == 1).all(), name
            else:
                assert running.get_tensor(name).std() == pytest.approx(deviation, rel=0.05), name
