"""Work is done once per template, and planning scales with templates rather than layers."""

from __future__ import annotations

import re

import pytest

from pure.plans import plan_graph, with_update
from tilewise.graph import GraphBuilder
from tilewise.ir.counts import counts
from tilewise.models import build_training_graph
from tilewise.models.llama import LlamaConfig


def plan_llama(layers, axes, accumulation=1):
    """A small Llama's plan, without native code."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    builder = GraphBuilder("llama")
    build_training_graph(builder, config, 16, 32, "bf16")
    return plan_graph(with_update(builder), axes, accumulation)


@pytest.mark.parametrize("layers", [1, 7])
def test_work_is_done_once_per_template(layers):
    """One trace and gradient; a layout and a lowering for forward, backward and seven kinds of updates."""
    counts.reset()
    plan_llama(layers, {"dp": 2})
    assert (counts.traced, counts.differentiated, counts.sharded, counts.lowered) == (1, 1, 9, 9)


def test_accumulation_makes_variants_of_the_backward_only():
    """Four microbatches fold in 0, 1, 0 and 2 carries: the backward template has four variants, forward one."""
    counts.reset()
    plan_llama(3, {}, accumulation=4)
    assert (counts.traced, counts.differentiated, counts.sharded, counts.lowered) == (1, 1, 9, 12)


def test_step_has_one_schedule():
    """Forward and backward per microbatch, then the update; evaluation runs the forward pass alone."""
    plan = plan_llama(3, {}, accumulation=2)
    program = plan.class_of(0)
    names = [program.templates[c.template].name for c in program.calls["step"]]
    layers = [n.endswith(".backward") for n in names if n.startswith("tilewise.models")]
    assert layers == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3
    assert plan.programs == ("forward", "step")
    forward = [program.templates[c.template].name for c in program.calls["forward"]]
    assert [n.endswith(".backward") for n in forward if n.startswith("tilewise.models")] == [False] * 6


def test_explain_and_why():
    """The plan explains what it allocates, moves and why."""
    plan = plan_llama(2, {"dp": 2, "tp": 2})
    text = plan.explain()
    assert "dp=2,tp=2" in text and "optimizer" in text and "elements from peers" in text
    assert re.search(r"device 0, 1, 2, 3: \d+ tiles of \d+ tensors", text)
    assert re.search(r"decoder_layer: 2 uses of \d+ instructions, \d+ tasks each", text)
    assert re.search(r"decoder_layer.backward: 2 uses", text)
    assert "on tp" in plan.why("layers.1.mlp.up_proj.weight") and "replicated" in plan.why("norm.weight")
    with pytest.raises(ValueError, match="nonsense"):
        plan.why("nonsense")
