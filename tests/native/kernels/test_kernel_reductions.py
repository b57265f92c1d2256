"""Leaf trees, AdamW and the gradient norm against fp64 and PyTorch."""

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_checks import (
    assert_close,
    assert_same_bits,
    bits,
    empty,
    every_level,
    packed,
    random,
    rng,
    tensor,
)

from tilewise.kernels import pack_weight, reference, unpack_weight
from tilewise.kernels.isa import run

HYPER = np.array([[3e-4, 0.9, 0.95, 1e-8, 1 - 0.9**3, 1 - 0.95**3, 0, 0]], np.float32)
CLIP = np.array([[2.0, 0.5]], np.float32)


@every_level
@pytest.mark.parametrize("leaves", [1, 3, 8])
def test_leaf_tree(isa, leaves):
    """Leaves by the fixed tree, then each carry in front."""
    gen = rng(leaves)
    partials, carries, out = random(gen, leaves, 37), [random(gen, 1, 37) for _ in range(2)], empty(1, 37)
    run("leaf_tree_f32", [out, partials, *carries], [2], isa=isa)
    assert_close(out, reference.leaf_tree(partials, carries), "f32")


@every_level
@pytest.mark.parametrize("shape", [(1, 37), (33, 20), (64, 33)], ids=str)
def test_adamw(isa, shape):
    """Three arrays after one step, fp32 and with a packed bf16 copy; padding stays zero."""
    gen = rng(shape[1])
    w, m, grad = (random(gen, *shape) for _ in range(3))
    v = np.abs(random(gen, *shape))
    exact = reference.adamw(w, m, v, grad, HYPER, CLIP, 0.1)
    plain = [x.copy() for x in (w, m, v, grad)]
    run("adamw_f32", [None, *plain, HYPER, CLIP], [0], [0.1], isa=isa)
    panels = [packed(x, "f32") for x in (w, m, v, grad)]
    copy = packed(np.zeros(shape, np.float32), "bf16")
    run("adamw_bf16", [copy, *panels, HYPER, CLIP], [1], [0.1], isa=isa)
    for got, panel, want in zip(plain, panels, exact, strict=False):
        assert_close(got, want, "f32")
        assert_same_bits(unpack_weight(panel[0], *shape), got)
        assert_same_bits(pack_weight(got, "f32"), panel[0])
    assert_same_bits(unpack_weight(copy[0], *shape), plain[0].astype(ml_dtypes.bfloat16))
    vector = [x.copy() for x in (w, m, v, grad)]
    rounded = np.empty(shape, ml_dtypes.bfloat16)
    run("adamw_bf16", [rounded, *vector, HYPER, CLIP], [0], [0.1], isa=isa)
    assert_same_bits(rounded, plain[0].astype(ml_dtypes.bfloat16))


def test_adamw_against_pytorch():
    """Ten steps follow torch.optim.AdamW."""
    gen = rng(8)
    w = random(gen, 4, 30).copy()
    m, v, ones = np.zeros_like(w), np.zeros_like(w), np.ones((1, 2), np.float32)
    peer = tensor(w).requires_grad_()
    optimizer = torch.optim.AdamW([peer], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 11):
        grad = random(gen, 4, 30).copy()
        hyper = np.array([[1e-2, 0.9, 0.95, 1e-8, 1 - 0.9**step, 1 - 0.95**step, 0, 0]], np.float32)
        run("adamw_f32", [None, w, m, v, grad, hyper, ones], [0], [0.1])
        peer.grad = tensor(grad)
        optimizer.step()
    np.testing.assert_allclose(w, peer.detach().numpy(), rtol=2e-6, atol=2e-7)


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


@every_level
def test_a_lost_step_changes_nothing(isa):
    """A clipping factor of NaN leaves weights, moments and the bf16 copy as they are; any other writes all of them."""
    gen = rng(12)
    shape = (33, 20)
    for packs, scale in ((False, np.nan), (True, np.nan), (False, 0.5), (True, 0.5)):
        place = (lambda x: packed(x, "f32")) if packs else (lambda x: x.copy())
        arrays = [place(np.abs(random(gen, *shape)) + 1) for _ in range(4)]
        copy = packed(np.ones(shape, np.float32), "bf16") if packs else np.ones(shape, ml_dtypes.bfloat16)
        written = [copy, *arrays[:3]]
        before = [np.array(x[0] if packs else x) for x in written]
        clip = np.array([[2.0, scale]], np.float32)
        run("adamw_bf16", [copy, *arrays, HYPER, clip], [int(packs)], [0.1], isa=isa)
        after = [np.array(x[0] if packs else x) for x in written]
        same = [a.tobytes() == b.tobytes() for a, b in zip(before, after)]
        assert all(same) if np.isnan(scale) else not any(same)
