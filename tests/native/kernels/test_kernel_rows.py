"""Norms, softmax, row sums, RoPE and cross-entropy against fp64 and PyTorch."""

import numpy as np
import torch
from kernel_checks import (
    NUMPY,
    array,
    assert_close,
    assert_same_bits,
    bits,
    empty,
    every_dtype,
    every_level,
    in_turn,
    random,
    rng,
    tensor,
)

from tilewise.kernels import reference
from tilewise.kernels.isa import run

every_width = in_turn("d", [1, 15, 16, 257])


every_grouping = in_turn("groups,offset", [(1, 0.0), (3, 0.0), (2, 1.0)])


@every_level
@every_dtype
@every_width
@every_grouping
def test_rms_norm(isa, dt, d, groups, offset):
    """y and rstd for odd widths, of whole rows and of heads; as accurate as fp32 rounded once, as in Gemma."""
    gen = rng(d)
    x, gamma = random(gen, 9, groups * d, dt, 3.0), random(gen, 1, d, dt)
    y, rstd = empty(9, groups * d, dt), empty(9, groups)
    run(f"rms_norm_{dt}", [y, rstd, x, gamma], floats=[1e-5, offset], isa=isa)
    exact, exact_rstd = reference.rms_norm(x, gamma, 1e-5, offset)
    heads, gain = tensor(x).float().unflatten(1, (groups, d)), tensor(gamma[0]).float() + offset
    peer = torch.nn.functional.rms_norm(heads, (d,), gain, 1e-5).flatten(1).to(tensor(x).dtype)
    assert_close(y, exact, dt, array(peer), 1e-6)
    assert_close(rstd, exact_rstd, "f32")


@every_level
@every_dtype
@every_width
@every_grouping
@in_turn("with_residual", [True, False])
def test_rms_norm_backward(isa, dt, d, groups, offset, with_residual):
    """dx, and dgamma per batch split if a task has whole batch splits."""
    gen = rng(d)
    x, dy, residual = (random(gen, 12, groups * d, dt) for _ in range(3))
    gamma, dx, batch_splits = random(gen, 1, d, dt), empty(12, groups * d, dt), empty(3, groups * d)
    rstd = reference.rms_norm(x, gamma, 1e-5)[1].astype(np.float32)
    extra = residual if with_residual else None
    tiles = [dx, batch_splits, dy, x, rstd, gamma, extra]
    run(f"rms_norm_backward_{dt}", tiles, [4, 2, 8, 2], [offset], row_begin=8, isa=isa)
    exact, exact_splits = reference.rms_norm_backward(dy, x, rstd, gamma, extra, 4, offset=offset)
    assert_close(dx, exact, dt, bound=5e-6)
    assert_close(batch_splits, exact_splits, "f32")


@every_level
@every_dtype
def test_norms_of_heads_equal_norms_of_rows(isa, dt):
    """To the bit: adjacent heads are as many rows; an offset of 0 has no effect, also for gains of -0."""
    gen = rng(5)
    x, gamma = random(gen, 8, 60, dt).copy(), random(gen, 1, 20, dt).copy()
    gamma[0, 3] = -0.0
    y, rstd, wide, alone = empty(8, 60, dt), empty(8, 3), empty(24, 20, dt), empty(24, 1)
    run(f"rms_norm_{dt}", [y, rstd, x, gamma], floats=[1e-5, 0.0], isa=isa)
    run(f"rms_norm_{dt}", [wide, alone, x.reshape(24, 20), gamma], floats=[1e-5, 0.0], isa=isa)
    assert_same_bits(y.reshape(24, 20), wide)
    assert_same_bits(rstd.reshape(24, 1), alone)
    exact = (x.reshape(24, 20).astype(np.float32) * alone * gamma.astype(np.float32)).astype(x.dtype)
    assert_same_bits(wide, exact)


@every_level
@every_dtype
@every_width
@in_turn("shift", [0.0, 30.0])
def test_layer_norm(isa, dt, d, shift):
    """y and statistics for odd widths, also if the mean is much larger than the deviations."""
    gen = rng(d)
    x = (random(gen, 9, d, "f32", 3.0) + np.float32(shift)).astype(NUMPY[dt])
    gamma, beta, y, stats = random(gen, 1, d, dt), random(gen, 1, d, dt), empty(9, d, dt), empty(9, 2)
    run(f"layer_norm_{dt}", [y, stats, x, gamma, beta], floats=[1e-5], isa=isa)
    exact, exact_stats = reference.layer_norm(x, gamma, beta, 1e-5)
    peer = torch.nn.functional.layer_norm(tensor(x), (d,), tensor(gamma[0]), tensor(beta[0]), 1e-5)
    bound = 1e-6 if shift == 0 or d == 1 else 2e-5
    assert_close(y, exact, dt, array(peer), bound)
    if d > 1:  # one column: the deviation is rounding alone
        assert_close(stats[:, :1], exact_stats[:, :1], "f32")
        assert_close(stats[:, 1:], exact_stats[:, 1:], "f32", bound=2e-6)


@every_level
@every_dtype
@every_width
@in_turn("with_residual", [True, False])
def test_layer_norm_backward(isa, dt, d, with_residual):
    """dx, and dgamma and dbeta per batch split if a task has whole batch splits."""
    gen = rng(d)
    x, dy, residual = (random(gen, 12, d, dt) for _ in range(3))
    gamma, dx, dgamma, dbeta = random(gen, 1, d, dt), empty(12, d, dt), empty(3, d), empty(3, d)
    stats = reference.layer_norm(x, gamma, gamma, 1e-5)[1].astype(np.float32)
    extra = residual if with_residual else None
    tiles = [dx, dgamma, dbeta, dy, x, stats, gamma, extra]
    run(f"layer_norm_backward_{dt}", tiles, [4, 2, 8, 2], row_begin=8, isa=isa)
    exact = reference.layer_norm_backward(dy, x, stats, gamma, extra, 4)
    if d > 1:
        for got, want, kind in zip((dx, dgamma, dbeta), exact, (dt, "f32", "f32"), strict=True):
            assert_close(got, want, kind, bound=5e-6)


@every_dtype
def test_gradients_of_norms_accumulate_across_tasks(dt):
    """Tasks that share a batch split give the bits of one task; dbeta equals the sum of columns."""
    gen = rng(3)
    x, dy, gamma = random(gen, 24, 33, dt), random(gen, 24, 33, dt), random(gen, 1, 33, dt)
    rstd = reference.rms_norm(x, gamma, 1e-5)[1].astype(np.float32)
    stats = reference.layer_norm(x, gamma, gamma, 1e-5)[1].astype(np.float32)
    results = []
    for cuts in ([(0, 24)], [(0, 5), (5, 6), (6, 24)], [(0, 5), (6, 24), (5, 6)]):
        of_rms, dgamma, dbeta, sums = (empty(1, 33) for _ in range(4))
        for a, b in cuts:
            dx, ints = empty(b - a, 33, dt), [24, 12, 8, 12]
            tiles = [dx, of_rms, dy[a:b], x[a:b], rstd[a:b], gamma, None]
            run(f"rms_norm_backward_{dt}", tiles, ints, [0.0], row_begin=48 + a)
            tiles = [dx, dgamma, dbeta, dy[a:b], x[a:b], stats[a:b], gamma, None]
            run(f"layer_norm_backward_{dt}", tiles, ints, row_begin=48 + a)
            run(f"column_sum_split_{dt}", [sums, dy[a:b]], ints, row_begin=48 + a)
        assert_same_bits(dbeta, sums)
        results.append((of_rms, np.concatenate([dgamma, dbeta])))
    for whole, parts, reordered in zip(*results, strict=True):
        assert_same_bits(whole, parts)
        assert (bits(whole) != bits(reordered)).any(), "tasks in another order must show"


def in_splits(values, seq_len, k_splits):
    """fp32 sums of each k split of a batch split's sequences, token by token."""
    cuts = reference.sequence_splits(seq_len, k_splits)
    sums = np.zeros((len(cuts), values.shape[1]), np.float32)
    for row, value in enumerate(values):
        place = next(i for i, (_, begin, end) in enumerate(cuts) if begin <= row % seq_len < end)
        sums[place] = sums[place] + value
    return sums.reshape(1, -1)


@every_level
@in_turn("seq_len,k_splits", [(64, 8), (65, 8), (200, 3), (320, 4), (130, 1)])
def test_sequence_splits_of_a_batch_split(isa, seq_len, k_splits):
    """To the bit: a partial value per batch split and k split, tokens in order, over tasks of any size."""
    gen, rows = rng(seq_len), 2 * seq_len
    cuts = reference.sequence_splits(seq_len, k_splits)
    x, gamma = random(gen, 3 * rows, 1), np.ones((1, 1), np.float32)
    expected = [in_splits(x[a : a + rows], seq_len, k_splits) for a in range(0, 3 * rows, rows)]
    for step in (50, rows, 3 * rows):
        sums, dgamma, columns = (empty(3, len(cuts)) for _ in range(3))
        for a in range(0, 3 * rows, step):
            b = min(a + step, 3 * rows)
            own_splits = slice(a // rows, -(-b // rows))
            ints = [rows, seq_len, k_splits, seq_len]
            run("row_sum_split_f32", [sums[own_splits], x[a:b]], ints, row_begin=a, isa=isa)
            run("column_sum_split_f32", [columns[own_splits], x[a:b]], ints, row_begin=a, isa=isa)
            ones = np.ones((b - a, 1), np.float32)
            tiles = [empty(b - a, 1), dgamma[own_splits], x[a:b], ones, ones, gamma, None]
            run("rms_norm_backward_f32", tiles, ints, [0.0], row_begin=a, isa=isa)
        assert_same_bits(sums, np.concatenate(expected))
        assert_same_bits(dgamma, sums)
        assert_same_bits(columns, sums)
    if len(cuts) > 1:
        other = in_splits(x[:rows], seq_len + 1, k_splits)
        assert (bits(other) != bits(expected[0])).any(), "a cut at another position must show"


@every_level
@in_turn("k_splits", [2, 8])
def test_padding_does_not_move_split_boundaries(isa, k_splits):
    """Sequences of 150 tokens, unpadded and padded, with k splits counted over 300: equal to the bit."""
    gen, bound = rng(k_splits), 300
    tokens, num_splits = random(gen, 4, 150), len(reference.sequence_splits(bound, k_splits))

    def sums(width, split_len):
        x = np.zeros((4, width), np.float32)
        x[:, :150] = tokens
        x, split, dgamma = x.reshape(-1, 1), empty(2, num_splits), empty(2, num_splits)
        ints, ones = [2 * width, width, k_splits, split_len], np.ones((4 * width, 1), np.float32)
        run("row_sum_split_f32", [split, x], ints, isa=isa)
        tiles = [empty(4 * width, 1), dgamma, x, ones, ones, np.ones((1, 1), np.float32), None]
        run("rms_norm_backward_f32", tiles, ints, [0.0], isa=isa)
        return np.concatenate([split, dgamma])

    assert_close(
        sums(150, bound)[:2].sum(1), tokens.reshape(2, -1).sum(1, dtype=np.float64), "f32", bound=2e-6
    )
    for width in (151, 256, 300):
        assert_same_bits(sums(150, bound), sums(width, bound))
    if k_splits == 2:  # of several atoms each
        assert (bits(sums(150, 150)) != bits(sums(150, bound))).any(), "cuts counted over the width must show"


@every_level
def test_row_sum_split(isa):
    """Losses add up per batch split in token order, continuing from an earlier task."""
    x, split = random(rng(), 20, 1), empty(2, 1)
    run("row_sum_split_f32", [split[:1], x[:7]], [10, 5, 8, 5], row_begin=0, isa=isa)
    run("row_sum_split_f32", [split[:1], x[7:10]], [10, 5, 8, 5], row_begin=7, isa=isa)
    run("row_sum_split_f32", [split[1:], x[10:]], [10, 5, 8, 5], row_begin=10, isa=isa)
    assert_close(split, reference.row_sum_split(x, 10), "f32", bound=2e-6)


@every_level
@every_dtype
@every_width
def test_column_sum_split(isa, dt, d):
    """Columns add up per batch split and k split in token order, continuing from an earlier task."""
    x, split = random(rng(d), 300, d, dt), empty(2, 2 * d)
    for a, b in ((0, 37), (37, 150), (150, 300)):
        run(f"column_sum_split_{dt}", [split[a // 150 :], x[a:b]], [150, 75, 8, 75], row_begin=a, isa=isa)
    assert_close(split, reference.column_sum_split(x, 150, 75, 8), "f32", bound=2e-6)


@every_level
@every_dtype
@in_turn("head_dim,rotated", [(2, 2), (20, 20), (32, 24), (64, 64), (21, 4), (128, 96)])
@in_turn("inverse", [0, 1])
def test_rope(isa, dt, head_dim, rotated, inverse):
    """Rotation by position of whole heads and of their first elements, also in place."""
    gen = rng(head_dim)
    x, angles = random(gen, 7, 3 * head_dim, dt), gen.uniform(0, 6, (50, rotated // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    positions, out = gen.integers(0, 50, (7, 1)).astype(np.int32), empty(7, 3 * head_dim, dt)
    run(f"rope_{dt}", [out, x, positions, table], [head_dim, inverse], isa=isa)
    assert_close(out, reference.rope(x, positions, table, head_dim, bool(inverse)), dt)
    rest = (slice(None), slice(None), slice(rotated, None))
    assert_same_bits(out.reshape(7, 3, -1)[rest], x.reshape(7, 3, -1)[rest])
    run(f"rope_{dt}", [x, x, positions, table], [head_dim, inverse], isa=isa)
    assert_same_bits(x, out)


@every_level
@every_dtype
@every_width
def test_softmax_and_backward(isa, dt, d):
    """Rows sum to one, large logits do not overflow, the gradient matches."""
    gen = rng(d)
    x, dy, y, dx = random(gen, 9, d, dt, 30.0), random(gen, 9, d, dt), empty(9, d, dt), empty(9, d, dt)
    run(f"softmax_{dt}", [y, x], isa=isa)
    assert_close(y, reference.softmax(x), dt, array(torch.softmax(tensor(x), 1)))
    run(f"softmax_backward_{dt}", [dx, dy, y], isa=isa)
    exact = reference.softmax_backward(dy, y)
    if d > 1:  # one column: the gradient is rounding alone
        assert_close(dx, exact, dt, bound=4e-6)


@every_level
@every_dtype
@every_width
def test_row_sum(isa, dt, d):
    """The sum of every row, in fp32."""
    x, out = random(rng(d), 9, d, dt), empty(9, 1)
    run(f"row_sum_{dt}", [out, x], isa=isa)
    assert_close(out, reference.REFERENCES["row_sum"](x), "f32", bound=2e-6)


def cross_entropy(dt, logits, labels, inv_count, isa, begin=0, k_splits=4):
    """dlogits and loss rows from the three kernels."""
    rows, width = logits.shape
    stats, sums, loss, grad = empty(rows, 2), empty(rows, 1), empty(rows, 1), empty(rows, width, dt)
    ints = [begin, -100]
    run(f"cross_entropy_max_{dt}", [stats, logits, labels], ints, isa=isa)
    ranges = [x for c in range(k_splits) for x in (width * c // k_splits, width * (c + 1) // k_splits)]
    run(f"cross_entropy_sum_{dt}", [sums, logits, stats], [k_splits, *ranges], isa=isa)
    run(f"cross_entropy_grad_{dt}", [grad, loss, logits, stats, sums, labels, inv_count], ints, isa=isa)
    return stats, sums, loss, grad


@every_level
@every_dtype
@in_turn("width", [3, 64, 301])
def test_cross_entropy(isa, dt, width):
    """Loss and gradient against PyTorch in fp64; ignored rows are zero."""
    gen = rng(width)
    logits, labels = random(gen, 11, width, dt, 5.0), gen.integers(0, width, (11, 1)).astype(np.int32)
    labels[4] = -100
    inv_count = np.array([[0.1]], np.float32)
    stats, sums, loss, grad = cross_entropy(dt, logits, labels, inv_count, isa)
    np.testing.assert_array_equal(stats, reference.cross_entropy_max(logits, labels, 0, -100))
    assert_close(sums, reference.cross_entropy_sum(logits, stats), "f32")
    exact = tensor(logits).double().requires_grad_()
    targets = torch.from_numpy(labels[:, 0].astype(np.int64))
    rows = torch.nn.functional.cross_entropy(exact, targets, reduction="none", ignore_index=-100)
    (rows.sum() * inv_count[0, 0].item()).backward()
    assert_close(loss[:, 0], array(rows) * 0.1, "f32", bound=2e-6)
    assert_close(grad, array(exact.grad), dt, bound=2e-6)
    got = reference.cross_entropy_grad(logits, stats, sums, labels, inv_count, 0, -100)
    assert_close(grad, got[0], dt)
    assert_close(loss, got[1], "f32", bound=2e-6)
    assert not grad[4].any()
    assert loss[4] == 0


@every_dtype
def test_cross_entropy_over_shards(dt):
    """Two shards of the vocabulary have the bits of one, by exact maxima and the tree over k splits."""
    gen = rng(1)
    logits, labels = random(gen, 6, 128, dt, 4.0), gen.integers(0, 128, (6, 1)).astype(np.int32)
    inv_count = np.array([[0.25]], np.float32)
    _, sums, loss, grad = cross_entropy(dt, logits, labels, inv_count, "")
    halves = [(0, logits[:, :64]), (64, logits[:, 64:])]
    stats = [empty(6, 2) for _ in halves]
    for own, (begin, part) in zip(stats, halves, strict=True):
        run(f"cross_entropy_max_{dt}", [own, part, labels], [begin, -100])
    top = empty(6, 2)
    run("tree_max_f32", [top, None, *stats])
    parts = [empty(6, 1) for _ in halves]
    for own, (_, part) in zip(parts, halves, strict=True):
        run(f"cross_entropy_sum_{dt}", [own, part, top], [2, 0, 32, 32, 64])
    total = empty(6, 1)
    run("tree_add_f32", [total, None, *parts])
    assert_same_bits(total, sums)
    run(f"cross_entropy_sum_{dt}", [parts[1], halves[1][1], stats[1]], [2, 0, 32, 32, 64])
    run("tree_add_f32", [total, None, *parts])
    assert (bits(total) != bits(sums)).any(), "a shard that keeps to its own maximum must show"
    run(f"cross_entropy_sum_{dt}", [parts[1], halves[1][1], top], [2, 0, 32, 32, 64])
    run("tree_add_f32", [total, None, *parts])
    for begin, part in halves:
        own_loss, own_grad = empty(6, 1), empty(6, 64, dt)
        tiles = [own_grad, own_loss, part, top, total, labels, inv_count]
        run(f"cross_entropy_grad_{dt}", tiles, [begin, -100])
        assert_same_bits(own_grad, grad[:, begin : begin + 64])
        assert_same_bits(own_loss, loss)


@every_level
@every_dtype
def test_nan_stays_in_its_row(isa, dt):
    """A NaN makes only its own row NaN in norms, softmax, sums and the loss."""
    gen = rng(2)
    x = random(gen, 5, 40, dt).copy()
    x[3, 17] = np.nan
    gamma, y, rstd, total = random(gen, 1, 40, dt), empty(5, 40, dt), empty(5, 1), empty(5, 1)
    run(f"rms_norm_{dt}", [y, rstd, x, gamma], floats=[1e-5, 0.0], isa=isa)
    outputs = [y.copy()]
    run(f"layer_norm_{dt}", [y, empty(5, 2), x, gamma, gamma], floats=[1e-5], isa=isa)
    outputs.append(y.copy())
    run(f"softmax_{dt}", [y, x], isa=isa)
    run(f"row_sum_{dt}", [total, x], isa=isa)
    _, _, loss, grad = cross_entropy(dt, x, np.zeros((5, 1), np.int32), np.ones((1, 1), np.float32), isa)
    for out in (*outputs, y, total, loss, grad):
        nan = np.isnan(out.astype(np.float32))
        assert nan[3].all()
        assert not nan[[0, 1, 2, 4]].any()
