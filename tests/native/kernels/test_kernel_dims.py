"""Kernels of tensors with any number of dims against NumPy, on drawn shapes."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import LEVELS, NUMPY, assert_close, assert_same_bits, every_level, in_turn, rng

from tilewise.kernels.isa import run
from tilewise.kernels.packing import pack_weight
from tilewise.kernels.reference import REFERENCES

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
levels, dtypes, few = st.sampled_from(LEVELS), st.sampled_from(["f32", "bf16"]), st.integers(1, 3)


def values(shape, dt="f32", seed=0):
    return rng(seed).standard_normal(shape).astype(np.float32).astype(NUMPY[dt])


def rows(x, items):
    """An array as a kernel's tile: a row per item."""
    return np.ascontiguousarray(x).reshape(items, -1)


def strides_of(shape):
    return [prod(shape[d + 1 :]) for d in range(len(shape))]


@settings(max_examples=60)
@given(levels, dtypes, st.integers(1, 3), sizes, st.data())
def test_rearranging(isa, dt, items, shape, data):
    """Permuted dims of items, then a part of them inside of a larger tensor."""
    x, order = values((items, *shape), dt), data.draw(st.permutations(range(len(shape))))
    moved = REFERENCES["rearrange"](x, [0, *(d + 1 for d in order)])
    out = np.empty((items, prod(shape)), x.dtype)
    strides, whole = [strides_of(shape)[d] for d in order], [shape[d] for d in order]
    ints = [len(shape), prod(shape), 0, 0, *whole, *strides, *[0] * len(shape), *whole]
    run(f"rearrange_{dt}", [out, rows(x, items)], ints, isa=isa)
    assert_same_bits(out.reshape(moved.shape), moved)
    before = [data.draw(st.integers(0, 2)) for _ in shape]
    padded = np.pad(x, [(0, 0), *((b, 1) for b in before)])
    larger = [*padded.shape[1:]]
    wide = np.empty((items, prod(larger)), x.dtype)
    first = -sum(b * s for b, s in zip(before, strides_of(shape)))
    ends = [b + n for b, n in zip(before, shape)]
    ints = [len(shape), prod(shape), first, 0, *larger, *strides_of(shape), *before, *ends]
    run(f"rearrange_{dt}", [wide, rows(x, items)], ints, isa=isa)
    assert_same_bits(wide.reshape(padded.shape), padded)


@settings(max_examples=60)
@given(levels, dtypes, st.integers(1, 3), st.lists(st.integers(1, 40), min_size=2, max_size=4), st.data())
def test_reductions(isa, dt, items, shape, data):
    """Sums and maxima over drawn dims."""
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    x, stays = values((items, *shape), dt), [int(d not in axes) for d in range(len(shape))]
    dims = tuple(d + 1 for d in axes)
    total, top = REFERENCES["reduce_sum"](x, dims, 0.25), REFERENCES["reduce_max"](x, dims)
    out = np.empty((items, total.size // items), x.dtype)
    run(f"reduce_sum_{dt}", [out, rows(x, items)], [len(shape), *shape, *stays], [0.25], isa=isa)
    scale = np.abs(x.astype(np.float64)).sum(dims).max() * 0.25
    error = np.abs(out.astype(np.float64).reshape(total.shape) - total).max()
    assert error <= scale * (1e-6 if dt == "f32" else 5e-3)
    run(f"reduce_max_{dt}", [out, rows(x, items)], [len(shape), *shape, *stays], isa=isa)
    assert np.array_equal(out.astype(np.float64).reshape(top.shape), top)
    x[0].reshape(-1)[0] = np.nan
    run(f"reduce_max_{dt}", [out, rows(x, items)], [len(shape), *shape, *stays], isa=isa)
    assert np.isnan(out.astype(np.float32)).sum() == 1


@settings(max_examples=60)
@given(
    levels,
    dtypes,
    st.integers(1, 3),
    st.lists(st.integers(1, 20), min_size=2, max_size=3),
    st.booleans(),
    st.data(),
)
def test_indices(isa, dt, items, shape, is_list, data):
    """Elements by index along a drawn dim, and their sums where they came from."""
    dim, count = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 6))
    size, inner, outer = shape[dim], prod(shape[dim + 1 :]), prod(shape[:dim])
    chosen = [*shape[:dim], count, *shape[dim + 1 :]]
    index = rng(1).integers(0, size, count if is_list else (items, *chosen)).astype(np.int32)
    x = values((items, *shape), dt)
    want = REFERENCES["gather_elements"](x, index, dim + 1)
    place = [0, 1, 0, 0] if is_list else [count * inner, inner, 1, outer * count * inner]
    ints, tile = [outer, size, inner, count, *place], rows(index, 1 if is_list else items)
    out = np.empty((items, prod(chosen)), x.dtype)
    run(f"gather_elements_{dt}", [out, rows(x, items), tile], ints, isa=isa)
    assert_same_bits(out.reshape(want.shape), want)
    src, sums = values((items, *chosen), dt, 2), np.empty((items, prod(shape)), x.dtype)
    for start in (x, None):
        exact = REFERENCES["scatter_add"](start, src, index, dim + 1, x.shape)
        tiles = [sums, None if start is None else rows(x, items), rows(src, items), tile]
        run(f"scatter_add_{dt}", tiles, ints, isa=isa)
        error = np.abs(sums.astype(np.float64).reshape(exact.shape) - exact).max()
        assert error <= np.abs(exact).max() * (1e-6 if dt == "f32" else 5e-3)


@settings(max_examples=40)
@given(levels, dtypes, st.integers(1, 2), st.data())
def test_windows(isa, dt, items, data):
    """Windows of images and their gradient, with drawn sizes, strides, padding and dilations."""
    channels = data.draw(st.integers(1, 3))
    window, stride, dilation = ([data.draw(st.integers(1, most)) for _ in "hw"] for most in (3, 2, 2))
    padding = [data.draw(st.integers(0, 2)) for _ in "hw"]
    image = [channels, *(d * (k - 1) + 1 + data.draw(st.integers(0, 4)) for d, k in zip(dilation, window))]
    how = {"window": window, "stride": stride, "padding": padding, "dilation": dilation}
    x = values((items, *image), dt)
    want = REFERENCES["unfold"](x, **how)
    columns = zip(image[1:], window, stride, padding, dilation)
    places = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in columns]
    ints = [*image, *places, *window, *stride, *padding, *dilation]
    out = np.empty((items, want[0].size), x.dtype)
    run(f"unfold_{dt}", [out, rows(x, items)], ints, isa=isa)
    assert_same_bits(out.reshape(want.shape), want)
    dy, dx = values(want.shape, dt, 1), np.empty((items, prod(image)), x.dtype)
    run(f"fold_{dt}", [dx, rows(dy, items)], ints, isa=isa)
    assert_close(
        dx, REFERENCES["fold"](dy, image, **how).reshape(dx.shape), "f32", bound=1e-6 if dt == "f32" else 5e-3
    )


@settings(max_examples=30)
@given(
    levels, dtypes, few, st.tuples(*map(st.integers, (1, 1, 1), (20, 40, 33))), st.booleans(), st.booleans()
)
def test_batched_products(isa, dt, items, shape, trans_a, trans_b):
    """Each product has the bits of `gemm`, in all transpose forms."""
    m, n, k = shape
    a = values((items, *((k, m) if trans_a else (m, k))), dt)
    b = values((items, *((n, k) if trans_b else (k, n))), dt, 1)
    out = np.empty((items * m, n), a.dtype)
    tiles = [out, a.reshape(-1, a.shape[2]), b.reshape(-1, b.shape[2])]
    run(f"batched_gemm_{dt}", tiles, [m, k, trans_a, trans_b], isa=isa)
    for i in range(items):
        one = np.empty((m, n), a.dtype)
        run(f"gemm_{dt}", [one, a[i], b[i]], [trans_a, trans_b, dt == "f32", 0], isa=isa)
        assert_same_bits(out[i * m : (i + 1) * m], one)


@every_level
@in_turn("dt", ["f32", "bf16"])
def test_copies(isa, dt):
    """Concatenation, repeated rows, one-hot rows and rows of panels."""
    a, b = values((6, 2, 3), dt), values((6, 5, 3), dt, 1)
    out = np.empty((6, 21), a.dtype)
    run(f"concat_{dt}", [out, rows(a, 6), rows(b, 6)], [2, 6, 15], isa=isa)
    assert_same_bits(out.reshape(6, 7, 3), REFERENCES["concat"]([a, b], 1))
    run(f"repeat_row_{dt}", [out, out[:1].copy()], isa=isa)
    assert_same_bits(out, REFERENCES["repeat_row"](out[:1], 6))
    ids = np.array([[3], [9], [0]], np.int32)
    hot = np.empty((3, 8), a.dtype)
    run(f"one_hot_{dt}", [hot, ids], [2], isa=isa)
    assert np.array_equal(hot.astype(np.float32), REFERENCES["one_hot"](ids, 8, 2))
    weight = values((37, 5))
    plain = np.empty((37, 5), a.dtype)
    run(f"unpack_{dt}", [plain, (pack_weight(weight, "f32"), 37, 5)], isa=isa)
    assert_same_bits(plain, REFERENCES["unpack"](weight).astype(a.dtype))
    same = np.empty((3, 1), a.dtype)
    run(f"equal_to_{dt}", [same, ids], [9], isa=isa)
    assert np.array_equal(same.astype(np.float32), REFERENCES["equal_to"](ids, 9))


@every_level
def test_dropout(isa):
    """The mask is that of Philox on the element's index in the whole item, for a part of it too; a negative step drops
    nothing, and the published test vector is met.
    """
    assert [hex(w) for w in REFERENCES["dropout"].__globals__["philox"]([0] * 4, [0] * 2)] == [
        "0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"
    ]  # fmt: skip
    x, keys = values((3, 5, 7)), np.array([[0, 8, 9, 1], [1, 8, 9, 1], [2, 8, 9, -1]], np.int32)
    want = REFERENCES["dropout"](x, keys, 0.4)
    out = np.empty((3, 35), np.float32)
    run("dropout_f32", [out, rows(x, 3), keys], [2, 5, 7, 0, 0, 7, 1], [0.4], isa=isa)
    np.testing.assert_allclose(out.reshape(x.shape), want, rtol=1e-6)
    part = np.empty((3, 6), np.float32)  # rows 2 to 4, columns 3 and 4
    run("dropout_f32", [part, rows(x[:, 2:5, 3:5], 3), keys], [2, 3, 2, 2, 3, 7, 1], [0.4], isa=isa)
    np.testing.assert_array_equal(part.reshape(3, 3, 2), out.reshape(x.shape)[:, 2:5, 3:5])
    assert 0.3 < (want[:2] == 0).mean() < 0.5
