"""The table of native kernels: what each is called, its operands and attributes in order, and what it costs.

This is the contract between the tile program (`plan`), the native sources (native/kernels) and the cost
model. A test compares the names with the native registry. Sizes are given as a mapping of the dims named in
`KernelSpec.dims`; `item` is the element size of the kernel's dtype in bytes. FLOPs count a multiply-add as
two and an exp or a division as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tilewise.core import InternalError

__all__ = ["KERNELS", "KernelSpec", "Operand", "kernel_spec"]

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        name: as the native source calls it; a trailing `...` marks a list of operands.
        role: `in`, `out` or `inout`.
        dtype: `dt` (the kernel's), `f32`, `f64`, `i32`, or `dt|f32`.
        packed: lies in panels.
        optional: may be absent.
    """

    name: str
    role: str
    dtype: str = "dt"
    packed: bool = False
    optional: bool = False


@dataclass(frozen=True)
class KernelSpec:
    """One kernel for all its dtypes.

    Attributes:
        base: name without the dtype suffix.
        names: full names, one per dtype.
        operands: in order.
        ints: integer attributes in order; a trailing `...` marks a list.
        floats: floating attributes in order.
        dims: dims that `flops` and `bytes` read from their argument.
        flops: operations of one call.
        bytes: bytes read and written at least once by one call.
    """

    base: str
    names: tuple[str, ...]
    operands: tuple[Operand, ...]
    ints: tuple[str, ...]
    floats: tuple[str, ...]
    dims: tuple[str, ...]
    flops: Callable[[Sizes], int]
    bytes: Callable[[Sizes], int]


def _operand(text: str) -> Operand:
    """`role name[:dtype][!packed][?optional]`, for example `in residual?`, `out rstd:f32`, `in w!`."""
    role, name = text.split()
    optional, packed = name.endswith("?"), "!" in name
    name = name.rstrip("?").replace("!", "")
    name, _, dtype = name.partition(":")
    return Operand(name, role, dtype or "dt", packed, optional)


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
        tuple(ints.split()),
        tuple(floats.split()),
        (*dims.split(), "item"),
        flops,
        bytes_,
    )


def _map(base: str, operands: str, per_element: int, *, floats: str = "") -> KernelSpec:
    arrays = len(operands.split(","))
    return _spec(
        base,
        operands,
        "m d",
        lambda s: per_element * s["m"] * s["d"],
        lambda s: arrays * s["m"] * s["d"] * s["item"],
        floats=floats,
    )


def _product(s: Sizes) -> int:
    return 2 * s["m"] * s["n"] * s["k"]


def _attended(s: Sizes) -> int:
    """Pairs of query and visible position over all heads."""
    pairs = s["seq"] * (s["seq"] + 1) // 2 if s["causal"] else s["seq"] ** 2
    return s["m"] // s["seq"] * pairs * s["heads"]


def _attention_rows(s: Sizes) -> int:
    return s["m"] * s["head_dim"] * s["item"] * (s["heads"] + s["kv_heads"])


_RANGES = "out_is_f32 num_terms num_chunks range..."
_HEADS = "heads kv_heads head_dim"
_VOCAB = "vocab_begin ignore_index"
_F32, _NONE = ("f32",), ()

_SPECS = [
    _spec(
        "matmul",
        "out out:dt|f32, in residual?, in a..., in w!...",
        "m n k",
        _product,
        lambda s: s["item"] * (s["m"] * (s["n"] + s["k"]) + s["n"] * s["k"]),
        ints=_RANGES,
    ),
    _spec(
        "matmul_dx",
        "out out:dt|f32, in residual?, in a..., in w!...",
        "m n k",
        _product,
        lambda s: s["item"] * (s["m"] * (s["n"] + s["k"]) + s["n"] * s["k"]),
        ints=_RANGES,
    ),
    _spec(
        "matmul_dw",
        "out out:f32!, in dy?, in x?, in ids:i32?, in de?, in carry:f32!...",
        "m n k",
        _product,
        lambda s: s["item"] * s["m"] * (s["n"] + s["k"]) + 4 * s["n"] * s["k"],
        ints="leaf_rows num_carries vocab_begin",
    ),
    _spec(
        "gemm",
        "inout out:dt|f32, in a, in b",
        "m n k",
        _product,
        lambda s: s["item"] * (s["m"] * (s["n"] + s["k"]) + s["n"] * s["k"]),
        ints="trans_a trans_b out_is_f32 accumulate",
    ),
    _spec(
        "rms_norm",
        "out y, out rstd:f32, in x, in gamma",
        "m d",
        lambda s: 4 * s["m"] * s["d"],
        lambda s: 2 * s["item"] * s["m"] * s["d"],
        floats="eps",
    ),
    _spec(
        "rms_norm_backward",
        "out dx, inout dgamma_leaf:f32, in dy, in x, in rstd:f32, in gamma, in dresidual?",
        "m d",
        lambda s: 11 * s["m"] * s["d"],
        lambda s: 4 * s["item"] * s["m"] * s["d"],
        ints="leaf_rows",
    ),
    _spec(
        "leaf_tree",
        "out out:f32, in partials:f32, in carry:f32...",
        "m d",
        lambda s: s["m"] * s["d"],
        lambda s: 4 * s["m"] * s["d"],
        ints="num_carries",
        dtypes=_F32,
    ),
    _spec(
        "row_sum_leaf",
        "inout leaf:f32, in x:f32",
        "m",
        lambda s: s["m"],
        lambda s: 4 * s["m"],
        ints="leaf_rows",
        dtypes=_F32,
    ),
    _spec(
        "rope",
        "out out, in x, in positions:i32, in table:f32",
        "m d",
        lambda s: 3 * s["m"] * s["d"],
        lambda s: 2 * s["item"] * s["m"] * s["d"],
        ints="head_dim inverse",
    ),
    _spec(
        "attention",
        "out out, out lse:f32, in q, in k, in v",
        "m seq heads kv_heads head_dim causal",
        lambda s: _attended(s) * (4 * s["head_dim"] + 4),
        lambda s: 2 * _attention_rows(s),
        ints=f"seq_len {_HEADS} causal",
        floats="scale",
    ),
    _spec(
        "attention_backward",
        "out dq, out dk:dt|f32, out dv:dt|f32, in dout, in out, in lse:f32, in q, in k, in v",
        "m seq heads kv_heads head_dim causal",
        lambda s: _attended(s) * (10 * s["head_dim"] + 8),
        lambda s: 4 * _attention_rows(s),
        ints=f"seq_len {_HEADS} causal dkv_is_f32",
        floats="scale",
    ),
    _spec(
        "attention_paged",
        "out out, in q, in k_cache, in v_cache, in positions:i32, in sequence:i32, in block_table:i32",
        "m length heads kv_heads head_dim",
        lambda s: s["m"] * s["length"] * s["heads"] * (4 * s["head_dim"] + 4),
        lambda s: 2 * s["item"] * s["m"] * s["head_dim"] * (s["heads"] + s["length"] * s["kv_heads"]),
        ints=f"block_size {_HEADS}",
        floats="scale",
    ),
    _spec(
        "kv_write",
        "inout cache, in x, in slots:i32",
        "m d",
        lambda s: 0,
        lambda s: 2 * s["item"] * s["m"] * s["d"],
    ),
    _map("silu_gate", "out h, in g, in u", 5),
    _map("silu_gate_backward", "out dg, out du, in dh, in g, in u", 10),
    _map("add", "out out, in a, in b", 1),
    _map("multiply", "out out, in a, in b", 1),
    _map("scale", "out out, in x", 1, floats="s"),
    _map("silu", "out out, in x", 4),
    _map("silu_backward", "out dx, in dy, in x", 8),
    _map("copy", "out out, in x", 0),
    _map("softmax", "out y, in x", 5),
    _map("softmax_backward", "out dx, in dy, in y", 4),
    _spec(
        "row_sum",
        "out out:f32, in x",
        "m d",
        lambda s: s["m"] * s["d"],
        lambda s: s["item"] * s["m"] * s["d"],
    ),
    _spec(
        "exp", "out out, in x", "m d", lambda s: s["m"] * s["d"], lambda s: 8 * s["m"] * s["d"], dtypes=_F32
    ),
    _spec(
        "log", "out out, in x", "m d", lambda s: s["m"] * s["d"], lambda s: 8 * s["m"] * s["d"], dtypes=_F32
    ),
    _spec(
        "cast_f32_bf16",
        "out out:bf16, in x:f32",
        "m d",
        lambda s: 0,
        lambda s: 6 * s["m"] * s["d"],
        dtypes=_NONE,
    ),
    _spec(
        "cast_bf16_f32",
        "out out:f32, in x:bf16",
        "m d",
        lambda s: 0,
        lambda s: 6 * s["m"] * s["d"],
        dtypes=_NONE,
    ),
    _spec(
        "embedding",
        "out out, in ids:i32, in table!",
        "m d",
        lambda s: 0,
        lambda s: 2 * s["item"] * s["m"] * s["d"],
        ints="vocab_begin",
    ),
    _spec(
        "gather_rows",
        "out out, in x, in index:i32",
        "m d",
        lambda s: 0,
        lambda s: 2 * s["item"] * s["m"] * s["d"],
    ),
    _spec(
        "cross_entropy_max",
        "out stats:f32, in logits, in labels:i32",
        "m d",
        lambda s: s["m"] * s["d"],
        lambda s: s["item"] * s["m"] * s["d"],
        ints=_VOCAB,
    ),
    _spec(
        "cross_entropy_sum",
        "out sums:f32, in logits, in stats:f32",
        "m d",
        lambda s: 3 * s["m"] * s["d"],
        lambda s: s["item"] * s["m"] * s["d"],
        ints="num_chunks range...",
    ),
    _spec(
        "cross_entropy_grad",
        "out dlogits?, out loss_rows:f32, in logits, in stats:f32, in sums:f32, in labels:i32, in inv_count:f32",
        "m d",
        lambda s: 4 * s["m"] * s["d"],
        lambda s: 2 * s["item"] * s["m"] * s["d"],
        ints=_VOCAB,
    ),
    _spec(
        "adamw",
        "out weight?, inout master:f32, inout m:f32, inout v:f32, in grad:f32, in hyper:f32, in clip:f32",
        "m d",
        lambda s: 14 * s["m"] * s["d"],
        lambda s: (28 + s["item"] % 4) * s["m"] * s["d"],
        ints="packed",
        floats="weight_decay",
    ),
    _spec(
        "square_sum",
        "out out:f64, in grad:f32",
        "m d",
        lambda s: 2 * s["m"] * s["d"],
        lambda s: 4 * s["m"] * s["d"],
        ints="packed num_chunks split_dim range...",
        dtypes=_F32,
    ),
    _spec(
        "norm_scale",
        "out out:f32, in partials:f64, in loss:f32",
        "m d",
        lambda s: s["m"] * s["d"],
        lambda s: 8 * s["m"] * s["d"],
        floats="max_norm",
        dtypes=_NONE,
    ),
    _spec(
        "tree_add",
        "out out, in residual?, in x:f32...",
        "m d inputs",
        lambda s: s["m"] * s["d"] * s["inputs"],
        lambda s: s["m"] * s["d"] * (4 * s["inputs"] + s["item"]),
    ),
    _spec(
        "tree_max",
        "out out:f32, in none?, in x:f32...",
        "m d inputs",
        lambda s: s["m"] * s["d"] * s["inputs"],
        lambda s: 4 * s["m"] * s["d"] * (s["inputs"] + 1),
        dtypes=_F32,
    ),
    _spec(
        "tree_or",
        "out out, in none?, in x...",
        "m d inputs",
        lambda s: 0,
        lambda s: s["item"] * s["m"] * s["d"] * (s["inputs"] + 1),
        dtypes=("f32", "bf16", "f64"),
    ),
    _spec(
        "copy_pairs",
        "out dst..., in src...",
        "m d",
        lambda s: 0,
        lambda s: 2 * s["item"] * s["m"] * s["d"],
        dtypes=("f32", "bf16", "f64"),
    ),
    _spec("peak", "out ops_per_step:f32", "steps", lambda s: 0, lambda s: 0, ints="steps"),
]

KERNELS = {spec.base: spec for spec in _SPECS}
_BY_NAME = {name: spec for spec in _SPECS for name in spec.names}


def kernel_spec(name: str) -> KernelSpec:
    """The specification of a full kernel name such as `matmul_bf16`.

    Raises:
        InternalError: there is no such kernel.
    """
    if name not in _BY_NAME:
        raise InternalError(
            f"[kernels.kernel_spec] a kernel must stand in the table; got {name!r}; add it to table.py"
        )
    return _BY_NAME[name]
