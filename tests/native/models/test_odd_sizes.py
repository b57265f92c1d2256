"""Extreme sizes against transformers: one of everything, windows of one, heads of two, odd widths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw
from native.models.families import Case, ids_of, our_logits, their_logits, training_graph
from tilewise import models

ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 2}
ODD = [
    Case("vocabulary of one", "llama", {"vocab_size": 1}),
    Case("widths of one", "llama", {**ONE_HEAD, "hidden_size": 1, "intermediate_size": 1}),
    Case("heads of two", "qwen3", {"head_dim": 2}),
    Case("window of one", "mistral", {"head_dim": 2, "sliding_window": 1}),
    Case("windows of one, heads of six", "gemma2", {"head_dim": 6, "sliding_window": 1}),
    Case("one sliding layer", "gemma3", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
    Case("heads of 512", "qwen3", {"head_dim": 512, "num_attention_heads": 3, "num_key_value_heads": 1}),
    Case("one rotated pair", "phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.13}}),
    Case("no rotated layer", "smollm3", {"no_rope_layer_interval": 1}),
    Case("norms of one head", "olmo2", {**ONE_HEAD, "hidden_size": 3}),
    Case("odd heads and widths", "gpt2", {"n_embd": 15, "n_head": 5, "n_inner": 7}),
    Case("unscaled scores", "gpt2", {"n_positions": 21, "scale_attn_weights": False}),
    Case("uncapped", "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
]


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_odd_sizes(case, tmp_path):
    """Logits of a text, and of a single token in a context of one, within 1e-4; the loss of one
    step on one token.
    """
    model = case.model()
    model.save_pretrained(tmp_path)
    config = models.open(tmp_path)
    for count in (20, 1):
        ids = ids_of(count, config.vocab_size)
        theirs = their_logits(model, ids)
        assert np.abs(our_logits(tmp_path, ids) - theirs).max() <= 1e-4 * np.abs(theirs).max()
    label = config.vocab_size // 2
    loss = torch.nn.functional.cross_entropy(torch.tensor(theirs[-1:]), torch.tensor([label])).item()
    graph = training_graph(config, 1, 1)
    graph.optimize(tw.optim.AdamW())
    with graph.instantiate(graph.plan(batch_splits=1)) as instance:
        instance.load_parameters(models.open_weights(tmp_path, config))
        batch = {"tokens": np.array([ids], np.int32), "labels": np.array([[label]], np.int32)}
        assert instance.step(batch, lr=1e-3).loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
