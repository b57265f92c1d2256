"""Every strategy equals one device to the bit, and the comparison detects planted faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_llama import (
    batches,
    change_first,
    config,
    drop_partial,
    halve_batch_splits,
    merge_splits,
    skip,
    swap_partials,
    training_graph,
)

from tilewise.core.mesh import DeviceMesh
from tilewise.session import verify_strategy
from tilewise.session.verify import first_difference

STRATEGIES = [
    ("bf16", {}, 4),
    ("f32", {"dp": 2}, 4),
    ("bf16", {"dp": 4}, 1),
    ("bf16", {"tp": 2}, 1),
    ("f32", {"tp": 4}, 1),
    ("f32", {"dp": 2, "tp": 2}, 1),
    ("bf16", {"dp": 2, "tp": 2}, 4),
]
LARGE = [
    (dtype, *mesh) for dtype in ("f32", "bf16") for mesh in (({"dp": 4}, 4), ({"tp": 4}, 4), ({"tp": 8}, 1))
]


@pytest.mark.parametrize(
    "dtype,axes,accumulation",
    [*STRATEGIES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)],
    ids=str,
)
def test_training_equals_one_device(dtype, axes, accumulation):
    """Loss, every gradient and, after four steps, every parameter and moment."""
    model = config()
    report = verify_strategy(
        training_graph(model, dtype), DeviceMesh(axes), batches(model, 4), accumulation=accumulation
    )
    assert report.equal, report.text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_two_kv_heads_over_four_devices(dtype):
    """KV heads are replicated when there are more devices than heads; their gradients still equal one device's."""
    model = config(num_key_value_heads=2, tie_word_embeddings=False)
    for axes in ({"tp": 4}, {"dp": 2, "tp": 4}):
        report = verify_strategy(training_graph(model, dtype), DeviceMesh(axes), batches(model, 4))
        assert report.equal, report.text


@pytest.mark.parametrize(
    "dtype,sizes",
    [
        ("bf16", {"vocab_size": 330, "intermediate_size": 100}),  # shards of unequal size, edge panels
        # heads that do not fill the k splits
        ("f32", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}),
        ("bf16", {"num_hidden_layers": 1, "hidden_size": 40, "num_key_value_heads": 8}),
        # unequal numbers of tiles
        ("f32", {"num_hidden_layers": 1, "vocab_size": 2112, "tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_odd_sizes(dtype, sizes):
    """Edge panels, empty k splits and shards of unequal size change nothing."""
    model = config(**sizes)
    report = verify_strategy(training_graph(model, dtype), DeviceMesh({"dp": 2, "tp": 2}), batches(model, 2))
    assert report.equal, report.text


def states_with_workers(dtype, axes, workers, change=lambda plan: plan):
    model = config()
    graph = training_graph(model, dtype)
    plan = change(graph.plan(axes, workers_per_device=workers))
    with graph.instantiate(plan) as running:
        running.initialize(0)
        for batch in batches(model, 3):
            running.step(batch, 1e-3)
        return running.state_dict()


def first_of(a, b):
    return next((d for n in a if (d := first_difference(n, a[n], b[n]))), None)


@pytest.mark.parametrize("dtype,axes", [("f32", {}), ("bf16", {"dp": 2, "tp": 2})], ids=str)
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_workers_change_no_bit(dtype, axes, workers):
    """One, two or three workers per device."""
    assert first_of(states_with_workers(dtype, axes, 1), states_with_workers(dtype, axes, workers)) is None


def test_fault_with_other_workers_is_detected():
    """The twin: one moved border."""
    change = change_first("linear_dw:self_attn.q_proj", halve_batch_splits, device=-1)
    assert first_of(states_with_workers("f32", {}, 1), states_with_workers("f32", {}, 2, change)) is not None


FAULTS = [
    ("f32", {"tp": 2}, 1, "o_proj.weight/reduce_scatter", drop_partial),
    ("bf16", {"tp": 4}, 1, "o_proj.weight/reduce_scatter", swap_partials),
    ("f32", {"tp": 2}, 1, "linear:mlp.down_proj", merge_splits),
    ("bf16", {"dp": 2}, 1, "linear_dw:mlp.up_proj.weight/reduce_scatter", drop_partial),
    ("f32", {"dp": 4}, 1, "linear_dw:mlp.up_proj.weight/reduce_scatter", swap_partials),
    ("f32", {}, 4, "linear_dw:self_attn.q_proj", halve_batch_splits),
    ("f32", {"dp": 2, "tp": 2}, 1, "embed_tokens.weight/reduce_scatter", drop_partial),
]


@pytest.mark.parametrize(
    "dtype,axes,accumulation,label,fault", FAULTS, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_planted_faults_are_detected(dtype, axes, accumulation, label, fault):
    """Dropped or swapped partial values and moved borders make the comparison fail."""
    model = config()
    report = verify_strategy(
        training_graph(model, dtype),
        DeviceMesh(axes),
        batches(model, 12),  # bf16 hides most changes of order: some steps are needed to see one
        accumulation=accumulation,
        change=change_first(label, fault),
    )
    assert not report.equal
    assert "NOT equal" in report.text and "on one device" in report.text


@pytest.mark.parametrize(
    "axes,sizes,label",
    [
        ({"tp": 4}, {"num_key_value_heads": 2}, "attention_backward/reduce_scatter"),
        (
            {"dp": 2, "tp": 2},
            {"vocab_size": 330, "intermediate_size": 100},
            "mlp.down_proj.weight/reduce_scatter",
        ),
    ],
    ids=["dK of replicas", "a shard that fills no panel"],
)
def test_dropped_partial_of_odd_shards_is_detected(axes, sizes, label):
    """Of KV heads that several devices have, and of a shard that fills no panel."""
    model, change = config(**sizes), change_first(label, drop_partial)
    report = verify_strategy(training_graph(model, "f32"), DeviceMesh(axes), batches(model, 2), change=change)
    assert not report.equal


def gather_own(instruction):
    """A device uses its own part where it should fetch the peer's."""
    mine, theirs, *rest = instruction.operands
    return replace(instruction, operands=(mine, theirs._replace(group=-1, member=0), *rest))


REPLICA_FAULTS = [
    ({"dp": 2}, "linear_dw:mlp.up_proj.weight/all_gather", gather_own),
    ({"dp": 4}, "linear_dw:mlp.up_proj.weight/all_gather", skip),
    ({"tp": 4}, "rms_norm_backward:norm.weight", skip),
    ({"dp": 2, "tp": 2}, "update", skip),
]


@pytest.mark.parametrize("axes,label,fault", REPLICA_FAULTS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_different_replicas_are_detected(axes, label, fault):
    """A fault on the last device alone, from which no whole tensor is read."""
    model = config()
    report = verify_strategy(
        training_graph(model, "f32"),
        DeviceMesh(axes),
        batches(model, 1),
        change=change_first(label, fault, -1),
    )
    assert not report.equal and "NOT equal" in report.text


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_missing_broadcast_is_detected(axes):
    """Loading lays a part out once; a device without its copy is detected."""
    model = config()

    forget = change_first("broadcast", skip, -1, "broadcast")
    report = verify_strategy(training_graph(model, "f32"), DeviceMesh(axes), batches(model, 1), change=forget)
    assert not report.equal


def test_difference_of_one_bit_is_named():
    """The report names index and both values; equal bits give none, and -0 is not 0."""
    a = np.zeros((2, 3), np.float32)
    b = a.copy()
    assert first_difference("w", a, b) is None
    b[1, 2] = -0.0
    assert first_difference("w", a, b) == "w[1, 2]: 0.0 on one device, -0.0 over the mesh (1 of 6 differ)"
    assert (
        first_difference("w", a, a.astype(np.float64)[:1])
        == "w: float32[2, 3] on one device, float64[1, 3] over the mesh"
    )
