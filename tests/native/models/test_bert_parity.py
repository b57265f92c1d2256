"""BERT against transformers: vectors of tokens, masked-language loss, every gradient, files in both directions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import tilewise as tw
from tilewise import models
from tilewise.checkpoint import open_weights, save_pretrained, write_weights
from tilewise.core import CheckpointError

BATCH, SEQ = 3, 20
LENGTHS = np.array([20, 7, 1], np.int32)


def their_model(**changes):
    """A small seeded encoder with its head."""
    sizes = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    torch.manual_seed(2)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def inputs():
    """Texts of three lengths and both segments."""
    generator = np.random.default_rng(4)
    labels = generator.integers(0, 131, (BATCH, SEQ)).astype(np.int32)
    hidden = (generator.random((BATCH, SEQ)) < 0.7) | (np.arange(SEQ) >= LENGTHS[:, None])
    return {
        "tokens": generator.integers(1, 131, (BATCH, SEQ)).astype(
            np.int32
        ),  # there, 0 is padding and never learns
        "token_types": generator.integers(0, 2, (BATCH, SEQ)).astype(np.int32),
        "lengths": LENGTHS,
        "labels": np.where(hidden, np.int32(-100), labels),
    }


def theirs_of(arrays):
    """The same for transformers."""
    tensors = {name: torch.tensor(value, dtype=torch.long) for name, value in arrays.items()}
    return {
        "input_ids": tensors["tokens"],
        "token_type_ids": tensors["token_types"],
        "attention_mask": (torch.arange(SEQ)[None] < tensors["lengths"][:, None]).long(),
    }


def encode(directory, dtype="f32", mesh=None):
    """Our vectors of all tokens."""
    config = models.open(directory)
    graph = tw.ComputeGraph("bert")
    models.build_encoding_graph(graph, config, BATCH, SEQ, dtype)
    arrays = inputs()
    arrays.pop("labels")
    with graph.instantiate(graph.plan(mesh or {"tp": 1})) as model:
        model.load_parameters(models.open_weights(directory, config, with_head=False))
        model.forward(**arrays)
        return np.array(model.get_tensor("hidden"), np.float32)


@pytest.mark.parametrize(
    "changes", [{}, {"hidden_act": "gelu_new", "num_attention_heads": 6}, {"hidden_act": "relu"}], ids=str
)
def test_vectors(tmp_path, changes):
    """Every token except padding, within 1e-4 of the largest; with and without a head in the files."""
    model = their_model(**changes)
    with torch.no_grad():
        expected = model.bert(**theirs_of(inputs())).last_hidden_state.numpy()
    is_text = np.arange(SEQ) < LENGTHS[:, None]
    for part, name in ((model, "whole"), (model.bert, "encoder")):
        part.save_pretrained(tmp_path / name)
        vectors = encode(tmp_path / name)
        assert np.abs(vectors - expected)[is_text].max() <= 1e-4 * np.abs(expected).max()


def test_loss_and_gradients(tmp_path):
    """The loss and every gradient within 1e-4 of the largest; dp and tp change no bit."""
    model = their_model()
    model.save_pretrained(tmp_path)
    arrays = inputs()
    loss = model(**theirs_of(arrays), labels=torch.tensor(arrays["labels"], dtype=torch.long)).loss
    loss.backward()
    config = models.open(tmp_path)
    graph = tw.ComputeGraph("bert")
    models.build_training_graph(graph, config, BATCH, SEQ, "f32")
    with graph.instantiate() as ours:
        ours.load_parameters(models.open_weights(tmp_path, config))
        ours.forward(**arrays)
        ours.backward()
        assert abs(float(ours.get_tensor("loss")[0]) - loss.item()) <= 1e-4 * abs(loss.item())
        names = [name for name, _ in models.parameter_shapes(config)]
        gradients = {name: np.array(ours.get_tensor(f"{name}.grad")) for name in names}
    assert {n: g.shape for n, g in gradients.items()} == dict(models.parameter_shapes(config))
    stored = {name: np.asarray(g) for name, g in models.stored_tensors(config, gradients)}
    expected = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    assert stored.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(np.abs(gradient).max(), 1e-3)
        assert np.abs(stored[name] - gradient).max() <= 1e-4 * scale, name


def test_files_both_ways(tmp_path):
    """transformers opens our files, with every tensor to the bit."""
    model = their_model()
    model.save_pretrained(tmp_path / "theirs")
    config = models.open(tmp_path / "theirs")
    weights = models.open_weights(tmp_path / "theirs", config)
    save_pretrained(tmp_path / "ours", config.to_dict(), models.stored_tensors(config, weights))
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_names_of_older_files(tmp_path):
    """Early BERT files name gains and biases of norms gamma and beta; training needs a head that encoders lack."""
    model = their_model()
    model.save_pretrained(tmp_path)
    expected = encode(tmp_path)
    files = open_weights(tmp_path)
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def renamed(name):
        return next((name.removesuffix(new) + old for new, old in older.items() if name.endswith(new)), name)

    write_weights(tmp_path, [(renamed(name), np.asarray(tensor)) for name, tensor in files.items()])
    assert np.array_equal(encode(tmp_path), expected)
    model.bert.save_pretrained(tmp_path / "encoder")
    config = models.open(tmp_path / "encoder")
    with pytest.raises(CheckpointError, match=r"cls\.predictions"):
        models.open_weights(tmp_path / "encoder", config)
