"""Shared by the kernel tests: arrays, k split ranges, PyTorch in bf16, and the two tolerance rules.

fp32: max|y - y64| / max|y64| within a bound. bf16: mean error at most 1.1 times and maximum at most
twice the error of PyTorch's own bf16 op against fp64.
"""

from __future__ import annotations

import functools
import inspect

import ml_dtypes
import numpy as np
import torch

from tilewise.kernels.isa import isa_levels
from tilewise.kernels.packing import pack_weight, packed_elements

BF16 = ml_dtypes.bfloat16
NUMPY = {"f32": np.float32, "bf16": BF16}
LEVELS = isa_levels()
FMA_LEVELS = [level for level in LEVELS if level != "baseline"]


def in_turn(names, values):
    """A test that takes each of the values in turn: as `pytest.mark.parametrize`, in one item of the list of tests.

    These tests last milliseconds; thousands of items would cost more than what they run.
    """
    names = names.split(",")

    def decorate(test):
        signature = inspect.signature(test)

        @functools.wraps(test)
        def every_value(**fixtures):
            for value in values:
                arguments = dict(zip(names, value if len(names) > 1 else [value], strict=True))
                try:
                    test(**fixtures, **arguments)
                except BaseException as error:
                    error.add_note(f"with {arguments}")
                    raise

        others = [item for name, item in signature.parameters.items() if name not in names]
        every_value.__signature__ = signature.replace(parameters=others)
        return every_value

    return decorate


every_level = in_turn("isa", LEVELS)
every_dtype = in_turn("dt", ["f32", "bf16"])


def rng(seed=0):
    return np.random.default_rng(seed)


def random(gen, m, n, dt="f32", scale=1.0):
    """Normal values as rows of a wider array (stride > columns)."""
    wide = (gen.standard_normal((m, n + 5)) * scale).astype(np.float32).astype(NUMPY[dt])
    return wide[:, 2 : n + 2]


def empty(m, n, dt="f32"):
    """An output with stride > columns, filled with a value that must be overwritten."""
    return np.full((m, n + 3), 77.0, np.float32).astype(NUMPY[dt])[:, :n]


def packed(w, dt):
    return (pack_weight(w, dt), *w.shape)


def packed_out(n, k, dt="f32"):
    """A packed output, filled with a value that must be overwritten."""
    return (np.full(packed_elements(n, k), 77.0, np.float32).astype(NUMPY[dt]), n, k)


def even_splits(k, k_splits, terms=1):
    """The integers of `k_splits` even ranges of k for every term."""
    cuts = [k * c // k_splits // 2 * 2 for c in range(k_splits)] + [k]
    return [x for c in range(k_splits) for _ in range(terms) for x in (cuts[c], cuts[c + 1])]


def tensor(x):
    if x.dtype == BF16:
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x).copy())


def array(t):
    return t.detach().to(torch.float64).numpy()


def bits(x):
    """The bit pattern, so that NaN and the sign of zero are compared, too."""
    return np.ascontiguousarray(x).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def assert_same_bits(a, b):
    np.testing.assert_array_equal(bits(a), bits(b))


def errors(y, exact):
    """Mean and maximum of |y - y64| / max|y64|."""
    scale = max(float(np.abs(exact).max()), 1e-30)
    distance = np.abs(np.asarray(y).astype(np.float64) - exact) / scale
    return float(distance.mean()), float(distance.max())


def assert_close(y, exact, dt, peer=None, bound=1e-6):
    """Within the rule of `dt`; `peer` is PyTorch's bf16 result (without one: 1 ulp of bf16 at the maximum)."""
    mean, worst = errors(y, exact)
    if np.asarray(y).dtype == np.float32 and dt == "f32":
        assert worst <= bound, f"error {worst:.2e} above {bound:.0e}"
        return
    peer_mean, peer_worst = (2**-8, 2**-7) if peer is None else errors(peer, exact)
    assert mean <= 1.1 * peer_mean + 1e-6, f"mean error {mean:.2e} against PyTorch's {peer_mean:.2e}"
    assert worst <= 2 * peer_worst + 1e-6, f"maximum error {worst:.2e} against PyTorch's {peer_worst:.2e}"
