"""Attention forward, backward and paged against fp64 and PyTorch; the bits of a row do not depend on other rows."""

from dataclasses import replace

import numpy as np
import pytest
from attention_calls import (
    Scores,
    backward,
    both_ways,
    exact,
    forward,
    operands,
    paged,
    run_paged,
    torch_attention,
)
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

# seq_len, sequences, heads, kv_heads, head_dim
SHAPES = [(5, 2, 2, 1, 8), (64, 1, 4, 2, 32), (131, 2, 6, 2, 20), (200, 1, 2, 2, 64), (70, 1, 3, 1, 136)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@every_level
@every_dtype
@every_shape
@in_turn("causal", [True, False])
def test_forward_and_backward(isa, dt, shape, causal):
    """Output, lse and gradients for odd lengths, grouped heads and odd head sizes."""
    q, k, v = operands(shape, dt)
    dout, scores = random(rng(9), *q.shape, dt), Scores(causal)
    results, want = both_ways(shape, dt, q, k, v, dout, isa, scores), exact(shape, q, k, v, dout, scores)
    peer, batch_splits = torch_attention(shape, q, k, v, scores)
    peer.backward(tensor(dout))
    assert_close(results[0], want[0], dt, array(peer), 2e-6)
    assert_close(results[1], want[1], "f32", bound=2e-6)
    for got, gradient, split in zip(results[2:], want[2:], batch_splits, strict=True):
        assert_close(got, gradient, dt, array(split.grad), 4e-6)


@every_dtype
def test_backward_returns_fp32_partial_values(dt):
    """dk and dv are fp32 if a group's heads are spread over devices."""
    shape = (80, 1, 4, 2, 16)
    q, k, v = operands(shape, dt)
    out, lse = forward(shape, dt, q, k, v)
    dout = random(rng(9), *q.shape, dt)
    rounded, partial = (
        backward(shape, dt, dout, out, lse, q, k, v, dkv_is_f32=flag) for flag in (False, True)
    )
    for a, b in zip(rounded, partial, strict=True):
        assert_same_bits(a, b.astype(NUMPY[dt]))


@every_level
@every_dtype
def test_bits_of_a_sequence_do_not_depend_on_its_neighbours(isa, dt):
    """Two sequences in one task, and each alone, give the same bits."""
    shape = (70, 2, 4, 2, 24)
    q, k, v = operands(shape, dt)
    both, _ = forward(shape, dt, q, k, v, isa)
    for half in (slice(0, 70), slice(70, 140)):
        alone, _ = forward((70, 1, 4, 2, 24), dt, q[half], k[half], v[half], isa)
        assert_same_bits(both[half], alone)


@every_level
@every_dtype
@in_turn("length", [33, 64, 100])
def test_bits_of_a_prefix_do_not_depend_on_what_follows(isa, dt, length):
    """Causal rows, and gradients that only they cause, equal those of the short sequence."""
    heads, kv_heads, dim, seq = 4, 2, 24, 131
    shape, short = (seq, 1, heads, kv_heads, dim), (length, 1, heads, kv_heads, dim)
    q, k, v = operands(shape, dt)
    dout = random(rng(9), *q.shape, dt)
    dout[length:] = 0
    results = [
        both_ways(case, dt, q[:rows], k[:rows], v[:rows], dout[:rows], isa)
        for case, rows in ((shape, seq), (short, length))
    ]
    for whole, prefix in zip(*results, strict=True):
        assert_same_bits(whole[:length], prefix)


@every_level
@every_dtype
@in_turn("scores", [Scores(), Scores(window=70, softcap=5.0)])
def test_documents_of_a_sequence_do_not_see_each_other(isa, dt, scores):
    """One that begins at a multiple of 64 has the bits that it has alone, forward and backward; all are right."""
    heads, starts, seq = (4, 2, 24), [0, 128, 192, 207], 230
    first = np.repeat(starts, np.diff([*starts, seq]))
    shape, scores = (seq, 2, *heads), replace(scores, first=(*first, *first[:1].repeat(seq)))
    q, k, v = operands(shape, dt)
    dout = random(rng(9), *q.shape, dt)
    together = both_ways(shape, dt, q, k, v, dout, isa, scores)
    peer, batch_splits = torch_attention(shape, q, k, v, scores)
    peer.backward(tensor(dout))
    want = exact(shape, q, k, v, dout, scores)
    assert_close(together[0], want[0], dt, array(peer), 2e-6)
    for ours, gradient, split in zip(together[2:], want[2:], batch_splits, strict=True):
        assert_close(ours, gradient, dt, array(split.grad), 4e-6)
    for begin, end in ((0, 128), (128, 192), (192, 207)):
        rows = slice(begin, end)
        alone = both_ways(
            (end - begin, 1, *heads),
            dt,
            *(x[rows] for x in (q, k, v, dout)),
            isa,
            replace(scores, first=None),
        )
        for whole, part in zip(together, alone, strict=True):
            assert_same_bits(whole[rows], part)
    wrong = both_ways(
        shape, dt, q, k, v, dout, isa, replace(scores, first=(*(first - (first == 128)), *first * 0))
    )
    assert all((bits(x[128:192]) != bits(y[128:192])).any() for x, y in zip(wrong[2:], together[2:])), (
        "the twin"
    )


@every_dtype
def test_comparisons_of_rows_can_fail(dt):
    """The twin: two sequences treated as one, and later rows that are not masked, change compared rows."""
    q, k, v = operands((70, 2, 4, 2, 24), dt)
    both, _ = forward((70, 2, 4, 2, 24), dt, q, k, v)
    one, _ = forward((140, 1, 4, 2, 24), dt, q, k, v)
    assert_same_bits(one[:70], both[:70])
    assert (bits(one[70:]) != bits(both[70:])).any()
    seeing, _ = forward((140, 1, 4, 2, 24), dt, q, k, v, scores=Scores(causal=False))
    assert (bits(seeing[:70]) != bits(one[:70])).any()


@every_level
@every_dtype
@in_turn("block_size", [64, 128])
def test_paged_equals_dense_to_the_bit(isa, dt, block_size):
    """A token alone, in a batch, and a whole prompt in k splits have the bits of dense attention."""
    shape = (150, 1, 4, 2, 32)
    q, k, v = operands(shape, dt)
    dense, _ = forward(shape, dt, q, k, v, isa)
    caches, table = paged(dt, k, v, block_size, rng(3), shape[4])
    for rows in ([149], [0, 63, 64, 127, 128], range(150), range(70, 150), [5, 3, 149]):
        rows = np.array(rows)
        out = run_paged(shape, dt, q[rows], caches, table, rows, isa, block_size=block_size)
        assert_same_bits(out, dense[rows])
    table[0, [0, 1]] = table[0, [1, 0]]
    out = run_paged(shape, dt, q[rows], caches, table, rows, isa, block_size=block_size)
    assert (bits(out) != bits(dense[rows])).any(), "pages that changed places must show"


FEW = [(1, 1, 64), (8, 1, 64), (4, 2, 32), (6, 3, 96), (8, 8, 128), (14, 2, 64), (2, 1, 256), (3, 1, 40)]
LASTS = (0, 1, 15, 16, 17, 32, 62, 63, 64, 65, 127, 128, 199)


@every_level
@every_dtype
@pytest.mark.parametrize("heads,scores", [*zip(FEW, [Scores(), Scores(window=70, softcap=5.0)] * 4)], ids=str)
def test_few_queries_have_the_bits_of_many(isa, dt, heads, scores):
    """One to three rows, which read keys and values in place, equal a prompt's rows, which read them packed."""
    shape = (200, 1, *heads)
    q, k, v = operands(shape, dt)
    many, _ = forward(shape, dt, q, k, v, isa, scores=scores)
    caches, table = paged(dt, k, v, 64, rng(7), shape[4])
    for last in LASTS:
        for rows in ([last], [last - 1, last], [last - 2, last - 1, last]):
            if rows[0] >= 0:
                out = run_paged(shape, dt, q[rows], caches, table, rows, isa, scores)
                assert_same_bits(out, many[rows])
    rows, owner = np.array([199, 77, 63, 130]), np.arange(4)
    out = run_paged(shape, dt, q[rows], caches, np.repeat(table, 4, 0), rows, isa, scores, sequence=owner)
    assert_same_bits(out, many[rows])
    reference.cache_pages(caches[1], 64, shape[4])[table[0, 1], :, 3] = 9.0
    out = run_paged(shape, dt, q[rows], caches, np.repeat(table, 4, 0), rows, isa, scores, sequence=owner)
    seen = [i for i, row in enumerate(rows) if 67 in scores.positions(row)]
    assert seen == [i for i in range(4) if (bits(out[i]) != bits(many[rows[i]])).any()], "one value must show"


@every_level
@every_dtype
@pytest.mark.parametrize("rows", [[70], range(40, 90)], ids=["few", "many"])
def test_some_heads_have_the_bits_of_all(isa, dt, rows):
    """A task of some heads gets their columns of the queries, the whole caches, and its first head."""
    shape, rows = (100, 1, 8, 4, 32), np.array(rows)
    q, k, v = operands(shape, dt)
    caches, table = paged(dt, k, v, 64, rng(3), 32)
    whole = run_paged(shape, dt, q[rows], caches, table, rows, isa)
    for first in range(0, 8, 4):
        columns, share = slice(first * 32, (first + 4) * 32), (100, 1, 4, 2, 32)
        own = q[rows][:, columns]
        out = run_paged(share, dt, own, caches, table, rows, isa, row_begin=first * 32)
        assert_same_bits(out, whole[:, columns])
    out = run_paged(share, dt, own, caches, table, rows, isa)
    assert (bits(out) != bits(whole[:, columns])).any(), "another place to begin must show"


@every_level
@every_dtype
@in_turn("heads", [(8, 2, 64), (4, 2, 20), (1, 1, 128)])
def test_int8_caches_are_the_caches_of_their_numbers(isa, dt, heads):
    """Written, few rows and many: the bits of a plain cache with the numbers that NumPy reads from the codes."""
    count, kv_heads, dim = heads
    gen, rows, block_size = rng(dim), 64 * 3, 64
    slots = gen.permutation(rows).astype(np.int32)[:, None]
    slots[3] = -1
    caches, plain = [], []
    for x in (random(gen, rows, kv_heads * dim, dt) for _ in range(2)):
        x[5, dim - 1], x[6] = 40.0, 0.0
        cache = np.zeros((rows, kv_heads * (dim // 4 + 1)), np.int32)
        expected = reference.kv_write_int8(cache, x, slots, block_size, dim)
        run(f"kv_write_int8_{dt}", [cache, x, slots], [block_size, dim], isa=isa)
        assert_same_bits(cache, expected)
        caches.append(cache)
        plain.append(reference.int8_numbers(cache, block_size, dim, NUMPY[dt]))
        written = reference.cache_pages(plain[-1], block_size, dim)[slots[7, 0] // 64, :, slots[7, 0] % 64]
        own = x[7].astype(np.float32).reshape(kv_heads, dim)
        assert (np.abs(written.astype(np.float32) - own) <= np.abs(own).max(1, keepdims=True) / 100).all()
    table = gen.permutation(3)[None].astype(np.int32)

    def attend(kernel, operands):
        out, owner = empty(*q.shape, dt), np.zeros_like(positions)
        sizes = [block_size, *heads, 0]
        run(f"{kernel}_{dt}", [out, q, *operands, positions, owner, table], sizes, [dim**-0.5, 0.0], isa=isa)
        return out

    for number in (1, 2, 70):
        q, positions = random(gen, number, count * dim, dt), np.sort(gen.integers(0, rows, (number, 1)), 0)
        positions = positions.astype(np.int32)
        out = attend("attention_paged_int8", caches)
        assert_same_bits(out, attend("attention_paged", plain))
    codes, _ = reference.int8_parts(caches[1], block_size, dim)
    codes[table[0, 0], 0, 0, 0] ^= 64  # the twin
    assert (bits(attend("attention_paged_int8", caches)) != bits(out)).any()


@every_dtype
def test_paged_mixes_sequences(dt):
    """Tokens of several sequences in a batch see only their own pages."""
    gen = rng(5)
    k_cache, v_cache = (np.ascontiguousarray(random(gen, 64 * 6, 16, dt)) for _ in range(2))
    q = random(gen, 4, 32, dt)
    table = np.array([[5, 0, 1], [2, 4, 3]], np.int32)
    positions, sequence = np.array([100, 3, 64, 7], np.int32), np.array([1, 0, 0, 1], np.int32)
    for scores in (Scores(), Scores(window=9, softcap=3.0)):
        caches = k_cache, v_cache
        out = run_paged((0, 0, 2, 1, 16), dt, q, caches, table, positions, scores=scores, sequence=sequence)
        sizes = 64, 2, 1, 16, 0.25, scores.window, scores.softcap
        want = reference.attention_paged(q, *caches, positions, sequence, table, *sizes)
        assert_close(out, want, dt, bound=2e-6)


@every_level
@every_dtype
def test_large_scores_do_not_overflow(isa, dt):
    """Scores of thousands give a finite softmax that selects the largest; NaN stays in its row."""
    shape = (66, 1, 1, 1, 16)
    q, k, v = (x.copy() for x in operands(shape, dt))
    q *= np.asarray(300, q.dtype)
    k *= np.asarray(300, k.dtype)
    q[10, 3] = np.nan
    out, _ = forward(shape, dt, q, k, v, isa)
    values = out.astype(np.float32)
    assert np.isnan(values[10]).all()
    assert np.isfinite(np.delete(values, 10, 0)).all()


def test_too_long_sequences_for_scratch_are_rejected():
    """The backward pass stores one KV head's sequence in scratch memory; a longer one is a clear error."""
    q = np.zeros((1 << 16, 128), np.float32)
    operands = [q.copy(), q.copy(), q.copy(), q, q, np.zeros((1 << 16, 1), np.float32), q, q, q, None, None]
    with pytest.raises(MemoryError, match="working memory"):
        run("attention_backward_f32", operands, [1 << 16, 1, 1, 128, 1, 0, 0], [1.0, 0.0])
