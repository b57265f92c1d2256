"""Makes ops for tests: classes with given fields and members, registered."""

from __future__ import annotations

from typing import Any

from tilewise.ir.op import Op, operand, register, result

__all__ = ["make_op"]


def make_op(name: str = "odd", takes: str = "a b", gives: str = "out", **members: Any) -> type[Op]:
    """Register an op `Odd` with elementwise operands, and results like the first of them.

    Args:
        name: its name in graphs.
        takes, gives: names of its operands and of its results.
        members: members of the class; those with the names of tensors replace their declarations,
            and types declare attributes.
    """
    fields: dict[str, Any] = {o: operand("...", packed=True) for o in takes.split()}
    fields |= {r: result(like=takes.split()[0]) for r in gives.split()}
    attributes = {n: kind for n, kind in members.items() if isinstance(kind, type)}
    others = {n: m for n, m in members.items() if n not in attributes}
    annotations = dict.fromkeys(fields, int) | attributes
    return register(type("Odd", (Op,), {"__annotations__": annotations, "name": name, **fields, **others}))
