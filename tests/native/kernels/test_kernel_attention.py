"""Attention forward, backward and paged against fp64 and PyTorch; the bits of a row against its neighbours."""

import numpy as np
import pytest
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
    random,
    rng,
    tensor,
)

from tilewise.kernels import reference
from tilewise.kernels.isa import run

# seq_len, sequences, heads, kv_heads, head_dim
SHAPES = [(5, 2, 2, 1, 8), (64, 1, 4, 2, 32), (131, 2, 6, 2, 20), (200, 1, 2, 2, 64), (70, 1, 3, 1, 136)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def operands(shape, dt, seed=0):
    """q, k, v of a shape."""
    seq, count, heads, kv_heads, dim = shape
    gen = rng(seed)
    return tuple(random(gen, seq * count, width * dim, dt) for width in (heads, kv_heads, kv_heads))


def forward(shape, dt, q, k, v, isa, causal=True):
    """out and lse of the kernel."""
    seq, _, heads, kv_heads, dim = shape
    out, lse = empty(len(q), heads * dim, dt), empty(len(q), heads)
    run(f"attention_{dt}", [out, lse, q, k, v], [seq, heads, kv_heads, dim, causal], [dim**-0.5], isa=isa)
    return out, lse


def torch_attention(shape, q, k, v, causal):
    """PyTorch's scaled_dot_product_attention in the operands' dtype; returns the output and its leaves."""
    seq, count, heads, kv_heads, dim = shape
    leaves = [tensor(x).requires_grad_() for x in (q, k, v)]
    widths = (heads, kv_heads, kv_heads)
    split = [x.view(count, seq, w, dim).transpose(1, 2) for x, w in zip(leaves, widths, strict=True)]
    split[1:] = [x.repeat_interleave(heads // kv_heads, 1) for x in split[1:]]
    out = torch.nn.functional.scaled_dot_product_attention(*split, is_causal=causal)
    return out.transpose(1, 2).reshape(count * seq, heads * dim), leaves


@every_level
@every_dtype
@every_shape
@pytest.mark.parametrize("causal", [True, False])
def test_forward(isa, dt, shape, causal):
    """Output and lse on odd lengths, grouped heads and odd head sizes."""
    q, k, v = operands(shape, dt)
    out, lse = forward(shape, dt, q, k, v, isa, causal)
    seq, _, heads, kv_heads, dim = shape
    exact, exact_lse = reference.attention(q, k, v, seq, heads, kv_heads, dim, causal, dim**-0.5)
    peer, _ = torch_attention(shape, q, k, v, causal)
    assert_close(out, exact, dt, array(peer), 2e-6)
    assert_close(lse, exact_lse, "f32", bound=2e-6)


@every_level
@every_dtype
@every_shape
@pytest.mark.parametrize("causal", [True, False])
def test_backward(isa, dt, shape, causal):
    """dq, dk and dv; dk and dv sum over the query heads of a group."""
    seq, _, heads, kv_heads, dim = shape
    q, k, v = operands(shape, dt)
    dout = random(rng(9), *q.shape, dt)
    out, lse = forward(shape, dt, q, k, v, isa, causal)
    grads = [empty(*x.shape, dt) for x in (q, k, v)]
    ints = [seq, heads, kv_heads, dim, causal, 0]
    run(f"attention_backward_{dt}", [*grads, dout, out, lse, q, k, v], ints, [dim**-0.5], isa=isa)
    exact = reference.attention_backward(dout, q, k, v, seq, heads, kv_heads, dim, causal, dim**-0.5)
    result, leaves = torch_attention(shape, q, k, v, causal)
    result.backward(tensor(dout))
    for got, want, leaf in zip(grads, exact, leaves, strict=True):
        assert_close(got, want, dt, array(leaf.grad), 4e-6)


@every_dtype
def test_backward_leaves_fp32_partials(dt):
    """dk and dv leave in fp32 when a group's heads are spread over devices."""
    shape = (80, 1, 4, 2, 16)
    q, k, v = operands(shape, dt)
    out, lse = forward(shape, dt, q, k, v, "")
    dout = random(rng(9), *q.shape, dt)
    rounded = [empty(*x.shape, dt) for x in (q, k, v)]
    kept = [empty(*q.shape, dt), empty(*k.shape), empty(*v.shape)]
    for grads, flag in ((rounded, 0), (kept, 1)):
        run(f"attention_backward_{dt}", [*grads, dout, out, lse, q, k, v], [80, 4, 2, 16, 1, flag], [0.25])
    for a, b in zip(rounded, kept, strict=True):
        assert_same_bits(a, b.astype(NUMPY[dt]))


@every_level
@every_dtype
def test_bits_of_a_sequence_do_not_depend_on_its_neighbours(isa, dt):
    """Two sequences in one task and each alone give the same bits."""
    shape = (70, 2, 4, 2, 24)
    q, k, v = operands(shape, dt)
    both, _ = forward(shape, dt, q, k, v, isa)
    for half in (slice(0, 70), slice(70, 140)):
        alone, _ = forward((70, 1, 4, 2, 24), dt, q[half], k[half], v[half], isa)
        assert_same_bits(both[half], alone)


@every_level
@every_dtype
@pytest.mark.parametrize("length", [33, 64, 100])
def test_bits_of_a_prefix_do_not_depend_on_what_follows(isa, dt, length):
    """Causal rows of a long sequence equal the short sequence's: skipped positions change no bit.

    Backward the same holds where nothing flows back from the later rows.
    """
    heads, kv_heads, dim, seq = 4, 2, 24, 131
    shape, short = (seq, 1, heads, kv_heads, dim), (length, 1, heads, kv_heads, dim)
    q, k, v = operands(shape, dt)
    dout = random(rng(9), *q.shape, dt)
    dout[length:] = 0
    results = []
    for case, rows in ((shape, seq), (short, length)):
        inputs = [x[:rows] for x in (q, k, v)]
        out, lse = forward(case, dt, *inputs, isa)
        grads = [empty(*x.shape, dt) for x in inputs]
        ints = [rows, heads, kv_heads, dim, 1, 0]
        tiles = [*grads, dout[:rows], out, lse, *inputs]
        run(f"attention_backward_{dt}", tiles, ints, [dim**-0.5], isa=isa)
        results.append([out, lse, *grads])
    for whole, prefix in zip(*results, strict=True):
        assert_same_bits(whole[:length], prefix)


@every_dtype
def test_comparisons_of_rows_can_fail(dt):
    """Two sequences taken for one, and later rows that are not masked, change the bits of rows that were compared."""
    q, k, v = operands((70, 2, 4, 2, 24), dt)
    both, _ = forward((70, 2, 4, 2, 24), dt, q, k, v, "")
    one, _ = forward((140, 1, 4, 2, 24), dt, q, k, v, "")
    assert_same_bits(one[:70], both[:70])
    assert (bits(one[70:]) != bits(both[70:])).any()
    seeing, _ = forward((140, 1, 4, 2, 24), dt, q, k, v, "", causal=False)
    assert (bits(seeing[:70]) != bits(one[:70])).any()


def paged(dt, k, v, block_size, gen):
    """A cache of shuffled pages full of NaN outside the sequence, and its block table."""
    blocks = -(-len(k) // block_size) + 3
    order = gen.permutation(blocks)
    caches = [np.full((blocks * block_size, x.shape[1]), np.nan).astype(NUMPY[dt]) for x in (k, v)]
    for cache, x in zip(caches, (k, v), strict=True):
        for p, row in enumerate(x):
            cache[order[p // block_size] * block_size + p % block_size] = row
    return caches, order[None, :].astype(np.int32)


@every_level
@every_dtype
@pytest.mark.parametrize("block_size", [64, 128])
def test_paged_equals_dense_to_the_bit(isa, dt, block_size):
    """A token alone, in a batch, and a whole prompt in chunks have the bits of dense attention."""
    shape = (150, 1, 4, 2, 32)
    q, k, v = operands(shape, dt)
    dense, _ = forward(shape, dt, q, k, v, isa)
    (k_cache, v_cache), table = paged(dt, k, v, block_size, rng(3))
    for rows in ([149], [0, 63, 64, 127, 128], range(150), range(70, 150), [5, 3, 149]):
        rows = np.array(rows)
        out = empty(len(rows), 128, dt)
        positions = rows.astype(np.int32)[:, None]
        tiles = [out, q[rows], k_cache, v_cache, positions, np.zeros_like(positions), table]
        run(f"attention_paged_{dt}", tiles, [block_size, 4, 2, 32], [32**-0.5], isa=isa)
        assert_same_bits(out, dense[rows])
    table[0, [0, 1]] = table[0, [1, 0]]
    run(f"attention_paged_{dt}", tiles, [block_size, 4, 2, 32], [32**-0.5], isa=isa)
    assert (bits(out) != bits(dense[rows])).any(), "pages that changed places must show"


@every_dtype
def test_paged_mixes_sequences(dt):
    """Tokens of several sequences in one batch each see their own pages."""
    gen = rng(5)
    k_cache, v_cache, q = random(gen, 64 * 6, 16, dt), random(gen, 64 * 6, 16, dt), random(gen, 4, 32, dt)
    table = np.array([[5, 0, 1], [2, 4, 3]], np.int32)
    positions, sequence = (
        np.array([[100], [3], [64], [7]], np.int32),
        np.array([[1], [0], [0], [1]], np.int32),
    )
    out = empty(4, 32, dt)
    run(
        f"attention_paged_{dt}",
        [out, q, k_cache, v_cache, positions, sequence, table],
        [64, 2, 1, 16],
        [0.25],
    )
    exact = reference.attention_paged(q, k_cache, v_cache, positions, sequence, table, 64, 2, 1, 16, 0.25)
    assert_close(out, exact, dt, bound=2e-6)


@every_level
@every_dtype
def test_large_scores_do_not_overflow(isa, dt):
    """Scores of thousands give a finite softmax that picks the largest; NaN stays in its row."""
    shape = (66, 1, 1, 1, 16)
    q, k, v = (x.copy() for x in operands(shape, dt))
    q *= np.asarray(300, q.dtype)
    k *= np.asarray(300, k.dtype)
    q[10, 3] = np.nan
    out, _ = forward(shape, dt, q, k, v, isa)
    values = out.astype(np.float32)
    assert np.isnan(values[10]).all()
    assert np.isfinite(np.delete(values, 10, 0)).all()


def test_sequences_too_long_for_scratch_are_refused():
    """The backward pass keeps one KV head's sequence in scratch; more than fits is one clear error."""
    q = np.zeros((1 << 16, 128), np.float32)
    operands = [q.copy(), q.copy(), q.copy(), q, q, np.zeros((1 << 16, 1), np.float32), q, q, q]
    with pytest.raises(MemoryError, match="working memory"):
        run("attention_backward_f32", operands, [1 << 16, 1, 1, 128, 1, 0], [1.0])
