"""One small call of every kernel, made from its line of the table: operands of the right sizes and
dtypes.

As a program (`test_kernel_read_only.py` starts it), it runs such calls with all input operands, or
the named one, on read-only pages. It prints each call before it runs, so the last line of a killed
process names the kernel.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from itertools import groupby
from math import prod

import ml_dtypes
import numpy as np

from tilewise.kernels import KERNELS
from tilewise.kernels.isa import run
from tilewise.kernels.packing import packed_elements

M, D, HEADS, KV_HEADS, HEAD_DIM = 6, 38, 4, 2, 8
SIZES = {
    "m": M,
    "t": M,
    "n": 40,
    "k": D,
    "d": D,
    "h": 2,
    "g": D // 2,
    "v": 40,
    "q": HEADS * HEAD_DIM,
    "kv": KV_HEADS * HEAD_DIM,
    "c": 8,
}
ANY = {  # sizes that the table leaves open
    ("gemm", "a"): (M, D),
    ("gemm", "b"): (D, 40),
    ("attention", "lse"): (M, HEADS),
    ("attention_backward", "lse"): (M, HEADS),
    ("attention_paged", "block_table"): (2, 2),
    ("attention_paged_int8", "block_table"): (2, 2),
    ("attention_paged_int8", "k_cache"): (8, KV_HEADS * (HEAD_DIM // 4 + 1)),
    ("attention_paged_int8", "v_cache"): (8, KV_HEADS * (HEAD_DIM // 4 + 1)),
    ("kv_write_int8", "cache"): (8, 5 * (HEAD_DIM // 4 + 1)),
    ("kv_write_int8", "x"): (M, 5 * HEAD_DIM),
    ("rope", "table"): (8, D),
    ("square_sum", "out"): (2 * M, 1),
    ("square_sum", "grad"): (M, D),
    ("tree_resume", "left"): (M, 2 * D),
    ("tree_resume", "carries"): (M, D),
    ("split_tree", "partials"): (8, D),
    ("head_sum", "x"): (1, 4 * D),
    ("attention", "lengths"): (1, 1),
    ("attention_backward", "lengths"): (1, 1),
    ("attention", "first"): (M, 1),
    ("attention_backward", "first"): (M, 1),
    ("rms_norm_backward", "dgamma_split"): (2, 2 * D),
    ("layer_norm_backward", "dgamma_split"): (2, 2 * D),
    ("layer_norm_backward", "dbeta_split"): (2, 2 * D),
    ("row_sum_split", "split"): (2, 2),
    ("column_sum_split", "split"): (2, 2 * D),
    ("peak", "ops_per_step"): (1, 1),
    ("rearrange", "x"): (M, D),
    ("concat", "x"): (M, D // 2),
    ("reduce_sum", "out"): (M, 1),
    ("reduce_max", "out"): (M, 1),
    ("gather_elements", "x"): (8, D),
    ("gather_elements", "index"): (M, 1),
    ("scatter_add", "x"): (M, D),
    ("scatter_add", "src"): (M, D),
    ("scatter_add", "index"): (M, 1),
    ("one_hot", "ids"): (M, 1),
    ("unfold", "x"): (1, M + D - 1),
    ("fold", "x"): (M * D, 1),
    ("batched_gemm", "a"): (M, 5),
    ("batched_gemm", "b"): (10, 40),
    ("dropout", "key"): (1, 4),
}
WINDOWS = [1, 1, 0, 0, 1, 1]  # strides, padding, dilations
EVERY_INT = {  # all integers of kernels whose sizes depend on each other
    "rearrange": [2, M * D, 0, 0, M, D, D, 1, 0, 0, M, D],
    "concat": [2, D // 2, D // 2],
    "reduce_sum": [2, M, D, 1, 0],
    "reduce_max": [2, M, D, 1, 0],
    "gather_elements": [1, 8, D, M, 0, 1, 0, 0],
    "scatter_add": [1, M, D, M, 0, 1, 0, 0],
    "unfold": [1, 1, M + D - 1, 1, M, 1, D, *WINDOWS],
    "fold": [1, M, D, M, D, 1, 1, *WINDOWS],
    "batched_gemm": [3, 5, 0, 0],
    "dropout": [2, M, D, 0, 0, D, 1],
}
INTS = {
    "num_k_splits": 2,
    "split_rows": 3,
    "rows": M,
    "slot": 1,
    "head_dim": HEAD_DIM,
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "seq_len": M,
    "split_len": M,
    "causal": 1,
    "window": 3,
    "block_size": 4,
    "ignore_index": -100,
    "steps": 2,
}
NUMPY = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "bf16": ml_dtypes.bfloat16}
MEMBERS = 2  # of every list


def sizes_of(spec, operand):
    if (spec.base, operand.name) in ANY:
        return ANY[spec.base, operand.name]
    open_rows = 8 if operand.role == "in" else 2  # tables that are looked up in; rows of batch splits
    if spec.base == "kv_write":
        open_rows = 8
    named = {**SIZES, "_": open_rows}
    return tuple(int(n) if n.isdigit() else named[n.rstrip("*")] for n in operand.sizes)


def operands_of(spec, name):
    """(name, role, rows, columns, dtype, packed) of every operand of a full call."""
    own = name[len(spec.base) + 1 :]
    members: list = []
    for is_list, group in groupby(spec.operands, lambda o: o.is_list):
        members += list(group) * (MEMBERS if is_list else 1)  # lists side by side take turns
    for operand in members:
        rows, cols = sizes_of(spec, operand)
        dtype = own if operand.dtypes[0] == "dt" else operand.dtypes[0]
        yield operand.name, operand.role, rows, cols, dtype, bool(operand.packed)


def integers_of(spec, name):
    """Integer arguments that match those operands."""
    if spec.base in EVERY_INT:
        return list(EVERY_INT[spec.base])
    made = list(operands_of(spec, name))
    integers, result = dict(INTS), []
    if spec.base in ("rope", "kv_write"):
        integers["head_dim"] = D
    for i in spec.ints:
        if i.source is not None:
            kind, of = i.source
            members = [o for o in made if o[0] == of]
            integers[i.name] = {
                "count": len(members),
                "f32": members[0][4] == "f32",
                "packed": members[0][5],
            }[kind]
        if not i.is_list:
            result.append(int(integers.get(i.name, 0)))
            continue
        if spec.base == "update":  # no steps: every array is left with itself
            result += range(1 + MEMBERS) if i.name == "left" else ()
            continue
        if i.name == "format":  # of every term
            result += [0] * integers["num_terms"]
            continue
        terms, end = integers.get("num_terms", 1), SIZES["d"]
        half = end // 4 * 2  # splits of bf16 begin at even elements
        values = [v for begin in (0, half) for _ in range(terms) for v in (begin, begin + half)]
        assert len(values) == prod(int(f) if f.isdigit() else integers[f] for f in i.length)
        result += values
    return result


class Page:
    """An operand in its own pages, which can be made read-only."""

    def __init__(self, rows, cols, dtype, packed):
        count = packed_elements(rows, cols) if packed else rows * cols
        kind = np.dtype(NUMPY[dtype])
        self.memory = mmap.mmap(-1, -(-count * kind.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE)
        array = np.frombuffer(self.memory, kind, count)
        array[:] = (np.arange(count) % 2).astype(kind) if dtype == "i32" else np.linspace(0.1, 0.9, count)
        self.address = array.__array_interface__["data"][0]
        self.tile = (array, rows, cols) if packed else array.reshape(rows, cols)

    def close(self):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(self.address, len(self.memory), mmap.PROT_READ) == 0

    def open(self):
        ctypes.CDLL(None).mprotect(
            ctypes.c_void_p(self.address), ctypes.c_size_t(len(self.memory)), mmap.PROT_READ | mmap.PROT_WRITE
        )


def run_closed(spec, name, isa, closed):
    """One call; `closed` names the read-only operands, None: all inputs."""
    operands = list(operands_of(spec, name))
    pages = [Page(*shape) for _, _, *shape in operands]
    shut = [
        p
        for p, (operand, role, *_) in zip(pages, operands)
        if (role == "in" if closed is None else operand == closed)
    ]
    for page in shut:
        page.close()
    run(name, [p.tile for p in pages], integers_of(spec, name), [0.5] * len(spec.floats), isa=isa)
    for page in shut:
        page.open()


def main(calls):
    """Run the calls: (kernel's full name, level, operand or None)."""
    for name, isa, closed in calls:
        print(name, isa, closed or "", flush=True)
        spec = next(s for s in KERNELS.values() if name in s.names)
        run_closed(spec, name, isa, closed)
    print("all returned", flush=True)


if __name__ == "__main__":
    main(json.load(sys.stdin))
