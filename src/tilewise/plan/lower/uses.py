"""What an op's instructions may read and write, by what the op says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewise.ir.graph import OpNode
from tilewise.ir.lowering import Draft
from tilewise.ir.op import Op
from tilewise.ir.program import Access, Operand
from tilewise.plan.lower.slots import SlotTable

__all__ = ["check_use"]


def check_use(low: SlotTable, op: OpNode, drafts: Sequence[Draft], rule: Op) -> None:
    """Refuse instructions of an op, `drafts`, that are not what it says.

    They read its operands and outputs alone, and of operands only the shape where `shape_of` says so. They write
    every output that is not summed over the batch (on one device of a team, where they are collectives), and of
    operands only what shares memory with an output. Ops without outputs are made to write an operand.

    Raises:
        InternalError: they are not.
    """
    roots = low.roots
    outputs = {roots.get(o, o) for o in op.outputs}
    given = {roots.get(i, i) for i in op.given}
    touched = {low.keys[o.slot].id for o in _operands(low, drafts)}
    if not touched <= outputs | given:
        other = low.graph.spec(min(touched - outputs - given))
        low.refuse("an op reads and writes its operands and outputs", f"a use of another tensor, {other}")
    written = {low.keys[o.slot].id for o in _operands(low, drafts) if (o.role or o.access) & Access.OUT}
    if outputs and not written.isdisjoint(given - outputs):
        odd = low.graph.spec(min(written & given - outputs))
        low.refuse(
            "an op writes its outputs, and operands only where `in_place` says so", f"a write to {odd}"
        )
    left = {roots.get(o, o) for n, o in enumerate(op.outputs) if n not in rule.accumulates} - written - given
    if left and not any(draft.waits or draft.notifies for draft in drafts):
        low.refuse(
            "every output is written",
            f"none of {len(drafts)} instructions that writes {low.graph.spec(min(left))}",
        )
    others = {t for p, t in enumerate(op.inputs) if p not in rule.shape_of} | {*op.outputs}
    absent = {op.inputs[p] for p in rule.shape_of} - {roots.get(t, t) for t in others if t is not None}
    if not touched.isdisjoint(absent):
        low.refuse("an op does not read what it needs the shape of", f"`shape_of` {sorted(rule.shape_of)}")


def _operands(low: SlotTable, drafts: Sequence[Draft]) -> Iterator[Operand]:
    """Those that are tensors, all absent ones left out."""
    return (
        o
        for draft in drafts
        for o in draft.instruction.operands
        if not o.null and low.keys[o.slot].kind in ("tensor", "flat")
    )
