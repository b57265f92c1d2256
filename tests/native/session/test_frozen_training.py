"""Training with frozen parameters: their bytes, their memory, and what a state contains."""

import hashlib

import numpy as np
import pytest

import tilewise as tw
from tilewise import models
from tilewise.checkpoint.adapters import LoraConfig
from tilewise.core import CheckpointError, PlanError
from tilewise.models.llama import LlamaConfig

MODEL = LlamaConfig(128, 32, 64, 2, num_attention_heads=4, num_key_value_heads=2)


def graph_of(dtype="bf16", *, lora=True):
    layout = models.lora_layout(MODEL, LoraConfig(r=4, dropout=0.1))
    graph = tw.ComputeGraph("m", adapters=layout.adapters if lora else None)
    models.build_training_graph(graph, MODEL, 4, 8, dtype)
    if lora:
        layout.freeze_base(graph)
    else:
        graph.freeze_parameters("embed*", "layers.0.*")
    graph.optimize(tw.optim.AdamW())
    return graph


def batch(step):
    tokens = np.random.default_rng(step).integers(0, 128, (4, 9)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def digests(model, names):
    return {n: hashlib.sha256(np.array(model.get_tensor(n, copy=False)).tobytes()).hexdigest() for n in names}


@pytest.mark.parametrize("lora", [True, False])
def test_frozen_bytes_do_not_change(lora):
    """After 100 steps every frozen parameter has its bytes, and every other one has changed."""
    graph = graph_of(lora=lora)
    with graph.instantiate(graph.plan()) as model:
        model.initialize(1)
        before = digests(model, model.parameter_names())
        for step in range(100):
            model.step(batch(step), 1e-2)
        after = digests(model, model.parameter_names())
        changed = [name for name in before if before[name] != after[name]]
        assert changed == model.trainable_names() != model.parameter_names()


@pytest.mark.parametrize("dtype, own", [("bf16", 2), ("f32", 4)])
def test_memory_is_the_formula_to_the_byte(dtype, own):
    """A frozen element takes its own bytes; a trained one also 4 of gradient, 8 of moments, and 4 of master in bf16."""
    graph = graph_of(dtype)
    plan = graph.plan(checkpoints=True)
    frozen = {*plan.graph.frozen}
    sizes = {t.id: int(np.prod(t.shape)) for t in plan.graph.of_kind("parameter")}
    trained = sum(size for t, size in sizes.items() if t not in frozen)
    panels = {t.id: -(-t.shape[0] // 32) * 32 * t.shape[1] if len(t.shape) == 2 else t.shape[0]
              for t in plan.graph.of_kind("parameter")}  # fmt: skip
    in_panels = sum(size for t, size in panels.items() if t not in frozen)
    (usage,) = plan.estimate_memory_usage()
    align = lambda n: -(-n // 64) * 64  # noqa: E731  (buffers begin at cache lines)
    assert usage["parameters"] == sum(align(own * n) for n in panels.values())
    states = 3 if dtype == "bf16" else 2
    assert usage["optimizer"] == sum(align(4 * n) * states for t, n in panels.items() if t not in frozen)
    assert usage["gradients"] >= 4 * trained and usage["gradients"] < 4 * in_panels + 64 * len(panels)
    assert sum(plan.checkpoint_bytes) == 12 * trained
    names = [t.spec.name for t in plan.graph.of_kind("state")]
    assert all("lora_" in name for name in names) and names


def test_state_dict_has_what_training_changes():
    """A state has adapters and moments alone; loading it on the same base continues with the same bits."""
    graph = graph_of()
    plan = graph.plan()
    with graph.instantiate(plan) as model, graph.instantiate(plan) as other:
        for one in (model, other):
            one.initialize(3)
        for step in range(3):
            model.step(batch(step), 1e-2)
        state = model.state_dict()
        assert all("lora_" in name or name == "optimizer.step" for name in state)
        assert {*model.copy_state()} == {*state}
        other.load_state_dict(state)
        assert other.step_count == 3
        results = [one.step(batch(3), 1e-2) for one in (model, other)]
        assert results[0] == results[1]
        for name in model.parameter_names():
            assert np.array_equal(model.get_tensor(name), other.get_tensor(name)), name
        with pytest.raises(CheckpointError, match="embed_tokens"):
            other.load_state_dict({**state, "embed_tokens.weight": model.get_tensor("embed_tokens.weight")})


def test_plan_of_other_frozen_parameters_is_rejected(tmp_path):
    """A plan file keeps the frozen parameters, and a graph that freezes others rejects it."""
    graph = graph_of(lora=False)
    path = tmp_path / "m.plan"
    graph.plan().save(path)
    plan = type(graph.plan()).load(path)
    assert plan.graph.frozen == graph.freeze().frozen
    graph.instantiate(plan).close()
    graph.freeze_parameters("layers.1.mlp.*")
    with pytest.raises(PlanError):
        graph.instantiate(plan)
