"""Quantised weights in panels: their numbers, products and rows, against plain bf16 weights of the same numbers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import LEVELS, NUMPY, assert_same_bits, empty, random, rng

from support.blocks import random_blocks
from tilewise import _native
from tilewise.formats import FORMATS, KERNEL_FORMATS
from tilewise.kernels.isa import run
from tilewise.kernels.packing import pack_weight
from tilewise.kernels.quantised import pack_blocks, quantised_bytes, unpack_blocks


def loading_level(isa):
    """The level that packs and reads panels, which are the same on all: an emulated one only multiplies."""
    return isa if isa in _native.kernels.isa_levels() else ""


def weight(name, n, k, seed, isa=""):
    """A weight in panels, as an operand, and its numbers in bf16."""
    form = FORMATS[name]
    blocks = random_blocks(form, n, k, seed)
    memory = np.full(quantised_bytes(form, n, k), 77, np.uint8)
    assert pack_blocks(blocks, form, memory, n, k, isa=loading_level(isa))
    return (memory.view(np.int32), n, -(-form.row_bytes(k) // 4)), form.dequantise(blocks).astype(
        NUMPY["bf16"]
    )


def gradient(kernel, formats, dy, weights, ranges, isa, k=None):
    """The input gradient of products of two weights, whose rows are in the given ranges."""
    out = empty(len(dy), weights[0][2] if k is None else k, "bf16")
    of_terms = [bound for span in ranges for _ in weights for bound in span]
    terms = [x for w in weights for x in (dy, w)]
    run(f"{kernel}_bf16", [out, None, *terms], [0, len(weights), len(ranges), *formats, *of_terms], isa=isa)
    return out


def product(kernel, ints, rows, w, ranges, isa, dtype="bf16"):
    """The product of some rows and a weight in the given ranges of the contraction."""
    out = empty(len(rows), w[1], dtype)
    is_f32 = int(dtype == "f32")
    run(f"{kernel}_bf16", [out, None, rows, w], [*ints, is_f32, 1, len(ranges), *np.ravel(ranges)], isa=isa)
    return out


def codes_and_scales(name, blocks, k):
    """Codes [n, k] minus their middle, and d and m [n, groups] of fp32, of three kinds of formats."""
    form = FORMATS[name]
    per_block = blocks.reshape(len(blocks), -1, form.block_bytes)
    halves = 2 if name == "q4_1" else 1
    scales = np.ascontiguousarray(per_block[..., : 2 * halves]).view(np.float16).astype(np.float32)
    first = 3 if name.startswith("int4") else 2 * halves
    nibbles = per_block[..., first:].reshape(len(blocks), -1, 16)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], -1).reshape(len(blocks), k).astype(np.float32)
    d, m = scales[..., 0], np.zeros_like(scales[..., 0])
    if name == "q4_1":
        return codes, d, scales[..., 1]
    if first == 3:
        m = 8 - per_block[..., 2].astype(np.float32)
    repeats = form.block // 32
    return codes - 8, d.repeat(repeats, 1), m.repeat(repeats, 1)


def fma(a, b, c):
    """a * b + c in fp32, rounded once: the product is exact in fp64."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def sum_by_group(name, rows, codes, d, m, begin, end):
    """The definition of docs/numerics.md, rule 12, with the order of levels that compute in fp32."""
    x, total = rows.astype(np.float32), np.zeros((len(rows), len(codes)), np.float32)
    for group in range(begin // 32, -(-end // 32)):
        first, last = max(begin, 32 * group), min(end, 32 * group + 32)
        products = np.zeros_like(total)
        for step in range(first, last, 2):
            for i in (step + 1, step):
                products = fma(x[:, i, None], codes[None, :, i], products)
        inside = np.where(
            (np.arange(k0 := 32 * group, k0 + 32) >= first) & (np.arange(k0, k0 + 32) < last), 1, 0
        )
        pairs = (x[:, k0 : k0 + 32] * inside).astype(np.float32)
        sums = pairs[:, ::2] + pairs[:, 1::2]
        while sums.shape[1] > 1:
            sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
        if name == "q4_1":
            total = fma(m[None, :, group], sums, fma(d[None, :, group], products, total))
        else:
            products = fma(m[None, :, group], sums, products) if m.any() else products
            total = fma(d[None, :, group], products, total)
    return total


def grouped_product(name, rows, codes, d, m, ranges):
    """The sum over one or more k splits, those of two to the bit."""
    parts = [sum_by_group(name, rows, codes, d, m, *span) for span in ranges if span[0] < span[1]]
    return sum(parts[1:], parts[0])


def assert_near(got, expected):
    """Equal up to the order of sums in fp32."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * max(np.abs(expected).max(), 1e-3))


def test_kernels_know_the_formats():
    """The native table has the formats by their numbers, with the same blocks."""
    expected = [(name, FORMATS[name].block, FORMATS[name].block_bytes) for name in KERNEL_FORMATS]
    assert _native.weights.quantised_formats() == expected
    assert [FORMATS[name].number for name in KERNEL_FORMATS] == list(range(len(KERNEL_FORMATS)))


@pytest.mark.parametrize("isa", LEVELS)
@given(
    st.sampled_from(KERNEL_FORMATS),
    st.integers(1, 70),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4, 5, 8, 14, 15, 33]),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_products_and_rows_are_those_of_the_numbers(isa, name, n, blocks, m, data):
    """To the bit: products of any number of rows over any ranges, transposed ones, looked-up rows, and all numbers."""
    k = FORMATS[name].block * blocks
    cuts = sorted(
        {0, k, *(2 * data.draw(st.integers(0, k // 2)) for _ in range(data.draw(st.integers(0, 3))))}
    )
    ranges = list(pairwise(cuts))
    packed, numbers = weight(name, n, k, n + k, isa)
    read = unpack_blocks(packed[0].view(np.uint8), FORMATS[name], n, k, isa=loading_level(isa))
    assert_same_bits(read, numbers)
    gen, number = rng(m), FORMATS[name].number
    rows = random(gen, m, k, "bf16")
    plain = (pack_weight(numbers, "bf16"), n, k)
    expected = product("matmul", [], rows, plain, ranges, isa)
    assert_same_bits(product("matmul_quantised", [number, 0], rows, packed, ranges, isa), expected)
    cuts = sorted({0, n, *(2 * data.draw(st.integers(0, n // 2)) for _ in range(2))})
    ranges, columns = list(pairwise(cuts)), random(gen, m, n, "bf16")
    other = data.draw(st.sampled_from([one for one in KERNEL_FORMATS if k % FORMATS[one].block == 0]))
    second, second_numbers = weight(other, n, k, n, isa)
    expected = gradient(
        "matmul_dx", [], columns, [plain, (pack_weight(second_numbers, "bf16"), n, k)], ranges, isa
    )
    formats = [number, FORMATS[other].number]
    assert_same_bits(
        gradient("matmul_dx_quantised", formats, columns, [packed, second], ranges, isa, k), expected
    )
    ids, out = gen.integers(-1, n + 1, (m, 1)).astype(np.int32), empty(m, k, "bf16")
    run("embedding_quantised_bf16", [out, ids, packed], [number, 0], isa=isa)
    inside = (ids >= 0) & (ids < n)
    expected_rows = np.where(inside, numbers[np.clip(ids[:, 0], 0, n - 1)], NUMPY["bf16"](0))
    assert_same_bits(out, expected_rows)


@pytest.mark.parametrize("isa", LEVELS)
@given(st.sampled_from(["q4_0", "q4_1", "int4_g64"]), st.integers(1, 70), st.integers(1, 20), st.data())
@settings(max_examples=40, deadline=None)
def test_grouped_products_follow_their_definition(isa, name, n, blocks, data):
    """To the bit where products of bf16 are those of fp32; and a code that differs shows."""
    form, m = FORMATS[name], data.draw(st.integers(1, 20))
    k = form.block * blocks
    middle = 2 * data.draw(st.integers(0, k // 2))
    packed, _ = weight(name, n, k, n, isa)
    codes, d, low = codes_and_scales(name, random_blocks(form, n, k, n), k)
    rows = random(rng(m), m, k, "bf16")
    ranges = [(0, middle), (middle, k)]
    got = product("matmul_quantised", [form.number, 1], rows, packed, ranges, isa, "f32")
    expected = grouped_product(name, rows, codes, d, low, ranges)
    if isa in ("avx2", "avx512"):
        assert_same_bits(got, expected)
        codes[0, 0] += 1
        assert not np.array_equal(got, grouped_product(name, rows, codes, d, low, ranges))
    assert_near(got, expected)


@pytest.mark.parametrize("isa", LEVELS)
@given(st.sampled_from(KERNEL_FORMATS), st.sampled_from([2, 3, 4, 5, 8, 14, 15, 16, 17, 33]), st.data())
@settings(max_examples=60, deadline=None)
def test_grouped_products_of_any_number_of_rows(isa, name, m, data):
    """Every row has the bits of a product with that row alone, in any format."""
    form = FORMATS[name]
    n, k = data.draw(st.integers(1, 40)), form.block * data.draw(st.integers(1, 3))
    cuts = sorted({0, k, *(2 * data.draw(st.integers(0, k // 2)) for _ in range(3))})
    ranges, (packed, _) = list(pairwise(cuts)), weight(name, n, k, k, isa)
    rows = random(rng(m), m, k, "bf16")
    results = [
        product("matmul_quantised", [form.number, is_grouped], rows, packed, ranges, isa, "f32")
        for is_grouped in (1, 0)
    ]
    alone = [
        product("matmul_quantised", [form.number, 1], rows[i : i + 1], packed, ranges, isa, "f32")
        for i in range(m)
    ]
    assert_same_bits(results[0], np.concatenate(alone))
    np.testing.assert_allclose(*results, rtol=0, atol=2e-2 * np.abs(results[1]).max())


@pytest.mark.parametrize("isa", LEVELS)
def test_which_formats_have_grouped_products(isa):
    """Those of 4 bits; others have the bits of exact products."""
    rows = random(rng(2), 3, 1024, "bf16")
    for name in KERNEL_FORMATS:
        form, (packed, _) = FORMATS[name], weight(name, 64, 1024, 2, isa)
        results = [
            product("matmul_quantised", [form.number, how], rows, packed, [(0, 1024)], isa, "f32")
            for how in (0, 1)
        ]
        assert np.array_equal(*results) != form.has_grouped_product, name


@pytest.mark.parametrize("isa", LEVELS)
def test_groups_across_windows_and_terms(isa):
    """Windows of many rows may end between ranges that share a group; ranges may be empty."""
    form, k, count = FORMATS["q4_1"], 2080, 20
    packed, _ = weight("q4_1", 40, k, 1, isa)
    rows = random(rng(1), count, k, "bf16")
    parts = codes_and_scales("q4_1", random_blocks(form, 40, k, 1), k)
    for cuts in (
        (0, 510, k),
        (0, 512, k),
        (0, 1022, k),
        (0, 1024, 1024, k),
        (0, 1026, k),
        (0, 10, 10, 2048, k),
    ):
        ranges = list(pairwise(cuts))
        got = product("matmul_quantised", [form.number, 1], rows, packed, ranges, isa, "f32")
        expected = grouped_product("q4_1", rows, *parts, ranges)
        assert_near(got, expected)
    for ranges in ([(0, 64), (10, 10), (64, 128), (128, 200)], [(0, 1024), (10, 10), (1024, 2048), (0, 200)]):
        out, both = empty(count, 40, "f32"), [rows, packed, rows, packed]
        ints = [form.number, 1, 1, 2, 2, *np.ravel(ranges)]
        run("matmul_quantised_bf16", [out, None, *both], ints, isa=isa)
        expected = grouped_product("q4_1", rows, *parts, ranges)
        assert_near(out, expected)


def test_parts_of_a_weight():
    """Rows and columns of blocks land in the parts that hold them; a changed bit shows."""
    form = FORMATS["q4_k"]
    blocks = random_blocks(form, 96, 1024, 3)
    numbers = form.dequantise(blocks).astype(NUMPY["bf16"])
    memory = np.zeros(quantised_bytes(form, 70, 512), np.uint8)
    for first, count in ((0, 32), (32, 38)):
        part = blocks[20 + first : 20 + first + count]
        assert pack_blocks(part, form, memory, 70, 512, row=first, first_block=2)
    assert_same_bits(unpack_blocks(memory, form, 70, 512), numbers[20:90, 512:])
    memory[5000] ^= 1
    assert not np.array_equal(unpack_blocks(memory, form, 70, 512), numbers[20:90, 512:])


def test_infinite_scales_are_reported():
    """In any format, scales that are not finite."""
    for name in KERNEL_FORMATS:
        form = FORMATS[name]
        blocks = random_blocks(form, 32, form.block, 1, is_finite=False)
        memory = np.zeros(quantised_bytes(form, 32, form.block), np.uint8)
        assert pack_blocks(blocks, form, memory, 32, form.block) == (name == "mxfp4"), name


@pytest.mark.parametrize(
    "rows,cols,row,first",
    [(33, 64, 0, 0), (32, 64, 1, 0), (32, 64, 0, 1), (31, 64, 0, 0), (32, 65, 0, 0), (32, 0, 0, 0)],
)
def test_blocks_outside_of_a_part(rows, cols, row, first):
    """Rejected before memory is touched."""
    form = FORMATS["q8_0"]
    memory = np.zeros(quantised_bytes(form, 32, 64), np.uint8)
    with pytest.raises(ValueError, match=r"weights\.quantised"):
        pack_blocks(np.zeros((rows, 68), np.uint8), form, memory, 32, cols, row=row, first_block=first)
