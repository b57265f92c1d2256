"""The rules of an op's class, checked when the class is registered: mistakes of its author that Python
does not find.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import InternalError
from tilewise.core.validation import Validator, shown
from tilewise.ir.fields import FLOAT, Declaration, OperandField, Partial, ResultField
from tilewise.ir.graph import STORAGES
from tilewise.ir.layout import BATCH_SPLITS, GROUPS, K_SPLITS

if TYPE_CHECKING:
    from tilewise.ir.op import Op

__all__ = ["check_declaration"]

COMBINES = ("sum", "max", "or")
TREES = (K_SPLITS, BATCH_SPLITS, GROUPS)
_ATTRIBUTES = (int, float, bool, str, tuple)
_DIMS = re.compile(r"|\*|(\.\.\.|[a-z]\w*\*?|\d+)( ([a-z]\w*\*?|\d+))*")
_author = Validator("ir", InternalError)

_Broken = Iterator[tuple[str, object]]
"""Rules that a class breaks, and what it has instead."""


def check_declaration(cls: type[Op], base: type[Op]) -> None:
    """Check the fields and members of `cls`, which derives from `base`.

    Raises:
        InternalError: names the class and the rule that it breaks.
    """
    declared = cls.declared
    for rules in (_of_fields(declared), _of_operands(declared), _of_results(cls, base), _of_members(cls)):
        for rule, got in rules:
            _author.invalid("register", rule, f"{shown(got)} of {cls.name!r}", f"correct {cls.__name__}")


def _of_fields(declared: Declaration) -> _Broken:
    every: tuple[OperandField | ResultField, ...] = (*declared.operands, *declared.results)
    for field in every:
        name = field.name
        if not _DIMS.fullmatch(field.dims):
            yield f"dims of {name!r} must be lower-case names, sizes, `k*`, or `...` in front", field.dims
        if field.dtype not in (FLOAT, "any", *DTYPES):
            yield f"the dtype of {name!r} must be float, any or one of {', '.join(DTYPES)}", field.dtype
        if field.storage not in ("", *STORAGES):
            yield f"the storage of {name!r} must be one of {', '.join(STORAGES)}", field.storage
    for name, kind in declared.attributes.items():
        if kind not in _ATTRIBUTES:
            yield "an attribute must be an int, float, bool, str or tuple", name


def _of_operands(declared: Declaration) -> _Broken:
    if sum(is_list for is_list, _ in declared.groups) > 1:
        yield "lists of operands must be neighbours", [f.name for f in declared.operands]
    named = {n for f in declared.results for n in (*f.in_place.split(), *f.indices_of.split())}
    after_list = False
    for field in declared.operands:
        after_list = after_list or field.is_list
        if after_list and (field.shape_only or field.name in named):
            yield "an operand whose memory, shape or indices are used must come before lists", field.name
        if field.indexes and field.indexes not in _sure_dims(declared):
            yield (
                f"operand {field.name!r} must index a dim of an operand that is always present",
                field.indexes,
            )


def _sure_dims(declared: Declaration) -> set[str]:
    """The dims of single operands that are always present, without those of a size of their own."""
    sure = (f for f in declared.operands if not f.is_optional and not f.is_list)
    return {d for f in sure for d in f.dims.split() if not d.endswith("*")}


def _of_results(cls: type[Op], base: type[Op]) -> _Broken:
    declared = cls.declared
    single = {f.name for f in declared.operands if not f.is_list}
    sure = {f.name for f in declared.operands if not f.is_optional and not f.is_list}
    for field in declared.results:
        for name in (*field.in_place.split(), *field.indices_of.split()):
            if name not in single:
                yield f"result {field.name!r} must name an operand that is no list", name
        if field.like and field.like not in sure:
            yield f"result {field.name!r} must be like an operand that is always present", field.like
    sources = [i for _, i in declared.in_place]
    if cls.must_alias and not len(sources) == len({*sources}) > 0:
        yield "an op with must_alias needs results in_place, each of another operand", declared.in_place
    if cls.results is not base.results:
        return
    always = [f for f in declared.operands if not f.is_optional and (not f.is_list or f.least > 0)]
    has_float = any(f.dtype == FLOAT and not f.indexes for f in always)
    dims = {d.rstrip("*") for f in always for d in f.dims.split()}
    for field in declared.results:
        if bool(field.dims) == bool(field.like) and cls.dims is base.dims:
            yield "a result must have dims, or be like an operand", field.name
        if (field.dtype == FLOAT and not has_float) or (field.dtype == "any" and not field.like):
            yield "the dtype of a result must follow from an operand that is always present", field.name
        for name in field.dims.split() if cls.dims is base.dims else ():
            if name not in dims and not name.isdigit():
                yield "dims of results must be dims of operands that are always present", name


def _of_members(cls: type[Op]) -> _Broken:
    declared, partials = cls.declared, cls.partial_values
    if not isinstance(cls.whole, str) or not isinstance(cls.moved, str):
        yield "`whole` and `moved` must be texts of dims", (cls.whole, cls.moved)
        return
    if not isinstance(partials, tuple) or not all(isinstance(p, Partial) for p in partials):
        yield "`partial_values` must be a tuple of Partials", partials
        return
    if len({p.name for p in partials}) < len(partials):
        yield "partial values must have different names", [p.name for p in partials]
    dims = {d.rstrip("*") for f in declared.operands for d in f.dims.split()} | {"..."}
    for name in " ".join([cls.whole, cls.moved, *(p.dims for p in partials)]).split():
        if name not in dims and not name.isdigit():
            yield "`whole`, `moved` and partial values must name dims of operands", name
    results = {f.name for f in declared.results}
    sums = {f.name for f in declared.results if f.accumulates}
    for partial in partials:
        title, is_sum = f"partial value {partial.name!r}", partial.tree == BATCH_SPLITS
        if partial.combine not in COMBINES or partial.tree not in TREES:
            rule = f"{title} must be combined by {', '.join(COMBINES)} along {', '.join(TREES)}"
            yield rule, (partial.combine, partial.tree)
        for name in partial.results.split():
            if name not in (sums if is_sum else results):
                yield f"{title} must name results" + (" with `accumulates`" if is_sum else ""), name
        for name in partial.cut_by.split():
            if name not in declared.positions:
                yield f"{title} must be cut by operands", name
