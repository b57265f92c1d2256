"""Numbers of devices and microbatches that are not powers of two equal one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_llama import batches, change_first, change_where, config, drop_partial

import tilewise as tw
from tilewise import models
from tilewise.session import verify_strategy

SEQ = 16
KV8 = {"num_key_value_heads": 8}
SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}


def training(k_splits, batch, **sizes):
    model = config(**sizes)
    graph = tw.ComputeGraph("llama", k_splits=k_splits)
    models.build_training_graph(graph, model, batch, SEQ, "f32")
    graph.optimize(tw.optim.AdamW())
    return model, graph


@pytest.mark.parametrize(
    ("mesh", "batch", "batch_splits", "accumulation"),
    [
        ({"dp": 3}, 12, 3, 1),
        ({"dp": 3}, 12, 12, 2),
        ({"dp": 5}, 10, 10, 1),
        ({}, 12, 12, 3),
        ({"dp": 2}, 10, 10, 5),  # devices share every microbatch: sums go in the storage shards in each
        ({"dp": 4}, 24, 12, 3),
        ({"dp": 2, "tp": 2}, 6, 6, 3),
    ],
    ids=str,
)
def test_widths_of_the_batch(mesh, batch, batch_splits, accumulation):
    """Three and five devices; three and five microbatches: a choice of batch splits."""
    model, graph = training(8, batch)
    steps = batches(model, 2, batch, SEQ)
    report = verify_strategy(graph, mesh, steps, batch_splits=batch_splits, accumulation=accumulation)
    assert report.equal, report.text


@pytest.mark.parametrize(
    ("mesh", "k_splits", "sizes"),
    [
        ({"tp": 3}, 12, KV8),  # heads 2, 3, 3; eight blocks of the vocabulary likewise
        ({"tp": 6}, 12, {"num_attention_heads": 12, "num_key_value_heads": 3}),  # shared KV heads
        ({"tp": 5}, 10, KV8),
        ({"dp": 2, "tp": 3}, 6, KV8),
        ({"tp": 2}, None, SMOLLM2),  # two KV heads on one device, one on the other
        ({"tp": 3, "pp": 2}, None, SMOLLM2),
    ],
    ids=str,
)
def test_widths_of_k_splits(mesh, k_splits, sizes):
    """Three, five and six devices with shares of unequal size: a choice of k splits."""
    model, graph = training(k_splits, 4, **sizes)
    report = verify_strategy(graph, mesh, batches(model, 2, 4, SEQ))
    assert report.equal, report.text


def swap_last(instruction):
    """The last two of three partial values change places in the tree."""
    operands = list(instruction.operands)
    operands[3], operands[4] = operands[4], operands[3]
    return replace(instruction, operands=tuple(operands))


@pytest.mark.parametrize("fault", [drop_partial, swap_last])
def test_fault_among_three_is_detected(fault):
    """A dropped and a swapped partial of three."""
    model, graph = training(8, 12)
    change = change_first("linear_dw:mlp.up_proj.weight/reduce_scatter", fault)
    report = verify_strategy(graph, {"dp": 3}, batches(model, 3, 12, SEQ), batch_splits=12, change=change)
    assert not report.equal


def lose_carry(instruction):
    """The stack of the earlier microbatches is ignored."""
    operands = list(instruction.operands)
    operands[1] = operands[1]._replace(null=True)
    ints = (0, *instruction.ints[1:])
    return replace(instruction, operands=tuple(operands), ints=ints)


def other_group(instruction):
    """A device's own part in place of its peer's."""
    operands = list(instruction.operands)
    operands[3] = operands[2]
    return replace(instruction, operands=tuple(operands))


@pytest.mark.parametrize("fault", [lose_carry, other_group])
def test_fault_among_shared_microbatches_is_detected(fault):
    """A lost carry and a part of the wrong device, after the first microbatch."""
    _, graph = training(8, 12)
    label = "linear_dw:mlp.up_proj.weight/reduce_scatter"
    change = change_where(lambda i: i.label == label and i.ints[0] > 0, fault)
    steps = batches(config(), 3, 12, SEQ)
    report = verify_strategy(graph, {"dp": 2}, steps, batch_splits=12, accumulation=3, change=change)
    assert not report.equal


def test_shared_microbatches_move_as_much_as_in_theory():
    """Each device reads half of every gradient in each microbatch, and half once at the end."""
    _, graph = training(8, 12)
    plan = graph.plan({"dp": 2}, batch_splits=12, accumulation=3)
    moved = plan.traffic()
    once = graph.plan({"dp": 2}, batch_splits=4).traffic()
    summed = [label for label in moved if label.endswith("/reduce_scatter") and label in once]
    assert len(summed) >= 10
    for label in summed:
        gathered = label.replace("/reduce_scatter", "/all_gather")
        assert moved[label] == [3 * v for v in once[label]], label
        assert moved[gathered] == once[gathered], gathered
