"""Sums over long sequences: a tree over sequence splits inside every batch split."""

from __future__ import annotations

import numpy as np
import pytest
from small_llama import batches, config, training_graph

import tilewise as tw
from tilewise import models
from tilewise.core.mesh import DeviceMesh
from tilewise.session import verify_strategy

BATCH, SEQ, K_SPLITS = 4, 200, 8


def tree(terms):
    """The left-complete tree, from the top; None is an empty slot."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    left, right = tree(terms[:half]), tree(terms[half:])
    return right if left is None else left if right is None else left + right


def in_order(values):
    """fp32, one after the other."""
    total = np.float32(0)
    for value in values:
        total = np.float32(total + value)
    return total


def sum_by_hand(x, batch_splits):
    """Atoms of 64 positions in k splits; a batch split's sequences in order, then k splits, then batch splits."""
    atoms = -(-SEQ // 64)
    sums = []
    for split in np.split(x, batch_splits):
        slots = [None] * K_SPLITS
        for c in range(K_SPLITS):
            begin, end = c * atoms // K_SPLITS * 64, (c + 1) * atoms // K_SPLITS * 64
            if end > begin:
                slots[c] = in_order(split[:, begin:end].reshape(-1))
        sums.append(tree(slots))
    return tree(sums)


@pytest.mark.parametrize("batch_splits", [1, 2, 4])
def test_sum_equals_an_explicit_tree(batch_splits):
    """To the bit, in NumPy in fp32; one run over all tokens of a batch split has other bits."""
    g = tw.ComputeGraph("sum", k_splits=K_SPLITS)
    x = g.input([BATCH, SEQ, 1], name="x", labels=[tw.BATCH, None, None])
    g.output(g.sum(x), "total")
    values = np.random.default_rng(batch_splits).standard_normal((BATCH, SEQ, 1), np.float32)
    with g.instantiate(g.plan({}, batch_splits=batch_splits)) as model:
        model.forward(x=values)
        total = model.get_tensor("total")[0]
    assert total == sum_by_hand(values, batch_splits)
    assert total != tree([in_order(split.reshape(-1)) for split in np.split(values, batch_splits)])


@pytest.mark.parametrize("axes,accumulation", [({}, 4), ({"dp": 2}, 2), ({"tp": 2}, 1)], ids=str)
def test_training_on_long_sequences_equals_one_device(axes, accumulation):
    """Loss, gradients of norms and all parameters, for any division of the batch."""
    model = config(max_position_embeddings=SEQ, vocab_size=128)
    graph = training_graph(model, "f32", BATCH, SEQ)
    report = verify_strategy(
        graph, DeviceMesh(axes), batches(model, 2, BATCH, SEQ), accumulation=accumulation
    )
    assert report.equal, report.text


def test_other_cut_of_the_sequence_is_detected():
    """A loss whose batch splits are one k split on one device differs from the other devices' loss."""
    model = config(max_position_embeddings=SEQ, vocab_size=128)
    first, second = (
        run_once(model, graph) for graph in (training_graph(model, "f32", BATCH, SEQ), one_split(model))
    )
    assert (first != second).any(), "gamma's gradient must depend on the cut"


def one_split(model):
    """The same graph with sums that are not cut."""
    graph = tw.ComputeGraph("llama", k_splits=1)
    models.build_training_graph(graph, model, BATCH, SEQ, "f32")
    graph.optimize(tw.optim.AdamW())
    return graph


def run_once(model, graph):
    with graph.instantiate() as running:
        running.initialize(0)
        running.step(batches(model, 1, BATCH, SEQ)[0], 1e-3)
        return running.get_tensor("norm.weight.grad")
