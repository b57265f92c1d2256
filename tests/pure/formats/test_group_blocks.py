"""Blocks of integer and fp8 codes: layouts and numbers, element by element."""

import struct

import ml_dtypes
import numpy as np
import pytest

from tilewise.formats import FORMATS
from tilewise.formats.group_blocks import GROUP_FORMATS, block_size

SCALES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}


def number_of(name: str, block: bytes, element: int) -> np.float32:
    """One element of a block, from the bytes that the module's docstring describes."""
    kind = name.split("_")[-1] if name.split("_")[-1] in ("bf16", "f32") else "f16"
    width = 4 if kind == "f32" else 2
    if kind == "bf16":
        scale = struct.unpack("<f", b"\0\0" + block[:2])[0]
    else:
        scale = struct.unpack("<f" if kind == "f32" else "<e", block[:width])[0]
    codes = block[width:] if name.startswith("fp8") else block[width + 1 :]
    if name.startswith("fp8"):
        code = codes[element]
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        value = float("nan") if code & 127 == 127 else (-1) ** sign * magnitude
        return np.float32(scale) * np.float32(value)
    if name.startswith("int8"):
        code = codes[element]
    else:
        code = codes[element // 32 * 16 + element % 16] >> (4 if element % 32 >= 16 else 0) & 15
    return np.float32(scale) * np.float32(code - block[width])


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_numbers_follow_from_the_described_bytes(name):
    """Every element of random blocks, of every format."""
    blocks = np.random.default_rng(1).integers(0, 256, (3, GROUP_FORMATS[name].block_bytes), np.uint8)
    numbers = FORMATS[name].dequantise(blocks.reshape(1, -1)).reshape(3, -1)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = [[number_of(name, row.tobytes(), i) for i in range(FORMATS[name].block)] for row in blocks]
    assert np.array_equal(numbers, np.array(expected, np.float32), equal_nan=True)


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_packed_codes_are_the_codes_again(name):
    """`pack` writes the bytes that `values` reads; a changed code, scale or zero point shows."""
    made, rng = GROUP_FORMATS[name], np.random.default_rng(2)
    top = 16 if made.element == "int4" else 120
    codes = rng.integers(1, top, (2, 2 * made.block), np.uint8)
    scales = rng.uniform(0.5, 2, (2, 2)).astype(SCALES[made.scale])
    zeros = rng.integers(0, 17, (2, 2), np.uint8) if made.has_zero else None
    rows = made.pack(codes, scales, zeros)
    assert rows.shape == (2, FORMATS[name].row_bytes(2 * made.block))
    numbers = (
        codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) if zeros is None else codes.astype(np.float32)
    )
    shift = 0 if zeros is None else zeros.repeat(made.block, 1).astype(np.float32)
    expected = scales.astype(np.float32).repeat(made.block, 1) * (numbers - shift)
    assert np.array_equal(FORMATS[name].dequantise(rows), expected)
    for part in {0, made.codes_begin - 1, made.codes_begin}:  # scale, zero point, code
        planted = rows.copy()
        planted[1, part] ^= 1
        assert not np.array_equal(FORMATS[name].dequantise(planted), expected)


def test_a_block_divides_rows_and_groups():
    """Also of a last group that the row cuts short; rows of other sizes have no block."""
    assert [block_size(4096, 128), block_size(896, 896), block_size(1024, 1024)] == [128, 128, 512]
    assert [block_size(160, 128), block_size(64, 128), block_size(96, 96)] == [32, 64, 32]
    assert [block_size(100, 100), block_size(128, 16)] == [None, None]
