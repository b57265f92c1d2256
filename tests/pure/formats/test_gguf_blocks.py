"""Tests of the numbers that blocks of GGUF files mean. The oracle is the gguf package."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.formats import FORMATS

KINDS = {kind.name.lower(): kind for kind in GGMLQuantizationType}
OURS = [name for name in FORMATS if name in KINDS]


def _bits(values):
    """Bits of fp32 numbers, with one pattern for all that are not numbers."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


@pytest.mark.parametrize("name", OURS)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_blocks_have_the_numbers_of_ggml(name, seed, count):
    """Random bytes, also with scales that are infinite, subnormal or not numbers."""
    one, kind = FORMATS[name], KINDS[name]
    assert (one.block, one.block_bytes) == GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(seed).integers(0, 256, (count, 2 * one.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(rows, kind) if count else np.zeros((0, 2 * one.block), np.float32)
    np.testing.assert_array_equal(_bits(one.dequantise(rows)), _bits(expected))


def test_every_exponent_of_mxfp4():
    """All 256 exponents, the subnormal ones included."""
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0], blocks[:, 1:] = np.arange(256), np.arange(16) * 17
    with np.errstate(over="ignore"):
        expected = dequantize(blocks, GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(_bits(FORMATS["mxfp4"].dequantise(blocks)), _bits(expected))


def test_a_changed_bit_is_noticed():
    """The comparison fails for every format if one bit of a block differs."""
    for name in OURS:
        one = FORMATS[name]
        rows = np.random.default_rng(1).integers(0, 64, (1, one.block_bytes), np.uint8)
        changed = rows.copy()
        changed[0, one.block_bytes // 2] ^= 5
        assert not np.array_equal(_bits(one.dequantise(changed)), _bits(dequantize(rows, KINDS[name]))), name
