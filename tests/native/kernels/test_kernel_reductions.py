"""Leaf trees and the gradient norm against fp64."""

import numpy as np
import pytest
from kernel_checks import (
    assert_close,
    assert_same_bits,
    bits,
    empty,
    every_level,
    packed,
    random,
    rng,
)

from tilewise.kernels import reference
from tilewise.kernels.isa import run


@every_level
@pytest.mark.parametrize("leaves", [1, 3, 8])
def test_leaf_tree(isa, leaves):
    """Leaves by the fixed tree, then each carry in front."""
    gen = rng(leaves)
    partials, carries, out = random(gen, leaves, 37), [random(gen, 1, 37) for _ in range(2)], empty(1, 37)
    run("leaf_tree_f32", [out, partials, *carries], [2], isa=isa)
    assert_close(out, reference.leaf_tree(partials, carries), "f32")


@every_level
@pytest.mark.parametrize("split_dim", [0, 1])
def test_square_sum(isa, split_dim):
    """Chunks of rows or columns, packed or plain, to the same fp64 bits."""
    grad = random(rng(9), 70, 50)
    chunks = [(0, 10), (10, 10), (10, 50)] if split_dim else [(0, 64), (64, 64), (64, 70)]
    ints = [3, split_dim, *(x for c in chunks for x in c)]
    plain, panels = np.empty((1, 3)), np.empty((1, 3))
    run("square_sum_f32", [plain, grad], [0, *ints], isa=isa)
    run("square_sum_f32", [panels, packed(grad, "f32")], [1, *ints], isa=isa)
    assert_same_bits(plain, panels)
    np.testing.assert_allclose(plain, reference.square_sum(grad, chunks, split_dim), rtol=1e-14)


@every_level
def test_square_sum_of_a_chunk_depends_on_its_contents_only(isa):
    """A shard that holds only the chunk, at another offset, gives the same bits."""
    grad = random(rng(10), 70, 50)
    whole, rows, columns = np.empty((1, 1)), np.empty((1, 1)), np.empty((1, 1))
    run("square_sum_f32", [whole, packed(grad, "f32")], [1, 1, 0, 40, 70], isa=isa)
    run("square_sum_f32", [rows, packed(grad[40:], "f32")], [1, 1, 0, 0, 30], isa=isa)
    assert_same_bits(whole, rows)
    run("square_sum_f32", [whole, packed(grad, "f32")], [1, 1, 1, 7, 31], isa=isa)
    run("square_sum_f32", [columns, packed(grad[:, 7:31], "f32")], [1, 1, 1, 0, 24], isa=isa)
    assert_same_bits(whole, columns)
    run("square_sum_f32", [columns, packed(grad[:, 8:32], "f32")], [1, 1, 1, 0, 24], isa=isa)
    assert (bits(whole) != bits(columns)).any(), "another chunk must show"


@every_level
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e6])
def test_norm_scale(isa, max_norm):
    """The norm and its clipping factor; the factor is NaN when the norm or the loss is no finite fp32 number."""
    partials = np.abs(rng(11).standard_normal((5, 8)))
    out, loss = np.empty((1, 2), np.float32), np.ones((1, 1), np.float32)
    for bad_square, bad_loss in (
        (None, 1),
        (np.nan, 1),
        (np.inf, 1),
        (1e90, 1),
        (None, np.nan),
        (None, -np.inf),
    ):
        squares = partials.copy()
        if bad_square is not None:
            squares[3, 3] = bad_square
        loss[0, 0] = bad_loss
        run("norm_scale", [out, squares, loss], floats=[max_norm], isa=isa)
        expected = reference.norm_scale(squares, loss, max_norm)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(out[0], expected.astype(np.float32), rtol=1e-6)
        assert np.isnan(out[0, 1]) == (bad_square is not None or bad_loss != 1)
