"""The table of native kernels: names, operands and attributes in order, costs and scratch memory.

The table is made from the declarations of the kernels, which stand above their code in
native/kernels (native/kernels/declarations.py describes them). It is the contract between tile
programs (`plan`), the native sources and the costs that plans report (`plan.costs`). Planning
checks every instruction against the table (`plan.emission`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, takewhile
from math import prod
from typing import Any

from tilewise.core import InternalError
from tilewise.kernels.declared import DECLARED

__all__ = [
    "KERNELS",
    "IntSpec",
    "KernelSpec",
    "OperandSpec",
    "declared_spec",
    "is_declared",
    "kernel_spec",
    "register_spec",
    "scratch_bytes",
]

Sizes = Mapping[str, int]
Shape = tuple[int, int]


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
        flops: operations of one call, from a mapping of the dims to sizes; `item` is the element size
            of the dtype. A multiply-add counts as two, and an exp or a division as one.
        bytes: bytes that one call reads and writes at least once, from the same mapping.
        scratch: upper bound of a call's scratch memory, from the integers by name, and from rows and
            columns of the operands by name; None if the kernel needs no scratch memory.
        each: names of sizes whose elements are computed independently; a call may cover any part of them.
        internal: why only tile programs can call the kernel; empty if tile calls (`tilewise.tile`) can.
    """

    base: str
    names: tuple[str, ...]
    operands: tuple[OperandSpec, ...]
    ints: tuple[IntSpec, ...]
    floats: tuple[str, ...]
    dims: tuple[str, ...]
    flops: Callable[[Sizes], int]
    bytes: Callable[[Sizes], int]
    scratch: Callable[[Mapping[str, Any], Mapping[str, Shape]], int] | None = None
    each: tuple[str, ...] = ()
    internal: str = ""

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


def declared_spec(fields: Mapping[str, Any]) -> KernelSpec:
    """The specification of a kernel from its declaration, as native/kernels/declarations.py writes it."""
    operands = tuple(OperandSpec(*operand) for operand in fields["operands"])
    ints = tuple(IntSpec(*integer) for integer in fields["ints"])
    return KernelSpec(**{**fields, "operands": operands, "ints": ints})


KERNELS = {fields["base"]: declared_spec(fields) for fields in DECLARED}
_BY_NAME = {name: spec for spec in KERNELS.values() for name in spec.names}
_DECLARED = frozenset((*KERNELS, *_BY_NAME))


def is_declared(name: str) -> bool:
    """Whether a kernel of Tilewise has this name, with or without its dtype."""
    return name in _DECLARED


def register_spec(spec: KernelSpec) -> None:
    """Add a user's kernel (`kernels.user`), or replace it."""
    KERNELS[spec.base] = _BY_NAME[spec.base] = spec


def kernel_spec(name: str) -> KernelSpec:
    """The specification of a full kernel name such as `matmul_bf16`.

    Raises:
        InternalError: there is no such kernel.
    """
    if name not in _BY_NAME:
        raise InternalError(
            f"[kernels.kernel_spec] a kernel must be in the table; got {name!r}; declare it next to its code"
        )
    return _BY_NAME[name]


def scratch_bytes(kernel: str, ints: Sequence[int], shapes: Sequence[Shape]) -> int:
    """The maximum scratch memory of one call, in bytes, over all instruction-set levels; 0 for
    kernels that need none. The planner gives every worker what the largest call of its plan needs.

    Args:
        kernel: full name of the kernel, for example `attention_backward_bf16`.
        ints: integer attributes of the call.
        shapes: rows and columns of every operand, as large as a task may see it; (0, 0) for an
            absent operand.
    """
    spec = kernel_spec(kernel)
    if spec.scratch is None:
        return 0
    return spec.scratch(_ints_by_name(spec, ints), _shapes_by_name(spec, shapes))


def _ints_by_name(spec: KernelSpec, ints: Sequence[int]) -> dict[str, Any]:
    by_name: dict[str, Any] = {}
    place = 0
    for integer in spec.ints:
        if integer.is_list:
            is_last = integer is spec.ints[-1]
            length = prod(int(f) if f.isdigit() else by_name[f] for f in integer.length)
            end = len(ints) if is_last else place + length
            by_name[integer.name] = ints[place:end]
            place = end
        else:
            by_name[integer.name] = ints[place]
            place += 1
    return by_name


def _shapes_by_name(spec: KernelSpec, shapes: Sequence[Shape]) -> dict[str, Shape]:
    """Rows and columns of the operands that are no lists."""
    first = [o.name for o in takewhile(lambda o: not o.is_list, spec.operands)]
    last = [o.name for o in spec.operands[len(first) :] if not o.is_list]
    return {**dict(zip(first, shapes)), **dict(zip(reversed(last), reversed(shapes)))}
