"""Calls of kernels by users: which kernels of the table they may name, and what the declarations do
not say about the operands of these.

A kernel reads and writes the tiles of its call. Some kernels also follow integers or indices to
other rows, which only an op can check. Users do not call these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.kernels.table import KernelSpec, is_declared

__all__ = ["problem_of"]

_PRODUCTS = {"matmul": 1, "matmul_dx": 0, "gemm": 1}  # the dim of the second operand that is contracted
_OF_OPS = ("fetch", "store", "peak", "tree_resume", "update", "split_tree", "head_sum")
Problem = tuple[str, str, str]


def problem_of(spec: KernelSpec, arguments: Mapping[str, Any]) -> Problem | None:
    """What is wrong with a user's call, as rule, value and advice; None if nothing is.

    Args:
        spec: the kernel.
        arguments: by name; operands have `shape` and `dtype`.
    """
    if not is_declared(spec.base):
        return None  # a user's own kernel checks what it gets
    if spec.base in _PRODUCTS:
        return _gemm(arguments) if spec.base == "gemm" else _product(spec.base, arguments)
    has_integers = any(i.source is None for i in spec.ints)
    has_indices = any("dt" not in o.dtypes and o.dtypes == ("i32",) for o in spec.operands)
    if has_integers or has_indices or spec.base in _OF_OPS:
        return (
            "a program may call kernels that use nothing besides their tiles",
            repr(spec.base),
            "write an op that emits it, or register a kernel of your own with tw.tile_kernel",
        )
    residual, out = arguments.get("residual"), arguments.get("out")
    if residual is not None and out is not None and residual.shape[0] not in (1, out.shape[0]):
        return "a residual has one row, or those of the result", f"{residual.shape[0]} rows", "slice it"
    return None


def _product(name: str, arguments: Mapping[str, Any]) -> Problem | None:
    """The ranges of k splits lie in the contracted dim, and begin where words of packed weights do."""
    a, w, ranges = arguments.get("a") or [], arguments.get("w") or [], arguments.get("range") or []
    splits = arguments.get("num_k_splits")
    if not isinstance(splits, int) or not isinstance(a, Sequence) or not isinstance(w, Sequence):
        return "a product has lists `a` and `w`, and a number of k splits", f"{splits!r}", "use comm.matmul"
    if len(ranges) != 2 * splits * len(a) or not all(type(v) is int for v in ranges):
        return "range has begin and end per k split and term", f"{len(ranges)} numbers", "use comm.matmul"
    for i, (x, weight) in enumerate(zip(a, w)):
        size = weight.shape[_PRODUCTS[name]]
        if x.shape[-1] != size:
            return "inner sizes of a product must agree", f"{x.shape[-1]} and {size}", "transpose or slice"
        pairs = list(zip(ranges[::2], ranges[1::2]))[i :: len(a)]
        if not all(0 <= begin <= end <= size for begin, end in pairs):
            return f"ranges of k splits must lie in {size} elements", f"{pairs}", "cut them"
        if x.dtype == "bf16" and any(begin % 2 and begin < end for begin, end in pairs):
            return "k splits of a bf16 product must begin at even elements", f"{pairs}", "choose other splits"
    return None


def _gemm(arguments: Mapping[str, Any]) -> Problem | None:
    """Inner and outer sizes agree."""
    shapes = [tuple(getattr(arguments.get(name), "shape", ())) for name in ("out", "a", "b")]
    if any(len(shape) != 2 for shape in shapes):
        return "gemm multiplies 2-D tensors", str([list(s) for s in shapes]), "pass out, a and b"
    out, a, b = ((shape[0], shape[1]) for shape in shapes)
    m, k = a[::-1] if arguments.get("trans_a") else a
    inner, n = b[::-1] if arguments.get("trans_b") else b
    if k != inner or tuple(out) != (m, n):
        return (
            "sizes of a product must agree",
            f"{list(a)} and {list(b)} for {list(out)}",
            "transpose or slice",
        )
    return None
