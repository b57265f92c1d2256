"""Optimizer updates against fp64, PyTorch and the published formulas."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_checks import (
    assert_close,
    assert_same_bits,
    bits,
    every_level,
    in_turn,
    packed,
    random,
    rng,
    tensor,
)
from update_calls import ADAMW, hyper_of, ints_of, program_of, run_update, step_by_step

from tilewise.core import ResourceError
from tilewise.kernels import pack_weight, reference, unpack_weight
from tilewise.kernels.isa import run
from tilewise.optim import SGD, AdamW, Lion

CLIP = np.array([[2.0, 0.5]], np.float32)
OPTIMIZERS = [ADAMW, SGD(momentum=0.9, weight_decay=0.1), Lion(weight_decay=0.1)]
TOO_LITTLE_FOR_BLOCKS = 4096


def arrays_for(optimizer, shape, seed):
    """Weight, states (not negative, like second moments) and gradient."""
    gen = rng(seed)
    states = [np.abs(random(gen, *shape)) for _ in optimizer.states]
    return [random(gen, *shape).copy(), *states, random(gen, *shape).copy()]


every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
every_way = pytest.mark.parametrize("way", [lambda p: p, step_by_step], ids=["shape", "blocks"])


@every_level
@every_way
@every_optimizer
@pytest.mark.parametrize("shape", [(1, 37), (33, 20), (64, 33), (1, 300)], ids=str)
def test_one_step(isa, shape, optimizer, way):
    """Weight and states after one step, in fp32 and with a bf16 copy, packed and flat; padding stays zero."""
    arrays = arrays_for(optimizer, shape, shape[1])
    program = way(program_of(optimizer))
    how = {"program": program, "isa": isa}
    hyper = hyper_of(optimizer)
    exact = reference.update(arrays, hyper, 0.5, program.steps, program.constants, program.left)
    plain = [x.copy() for x in arrays]
    run_update(optimizer, None, plain, CLIP, **how)
    panels = [packed(x, "f32") for x in arrays]
    copy = packed(np.zeros(shape, np.float32), "bf16")
    run_update(optimizer, copy, panels, CLIP, "bf16", packed=True, **how)
    rounded, vector = np.empty(shape, ml_dtypes.bfloat16), [x.copy() for x in arrays]
    run_update(optimizer, rounded, vector, CLIP, "bf16", **how)
    for got, panel, flat, want in zip(plain, panels, vector, exact, strict=False):
        assert_close(got, want, "f32")
        assert_same_bits(unpack_weight(panel[0], *shape), got)
        assert_same_bits(pack_weight(got, "f32"), panel[0])
        assert_same_bits(flat, got)
    assert_same_bits(unpack_weight(copy[0], *shape), plain[0].astype(ml_dtypes.bfloat16))
    assert_same_bits(rounded, plain[0].astype(ml_dtypes.bfloat16))


@every_level
@every_optimizer
@pytest.mark.parametrize("shape", [(1, 37), (33, 20), (70, 301)], ids=str)
def test_a_known_shape_gives_the_bits_of_its_steps(isa, shape, optimizer):
    """A loop in registers and blocks step by step give the same bits; another clipping factor differs."""
    originals = arrays_for(optimizer, shape, 7)
    results = []
    for program, scale in (
        (program_of(optimizer), 0.7),
        (step_by_step(program_of(optimizer)), 0.7),
        (program_of(optimizer), np.nextafter(np.float32(0.7), np.float32(0))),
    ):
        arrays, clip = [x.copy() for x in originals], np.array([[2.0, scale]], np.float32)
        run_update(optimizer, None, arrays, clip, program=program, isa=isa)
        results.append(np.stack(arrays[:-1]))
    assert_same_bits(results[0], results[1])
    assert (results[0] != results[2]).any()


@pytest.mark.parametrize(
    "optimizer",
    [
        *OPTIMIZERS,
        AdamW(beta1=0.9, beta2=0.9, eps=0.1, weight_decay=0),
        SGD(momentum=0, weight_decay=0),
        Lion(beta2=0.9),
    ],
    ids=repr,
)
def test_optimizers_have_known_shapes(optimizer):
    """With any and equal hyperparameters; they need no scratch for blocks, unlike other programs."""
    arrays = arrays_for(optimizer, (3, 20), 5)
    run_update(optimizer, None, arrays, CLIP, scratch_bytes=TOO_LITTLE_FOR_BLOCKS)
    with pytest.raises(ResourceError):
        other = step_by_step(program_of(optimizer))
        run_update(optimizer, None, arrays, CLIP, program=other, scratch_bytes=TOO_LITTLE_FOR_BLOCKS)


@every_level
def test_arrays_may_be_swapped(isa):
    """A step may write an array's new value to another array."""
    w, m, g = (random(rng(3), 5, 40).copy() for _ in range(3))
    got = [w.copy(), m.copy()]
    run("update_f32", [None, *got, g, np.ones((1, 1), np.float32), CLIP], [0, 1, 0, 1, 0], isa=isa)
    assert_same_bits(got[0], m)
    assert_same_bits(got[1], w)


@in_turn("kind", ["adamw", "sgd", "nesterov"])
def test_ten_steps_against_pytorch(kind):
    """AdamW, and SGD with momentum and with Nesterov momentum, follow torch.optim."""
    gen = rng(8)
    w = random(gen, 4, 30).copy()
    peer = tensor(w).requires_grad_()
    if kind == "adamw":
        ours = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
        theirs = torch.optim.AdamW([peer], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    else:
        settings = {"momentum": 0.9, "nesterov": kind == "nesterov"}
        ours, theirs = SGD(**settings), torch.optim.SGD([peer], lr=1e-2, **settings)
    states, clip = [np.zeros_like(w) for _ in ours.states], np.ones((1, 2), np.float32)
    for step in range(1, 11):
        grad = random(gen, 4, 30).copy()
        run_update(ours, None, [w, *states, grad], clip, step=step, lr=1e-2)
        peer.grad = tensor(grad)
        theirs.step()
    np.testing.assert_allclose(w, peer.detach().numpy(), rtol=2e-6, atol=2e-7)


def test_lion_follows_its_paper():
    """Chen et al. 2023, algorithm 2, in NumPy."""
    gen = rng(9)
    ours = Lion(beta1=0.9, beta2=0.99, weight_decay=0.3)
    w, m, clip = random(gen, 4, 30).copy(), np.zeros((4, 30), np.float32), np.ones((1, 2), np.float32)
    weight, momentum = w.astype(np.float64), m.astype(np.float64)
    for step in range(1, 11):
        grad = random(gen, 4, 30).copy()
        run_update(ours, None, [w, m, grad], clip, step=step, lr=1e-2)
        direction = np.sign(0.9 * momentum + 0.1 * grad)
        weight -= 1e-2 * (direction + 0.3 * weight)
        momentum = 0.99 * momentum + 0.01 * grad
    np.testing.assert_allclose(w, weight, rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(m, momentum, rtol=2e-6, atol=2e-7)


@every_level
@every_way
def test_a_copy_does_not_depend_on_its_alignment(isa, way):
    """On cache lines, where it is non-temporal, and elsewhere: rows of bf16 pairs, rounded to nearest even."""
    gen, rows, cols = rng(13), 64, 6
    arrays = [packed(np.abs(random(gen, rows, cols)) + 1, "f32") for _ in range(4)]
    for offset in (0, 2, 16):
        raw = np.zeros(rows * cols + 64, np.uint16)
        begin = -raw.ctypes.data % 64 // 2 + offset
        flat = raw[begin : begin + rows * cols].view(ml_dtypes.bfloat16)
        own = [(x[0].copy(), *x[1:]) for x in arrays]
        program = way(program_of(ADAMW))
        run_update(ADAMW, (flat, rows, cols), own, CLIP, "bf16", program=program, packed=True, isa=isa)
        pairs = own[0][0].reshape(rows // 32, cols // 2, 2, 32).swapaxes(2, 3)
        assert_same_bits(flat, pairs.astype(ml_dtypes.bfloat16).reshape(-1))
        assert not raw[:begin].any() and not raw[begin + flat.size :].any()
        assert (bits(flat) != bits(own[0][0].astype(ml_dtypes.bfloat16)).reshape(-1)).any(), "pairs must show"


@every_level
@every_way
def test_a_skipped_step_changes_nothing(isa, way):
    """A clipping factor of NaN leaves weights, states and the bf16 copy unchanged; any other writes all of them."""
    gen = rng(12)
    shape = (33, 20)
    for packs, scale in ((False, np.nan), (True, np.nan), (False, 0.5), (True, 0.5)):
        place = (lambda x: packed(x, "f32")) if packs else (lambda x: x.copy())
        arrays = [place(np.abs(random(gen, *shape)) + 1) for _ in range(4)]
        copy = packed(np.ones(shape, np.float32), "bf16") if packs else np.ones(shape, ml_dtypes.bfloat16)
        written = [copy, *arrays[:3]]
        before = [np.array(x[0] if packs else x) for x in written]
        clip = np.array([[2.0, scale]], np.float32)
        run_update(ADAMW, copy, arrays, clip, "bf16", program=way(program_of(ADAMW)), packed=packs, isa=isa)
        after = [np.array(x[0] if packs else x) for x in written]
        same = [a.tobytes() == b.tobytes() for a, b in zip(before, after)]
        assert all(same) if np.isnan(scale) else not any(same)


@every_level
def test_every_kind_of_step(isa):
    """Each step of the table, for both signs, zeros and NaN, against NumPy."""
    values = np.array([[1.5, -2.0, 0.0, -0.0, 3.25, np.nan, 1e-30, -7.0, 0.5]], np.float32)
    other = np.array([[2.5, -2.0, 1.0, 4.0, -1.0, 1.0, 2.0, 3.0, 0.25]], np.float32)
    clip, hyper = np.ones((1, 2), np.float32), np.array([[2.0]], np.float32)
    for number, (name, compute) in enumerate(reference.UPDATE_STEPS.items()):
        w, g = values.copy(), other.copy()
        run("update_f32", [None, w, g, hyper, clip], [0, 0, 1, number, 0, 1, 2, 3], isa=isa)
        with np.errstate(all="ignore"):
            want = compute(values.astype(np.float64), other.astype(np.float64), np.full(values.shape, 2.0))
        if name in ("maximum", "minimum"):  # the second where either is NaN, as the processor has it
            want = np.where(np.isnan(values), other, want)
        np.testing.assert_allclose(w, want.astype(np.float32), rtol=3e-7)


def test_the_order_of_steps_matters():
    """The twin: another order of steps differs."""
    arrays = arrays_for(ADAMW, (3, 21), 4)
    program, changed = program_of(ADAMW), [x.copy() for x in arrays]
    ints = ints_of(program, len(ADAMW.states))
    left = len(ints) - 2
    ints[left], ints[left + 1] = ints[left + 1], ints[left]  # the two moments, exchanged
    run("update_f32", [None, *changed, hyper_of(ADAMW), CLIP], ints, list(program.constants))
    exact = reference.update(arrays, hyper_of(ADAMW), 0.5, program.steps, program.constants, program.left)
    with pytest.raises(AssertionError):
        assert_close(changed[1], exact[1], "f32")
