"""Equality to the bit across levels, tile heights, devices and accumulation steps, each with a planted fault."""

import numpy as np
import pytest
from attention_calls import Scores, both_ways
from kernel_checks import (
    FMA_LEVELS,
    LEVELS,
    assert_same_bits,
    bits,
    empty,
    even_splits,
    every_dtype,
    every_level,
    in_turn,
    packed,
    packed_out,
    random,
    rng,
)
from update_calls import ADAMW, run_update

from tilewise.kernels.isa import run

K_SPLITS = 8


def matmul(dt, a, w, ranges, isa="", f32=1, residual=None, name="matmul"):
    """One call; the output is fp32 unless f32 is 0."""
    width = w.shape[0] if name == "matmul" else w.shape[1]
    out = empty(len(a), width, "f32" if f32 else dt)
    run(f"{name}_{dt}", [out, residual, a, packed(w, dt)], [f32, 1, len(ranges) // 2, *ranges], isa=isa)
    return out


def weight_gradient(dt, dy, x, ids, de, split_rows, carries=(), isa=""):
    """One call of matmul_dw; the flat packed result."""
    n, k = dy.shape[1], x.shape[1]
    out = packed_out(n, k)
    tiles = [out, dy, x, ids, de, *((c, n, k) for c in carries)]
    run(f"matmul_dw_{dt}", tiles, [split_rows, len(carries), 0, 0], isa=isa)
    return out[0]


def tree_add(parts, dt="f32"):
    out = empty(*parts[0].shape, dt)
    run(f"tree_add_{dt}", [out, None, *parts])
    return out


def training_operands(dt, tokens=96, n=40, k=70):
    gen = rng(12)
    ids = gen.integers(0, n, (tokens, 1)).astype(np.int32)
    return random(gen, tokens, n, dt), random(gen, tokens, k, dt), ids, random(gen, tokens, k, dt)


def everything_in_fp32(isa):
    """Outputs of the kernels whose bits must not depend on the level."""
    gen = rng(20)
    a, w, gamma = random(gen, 37, 130), random(gen, 45, 130), random(gen, 1, 130)
    results = [
        matmul("f32", a, w, even_splits(130, 8), isa),
        matmul("f32", random(gen, 9, 45), w, even_splits(45, 4), isa, name="matmul_dx"),
    ]
    results.append(weight_gradient("f32", *training_operands("f32"), 24, isa=isa))
    y, rstd, soft = empty(37, 130), empty(37, 1), empty(37, 130)
    run("rms_norm_f32", [y, rstd, a, gamma], floats=[1e-5, 0.0], isa=isa)
    run("softmax_f32", [soft, a], isa=isa)
    results += [empty(37, 130), empty(37, 2)]
    run("layer_norm_f32", [*results[-2:], a, gamma, gamma], floats=[1e-5], isa=isa)
    gate, positive = empty(37, 130), np.abs(a)
    run("silu_gate_f32", [gate, a, y], isa=isa)
    for name in ("gelu", "gelu_tanh", "tanh"):
        results += [empty(37, 130), empty(37, 130)]
        run(f"{name}_f32", [results[-2], a], isa=isa)
        run(f"{name}_backward_f32", [results[-1], y, a], isa=isa)
    log = empty(37, 130)
    run("log_f32", [log, positive], isa=isa)
    q, k, v = random(gen, 100, 64), random(gen, 100, 32), random(gen, 100, 32)
    attended = [
        x
        for scores in (Scores(), Scores(window=70, softcap=2.0), Scores(causal=False, lengths=(67,)))
        for x in both_ways((100, 1, 2, 1, 32), "f32", q, k, v, q, isa, scores)
    ]
    w, m, g = (random(gen, 1, 100).copy() for _ in range(3))
    state = [w, m, np.abs(w), g]
    run_update(ADAMW, None, state, np.ones((1, 2), np.float32), isa=isa)
    return [*results, y, rstd, soft, gate, log, *attended, *state]


@in_turn("isa", FMA_LEVELS[1:])
def test_fp32_bits_are_equal_on_every_fma_level(isa):
    """Contractions, norms, exp, log, attention and AdamW have the bits of avx2."""
    for got, want in zip(everything_in_fp32(isa), everything_in_fp32(FMA_LEVELS[0]), strict=True):
        assert_same_bits(got, want)


@pytest.mark.skipif("baseline" not in LEVELS, reason="every level has fused multiply-add")
def test_a_level_without_fma_is_detected():
    """The twin: rounding products before the addition gives other bits."""
    pairs = zip(everything_in_fp32("baseline"), everything_in_fp32(FMA_LEVELS[0]), strict=True)
    assert any((bits(got) != bits(want)).any() for got, want in pairs)


@pytest.mark.skipif("avx512_bf16" not in FMA_LEVELS, reason="needs vdpbf16ps")
def test_emulated_bf16_dot_follows_the_hardware_order():
    """Two fused multiply-adds, odd element first, are close to vdpbf16ps: nearly all results are equal."""
    gen = rng(21)
    a, w = random(gen, 30, 200, "bf16"), random(gen, 64, 200, "bf16")
    hard, soft = (matmul("bf16", a, w, [0, 200], isa) for isa in ("avx512_bf16", "avx512"))
    np.testing.assert_allclose(hard, soft, rtol=0, atol=1e-5 * np.abs(soft).max())


def amx_sum(a, w, ranges, steps):
    """The order of `amx_bf16` in docs/numerics.md: groups of this many pairs, even and odd products
    separately, then both.

    In float64, where products and nearly all sums of these operands are exact; each is rounded once
    as in the hardware.
    """
    a, w = a.astype(np.float64), w.astype(np.float64)
    total = np.zeros((len(a), len(w)), np.float32)
    for first in range(*ranges, 2 * steps):
        apart = np.zeros((2, len(a), len(w)), np.float32)
        for k in range(first, min(first + 2 * steps, ranges[1])):
            apart[k % 2] = (apart[k % 2] + a[:, k, None] * w[None, :, k]).astype(np.float32)
        total += apart[0] + apart[1]
    return total


@pytest.mark.skipif("amx_bf16" not in LEVELS, reason="needs AMX")
def test_amx_adds_groups_of_sixteen_pairs():
    """To the bit, with a last group of four pairs; groups of another length (planted fault) differ."""
    gen = rng(22)
    a, w = random(gen, 37, 200, "bf16"), random(gen, 64, 200, "bf16")
    got = matmul("bf16", a, w, [0, 200], "amx_bf16")
    assert_same_bits(got, amx_sum(a, w, (0, 200), 16))
    assert (bits(got) != bits(amx_sum(a, w, (0, 200), 8))).any()


@every_level
@every_dtype
@in_turn("name", ["matmul", "matmul_dx"])
def test_bits_of_a_row_are_equal_at_every_height(isa, dt, name):
    """A row alone, in a pair, in a decode batch and in a tall tile has the same bits."""
    gen = rng(13)
    a, w = random(gen, 77, 130, dt), random(gen, 130, 130, dt)
    ranges = even_splits(130, K_SPLITS)
    whole = matmul(dt, a, w, ranges, isa, name=name)
    for begin, end in ((0, 1), (76, 77), (3, 5), (10, 26), (13, 64)):
        assert_same_bits(matmul(dt, a[begin:end], w, ranges, isa, name=name), whole[begin:end])
    moved = matmul(dt, a, w, even_splits(130, K_SPLITS // 2), isa, name=name)
    assert (bits(moved) != bits(whole)).any(), "other k splits must show"


@every_dtype
@in_turn("rows", [30, 200])
def test_bits_do_not_depend_on_windows_and_panel_groups(dt, rows):
    """A wide call equals some of its columns computed alone, with several windows."""
    gen = rng(14)
    a, w = random(gen, rows, 2600, dt), random(gen, 2600, 96, dt)
    ranges = even_splits(2600, K_SPLITS)
    whole = matmul(dt, a, w, ranges, name="matmul_dx")
    part = matmul(dt, a, w[:, 32:64].copy(), ranges, name="matmul_dx")
    assert_same_bits(part, whole[:, 32:64])
    moved = matmul(dt, a, w[:, 32:64].copy(), even_splits(2600, K_SPLITS // 2), name="matmul_dx")
    assert (bits(moved) != bits(part)).any(), "other k splits must show"


def subtrees(dt, a, w, devices, k_splits=K_SPLITS):
    """The fp32 partial value of every device: its aligned run of k splits."""
    ranges = even_splits(a.shape[1], k_splits)
    own = 2 * k_splits // devices
    return [matmul(dt, a, w, ranges[d * own : (d + 1) * own]) for d in range(devices)]


@every_dtype
@in_turn("devices", [1, 2, 4, 8])
def test_subtrees_of_devices_complete_the_tree(dt, devices):
    """Partial values of 1, 2, 4 or 8 devices, combined by tree_add, equal the whole call; planted faults do not."""
    gen = rng(15)
    a, w = random(gen, 33, 256, dt), random(gen, 64, 256, dt)
    whole = matmul(dt, a, w, even_splits(256, K_SPLITS))
    parts = subtrees(dt, a, w, devices)
    assert_same_bits(tree_add(parts), whole)
    if devices > 1:
        assert (bits(tree_add(parts[:-1])) != bits(whole)).any(), "a dropped partial must show"
    if devices > 2:
        swapped = [parts[1 - i] if i < 2 else p for i, p in enumerate(parts)]
        assert_same_bits(tree_add(swapped), whole)  # addition commutes inside a pair
        swapped = [parts[0], parts[2], parts[1], *parts[3:]]
        assert (bits(tree_add(swapped)) != bits(whole)).any(), "partials out of order must show"


@every_dtype
def test_rounded_partial_values_are_detected(dt):
    """The twin: partial values rounded to bf16 before the tree differ."""
    gen = rng(16)
    a, w = random(gen, 33, 256, dt), random(gen, 64, 256, dt)
    rounded = []
    for part in subtrees(dt, a, w, 2):
        narrow, wide = empty(*part.shape, "bf16"), empty(*part.shape)
        run("cast_f32_bf16", [narrow, part])
        run("cast_bf16_f32", [wide, narrow])
        rounded.append(wide)
    assert (bits(tree_add(rounded)) != bits(matmul(dt, a, w, even_splits(256, K_SPLITS)))).any()


@every_dtype
def test_residual_comes_after_the_root(dt):
    """tree_add with the residual on two devices equals the epilogue on one."""
    gen = rng(17)
    a, w, residual = random(gen, 20, 128, dt), random(gen, 64, 128, dt), random(gen, 20, 64, dt)
    whole = matmul(dt, a, w, even_splits(128, K_SPLITS), f32=0, residual=residual)
    out = empty(20, 64, dt)
    run(f"tree_add_{dt}", [out, residual, *subtrees(dt, a, w, 2)])
    assert_same_bits(out, whole)


@every_dtype
@in_turn("n", [64, 37])
def test_a_residual_of_one_row_is_added_to_every_row(dt, n):
    """A bias in the epilogue, and after the tree over two devices, equals a residual with equal rows."""
    gen = rng(19)
    a, w, bias = random(gen, 20, 128, dt), random(gen, n, 128, dt), random(gen, 1, n, dt)
    ranges = even_splits(128, K_SPLITS)
    whole = matmul(dt, a, w, ranges, f32=0, residual=np.repeat(bias, 20, axis=0))
    assert_same_bits(matmul(dt, a, w, ranges, f32=0, residual=bias), whole)
    out = empty(20, n, dt)
    run(f"tree_add_{dt}", [out, bias, *subtrees(dt, a, w, 2)])
    assert_same_bits(out, whole)
    other = bias.copy()
    other[0, -1] += 1
    assert (bits(matmul(dt, a, w, ranges, f32=0, residual=other)) != bits(whole)).any(), (
        "its last column must show"
    )


@every_dtype
@in_turn("k_splits", [3, 5, 6, 8])
def test_empty_k_splits_are_skipped(dt, k_splits):
    """Empty slots pass sums up unchanged: the tree over the others."""
    gen = rng(18)
    a, w = random(gen, 9, 64, dt), random(gen, 33, 64, dt)
    own = 64 // k_splits // 2 * 2
    every = [(c * own, (c + 1) * own) for c in range(k_splits)]
    for mask in range(1 << k_splits):
        products = {c: matmul(dt, a, w, list(every[c])) for c in range(k_splits) if mask >> c & 1}
        ranges = [
            x for c in range(k_splits) for x in (every[c] if c in products else (every[c][0], every[c][0]))
        ]
        want = counter_tree([products.get(c) for c in range(k_splits)], a.shape[0], 33)
        assert_same_bits(matmul(dt, a, w, ranges), want)


def counter_tree(slots, m, n):
    """Rule 2 of docs/numerics.md, literally: a binary counter over slots, None for an empty one."""
    stack = {}
    for c, value in enumerate(slots):
        level = 0
        while c >> level & 1:
            top = stack.pop(level, None)
            value = top if value is None else value if top is None else top + value
            level += 1
        if value is not None:
            stack[level] = value
    total = None
    for level in sorted(stack):
        total = stack[level] if total is None else stack[level] + total
    return np.zeros((m, n), np.float32) if total is None else total


@every_level
@every_dtype
def test_weight_gradient_by_carries_equals_one_call(isa, dt):
    """All batch splits in one task, and the last ones with the carries of the earlier ones, give the same bits."""
    operands = training_operands(dt)
    whole = weight_gradient(dt, *operands, 24, isa=isa)
    part = [[x[i : i + 24] for x in operands] for i in range(0, 96, 24)]
    two = [np.concatenate([a, b]) for a, b in zip(part[0], part[1], strict=True)]
    first = weight_gradient(dt, *two, 24, isa=isa)
    third = weight_gradient(dt, *part[2], 24, isa=isa)
    assert_same_bits(weight_gradient(dt, *part[3], 24, [third, first], isa=isa), whole)
    dropped = weight_gradient(dt, *part[3], 24, [first], isa=isa)
    assert (bits(dropped) != bits(whole)).any(), "a dropped carry must show"
    swapped = weight_gradient(dt, *part[3], 24, [first, third], isa=isa)
    assert (bits(swapped) != bits(whole)).any(), "carries out of order must show"


@every_level
@every_dtype
@in_turn("tokens", [960, 2400])
def test_weight_gradient_does_not_depend_on_windows_and_panel_groups(isa, dt, tokens):
    """Many panels over many batch splits equal one panel alone, and the tree over halves packed at a time."""
    gen, split = rng(20), tokens // 8
    dy, x = random(gen, tokens, 1100, dt), random(gen, tokens, 30, dt)
    whole = weight_gradient(dt, dy, x, None, None, split, isa=isa)
    one = weight_gradient(dt, dy[:, 64:96], x, None, None, split, isa=isa)
    assert_same_bits(one, whole[2 * one.size : 3 * one.size])
    halves = [
        weight_gradient(dt, dy[part], x[part], None, None, split, isa=isa)
        for part in (slice(tokens // 2), slice(tokens // 2, tokens))
    ]
    assert_same_bits(tree_add([h.reshape(1, -1) for h in halves])[0], whole)
    other = weight_gradient(dt, dy, x, None, None, 2 * split, isa=isa)
    assert (bits(other) != bits(whole)).any(), "other batch splits must show"


@every_dtype
def test_weight_gradient_of_two_devices(dt):
    """Two devices with half the batch splits each, combined by tree_add, equal one device."""
    operands = training_operands(dt)
    whole = weight_gradient(dt, *operands, 24)
    halves = [weight_gradient(dt, *(x[i : i + 48] for x in operands), 24) for i in (0, 48)]
    assert_same_bits(tree_add([h.reshape(1, -1) for h in halves])[0], whole)


@every_dtype
def test_weight_gradient_of_row_blocks(dt):
    """A task for some rows of W gives the bits of those rows."""
    gen = rng(19)
    dy, x = random(gen, 64, 100, dt), random(gen, 64, 40, dt)
    ids, de = gen.integers(0, 100, (64, 1)).astype(np.int32), random(gen, 64, 40, dt)
    whole, part = packed_out(100, 40), packed_out(36, 40)
    run(f"matmul_dw_{dt}", [whole, dy, x, ids, de], [16, 0, 0, 0])
    run(f"matmul_dw_{dt}", [part, dy[:, 64:], x, ids, de], [16, 0, 0, 0], row_begin=64)
    assert_same_bits(part[0], whole[0][64 * 40 :])


def scattered(dt, tokens_are, isa, carries=2, n=100, k=70):
    """Embedding rows alone, and next to products of zeros, which use another code path."""
    gen = rng(23)
    ids, de = gen.integers(20, 30, (90, 1)).astype(np.int32), random(gen, 90, k, dt)
    ids[70:] += 72  # whole panels between them have no token
    de *= 10.0 ** gen.integers(-4, 4, (90, 1))  # so that sums are rounded in bf16 too
    before = [packed_out(n, k) for _ in range(carries)]
    for flat, *_ in before:
        flat.reshape(-1, k, 32)[: n // 32] = random(gen, n // 32 * k, 32).reshape(-1, k, 32)
        flat[::7] = -0.0
    zeros = np.zeros_like(de)
    results = []
    for dy in (None, np.zeros((90, n), de.dtype)):
        out = packed_out(n, k)
        rows = [np.ascontiguousarray(x[tokens_are]) for x in (ids, de)]
        tiles = [out, dy, None if dy is None else zeros, *rows, *before]
        run(f"matmul_dw_{dt}", tiles, [24, carries, 10, 0], row_begin=-5, isa=isa)
        results.append(out[0])
    return results


@every_level
@every_dtype
@in_turn("carries", [0, 2])
def test_an_embeddings_gradient_has_the_bits_of_the_tree(isa, dt, carries):
    """Rows without tokens are written as zeros directly, and others are summed separately; no bit differs."""
    alone, separate = scattered(dt, slice(None), isa, carries)
    assert_same_bits(alone, separate)
    moved, _ = scattered(dt, slice(None, None, -1), isa, carries)
    assert (bits(moved) != bits(alone)).any(), "another order of tokens must show"


@every_level
@every_dtype
def test_panels_without_tokens_are_normalized(isa, dt):
    """Written over its only carry, -0 becomes +0 and a NaN quiet, also in panels that do not change otherwise."""
    gen, n, k = rng(29), 160, 70
    ids = gen.integers(33, 60, (20, 1)).astype(np.int32)
    de = random(gen, 20, k, dt)
    carry = packed_out(n, k)
    carry[0][...] = random(gen, carry[0].size // 32, 32).reshape(-1)
    panel = 32 * k  # values of a panel; the second is named, the others are not
    carry[0][2 * panel + 5] = -0.0
    carry[0].view(np.uint32)[4 * panel - 1] = 0x7FA00000
    separate, over = packed_out(n, k), (carry[0].copy(), n, k)
    run(f"matmul_dw_{dt}", [separate, None, None, ids, de, carry], [10, 1, 0, 0], isa=isa)
    run(f"matmul_dw_{dt}", [over, None, None, ids, de, over], [10, 1, 0, 0], isa=isa)
    assert_same_bits(over[0], separate[0])
    changed = (bits(over[0]) != bits(carry[0])).reshape(5, panel).sum(1)
    assert changed[1] > 0 and [*changed[[0, 2, 3, 4]]] == [0, 1, 1, 0]
