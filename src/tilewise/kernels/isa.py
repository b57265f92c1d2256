"""Instruction-set levels of the native kernels, and `run`, which runs a single kernel on NumPy
arrays.

Tests, benchmarks and users call `run`; tile programs do not. bf16 arrays may be
`ml_dtypes.bfloat16`; the native code gets their 16-bit patterns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tilewise import _native
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import PlanError
from tilewise.core.validation import Validator, shown
from tilewise.kernels.packing import pack_weight, unpack_weight
from tilewise.kernels.table import KERNELS, KernelSpec, OperandSpec
from tilewise.kernels.user import user_kernel

__all__ = ["Packed", "isa_in_use", "isa_levels", "isa_missing", "kernel_names", "run", "run_named"]

_validate = Validator("kernels", PlanError)

Packed = tuple[NDArray[Any], int, int]
Tile = NDArray[Any] | Packed | None


def kernel_names() -> list[str]:
    """Names of all native kernels, sorted."""
    return list(_native.kernels.kernel_names())


def isa_levels() -> list[str]:
    """Levels that this build has and this machine can run, weakest first. On aarch64 the only level
    is `neon`.
    """
    return list(_native.kernels.isa_levels())


def isa_missing() -> list[str]:
    """Levels that this machine can run and that are better than every level of this build, weakest first.

    A build from source has the weakest level and the best one of the machine that built it. Wheels of a release have
    all levels.
    """
    return list(_native.kernels.isa_missing())


def isa_in_use() -> str:
    """The level that the runtime uses: the best one, or the one that `TILEWISE_ISA` names."""
    return str(_native.kernels.isa_in_use())


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def _operand(tile: Tile) -> object:
    if isinstance(tile, tuple):
        return (_bits(tile[0].reshape(1, -1)), tile[1], tile[2])
    return None if tile is None else _bits(tile)


def run(
    name: str,
    tiles: Sequence[Tile],
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
    *,
    row_begin: int = 0,
    isa: str = "",
    repeat: int = 1,
    scratch_bytes: int = 64 << 20,
) -> None:
    """Run one kernel in place.

    Args:
        name: a kernel of `kernel_names()`.
        tiles: operands in the table's order. An operand is a 2-D array with contiguous columns,
            `(flat, rows, cols)` for a packed weight, or None if it is absent.
        ints: attributes in the table's order.
        floats: attributes in the table's order.
        row_begin: first row of the loop that this call covers.
        isa: a level of `isa_levels()`; empty for the level in use.
        repeat: number of runs without returning to Python.
        scratch_bytes: scratch memory that the kernel may use.

    Raises:
        ValueError: the kernel is unknown, the level is missing, an operand cannot be a tile, or the
            call has more or fewer operands or attributes than the kernel declares.
    """
    operands = [_operand(tile) for tile in tiles]
    _native.kernels.run(
        name,
        operands,
        ints=list(ints),
        floats=list(floats),
        row_begin=row_begin,
        isa=isa,
        repeat=repeat,
        scratch_bytes=scratch_bytes,
    )


def run_named(base: str, arguments: Mapping[str, Any]) -> None:
    """Run one kernel in place, with its operands and attributes by name.

    Args:
        base: a kernel of the table, without its dtype. The operands determine the dtype.
        arguments: operands and attributes by the names in the table, without attributes that the
            table derives. An operand is a 2-D array, or a list of them if the table says so. Absent
            operands are None or omitted. A weight that the kernel stores in panels is passed as a plain matrix;
            it is packed before the call, and unpacked after it.

    Raises:
        PlanError: the kernel is unknown; an argument is missing, unknown, or has another dtype.
        ValueError: as in `run`.
    """
    base = _validate.choice("run_named", "a kernel", base, sorted(spec.base for spec in KERNELS.values()))
    spec = KERNELS[base]
    names = spec.operand_names | spec.int_names | spec.float_names
    if odd := sorted(arguments.keys() - names):
        _validate.invalid(
            "run_named",
            f"the arguments of {base!r} are {', '.join(sorted(names))}",
            repr(odd[0]),
            "rename it",
        )
    operands = _in_order(spec, arguments)
    name = _full_name(spec, operands)
    for operand, array in operands:
        if array is not None:
            _require_dtype(operand, array, name.removeprefix(f"{base}_"))
    tiles = [
        (pack_weight(array, _dtype_name(array)), *array.shape)
        if operand.packed and array is not None
        else array
        for operand, array in operands
    ]
    attributes = _integers(spec, operands, arguments), _floats(spec, arguments)
    own = user_kernel(base)
    if own is not None:
        own.run([array for _, array in operands], *attributes)
        return
    run(name, tiles, *attributes)
    for (operand, array), tile in zip(operands, tiles):
        if isinstance(tile, tuple) and operand.role != "in":
            array[...] = unpack_weight(*tile)


def _in_order(spec: KernelSpec, arguments: Mapping[str, Any]) -> list[tuple[OperandSpec, Any]]:
    """Operands in the table's order; adjacent lists alternate."""
    placed: list[tuple[OperandSpec, Any]] = []
    for is_list, group in spec.operand_groups:
        values = [
            _argument(spec, o.name, arguments, () if is_list else None, is_list or o.optional) for o in group
        ]
        rows = zip(*values, strict=True) if is_list else [values]
        try:
            placed += [(operand, value) for row in rows for operand, value in zip(group, row)]
        except ValueError:
            lengths = ", ".join(f"{len(v)} of {o.name!r}" for o, v in zip(group, values))
            _validate.invalid(
                "run_named", "lists that alternate must have equal lengths", lengths, "correct them"
            )
    return placed


def _argument(
    spec: KernelSpec, name: str, arguments: Mapping[str, Any], absent: Any, is_optional: bool = False
) -> Any:
    if name not in arguments and not is_optional:
        _validate.invalid("run_named", f"{spec.base!r} needs the argument {name!r}", "none", "pass it")
    return arguments.get(name, absent)


def _full_name(spec: KernelSpec, operands: Sequence[tuple[OperandSpec, Any]]) -> str:
    """The kernel's name with the dtype of the first operand that has the kernel's own type."""
    own = [array for operand, array in operands if operand.dtypes == ("dt",) and array is not None]
    name = f"{spec.base}_{_dtype_name(own[0])}" if own else spec.names[0]
    if name not in spec.names and len(spec.names) > 1:
        _validate.invalid(
            "run_named",
            f"the dtypes of {spec.base!r} are those of {', '.join(spec.names)}",
            name,
            "convert it",
        )
    return name if name in spec.names else spec.names[0]


def _dtype_name(array: Any) -> str:
    array = _validate.instance("run_named", "an operand", array, np.ndarray, "pass a 2-D array")
    return next((name for name, kind in DTYPES.items() if kind.numpy == array.dtype), str(array.dtype))


def _require_dtype(operand: OperandSpec, array: NDArray[Any], own: str) -> None:
    allowed = {own if name == "dt" else name for name in operand.dtypes}
    if _dtype_name(array) not in allowed:
        _validate.invalid(
            "run_named",
            f"operand {operand.name!r} must have the dtype {' or '.join(sorted(allowed))}",
            _dtype_name(array),
            "convert it",
        )


def _integers(
    spec: KernelSpec, operands: Sequence[tuple[OperandSpec, Any]], arguments: Mapping[str, Any]
) -> list[int]:
    result: list[int] = []
    for integer in spec.ints:
        if integer.source is not None:
            kind, name = integer.source
            members = [(o, array) for o, array in operands if o.name == name and array is not None]
            derived = {
                "count": lambda m: len(m),
                "f32": lambda m: int(_dtype_name(m[0][1]) == "f32"),
                "packed": lambda m: int(bool(m[0][0].packed)),
            }
            result.append(derived[kind](members))
            continue
        value = _argument(spec, integer.name, arguments, None)
        if isinstance(value, list | tuple) != integer.is_list:
            what = "a list of integers" if integer.is_list else "an integer"
            _validate.invalid("run_named", f"{integer.name!r} must be {what}", shown(value), "correct it")
        result += value if integer.is_list else [value]
    return result


def _floats(spec: KernelSpec, arguments: Mapping[str, Any]) -> list[float]:
    result: list[float] = []
    for name in spec.floats:
        value = _argument(spec, name.removesuffix("..."), arguments, None)
        result += value if name.endswith("...") else [value]
    return result
