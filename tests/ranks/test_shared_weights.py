"""A weight used many times: every use has its own tree over the batch, the totals are added last, head first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_llama import change_first, halve_batch_splits

import tilewise as tw
from pure.plan.test_templates import plan_graph
from tilewise.core.errors import PlanError
from tilewise.core.mesh import DeviceMesh
from tilewise.graph import fuse_into_table_gradients
from tilewise.session import verify_strategy

BATCH, SEQ, VOCAB, WIDTH = 8, 6, 72, 20
SMALL_VOCAB = 40  # with more tokens than rows, gradients of rows cross as those of weights do
CASES = [
    ({}, 2, "f32", VOCAB),
    ({"dp": 2}, 1, "bf16", VOCAB),
    ({"dp": 2}, 1, "f32", SMALL_VOCAB),
    ({"dp": 2}, 2, "f32", VOCAB),
    ({"tp": 2}, 1, "f32", VOCAB),
    ({"dp": 2, "tp": 2}, 2, "bf16", 20),
    ({"fsdp": 2}, 1, "f32", SMALL_VOCAB),
    ({"fsdp": 2}, 1, "bf16", VOCAB),
    ({"dp": 2, "fsdp": 2}, 1, "f32", VOCAB),
]


@tw.layer
def twice(graph, x, *, width):
    """Both weight and gamma are used twice in one layer."""
    w = graph.parameter([width, width], name="w")
    gamma = graph.parameter([width], name="gamma")
    y = graph.matmul(graph.rms_norm(x, gamma, eps=1e-5), w, trans_b=True)
    return graph.add(x, graph.matmul(graph.rms_norm(y, gamma, eps=1e-5), w, trans_b=True))


def build(dtype="f32", vocab_size=VOCAB):
    """Three products and two embeddings with one table, and two layers that use their weights twice."""
    batch, vocab = tw.BATCH, tw.DimLabel("vocab")
    graph = tw.ComputeGraph("shared")
    ids, more, labels = (
        graph.input([BATCH, SEQ], "i32", name=n, labels=[batch, None], storage="scalars")
        for n in ("ids", "more", "labels")
    )
    table = graph.parameter([vocab_size, WIDTH], dtype, name="table", labels=[vocab, None])
    h = graph.add(graph.embedding(ids, table), graph.embedding(more, table))
    if dtype == "f32":  # the layer's own parameters are fp32
        h = twice(graph, twice(graph, h, path="one", width=WIDTH), path="two", width=WIDTH)
    inner = graph.silu(graph.matmul(h, table, trans_b=True))
    h = graph.add(h, graph.matmul(inner, table))
    loss, _ = graph.mean_cross_entropy(graph.matmul(h, table, trans_b=True), labels)
    graph.loss(loss)
    graph.optimize(tw.optim.AdamW())
    return graph


def batches(steps, vocab_size=VOCAB):
    """Random labels, and few different ids: a batch split adds several rows to one of the table."""
    rng = np.random.default_rng(4)
    bounds = {"ids": 3, "more": 2, "labels": vocab_size}
    return [
        {n: rng.integers(0, high, (BATCH, SEQ)).astype(np.int32) for n, high in bounds.items()}
        for _ in range(steps)
    ]


def torch_loss(p, data):
    """The same in PyTorch."""

    def norm(t, gamma):
        return t * (t.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gamma

    ids, more, labels = (torch.tensor(data[n]).long() for n in ("ids", "more", "labels"))
    h = p["table"][ids] + p["table"][more]
    for layer in ("one", "two"):
        w, gamma = p[f"{layer}.w"], p[f"{layer}.gamma"]
        h = h + norm(norm(h, gamma) @ w.T, gamma) @ w.T
    h = h + torch.nn.functional.silu(h @ p["table"].T) @ p["table"]
    return torch.nn.functional.cross_entropy((h @ p["table"].T).flatten(0, 1), labels.flatten())


def test_gradients_against_pytorch():
    """Every gradient within 1e-5 of its largest element."""
    graph, (data,) = build(), batches(1)
    with graph.instantiate() as model:
        model.initialize(seed=1, scale=0.5)
        batch_splits = {
            n: torch.tensor(model.get_tensor(n), requires_grad=True) for n in model.parameter_names()
        }
        loss = torch_loss(batch_splits, data)
        loss.backward()
        assert abs(model.step(data, 0.0).loss - loss.item()) < 1e-5 * abs(loss.item())
        for n, split in batch_splits.items():
            expected = split.grad.numpy()
            assert np.abs(model.get_tensor(f"{n}.grad") - expected).max() <= 1e-5 * np.abs(expected).max(), n


@pytest.mark.parametrize("axes,accumulation,dtype,vocab_size", CASES, ids=str)
def test_equal_to_one_device(axes, accumulation, dtype, vocab_size):
    """Three steps over meshes and microbatches equal one device to the bit."""
    data = batches(3, vocab_size)
    report = verify_strategy(build(dtype, vocab_size), DeviceMesh(axes), data, accumulation=accumulation)
    assert report.equal, report.text


@pytest.mark.parametrize("label", ["linear_dw:table", "embedding_dw:table", "linear_dw:w"])
def test_other_tree_is_detected(label):
    """A use whose batch splits are cut otherwise on one device is detected."""
    change = change_first(label, halve_batch_splits, kernel="matmul_dw_f32")
    assert not verify_strategy(build(), DeviceMesh({"dp": 2}), batches(2), change=change).equal


@pytest.mark.parametrize(
    "axes,vocab_size",
    [
        ({}, VOCAB),
        ({"dp": 2}, SMALL_VOCAB),
        ({"tp": 2}, VOCAB),
        ({"fsdp": 2}, VOCAB),
        ({"fsdp": 2}, SMALL_VOCAB),
    ],
    ids=str,
)
def test_rows_of_a_table_are_added_to_its_other_gradient(axes, vocab_size):
    """In one microbatch no op adds the totals of embeddings, and they have no memory of their own."""
    graph = build(vocab_size=vocab_size)
    graph.set_distribution(tw.DistributionStrategy.for_mesh(DeviceMesh(axes)))
    plan = graph.plan(axes)
    added = [op for op in plan.graph.ops if op.op == "embedding_dw"]
    assert len(added) == 2 and all(op.inputs[3] is not None for op in added)
    assert (
        added[1].inputs[3] == added[0].outputs[0] and added[1].outputs[0] == plan.graph.outputs["table.grad"]
    )
    assert not any(
        b.key[0] == "tensor" and b.key[1] == added[0].outputs[0] for b in plan.placement(0).buffers
    )


def test_missing_addition_of_a_table_gradient_is_detected():
    """On one device rows are added by the op that scatters them."""

    def without_carry(i):
        return replace(i, operands=i.operands[:-1], ints=(i.ints[0], i.ints[1] - 1, *i.ints[2:]))

    alone = change_first("embedding_dw:table", without_carry)
    assert not verify_strategy(build(), DeviceMesh({}), batches(2), change=alone).equal


def without_residual(instruction):
    """A reduction that omits the addition after the tree's root."""
    out, residual, *parts = instruction.operands
    return replace(instruction, operands=(out, residual._replace(null=True), *parts))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"fsdp": 2}, {"dp": 2, "fsdp": 2}], ids=str)
def test_missing_addition_of_a_reduced_sum_is_detected(axes):
    """On several devices the reduction adds: the comparison detects one that does not."""
    forget = change_first("embedding_dw:table/reduce_scatter", without_residual)
    graph, data = build(vocab_size=SMALL_VOCAB), batches(2, SMALL_VOCAB)
    assert not verify_strategy(graph, DeviceMesh(axes), data, change=forget).equal


def test_microbatches_have_their_own_sums():
    """No part of a batch is added to a whole gradient."""
    graph = fuse_into_table_gradients(build().complete())
    plan_graph(graph, {})
    with pytest.raises(PlanError, match="no part of the batch may depend on a total"):
        plan_graph(graph, {}, accumulation=2)


def test_totals_are_added_head_first():
    """The additions come after all totals, in reverse order of use, and overwrite the first."""
    graph = build().complete()
    totals = [op for op in graph.ops if op.op in ("linear_dw", "embedding_dw")]
    assert [op.op for op in totals] == ["linear_dw"] * 3 + ["embedding_dw"] * 2
    adds = [op for op in graph.ops if op.phase == "backward" and op.op == "add"][-4:]
    assert adds[0].inputs == (totals[0].outputs[0], totals[1].outputs[0])
    for add, total, before in zip(adds[1:], totals[2:], adds):
        assert add.inputs == (before.outputs[0], total.outputs[0])
    assert graph.outputs["table.grad"] == adds[-1].outputs[0]
    plan = build().plan({"dp": 2}, accumulation=2)
    table = {t.id: plan.outside.get(t.id) for t in plan.graph.tensors}
    assert (
        table[adds[-1].outputs[0]] and not table[adds[0].outputs[0]]
    )  # one memory holds all totals and their sums
    loss = 1  # a sum over the batch as well
    gradients = [b for b in plan.placement(0).buffers if b.category == "gradients"]
    assert len(gradients) == len(plan.graph.of_kind("parameter")) + loss


def test_sums_of_totals_run_once():
    """With four microbatches, four additions of totals run once each; every use has its own carries."""
    plan = build().plan({}, accumulation=4)
    program = plan.class_of(0)
    runs = [
        i.label
        for call in program.calls["step"]
        for i in program.templates[call.template].instructions
        if i.kernel == "add_f32" and i.priority == 0 and i.label == "add"
    ]
    once = build().plan({}, accumulation=1).class_of(0)
    whole = [
        i.label
        for call in once.calls["step"]
        for i in once.templates[call.template].instructions
        if i.kernel == "add_f32" and i.label == "add"
    ]
    late = 4 + 2 * 2  # of the table, and of weight and gamma in two layers
    scattered = 2  # embeddings add what they scatter themselves then
    assert len(runs) == 4 * (len(whole) + scattered - late) + late
    carries = [b for b in plan.placement(0).buffers if b.key[0] == "carry"]
    assert len({b.key[1:3] for b in carries}) == 5 + 2 * 4 + 1  # uses of the table; of layers; the loss
