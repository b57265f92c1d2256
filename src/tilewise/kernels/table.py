"""The table of native kernels: names, operands and attributes in order, and costs.

The table is the contract between tile programs (`plan`), the native sources (native/kernels) and
the costs that plans report (`plan.costs`). Planning checks every instruction against the table
(`plan.emission`). Tests compare the native registry, and what kernels write, with the table.

Functions of costs take a mapping from the dims in `KernelSpec.dims` to sizes, where `item` is the
element size of the dtype. FLOPs count a multiply-add as two, and an exp or a division as one.

An operand is written `role name[:dtype][!|~][...][?][[rows cols]]`, as in `in residual?[m n]` and
`in w!...[n k*]`:

    :dtype     element type: the kernel's own (`dt`, if not written), `f32`, `f64`, `i32`, `bf16`, or `dt|f32`
    ! ~        stored in panels; stored in panels or in rows
    ...        a list of operands; adjacent lists alternate: a0, w0, a1, w1
    ?          may be absent
    [m n]      rows and columns; equal names have equal sizes, a number is that size, `_` is any, and `k*` is a size
               of its own for every member of a list

An integer is written `name`. Some integers are computed and never passed: `name=count(a)` is the
length of list a, `name=f32(out)` says whether the elements of operand out are f32, and
`name=packed(grad)` says whether operand grad is stored in panels. `range...(2*n)` is a list of 2 *
n integers. Floats are written as names; the last may be a list `constant...`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from tilewise.core import InternalError
from tilewise.kernels.declared import DECLARED

__all__ = ["KERNELS", "IntSpec", "KernelSpec", "OperandSpec", "kernel_spec"]

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class OperandSpec:
    """One operand.

    Attributes:
        name: as in the native source.
        role: `in`, `out` or `inout`.
        dtypes: its possible element types; `dt` is the kernel's own type.
        packed: whether it is stored in panels; None if both are possible.
        optional: whether it may be absent.
        is_list: whether it is a list of any number of operands.
        sizes: names of the sizes of its rows and columns; may be empty.
    """

    name: str
    role: str
    dtypes: tuple[str, ...] = ("dt",)
    packed: bool | None = False
    optional: bool = False
    is_list: bool = False
    sizes: tuple[str, ...] = ()


@dataclass(frozen=True)
class IntSpec:
    """One integer attribute.

    Attributes:
        name: as in the native source.
        source: for a computed integer, `count`, `f32` or `packed`, and the operand.
        is_list: whether it is a list of integers.
        length: factors whose product is the length of the list: numbers and names of integers.
    """

    name: str
    source: tuple[str, str] | None = None
    is_list: bool = False
    length: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelSpec:
    """One kernel for all its dtypes.

    Attributes:
        base: name without the dtype suffix.
        names: full names, one per dtype.
        operands: operands in order.
        ints: integer attributes in order.
        floats: floating-point attributes in order; a trailing `...` marks a list of any length.
        dims: dims on which `flops` and `bytes` depend.
        flops: operations of one call.
        bytes: bytes that one call reads and writes at least once.
    """

    base: str
    names: tuple[str, ...]
    operands: tuple[OperandSpec, ...]
    ints: tuple[IntSpec, ...]
    floats: tuple[str, ...]
    dims: tuple[str, ...]
    flops: Callable[[Sizes], int]
    bytes: Callable[[Sizes], int]
    scratch: Callable[[Mapping[str, Any], Mapping[str, tuple[int, int]]], int] | None = None

    @cached_property
    def operand_groups(self) -> tuple[tuple[bool, tuple[OperandSpec, ...]], ...]:
        """Consecutive operands, grouped by whether they are lists. Consecutive lists alternate in a
        call.
        """
        groups = groupby(self.operands, key=lambda o: o.is_list)
        return tuple((is_list, tuple(group)) for is_list, group in groups)

    @cached_property
    def operand_names(self) -> frozenset[str]:
        """Names of the operands."""
        return frozenset(o.name for o in self.operands)

    @cached_property
    def int_names(self) -> frozenset[str]:
        """Names of the integers that a call passes, without computed ones."""
        return frozenset(i.name for i in self.ints if i.source is None)

    @cached_property
    def float_names(self) -> frozenset[str]:
        """Names of the floats."""
        return frozenset(f.removesuffix("...") for f in self.floats)


_OPERAND = re.compile(r"(in|out|inout) (\w+)(?::([\w|]+))?([!~])?(\.\.\.)?(\?)?(?:\[(.+)\])?")
_INT = re.compile(r"(\w+)(?:=(count|f32|packed)\((\w+)\)|(\.\.\.)(?:\((.+)\))?)?")


def _operand(text: str) -> OperandSpec:
    match = _OPERAND.fullmatch(text)
    assert match is not None, text
    role, name, dtypes, packed, dots, optional, sizes = match.groups()
    return OperandSpec(
        name,
        role,
        tuple((dtypes or "dt").split("|")),
        {"!": True, "~": None}.get(packed, False),
        optional is not None,
        dots is not None,
        tuple((sizes or "").split()),
    )


def _integer(text: str) -> IntSpec:
    match = _INT.fullmatch(text)
    assert match is not None, text
    name, kind, operand, dots, length = match.groups()
    source = (kind, operand) if kind else None
    return IntSpec(name, source, dots is not None, tuple((length or "").split("*")) if length else ())


Cost = Callable[[Sizes], int]


def _spec(
    base: str,
    operands: str,
    dims: str,
    flops: Cost,
    bytes_: Cost,
    *,
    ints: str = "",
    floats: str = "",
    dtypes: tuple[str, ...] = ("f32", "bf16"),
) -> KernelSpec:
    names = tuple(f"{base}_{d}" for d in dtypes) if dtypes else (base,)
    parsed = tuple(_operand(o.strip()) for o in operands.split(","))
    return KernelSpec(
        base,
        names,
        parsed,
        tuple(_integer(i) for i in ints.split()),
        tuple(floats.split()),
        (*dims.split(), "item"),
        flops,
        bytes_,
    )


def _product(s: Sizes) -> int:
    return 2 * s["m"] * s["n"] * s["k"]


def _attended(s: Sizes) -> int:
    """Pairs of query and attended position over all heads; a window of 0 means none."""
    seq, window = s["seq"], min(s["window"] or s["seq"], s["seq"])
    pairs = seq * window - window * (window - 1) // 2 if s["causal"] else seq**2
    return s["m"] // seq * pairs * s["heads"]


def _paged_length(s: Sizes) -> int:
    """Positions that a token attends to."""
    return min(s["length"], s["window"] or s["length"])


def _attention_rows(s: Sizes) -> int:
    return s["m"] * s["head_dim"] * s["item"] * (s["heads"] + s["kv_heads"])


_RANGES = "out_is_f32=f32(out) num_terms=count(a) num_k_splits range...(2*num_k_splits*num_terms)"
_HEADS = "heads kv_heads head_dim"

_SPECS = [
    _spec(
        "matmul",
        "out out:dt|f32[m n], in residual?[_ n], in a...[m k*], in w!...[n k*]",
        "m n k",
        _product,
        lambda s: s["item"] * (s["m"] * (s["n"] + s["k"]) + s["n"] * s["k"]),
        ints=_RANGES,
    ),
    _spec(
        "matmul_dx",
        "out out:dt|f32[m n], in residual?[_ n], in a...[m k*], in w!...[k* n]",
        "m n k",
        _product,
        lambda s: s["item"] * (s["m"] * (s["n"] + s["k"]) + s["n"] * s["k"]),
        ints=_RANGES,
    ),
    _spec(
        "matmul_dw",
        "out out:f32![n k], in dy?[t n], in x?[t k], in ids:i32?[t 1], in de?[t k], in carry:f32!...[n k]",
        "m n k",
        _product,
        lambda s: s["item"] * s["m"] * (s["n"] + s["k"]) + 4 * s["n"] * s["k"],
        ints="split_rows num_carries=count(carry) vocab_begin padded_len",
    ),
    _spec(
        "gemm",
        "inout out:dt|f32[m n], in a, in b",
        "m n k",
        _product,
        lambda s: s["item"] * (s["m"] * (s["n"] + s["k"]) + s["n"] * s["k"]),
        ints="trans_a trans_b out_is_f32=f32(out) accumulate",
    ),
    _spec(
        "attention",
        "out out[m q], out lse:f32[m _], in q[m q], in k[m kv], in v[m kv], in lengths:i32?[_ 1]",
        "m seq heads kv_heads head_dim causal window",
        lambda s: _attended(s) * (4 * s["head_dim"] + 4),
        lambda s: 2 * _attention_rows(s),
        ints=f"seq_len {_HEADS} causal window",
        floats="scale softcap",
    ),
    _spec(
        "attention_backward",
        "out dq[m q], out dk:dt|f32[m kv], out dv:dt|f32[m kv], in dout[m q], in out[m q], in lse:f32[m _], in q[m q], "
        "in k[m kv], in v[m kv], in lengths:i32?[_ 1]",
        "m seq heads kv_heads head_dim causal window",
        lambda s: _attended(s) * (10 * s["head_dim"] + 8),
        lambda s: 4 * _attention_rows(s),
        ints=f"seq_len {_HEADS} causal dkv_is_f32=f32(dk) window",
        floats="scale softcap",
    ),
    _spec(
        "attention_paged",
        "out out[m q], in q[m q], in k_cache[c kv], in v_cache[c kv], in positions:i32[m 1], in sequence:i32[m 1], "
        "in block_table:i32[_ _]",
        "m length heads kv_heads head_dim window",
        lambda s: s["m"] * _paged_length(s) * s["heads"] * (4 * s["head_dim"] + 4),
        lambda s: 2 * s["item"] * s["m"] * s["head_dim"] * (s["heads"] + _paged_length(s) * s["kv_heads"]),
        ints=f"block_size {_HEADS} window",
        floats="scale softcap",
    ),
    _spec("peak", "out ops_per_step:f32", "steps", lambda s: 0, lambda s: 0, ints="steps"),
]



def _declared(fields: Mapping[str, Any]) -> KernelSpec:
    """The specification that a declaration in the native sources makes."""
    operands = tuple(OperandSpec(*operand) for operand in fields["operands"])
    ints = tuple(IntSpec(*integer) for integer in fields["ints"])
    return KernelSpec(**{**fields, "operands": operands, "ints": ints})


_SPECS += [_declared(fields) for fields in DECLARED]
KERNELS = {spec.base: spec for spec in _SPECS}
_BY_NAME = {name: spec for spec in _SPECS for name in spec.names}


def kernel_spec(name: str) -> KernelSpec:
    """The specification of a full kernel name such as `matmul_bf16`.

    Raises:
        InternalError: there is no such kernel.
    """
    if name not in _BY_NAME:
        raise InternalError(
            f"[kernels.kernel_spec] a kernel must be in the table; got {name!r}; add it to table.py"
        )
    return _BY_NAME[name]
