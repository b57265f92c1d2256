"""Random blocks of every format of quantised weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# where blocks have scales of 16 bits, and which; the others begin with one
_SCALES = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "mxfp4": ()}
_WITH_MINIMUM = ("q4_1", "q5_1", "q4_k", "q5_k")
_TYPES = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}


def random_blocks(form, n, k, seed, *, is_finite=True):
    """Rows of random codes, uint8 `[n, row bytes]`, with small scales of both signs, or infinite ones."""
    gen = np.random.default_rng(seed)
    blocks = gen.integers(0, 256, (n * k // form.block, form.block_bytes), np.uint8)
    if form.name.startswith("fp8"):
        blocks[blocks & 0x7F == 0x7F] = 3  # not a number
    kind = np.dtype(_TYPES.get(form.name.rpartition("_")[2], np.float16))
    for at in _SCALES.get(form.name, (0, 2) if form.name in _WITH_MINIMUM else (0,)):
        scales = (
            gen.standard_normal((len(blocks), 1)) * 0.02 if is_finite else np.full((len(blocks), 1), np.inf)
        )
        blocks[:, at : at + kind.itemsize] = scales.astype(kind).view(np.uint8)
    if form.name == "mxfp4":
        blocks[:, 0] = gen.integers(100, 140, len(blocks))
    return blocks.reshape(n, -1)
