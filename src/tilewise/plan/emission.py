"""Makes an instruction of an op's request, and checks it against the kernel table.

An instruction is a kernel and a loop over rows; each iteration is a task. An op names a kernel and
passes operands, integers and floats by the names in the kernel table. This module puts them in the
table's order, derives read or write accesses from the table's roles, computes the values that
follow from others, and checks the rest. So a missing operand is an error when planning, and never a
read of unrelated memory. A task has one access per tile, even if several operands view the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from math import isfinite, prod
from operator import or_
from typing import NoReturn

from tilewise.core.errors import InternalError
from tilewise.core.validation import shown
from tilewise.ir.graph import PANEL_ROWS
from tilewise.ir.loop_parts import has_rows, is_divided
from tilewise.ir.lowering import Draft, Ref, Tiles
from tilewise.ir.program import (
    Access,
    Instruction,
    Mode,
    Number,
    NumberLike,
    Operand,
    Source,
    is_single,
    is_size,
    plain,
    upper,
)
from tilewise.kernels.table import KERNELS, IntSpec, KernelSpec, OperandSpec, kernel_spec

__all__ = ["ACCESS_OF_ROLE", "make_hold", "make_instruction", "repeat_instruction"]

_INT64 = 1 << 63
_MAX_PRIORITY = 1 << 20
_HOLD = KernelSpec("", (), (OperandSpec("operand", "in"),), (), (), (), lambda s: 0, lambda s: 0)
Placed = tuple[OperandSpec, Operand | None]


@dataclass(frozen=True)
class _Call:
    """A call of a kernel that is being checked. The fields are the op that makes it, and its loop."""

    spec: KernelSpec
    maker: str
    extent: Number
    step: NumberLike
    ref_of: Callable[[int], Ref]
    writes_peers: bool = False

    def invalid(self, rule: str, got: str) -> NoReturn:
        """Raise an error that names the kernel and the op that calls it."""
        what = f"kernel {self.spec.base!r}" if self.spec.names else "a hold"
        raise InternalError(
            f"[plan.emission] {rule}; got {got} for {what} in {self.maker}; correct what it emits"
        )

    def operand(self, value: object, name: str) -> Operand:
        """An operand that an op passed under a name."""
        if not isinstance(value, Operand):
            self.invalid(
                "an operand must be a result of low.row, low.whole or low.col", f"{shown(value)} for {name!r}"
            )
        return value


def make_instruction(
    kernel: str,
    *,
    maker: str,
    label: str,
    extent: Number,
    step: NumberLike,
    tiles: Tiles,
    ref_of: Callable[[int], Ref],
    dtype: str | None = None,
    ints: Mapping[str, NumberLike | Sequence[NumberLike]] | None = None,
    floats: Mapping[str, float | Sequence[float]] | None = None,
    priority: int = 0,
    writes_peers: bool = False,
) -> Draft:
    """Make one instruction and check it against the kernel table.

    Args:
        kernel: base name in the table.
        maker: the op, for messages.
        label: its name in traces.
        extent, step: rows of its loop, and rows per task (0: one task for all rows).
        tiles: operands by name; a list if the table says so. Operands that are absent may be
            omitted or None.
        ref_of: returns the tensor of a slot.
        dtype: the kernel's element type, if the kernel has several.
        ints, floats: attributes by name, without those that the table derives.
        priority: priority of the instruction's tasks.
        writes_peers: whether it may write the memory of other devices, ordered by signals only.

    Raises:
        InternalError: an operand or attribute is missing, unknown, or does not have the kind that
            the table says.
    """
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise InternalError(
            f"[plan.emission] a kernel must be in the table; got {kernel!r} in {maker}; declare it in native/kernels"
        )
    call = _Call(KERNELS[kernel], maker, extent, step, ref_of, writes_peers)
    _check_loop(call, label, priority)
    name = _full_name(call, dtype)
    _check_names(call, "operands", tiles, call.spec.operand_names)
    placed = _place(call, tiles)
    for operand_spec, operand in placed:
        if operand is not None:
            _check_operand(call, operand_spec, operand, dtype or name.removeprefix(f"{kernel}_"))
    _check_sizes(call, placed)
    instruction = Instruction(
        name,
        label,
        extent,
        step,
        tuple(_with_access(call, placed)),
        tuple(_integers(call, placed, tiles, ints or {})),
        tuple(_floats(call, floats or {})),
        priority=priority,
    )
    return Draft(instruction)


def make_hold(
    maker: str, label: str, extent: Number, step: NumberLike, operand: Operand, ref_of: Callable[[int], Ref]
) -> Draft:
    """Make an instruction without a kernel. Its tasks read one tile each, delay later writers, and
    can post acknowledgements.

    Args:
        maker: the op, for messages.
        label: its name in traces.
        extent, step: rows of its loop, and rows per task (0: one task for all rows).
        operand: the operand that a task reads.
        ref_of: returns the tensor of a slot.

    Raises:
        InternalError: an argument has the wrong kind, or the operand is not divided as the loop is.
    """
    call = _Call(_HOLD, maker, extent, step, ref_of)
    _check_loop(call, label, 0)
    if call.operand(operand, "operand").group < 0:
        _check_part(call, _HOLD.operands[0], operand, ref_of(operand.slot))
    reader = operand._replace(access=Access.IN)
    return Draft(Instruction("", label, extent, step, (reader,), priority=2))


def repeat_instruction(like: Draft, tiles: Mapping[str, Operand], ref_of: Callable[[int], Ref]) -> Draft:
    """Make a copy of an instruction that was checked, with some operands replaced by operands of
    the same form.

    Args:
        like: an instruction from `make_instruction`, whose kernel has no lists of operands.
        tiles: new operands by name. Each has the mode of the operand that it replaces, and a tensor
            of the same form.
        ref_of: returns the tensor of a slot.

    Raises:
        InternalError: an operand is unknown, or has another form.
    """
    instruction = like.instruction
    names = _operand_places(instruction.kernel)
    operands = list(instruction.operands)
    for name, new in tiles.items():
        if not isinstance(new, Operand):
            raise InternalError(
                f"[plan.emission] an operand must be a result of low.row, low.whole or low.col; got {shown(new)} for "
                f"{name!r} of {instruction.kernel!r} in {instruction.label!r}; correct what it repeats"
            )
        place = names.get(name, -1) if len(names) == len(operands) else -1
        old = operands[place]
        own, other = ref_of(new.slot), ref_of(old.slot)
        is_alike = new.mode == old.mode and (own is other or own.form == other.form)
        if place < 0 or not is_alike or (new.mode == Mode.ROWS and not has_rows(own, new)):
            raise InternalError(
                f"[plan.emission] a repeated instruction needs operands of the same form; got another for {name!r} of "
                f"{instruction.kernel!r} in {instruction.label!r}; emit it"
            )
        operands[place] = old._replace(slot=new.slot, part=new.part, parts=new.parts)
    if len({o.slot for o in operands}) != len({o.slot for o in instruction.operands}):
        raise InternalError(
            f"[plan.emission] a repeated instruction must have as many tensors as before; got {operands} for "
            f"{instruction.label!r}; emit it"
        )
    return Draft(replace(instruction, operands=tuple(operands)))


@cache
def _operand_places(kernel: str) -> dict[str, int]:
    """Positions of a kernel's operands by name."""
    return {spec.name: i for i, spec in enumerate(kernel_spec(kernel).operands)}


def _full_name(call: _Call, dtype: str | None) -> str:
    names = call.spec.names
    name = names[0] if dtype is None and len(names) == 1 else f"{call.spec.base}_{dtype}"
    if name not in names:
        call.invalid(f"a kernel's dtype must be one of {', '.join(names)}", repr(dtype))
    return name


def _check_loop(call: _Call, label: object, priority: object) -> None:
    """Check the parts of a loop: rows, rows per task, a name and a priority."""
    extent, step = call.extent, call.step
    if not isinstance(extent, Number) or not is_size(extent):
        call.invalid(
            "the rows of a loop must be a Number below 2^40, or in emit a tensor's Ref", shown(extent)
        )
    if not is_size(step):
        call.invalid("rows per task must be at least 1 and below 2^40, or 0 for one task", shown(step))
    if not isinstance(label, str) or not label.isprintable():
        call.invalid("a label must be printable text", shown(label))
    if type(priority) is not int or abs(priority) > _MAX_PRIORITY:
        call.invalid(f"a priority must be an integer of at most {_MAX_PRIORITY}", shown(priority))


def _check_names(call: _Call, what: str, values: Mapping[str, object], names: frozenset[str]) -> None:
    if not isinstance(values, Mapping):
        call.invalid(f"{what} must be a dictionary by name", shown(values))
    if not values.keys() <= names:
        odd = sorted(set(values) - names, key=str)
        condition = f"the {what} of this kernel are {', '.join(sorted(names))}"
        call.invalid(condition if names else f"this kernel has no {what}", repr(odd[0]))


def _place(call: _Call, tiles: Tiles) -> list[Placed]:
    """Operands in the table's order. Adjacent lists alternate, so they must have equal lengths."""
    placed: list[Placed] = []
    for is_list, specs in call.spec.operand_groups:
        if not is_list:
            for spec in specs:
                value = tiles.get(spec.name)
                if value is None and not spec.optional:
                    call.invalid(
                        "every operand that is not optional must be given", f"none for operand {spec.name!r}"
                    )
                placed.append((spec, None if value is None else call.operand(value, spec.name)))
            continue
        lists: list[list[Operand]] = []
        for spec in specs:
            members = tiles.get(spec.name, ())
            if isinstance(members, Operand) or not isinstance(members, list | tuple):
                call.invalid("a list of operands must be a list", f"{members!r} for operand {spec.name!r}")
            lists.append([call.operand(member, spec.name) for member in members])
        if len({len(members) for members in lists}) > 1:
            lengths = ", ".join(f"{len(m)} of {s.name!r}" for s, m in zip(specs, lists))
            call.invalid("lists of operands that alternate must have equal lengths", lengths)
        placed += [(spec, member) for members in zip(*lists) for spec, member in zip(specs, members)]
    return placed


def _check_operand(call: _Call, spec: OperandSpec, operand: Operand, dtype: str) -> None:
    """Check the dtype, the storage in panels, and that the loop's tiles are tiles of the operand
    that the loop runs over.
    """
    ref = call.ref_of(operand.slot)
    dtypes = [dtype if d == "dt" else d for d in spec.dtypes]
    if ref.dtype not in dtypes:
        call.invalid(f"operand {spec.name!r} must have elements of {' or '.join(dtypes)}", ref.dtype)
    if spec.packed is not None and ref.packed != spec.packed:
        wanted, got = (
            ("panels", "rows") if spec.packed else ("rows", "panels: use low.flat or low.whole of a copy")
        )
        call.invalid(f"operand {spec.name!r} must be stored in {wanted}", got)
    if operand.mode in (Mode.COL, Mode.PANELCOLS) and ref.packed != (operand.mode == Mode.PANELCOLS):
        got = "rows of a packed weight" if ref.packed else "panels of a tensor that is not packed"
        call.invalid(f"columns of operand {spec.name!r} must be viewed as they are stored: use low.col", got)
    if operand.group >= 0:
        rows = operand.parts if operand.mode == Mode.ROWS else ref.extent.constant
        if ref.packed and (not isinstance(rows, int) or rows % PANEL_ROWS):
            call.invalid(
                f"a peer's packed operand {spec.name!r} must have whole panels of {PANEL_ROWS} rows",
                f"{rows!r} rows",
            )
        if spec.role != "in" and not call.writes_peers:
            call.invalid(
                "a task must write its own device's memory", f"a peer's tile for operand {spec.name!r}"
            )
    elif operand.mode != Mode.WHOLE:
        _check_part(call, spec, operand, ref)


def _check_part(call: _Call, spec: OperandSpec, operand: Operand, ref: Ref) -> None:
    """Check that fixed rows lie in the operand. If tasks view parts of it, check that they together
    view the whole operand, and nothing else.
    """
    mode, div, extent = operand.mode, operand.div, call.extent
    if mode == Mode.ROWS and not has_rows(ref, operand):
        call.invalid(
            f"fixed rows must lie in operand {spec.name!r}",
            f"{operand.parts!r} rows from {operand.part!r} on, of {_many(ref.extent, 'rows')}",
        )
    if mode not in (Mode.ROW, Mode.COL, Mode.PANELCOLS):
        return
    if type(div) is not int and not isinstance(div, Number):
        call.invalid(f"`div` of operand {spec.name!r} must be an integer or a Number", shown(div))
    div = plain(div)
    if div == 1 and mode == Mode.ROW:
        if ref.extent != extent:
            call.invalid(
                f"operand {spec.name!r} must have as many rows as the loop",
                f"{_many(ref.extent, 'rows')} under a loop over {_many(extent, 'rows')}",
            )
        return
    what, size = ("rows", ref.extent) if mode == Mode.ROW else ("columns", Number(ref.cols))
    if not is_divided(extent, div, size):
        call.invalid(
            f"{what} of operand {spec.name!r} times its `div` must equal those of the loop",
            f"{_many(size, what)} with div {div} under a loop over {_many(extent, 'of them')}",
        )


def _many(size: Number, what: str) -> str:
    return f"{size.constant} {what}" if size.source == Source.NOTHING else f"{size} {what}"


_Size = str | int | Number


def _check_sizes(call: _Call, placed: Sequence[Placed]) -> None:
    """Check that rows and columns with the same name in the table are equal, as far as they are
    known when planning.
    """
    first_sizes: dict[object, tuple[_Size, str]] = {}
    number: dict[str, int] = {}
    for spec, operand in placed:
        number[spec.name] = number.get(spec.name, -1) + 1
        if operand is None or operand.group >= 0 or not spec.sizes:
            continue
        for name, size in zip(spec.sizes, _sizes(call, operand)):
            if name == "_" or size is None:
                continue
            if name.isdigit():
                if size != int(name):
                    call.invalid(
                        f"operand {spec.name!r} must be [{' '.join(spec.sizes)}]", f"{name} as {size}"
                    )
                continue
            key = (name, number[spec.name]) if name.endswith("*") else name
            first, where = first_sizes.setdefault(key, (size, spec.name))
            if first != size:
                got = f"{first} in operand {where!r} and {size} in operand {spec.name!r}"
                call.invalid(f"{name.rstrip('*')!r} must be one size", got)


def _sizes(call: _Call, operand: Operand) -> tuple[_Size | None, _Size | None]:
    """Rows and columns of a task's view: a number, `a tile of the loop`, or None if the table
    cannot tell.
    """
    ref = call.ref_of(operand.slot)
    loop: _Size = plain(call.extent) if is_single(call.step) else "a tile of the loop"
    match operand.mode:
        case Mode.ROW:
            div = plain(operand.div)
            if div == 1 or is_single(call.step):
                return (loop if div == 1 else plain(ref.extent)), ref.cols
            if div == plain(call.step):
                return 1, ref.cols
            return f"a tile of the loop over {div}", ref.cols
        case Mode.WHOLE:
            return plain(ref.extent), ref.cols
        case Mode.COL | Mode.PANELCOLS:
            return plain(ref.extent), (loop if operand.div == 1 else None)
        case Mode.ROWCOLS:
            return None, upper(operand.parts)
        case Mode.ROWS:
            return plain(operand.parts), ref.cols
    return None, ref.cols


def _with_access(call: _Call, placed: Sequence[Placed]) -> list[Operand]:
    """Turn the table's roles into accesses to tiles. If several operands view the same tile, one of
    them has the access for all: the first one that writes the tile, or the first one if none
    writes. A write to a part of a tile is an access that keeps the rest of the tile. If an
    operand's access differs from what the kernel does with the operand, its role says so.
    """
    result: list[Operand] = []
    views: dict[tuple[object, ...], list[int]] = {}
    for i, (spec, operand) in enumerate(placed):
        if operand is None:
            result.append(_ABSENT)
            continue
        if operand.group < 0:
            is_part = operand.mode in (Mode.ROWPART, Mode.ROWCOLS)
            access = Access.INOUT if is_part and spec.role == "out" else ACCESS_OF_ROLE[spec.role]
            is_cut = operand.mode in (Mode.COL, Mode.ROWCOLS) and call.ref_of(operand.slot).tile_cols > 0
            columns = (operand.div, operand.part, operand.parts) if is_cut else None
            views.setdefault((operand.slot, _touched(operand), columns), []).append(i)
            operand = Operand(operand[0], operand[1], access, *operand[3:])
        result.append(operand)
    own = {slot for slot, *_ in views}
    # a member of the device group may be the device itself, which then uses its own tile
    for i, operand in enumerate(result):
        if operand.group >= 0 and operand.slot not in own:
            result[i] = operand._replace(access=ACCESS_OF_ROLE[placed[i][0].role])
    for members in views.values():
        if len(members) > 1:
            access = Access(reduce(or_, (result[i].access for i in members)))
            speaker = next((i for i in members if result[i].access & Access.OUT), members[0])
            for i in members:
                result[i] = result[i]._replace(access=access if i == speaker else Access.NONE)
    return [_with_role(spec, operand) for (spec, _), operand in zip(placed, result)]


def _with_role(spec: OperandSpec, operand: Operand) -> Operand:
    role = ACCESS_OF_ROLE[spec.role]
    assumed = operand.access or Access.IN  # what readers of the instruction assume without a role
    return operand if operand.null or assumed == role else operand._replace(role=role)


ACCESS_OF_ROLE = {"in": Access.IN, "out": Access.OUT, "inout": Access.INOUT}
_ABSENT = Operand(0, null=True)


def _touched(operand: Operand) -> NumberLike:
    """The tiles of a tensor that an operand depends on: 0 stands for all tiles, -1 for the tiles of
    the loop's iteration, and any other value is the number of rows per step.
    """
    if operand.mode in (Mode.WHOLE, Mode.COL, Mode.PANELCOLS):
        return 0
    return -1 if operand.div == 1 else operand.div


def _integers(
    call: _Call,
    placed: Sequence[Placed],
    tiles: Tiles,
    ints: Mapping[str, NumberLike | Sequence[NumberLike]],
) -> list[NumberLike]:
    specs = call.spec.ints
    _check_names(call, "integers", ints, call.spec.int_names)
    by_name: dict[str, NumberLike] = {
        i.name: _filled_in(call, i.source, placed) for i in specs if i.source is not None
    }
    result: list[NumberLike] = []
    for spec in specs:
        if spec.source is not None:
            result.append(by_name[spec.name])
        elif spec.name not in ints:
            call.invalid("every integer must be given", f"none for {spec.name!r}")
        elif spec.is_list:
            values = ints[spec.name]
            if not isinstance(values, list | tuple):
                call.invalid("a list of integers must be a list", f"{values!r} for {spec.name!r}")
            _check_length(call, spec, len(values), by_name)
            small = all(type(v) is int for v in values) and max(map(abs, values), default=0) < _INT64
            result += values if small else [_integer(call, spec.name, v) for v in values]
        else:
            by_name[spec.name] = _integer(call, spec.name, ints[spec.name])
            result.append(by_name[spec.name])
    return result


def _filled_in(call: _Call, source: tuple[str, str], placed: Sequence[Placed]) -> int:
    kind, name = source
    members = [o for spec, o in placed if spec.name == name and o is not None]
    if kind == "count":
        return len(members)
    ref = call.ref_of(members[0].slot)
    return int(ref.dtype == "f32" if kind == "f32" else ref.packed)


def _check_length(call: _Call, spec: IntSpec, length: int, by_name: Mapping[str, NumberLike]) -> None:
    wanted = prod(int(f) if f.isdigit() else upper(by_name[f]) for f in spec.length)
    if spec.length and length != wanted:
        call.invalid(f"list {spec.name!r} must have {'*'.join(spec.length)} = {wanted} integers", str(length))


def _integer(call: _Call, name: str, value: object) -> NumberLike:
    if isinstance(value, Number):
        return value
    if not isinstance(value, int) or not -_INT64 <= value < _INT64:
        call.invalid("an integer must fit in 64 bits", f"{value!r} for {name!r}")
    return int(value)


def _floats(call: _Call, floats: Mapping[str, float | Sequence[float]]) -> list[float]:
    names = [name.removesuffix("...") for name in call.spec.floats]
    _check_names(call, "floats", floats, call.spec.float_names)
    result = []
    for spec, name in zip(call.spec.floats, names):
        if name not in floats:
            call.invalid("every float must be given", f"none for {name!r}")
        value = floats[name]
        if isinstance(value, list | tuple) != (spec != name):
            call.invalid("a list of floats must be a list, and a float a number", f"{value!r} for {name!r}")
        result += [_float(call, name, v) for v in (value if isinstance(value, list | tuple) else [value])]
    return result


def _float(call: _Call, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        call.invalid("a float must be a finite number", f"{value!r} for {name!r}")
    return float(value)
