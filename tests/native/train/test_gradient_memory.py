"""Gradients reuse the memory of activations: less memory, equal bits, and nothing else is returned
as a gradient.
"""

import numpy as np
import pytest

import tilewise as tw
from support.faults import inject
from tilewise import models
from tilewise.core import PlanError, TaskFailed
from tilewise.models import llama
from tilewise.plan.memory import most_at_one_time

BATCH, SEQ = 4, 16
SIZES = {
    "vocab_size": 333,  # no multiple of a panel
    "hidden_size": 36,
    "intermediate_size": 75,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 18,
}


def make_graph(dtype="f32", **sizes):
    """A training step."""
    graph = tw.ComputeGraph("gradients")
    models.build_training_graph(graph, llama.LlamaConfig(**{**SIZES, **sizes}), BATCH, SEQ, dtype)
    graph.optimize(tw.optim.AdamW())
    return graph


def batch():
    """Random tokens."""
    ids = np.random.default_rng(3).integers(0, SIZES["vocab_size"], (BATCH, SEQ + 1), dtype=np.int32)
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


def bits_after(model, steps=3):
    """The bits of every gradient and parameter."""
    model.initialize(seed=1)
    for _ in range(steps):
        model.step(batch(), lr=1e-2)
    names = [f"{n}{end}" for n in model.parameter_names() for end in ("", ".grad")]
    return b"".join(model.get_tensor(name).tobytes() for name in names)


def test_activations_and_gradients_share_memory():
    """The reserved memory is the largest live size, and every gradient lives from its segment to the end."""
    plan = make_graph(num_hidden_layers=8).plan(workers_per_device=1)
    passing = [b for b in plan.placement(0).buffers if b.first >= 0 and b.category != "temporaries"]
    gradients = [b for b in passing if b.category == "gradients"]
    others = [b for b in passing if b.category != "gradients"]
    assert len(gradients) == len(plan.graph.of_kind("parameter"))
    assert {b.last for b in gradients} == {max(b.last for b in passing)}
    both = most_at_one_time(gradients) + most_at_one_time(others)
    assert plan.placement(0).regions["activations"] < 0.9 * both
    usage = plan.estimate_memory_usage()[0]
    assert usage["gradients"] >= sum(b.bytes for b in gradients) and usage["activations"] > 0
    assert sum(usage.values()) - usage["total"] - usage["offloaded"] == usage["total"]


def test_the_heads_gradient_is_computed_first():
    """Logits are freed before the last layer's backward pass begins."""
    graph = make_graph(num_hidden_layers=8).complete()
    backward = [op for op in graph.ops if op.phase == "backward"]
    first = next(i for i, op in enumerate(backward) if op.op == "call")
    logits = next(op for op in graph.ops if op.op == "cross_entropy").inputs[0]
    made = next(op for op in backward if op.op == "cross_entropy_backward").outputs[0]
    assert not any({logits, made} & {*op.inputs} for op in backward[first:])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_earlier_content_changes_no_bit(dtype, tied, tmp_path):
    """Not in the padding of panels either: with states in a file, gradients have their own memory,
    and are equal.
    """
    graph, states = make_graph(dtype, tie_word_embeddings=tied), {}
    for offload in ("none", "optimizer"):
        plan = graph.plan(offload=offload, workers_per_device=2)
        assert bool(plan.gradients_in_passing) == (offload == "none")
        with graph.instantiate(plan, offload_directory=tmp_path) as model:
            states[offload] = bits_after(model)
            again = bits_after(model, 2)
    assert states["none"] == states["optimizer"] != again


def test_a_gradient_is_readable_only_after_its_backward_pass():
    """After a forward pass its memory has activations, and after a failed run any content."""
    with make_graph().instantiate() as model:
        model.initialize(seed=1)
        name = f"{model.parameter_names()[0]}.grad"
        model.step(batch(), lr=1e-2)
        expected = model.get_tensor(name)
        model.set_tensor("tokens", batch()["tokens"])
        assert np.array_equal(model.get_tensor(name), expected)
        model.forward(**batch())
        for read in (model.get_tensor, model.differing_replicas, lambda n: model.get_tensor(n, copy=False)):
            with pytest.raises(PlanError, match="before activations of the next run reuse its memory"):
                read(name)
        assert np.isfinite(model.get_tensor("loss")).all()
        model.backward()
        assert np.isfinite(model.get_tensor(name)).all()
        of = model.plan.class_of(0)
        inject(model, "throw", 0, of.templates[of.calls["step"][0].template].instructions[0].label, 0)
        with pytest.raises(TaskFailed):
            model.step(batch(), lr=1e-2)
        with pytest.raises(PlanError, match="a failed run"):
            model.get_tensor(name)
