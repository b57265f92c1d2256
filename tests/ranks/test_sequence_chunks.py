"""Sums over long sequences: a tree over sequence chunks inside every leaf, equal however the batch is cut."""

from __future__ import annotations

import numpy as np
import pytest
from small_llama import batches, config, training_graph

import tilewise as tw
from tilewise import models
from tilewise.core.mesh import DeviceMesh
from tilewise.session import verify_strategy

BATCH, SEQ, CHUNKS = 4, 200, 8


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


def sum_by_hand(x, leaves):
    """Atoms of 64 positions in chunks, a leaf's sequences in order inside each, then chunks, then leaves."""
    atoms = -(-SEQ // 64)
    sums = []
    for leaf in np.split(x, leaves):
        slots = [None] * CHUNKS
        for c in range(CHUNKS):
            begin, end = c * atoms // CHUNKS * 64, (c + 1) * atoms // CHUNKS * 64
            if end > begin:
                slots[c] = in_order(leaf[:, begin:end].reshape(-1))
        sums.append(tree(slots))
    return tree(sums)


@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_a_sum_is_the_written_out_tree(leaves):
    """To the bit against NumPy in fp32; one run over all tokens of a leaf has other bits."""
    g = tw.ComputeGraph("sum", reduction_chunks=CHUNKS)
    x = g.input([BATCH, SEQ, 1], name="x", labels=[tw.BATCH, None, None])
    g.output(g.sum(x), "total")
    values = np.random.default_rng(leaves).standard_normal((BATCH, SEQ, 1), np.float32)
    with g.instantiate(g.plan({}, leaves=leaves)) as model:
        model.forward(x=values)
        found = model.get_tensor("total")[0]
    assert found == sum_by_hand(values, leaves)
    assert found != tree([in_order(leaf.reshape(-1)) for leaf in np.split(values, leaves)])


@pytest.mark.parametrize(
    "axes,accumulation", [({}, 2), ({}, 4), ({"dp": 2}, 1), ({"dp": 2}, 2), ({"tp": 2}, 1)], ids=str
)
def test_training_on_long_sequences_equals_one_device(axes, accumulation):
    """Loss, gradients of norms and all parameters, whatever shares or cuts the batch."""
    model = config(max_position_embeddings=SEQ, vocab_size=128)
    graph = training_graph(model, "f32", BATCH, SEQ)
    report = verify_strategy(
        graph, DeviceMesh(axes), batches(model, 2, BATCH, SEQ), accumulation=accumulation
    )
    assert report.equal, report.text


def test_another_cut_of_the_sequence_shows():
    """A loss whose leaves are one chunk on one device differs from the other devices' loss."""
    model = config(max_position_embeddings=SEQ, vocab_size=128)
    first, second = (
        run_once(model, graph) for graph in (training_graph(model, "f32", BATCH, SEQ), one_chunk(model))
    )
    assert (first != second).any(), "gamma's gradient must depend on the cut"


def one_chunk(model):
    """The same graph with sums that are not cut."""
    graph = tw.ComputeGraph("llama", reduction_chunks=1)
    models.build_training_graph(graph, model, BATCH, SEQ, "f32")
    graph.optimize(tw.optim.AdamW())
    return graph


def run_once(model, graph):
    """The gradient of the last norm after one step."""
    with graph.instantiate() as running:
        running.initialize(0)
        running.step(batches(model, 1, BATCH, SEQ)[0], 1e-3)
        return running.get_tensor("norm.weight.grad")
