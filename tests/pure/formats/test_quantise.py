"""Rounding to 8 and 4 bits: the bytes of llama.cpp in groups of 32, nearest numbers in larger groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.formats.quantise import quantise, quantised_format


def rows_of(seed, k, scale):
    """Rows with zeros, ties and outliers in them."""
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((6, k)) * scale).astype(np.float32)
    rows[1] = np.round(rows[1] / scale * 4) * scale  # many equal numbers
    rows[2, :32] = 0
    rows[3, 5] *= 1000
    return rows


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.sampled_from((32, 96, 256)), st.sampled_from((1e-6, 0.02, 1.0, 300.0)))
def test_groups_of_32_have_the_bytes_of_llama_cpp(seed, k, scale):
    """Of Q8_0 and Q4_0, as its Python package writes them."""
    gguf = pytest.importorskip("gguf")
    rows = rows_of(seed, k, scale)
    for bits, kind in ((8, gguf.GGMLQuantizationType.Q8_0), (4, gguf.GGMLQuantizationType.Q4_0)):
        ours = quantise(rows, bits, 32)
        assert np.array_equal(ours, gguf.quants.quantize(rows, kind))
        planted = rows.copy()
        planted[0, 7] = -2 * np.abs(rows[0, :32]).max()
        assert not np.array_equal(quantise(planted, bits, 32), ours)


@pytest.mark.parametrize("block", [64, 128, 512])
@pytest.mark.parametrize("bits", [8, 4])
def test_larger_groups_hold_the_nearest_numbers(bits, block):
    """Of the scale, which is the largest number by magnitude over 127, or over -8."""
    rows = rows_of(1, 1024, 0.02)
    groups = rows.reshape(-1, block).astype(np.float64)
    places = np.abs(groups).argmax(1)[:, None]
    top = np.take_along_axis(groups, places, 1)
    scale = (
        (np.abs(top) / 127 if bits == 8 else top / -8)
        .astype(np.float32)
        .astype(np.float16)
        .astype(np.float64)
    )
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    safe = np.where(scale == 0, 1, scale)
    nearest = np.clip(np.round(groups / safe), low, high) * scale
    kind = quantised_format(bits, block)
    assert kind.name == f"int{bits}_g{block}"
    numbers = kind.dequantise(quantise(rows, bits, block)).reshape(groups.shape)
    # the scale is rounded to f16 after the codes are chosen, so a code may be the second nearest
    assert np.abs(numbers - nearest).max() <= np.abs(scale).max() * 1.001
    assert (np.abs(numbers - nearest) < 1e-9).mean() > 0.98


def test_numbers_that_are_not_finite_stay_so():
    """Loading rejects their block."""
    for bits in (8, 4):
        for bad in (np.nan, np.inf, -np.inf):
            rows = np.ones((1, 64), np.float32)
            rows[0, 40] = bad
            numbers = quantised_format(bits, 32).dequantise(quantise(rows, bits, 32))
            assert np.isfinite(numbers[0, :32]).all() and not np.isfinite(numbers[0, 32:]).all()
