"""The table of kernels, references, packing, and argument errors."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import LEVELS, NUMPY, assert_same_bits, every_dtype
from table_calls import integers_of, operands_of

from tilewise.core import ShapeError
from tilewise.kernels import KERNELS, kernel_spec, pack_weight, packed_elements, unpack_weight
from tilewise.kernels.isa import isa_in_use, kernel_names, run
from tilewise.kernels.reference import REFERENCES


def test_table_names_the_native_kernels():
    """The table and the native module were built from the same declarations."""
    assert sorted(name for spec in KERNELS.values() for name in spec.names) == kernel_names()


@pytest.mark.parametrize("spec", KERNELS.values(), ids=lambda s: s.base)
def test_run_rejects_operands_and_attributes_that_are_not_declared(spec):
    """One operand, integer or float too many or too few, and lists that contradict their lengths."""
    name = spec.names[0]
    tiles = [None] * len(list(operands_of(spec, name)))
    ints, floats = integers_of(spec, name), [0.5] * len(spec.floats)
    wrong = []
    if not any(o.is_list for o in spec.operands):
        wrong += [(tiles[1:], ints, floats), ([*tiles, None], ints, floats)]
    elif any(i.source and i.source[0] == "count" for i in spec.ints):
        wrong += [([*tiles, None], ints, floats)]
    if not spec.ints or not spec.ints[-1].is_list or spec.ints[-1].length:
        wrong += [(tiles, [*ints, 1], floats)]
    wrong += [(tiles, ints[:-1], floats)] if spec.ints and spec.base != "update" else []
    if not any(f.endswith("...") for f in spec.floats):
        wrong += [(tiles, ints, [*floats, 0.5]), *([(tiles, ints, floats[1:])] if floats else [])]
    assert wrong or spec.base == "update"
    for operands, integers, reals in wrong:
        with pytest.raises(
            ValueError, match="must have the operands and attributes that the kernel declares"
        ):
            run(name, operands, integers, reals)


def test_every_kernel_has_a_reference():
    """Each family has a NumPy version; only the loops that measure the ceiling compute nothing."""
    assert set(KERNELS) - set(REFERENCES) == {"peak"}
    assert set(REFERENCES) <= set(KERNELS)


MOVES = {
    "kv_write",
    "kv_write_int8",
    "copy",
    "copy_pairs",
    "fetch",
    "store",
    "cast_f32_bf16",
    "cast_bf16_f32",
    "embedding",
    "embedding_quantised",
    "gather_rows",
    "spread",
    "tree_or",
    "rearrange",
    "concat",
    "repeat_row",
    "gather_elements",
    "one_hot",
    "unfold",
    "unpack",
}


@pytest.mark.parametrize("spec", KERNELS.values(), ids=lambda s: s.base)
def test_costs_are_counted_from_the_named_dims(spec):
    """FLOPs and bytes depend only on dims that the table names, and grow with them; a copy has no FLOPs."""
    few, many = (dict.fromkeys(spec.dims, size) for size in (4, 8))
    flops, moved = (spec.flops(few), spec.flops(many)), (spec.bytes(few), spec.bytes(many))
    if spec.base == "peak":
        assert (*flops, *moved) == (0, 0, 0, 0)
        return
    assert 0 < 2 * moved[0] <= moved[1]
    assert (0 < 2 * flops[0] <= flops[1]) if spec.base not in MOVES else flops == (0, 0)


def test_matmul_costs():
    """A product counts 2mnk operations and each operand once."""
    spec = kernel_spec("matmul_bf16")
    sizes = {"m": 4, "n": 8, "k": 16, "item": 2}
    assert spec.flops(sizes) == 1024
    assert spec.bytes(sizes) == 2 * (4 * 8 + 4 * 16 + 8 * 16)


def test_attention_counts_visible_pairs():
    """Pairs of query and position: all, causal, in a window; a long window counts as causal."""
    spec = kernel_spec("attention_f32")
    sizes = {"m": 20, "seq": 10, "heads": 3, "kv_heads": 1, "head_dim": 8, "item": 4}

    def pairs(causal, window):
        return spec.flops({**sizes, "causal": causal, "window": window}) // (2 * 3 * 36)

    def seen(window):
        return sum(min(p + 1, window) for p in range(10))

    assert [pairs(0, 0), pairs(1, 0), pairs(1, 10), pairs(1, 99)] == [100, 55, 55, 55]
    assert [pairs(1, w) for w in range(1, 10)] == [seen(w) for w in range(1, 10)]
    paged = kernel_spec("attention_paged_f32")
    token = {"m": 1, "length": 1000, "heads": 1, "kv_heads": 1, "head_dim": 8, "item": 4}
    assert paged.flops({**token, "window": 0}) == 10 * paged.flops({**token, "window": 100})


@every_dtype
@given(n=st.integers(1, 70), k=st.integers(1, 9))
def test_pack_and_unpack_are_inverse(dt, n, k):
    """Any shape is restored to the bit, and padding is zero."""
    w = np.arange(1, n * k + 1, dtype=np.float32).reshape(n, k).astype(NUMPY[dt])
    flat = pack_weight(w, dt)
    assert flat.size == packed_elements(n, k)
    assert np.count_nonzero(flat) == n * k
    assert_same_bits(unpack_weight(flat, n, k), w)


def test_panel_order():
    """fp32: [panel][k][32]; bf16: adjacent pairs along k."""
    w = np.arange(64 * 4, dtype=np.float32).reshape(64, 4) % 251
    assert pack_weight(w, "f32")[(4 + 3) * 32 + 5] == w[37, 3]
    assert pack_weight(w, "bf16")[4 * 32 + (1 * 32 + 5) * 2 + 1] == w[37, 3]


def test_packing_refuses_wrong_shapes():
    """Wrong ranks and sizes are named."""
    with pytest.raises(ShapeError, match="must be 2-D"):
        pack_weight(np.zeros(3, np.float32), "f32")
    with pytest.raises(ShapeError, match="packs into 64 elements"):
        unpack_weight(np.zeros(5, np.float32), 2, 2)


def test_run_rejects_invalid_tiles():
    """Unknown names and levels, strided columns and short packed operands are rejected before anything runs."""
    x = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match="must be a kernel"):
        run("matmul_f16", [x])
    with pytest.raises(ValueError, match="must name a level"):
        run("add_f32", [x, x, x], isa="avx1024")
    with pytest.raises(ValueError, match="must be contiguous"):
        run("add_f32", [x, x.T, x])
    with pytest.raises(ValueError, match="needs 128 elements"):
        run("update_f32", [(np.zeros(64, np.float32), 4, 4)])


def _level_in_new_process(level):
    code = "from tilewise.kernels.isa import isa_in_use; print(isa_in_use())"
    environment = {**os.environ, "TILEWISE_ISA": level}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_environment_forces_a_level():
    """TILEWISE_ISA selects a level; an unsupported one is an error that lists the others."""
    assert isa_in_use() == os.environ.get("TILEWISE_ISA", LEVELS[-1])
    assert _level_in_new_process(LEVELS[0]).stdout.strip() == LEVELS[0]
    refused = _level_in_new_process("sse9")
    assert refused.returncode != 0
    assert "TILEWISE_ISA must name a level that this machine has; got 'sse9'" in refused.stderr
