"""matmul, matmul_dx, matmul_dw and gemm against fp64 and PyTorch, for odd sizes and strides."""

import numpy as np
import pytest
from kernel_checks import (
    array,
    assert_close,
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
    tensor,
)

from tilewise.kernels import reference
from tilewise.kernels.isa import run
from tilewise.kernels.packing import unpack_weight

SHAPES = [(1, 5, 3), (7, 33, 65), (16, 64, 258), (77, 100, 257), (29, 31, 1030), (2050, 3, 7)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def bound(k):
    """Error bound of an fp32 contraction of length k."""
    return 1e-6 * max(1.0, k**0.5 / 4)


@every_level
@every_dtype
@every_shape
@in_turn("k_splits", [1, 5, 8])
def test_matmul(isa, dt, shape, k_splits):
    """out = cast(tree(A W^T) + residual) for odd sizes and strided rows."""
    m, n, k = shape
    gen = rng(m)
    a, w, residual, out = random(gen, m, k, dt), random(gen, n, k, dt), random(gen, m, n, dt), empty(m, n, dt)
    run(
        f"matmul_{dt}",
        [out, residual, a, packed(w, dt)],
        [0, 1, k_splits, *even_splits(k, k_splits)],
        isa=isa,
    )
    peer = array(tensor(a) @ tensor(w).T + tensor(residual))
    assert_close(out, reference.matmul(residual, [(a, w)]), dt, peer, bound(k))


@every_level
@every_dtype
def test_matmul_sums_terms_of_different_length(isa, dt):
    """Two terms with different k add up, in fp32 on request."""
    gen = rng(1)
    terms = [(random(gen, 20, k, dt), random(gen, 40, k, dt)) for k in (64, 38)]
    out = empty(20, 40)
    ints = [1, 2, 2, 0, 32, 0, 20, 32, 64, 20, 38]
    run(f"matmul_{dt}", [out, None, *(t for a, w in terms for t in (a, packed(w, dt)))], ints, isa=isa)
    assert_close(out, reference.matmul(None, terms), "f32", bound=bound(102))


@every_level
@every_dtype
def test_matmul_counts_only_its_ranges(isa, dt):
    """Elements outside the ranges, even NaN, have no effect; empty k splits add nothing."""
    gen = rng(2)
    a, w = random(gen, 9, 50, dt).copy(), random(gen, 33, 50, dt)
    a[:, 20:30] = np.nan
    out = empty(9, 33)
    run(f"matmul_{dt}", [out, None, a, packed(w, dt)], [1, 1, 4, 0, 0, 2, 19 + 1, 30, 30, 30, 49], isa=isa)
    use = np.r_[2:20, 30:49]
    assert_close(out, reference.matmul(None, [(a, w)], [use]), "f32", bound=bound(50))


@every_level
@every_dtype
@every_shape
def test_matmul_dx(isa, dt, shape):
    """Transposed use of packed weights, with k splits that begin inside a panel."""
    m, n, k = shape
    gen = rng(m + 1)
    a, w, residual, out = random(gen, m, n, dt), random(gen, n, k, dt), random(gen, m, k, dt), empty(m, k, dt)
    run(f"matmul_dx_{dt}", [out, residual, a, packed(w, dt)], [0, 1, 3, *even_splits(n, 3)], isa=isa)
    peer = array(tensor(a) @ tensor(w) + tensor(residual))
    assert_close(out, reference.matmul_dx(residual, [(a, w)]), dt, peer, bound(n))


@every_level
@every_dtype
def test_matmul_dx_of_many_rows_of_weights(isa, dt):
    """A contraction longer than a window, over two terms, carries its sums between windows."""
    gen = rng(3)
    terms = [(random(gen, 40, n, dt), random(gen, n, 70, dt)) for n in (2500, 1301)]
    out = empty(40, 70)
    ranges = [
        x
        for c in range(4)
        for n in (2500, 1301)
        for x in (n * c // 8 * 2, n if c == 3 else n * (c + 1) // 8 * 2)
    ]
    tiles = [out, None, *(t for a, w in terms for t in (a, packed(w, dt)))]
    run(f"matmul_dx_{dt}", tiles, [1, 2, 4, *ranges], isa=isa)
    assert_close(out, reference.matmul_dx(None, terms), "f32", bound=bound(3801))


@every_level
@every_dtype
@pytest.mark.parametrize(
    "tokens,split_rows,n,k", [(1, 1, 5, 3), (77, 77, 33, 65), (300, 64, 70, 130), (900, 450, 40, 33)]
)
def test_matmul_dw(isa, dt, tokens, split_rows, n, k):
    """Packed weight gradients over batch splits, embedding rows and carries; padding becomes zero."""
    gen = rng(tokens)
    dy, x, de = random(gen, tokens, n, dt), random(gen, tokens, k, dt), random(gen, tokens, k, dt)
    ids = gen.integers(90, 100 + n + 10, (tokens, 1)).astype(np.int32)
    carries = [random(gen, n, k) for _ in range(2)]
    out = packed_out(n, k)
    tiles = [out, dy, x, ids, de, *(packed(c, "f32") for c in carries)]
    run(f"matmul_dw_{dt}", tiles, [split_rows, 2, 60, 0], row_begin=40, isa=isa)
    exact = reference.matmul_dw(n, dy, x, ids, de, carries, 100)
    assert_close(unpack_weight(out[0], n, k), exact, "f32", bound=bound(tokens))
    padding = out[0].reshape(-1, k + k % 2, 32)
    assert not padding[:, k:].any()
    assert not padding[-1, :, n % 32 or 32 :].any()


@every_level
@every_dtype
@in_turn("n,k", [(33, 40), (300, 1100)])
def test_matmul_dw_of_embedding_only(isa, dt, n, k):
    """Without dY, batch splits have only the scatter-add, also if columns need several passes."""
    gen = rng(4)
    ids = gen.integers(0, n, (50, 1)).astype(np.int32)
    de, out = random(gen, 50, k, dt), packed_out(n, k)
    run(f"matmul_dw_{dt}", [out, None, None, ids, de], [5, 0, 0, 0], isa=isa)
    assert_close(
        unpack_weight(out[0], n, k), reference.matmul_dw(n, None, None, ids, de, [], 0), "f32", bound=2e-6
    )


@every_level
@every_dtype
@in_turn("trans_a", [0, 1])
@in_turn("trans_b", [0, 1])
@pytest.mark.parametrize("shape", [(5, 3, 1), (37, 65, 129), (15, 40, 1100)], ids=str)
def test_gemm(isa, dt, trans_a, trans_b, shape):
    """All four transpose forms, from zero in the dtype and from the output in fp32."""
    m, n, k = shape
    gen = rng(5)
    a = random(gen, *((k, m) if trans_a else (m, k)), dt)
    b = random(gen, *((n, k) if trans_b else (k, n)), dt)
    start = random(gen, m, n)
    accumulated, plain = start.copy(), empty(m, n, dt)
    run(f"gemm_{dt}", [accumulated, a, b], [trans_a, trans_b, 1, 1], isa=isa)
    run(f"gemm_{dt}", [plain, a, b], [trans_a, trans_b, 0, 0], isa=isa)
    exact = reference.gemm(a, b, trans_a=bool(trans_a), trans_b=bool(trans_b))
    assert_close(accumulated, exact + start, "f32", bound=bound(k))
    peer = array((tensor(a).T if trans_a else tensor(a)) @ (tensor(b).T if trans_b else tensor(b)))
    assert_close(plain, exact, dt, peer, bound(k))


@every_level
@every_dtype
@in_turn("split", [1, 3])
def test_padding_does_not_change_a_weight_gradient(isa, dt, split):
    """Sequences of odd length, padded or not, give equal bits, also of sums that underflow to zero."""
    gen, n, k, length = rng(split), 40, 70, 5
    dy, x = random(gen, 6 * length, n, dt), random(gen, 6 * length, k, dt)
    dy[:, 0], x[:, 0] = 1e-30, -1e-30
    ids = gen.integers(0, n, (6 * length, 1)).astype(np.int32)

    def gradient(width, is_padded, with_ids=False):
        def rows(values, fill):
            wide = np.full((6, width, values.shape[1]), fill, values.dtype)
            wide[:, :length] = values.reshape(6, length, -1)
            return wide.reshape(6 * width, -1)

        out = packed_out(n, k)
        scattered = [rows(ids, 7), rows(x, 0)] if with_ids else [None, None]
        tiles = [out, rows(dy, 0), rows(x, 0.5), *scattered]
        run(f"matmul_dw_{dt}", tiles, [split * width, 0, 0, width if is_padded else 0], isa=isa)
        return out[0]

    for width in (6, 7, 64):
        for with_ids in (False, True):
            assert_same_bits(gradient(length, True, with_ids), gradient(width, True, with_ids))
    plain = unpack_weight(gradient(length, False), n, k)
    assert_close(plain, unpack_weight(gradient(length, True), n, k), "f32", bound=1e-5)
    traces = [(bits(gradient(length, False)) != bits(gradient(w, False))).any() for w in (6, 7, 64)]
    begins_with_zero = (isa, dt, split) == ("amx_bf16", "bf16", 1)  # sums of a group do, so none is -0
    assert any(traces) or isa == "baseline" or begins_with_zero, "without a rule of its own padding must show"


@every_level
@every_dtype
def test_empty_calls(isa, dt):
    """No rows or no tokens: outputs without rows are unchanged, weight gradients become zero."""
    w = packed(random(rng(), 8, 6, dt), dt)
    run(f"matmul_{dt}", [empty(0, 8, dt), None, empty(0, 6, dt), w], [0, 1, 1, 0, 6], isa=isa)
    run(f"matmul_dx_{dt}", [empty(0, 6, dt), None, empty(0, 8, dt), w], [0, 1, 1, 0, 8], isa=isa)
    out = packed_out(8, 6)
    run(f"matmul_dw_{dt}", [out, empty(0, 8, dt), empty(0, 6, dt), None, None], [4, 0, 0, 0], isa=isa)
    assert not out[0].any()


@every_level
@every_dtype
def test_nan_and_infinity_reach_only_their_row(isa, dt):
    """A NaN or infinity in a row of A makes only that row NaN or infinite."""
    gen = rng(6)
    a, w = random(gen, 6, 64, dt).copy(), np.abs(random(gen, 40, 64, dt))
    a[2, 5], a[4, 63] = np.nan, np.inf
    out = empty(6, 40, dt)
    run(f"matmul_{dt}", [out, None, a, packed(w, dt)], [0, 1, 8, *even_splits(64, 8)], isa=isa)
    values = out.astype(np.float32)
    assert np.isnan(values[2]).all()
    assert np.isposinf(values[4]).all()
    assert np.isfinite(values[[0, 1, 3, 5]]).all()
