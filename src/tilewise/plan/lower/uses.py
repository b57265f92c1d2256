"""Checks that an op's instructions read and write only what the op's declaration allows, and finds
what every use of a template writes completely.

After a complete write, later writers of the same memory need not wait for its earlier uses
(`plan.bind.reuse`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tilewise.core.tree import Interval
from tilewise.ir.fields import Declaration
from tilewise.ir.graph import OpNode
from tilewise.ir.lowering import Draft
from tilewise.ir.program import Access, LoweredTemplate, Mode, Number, Operand, Source
from tilewise.plan.lower.local_view import LocalView

__all__ = ["check_use", "written_slots"]

_TENSORS = ("tensor", "flat")


@dataclass
class _Used:
    """The tensors that instructions access.

    Attributes:
        early: tensors that are read before they are written.
        rows: slot and rows of each write, for tensors of which instructions write only fixed rows.
    """

    touched: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    early: set[int] = field(default_factory=set)
    rows: dict[int, list[Operand]] = field(default_factory=dict)


def check_use(low: LocalView, op: OpNode, drafts: Sequence[Draft], declared: Declaration) -> None:
    """Reject instructions (`drafts`) of an op if they contradict the op's declaration.

    Instructions may read only the op's operands and outputs, but not operands with `shape_only`. Before
    they read an output, they must write all its rows, unless the output is summed over the batch.
    (Rows that a collective writes on another device of its group count as written.) They may write
    only outputs, and operands that share memory with an output. An op without outputs must write an
    operand.

    Raises:
        InternalError: instructions contradict the declaration.
    """
    roots = low.roots
    outputs = {roots.get(o, o) for o in op.outputs}
    operands = {roots.get(i, i) for i in op.given}
    used = _use(low, drafts)
    touched, written = used.touched, used.written
    if not touched <= outputs | operands:
        other = low.graph.spec(min(touched - outputs - operands))
        low.invalid(
            "an op may read and write only its operands and outputs", f"a use of another tensor, {other}"
        )
    if outputs and not written.isdisjoint(operands - outputs):
        odd = low.graph.spec(min(written & operands - outputs))
        low.invalid(
            "an op may write only its outputs and the operands of results `in_place`", f"a write to {odd}"
        )
    own = {roots.get(o, o) for n, o in enumerate(op.outputs) if n not in declared.accumulates} - operands
    if own and not any(draft.waits or draft.notifies for draft in drafts):
        _check_outputs(low, op, own, used, len(drafts))
    others = {t for p, t in enumerate(op.inputs) if p not in declared.shape_of} | {*op.outputs}
    absent = {op.inputs[p] for p in declared.shape_of} - {roots.get(t, t) for t in others if t is not None}
    if not touched.isdisjoint(absent):
        low.invalid(
            "an op must not read operands with `shape_only`", f"a read of {sorted(declared.shape_of)}"
        )


def _use(low: LocalView, drafts: Sequence[Draft]) -> _Used:
    used, keys = _Used(), low.keys
    touched, written = used.touched, used.written
    for draft in drafts:
        instruction = draft.instruction
        writes: list[tuple[int, Operand]] = []
        for operand in instruction.operands:
            if operand.null or keys[operand.slot].kind not in _TENSORS:
                continue
            tensor = keys[operand.slot].id
            touched.add(tensor)
            role = operand.role or operand.access
            if role & Access.OUT:
                # the kernel table does not say whether it adds to the old value
                writes.append((tensor, operand))
            elif tensor not in written:
                used.early.add(tensor)
        for tensor, operand in writes:
            if operand.mode == Mode.ROWS and (tensor not in written or tensor in used.rows):
                used.rows.setdefault(tensor, []).append(operand)
            elif operand.mode != Mode.ROWS:
                used.rows.pop(tensor, None)
            if not _is_empty(instruction.extent) or _is_empty(low.views[operand.slot].extent):
                written.add(tensor)
    return used


def _is_empty(rows: Number) -> bool:
    return rows.source == Source.NOTHING and rows.constant == 0


def _check_outputs(low: LocalView, op: OpNode, own: set[int], used: _Used, count: int) -> None:
    """Check that all rows of every output are written before the output is read."""
    if not own <= used.written:
        spec = low.graph.spec(min(own - used.written))
        low.invalid("every output must be written", f"none of {count} instructions that writes {spec}")
    for tensor in sorted(own & used.rows.keys()):
        missing = _missing_rows(low, used.rows[tensor])
        if missing:
            number = next(n for n, o in enumerate(op.outputs) if low.roots.get(o, o) == tensor)
            low.invalid(
                "every row of an output must be written",
                f"none of {count} instructions that writes {_in_words(missing)} of output {number}, "
                f"{low.graph.spec(tensor)}",
            )
    if not own.isdisjoint(used.early):
        spec = low.graph.spec(min(own & used.early))
        low.invalid("an output must be written before it is read", f"a read of {spec} before")


def _missing_rows(low: LocalView, writes: Iterable[Operand]) -> list[tuple[int, int]]:
    """Ranges `[begin, end)` of a tensor's rows on this device that no write of fixed rows covers.
    If the tensor has views with different numbers of rows, each view is checked separately, and it
    is enough if the rows of one are covered.
    """
    left: list[tuple[int, int]] = []
    by_rows: dict[Number, list[tuple[int, int]]] = {}
    for operand in writes:
        part, parts = operand.part, operand.parts
        assert isinstance(part, int) and isinstance(parts, int)  # from `rows_at`, which checked them
        by_rows.setdefault(low.views[operand.slot].extent, []).append((part, part + parts))
    for extent, ranges in by_rows.items():
        left = [*_gaps(sorted(ranges), extent.upper(low.shapes.bounds))]
        if not left:
            return []
    return left


def _gaps(ranges: Iterable[Interval], rows: int) -> Iterator[Interval]:
    done = 0
    for begin, end in ranges:
        if begin > done:
            yield done, begin
        done = max(done, end)
    if done < rows:
        yield done, rows


def _in_words(ranges: Sequence[tuple[int, int]]) -> str:
    """Ranges of rows in words."""
    words = [str(begin) if end == begin + 1 else f"{begin} to {end - 1}" for begin, end in ranges[:3]]
    more = [f"{len(ranges) - 3} more stretches"] if len(ranges) > 3 else []
    return f"{'row' if words == [str(ranges[0][0])] else 'rows'} {', '.join([*words, *more])}"


def written_slots(template: LoweredTemplate, extents: Sequence[Number]) -> frozenset[int]:
    """The slots whose every row is written by an instruction, in every use and for any sizes of a
    run.

    Args:
        template: the template whose instructions are examined.
        extents: rows of what each slot refers to.
    """
    rows: dict[int, list[Interval]] = {}
    for instruction in template.instructions:
        for operand in instruction.operands:
            if operand.access & Access.OUT:
                written = _rows_written(operand, instruction.extent, extents[operand.slot])
                rows.setdefault(operand.slot, []).append(written)
    return frozenset(
        slot for slot, written in rows.items() if not [*_gaps(sorted(written), extents[slot].constant)]
    )


def _rows_written(operand: Operand, extent: Number, rows: Number) -> Interval:
    """Rows of a tensor that an instruction writes in every use; none if sizes depend on the run."""
    is_known = extent.source == rows.source == Source.NOTHING and extent.constant > 0
    if operand.null or operand.group >= 0 or not is_known:
        return 0, 0
    if operand.mode in (Mode.WHOLE, Mode.COL, Mode.PANELCOLS):
        return 0, rows.constant
    if operand.mode == Mode.ROWPART:  # handles are those of the whole loop's rows
        first = operand.offset
        return (first, first + extent.constant) if isinstance(first, int) else (0, 0)
    if operand.mode == Mode.ROWS:
        is_fixed = isinstance(operand.part, int) and isinstance(operand.parts, int)
        return (operand.part, operand.part + operand.parts) if is_fixed else (0, 0)  # type: ignore[operator, return-value]
    return (0, -(-extent.constant // operand.div)) if isinstance(operand.div, int) else (0, 0)
