"""The length of a sequence that attention's backward pass can work on, known beforehand."""

import ml_dtypes
import numpy as np
import pytest

from tilewise.core import ConfigError
from tilewise.kernels.isa import isa_in_use, run
from tilewise.kernels.scratch import SCRATCH_BYTES, longest_sequence
from tilewise.train.config import TrainConfig, check_context

PAIRS = isa_in_use() == "avx512_bf16"


def _backward(name, dtype, seq, group, dim):
    """One sequence's backward pass."""
    q, k = np.zeros((seq, group * dim), dtype), np.zeros((seq, dim), dtype)
    tiles = [q.copy(), k.copy(), k.copy(), q, q, np.zeros((seq, group), np.float32), q, k, k]
    run(name, tiles, [seq, group, 1, dim, 1, 0], [1.0])


@pytest.mark.parametrize(("group", "dim"), [(1, 1024), (2, 1000), (3, 512), (32, 100)])
@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_the_bound_is_the_kernel_s_own(name, group, dim):
    """The next granule of positions no longer fits the worker's scratch."""
    dtype = np.float32 if name == "f32" else ml_dtypes.bfloat16
    longest = longest_sequence(dim, group, 2 if PAIRS and name == "bf16" else 1)
    with pytest.raises(MemoryError, match=f"must fit a worker's {SCRATCH_BYTES} bytes"):
        _backward(f"attention_backward_{name}", dtype, longest + 128, group, dim)


@pytest.mark.parametrize("name", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_longest_sequence_runs(name):
    """What the bound allows, the kernel does."""
    dtype = np.float32 if name == "f32" else ml_dtypes.bfloat16
    _backward(
        f"attention_backward_{name}",
        dtype,
        longest_sequence(1024, 1, 2 if PAIRS and name == "bf16" else 1),
        1,
        1024,
    )


def test_a_context_beyond_the_bound_is_refused():
    """The message names the longest context; it depends on the heads that a device has, and that one is accepted."""
    config = TrainConfig.model_validate({"data": {"context": 100_000}, "train": {"batch": 1, "leaves": 1}})
    with pytest.raises(ConfigError, match=r"data\.context must be at most (\d+) .*; got 100000") as caught:
        check_context(config, 1)
    longest = longest_sequence(32, 2, 2 if PAIRS else 1)
    assert f"at most {longest} " in str(caught.value)
    check_context(config.model_copy(update={"data": config.data.model_copy(update={"context": longest})}), 1)
    assert longest_sequence(32, 1, 1) > longest_sequence(32, 2, 1) > longest_sequence(64, 2, 1)
