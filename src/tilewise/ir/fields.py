"""The fields of an op's class: `operand`, `operands`, `optional` and `result` declare tensors, a
plain annotation declares an attribute.

Dims are written as names in one text, as in `"... k"`. Equal names have equal sizes and are sharded
together:

    k          a dim
    ...        all dims before the others; only in front
    2          a dim of this size
    k*         a dim named k that has a size of its own in every operand
    *          any dims, which no other operand shares
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_origin, get_type_hints

from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import InternalError
from tilewise.core.validation import Validator
from tilewise.ir.graph import STORAGES
from tilewise.ir.layout import BATCH_SPLITS, GROUPS, K_SPLITS

if TYPE_CHECKING:
    from tilewise.ir.op import Op

__all__ = [
    "FLOAT",
    "Declaration",
    "OperandField",
    "Partial",
    "ResultField",
    "operand",
    "operands",
    "optional",
    "result",
]

FLOAT = "float"
_FIELD = "tensor"
_ATTRIBUTES = (int, float, bool, str, tuple)
_DIMS = re.compile(r"|\*|(\.\.\.|[a-z]\w*\*?|\d+)( ([a-z]\w*\*?|\d+))*")
COMBINES = ("sum", "max", "or")
TREES = (K_SPLITS, BATCH_SPLITS, GROUPS)
_author = Validator("ir", InternalError)


@dataclass(frozen=True)
class OperandField:
    """A declared operand, or list of operands. `operand` explains the fields."""

    dims: str
    dtype: str
    storage: str
    packed: bool
    indexes: str
    shape_only: bool
    advice: str
    is_optional: bool = False
    is_list: bool = False
    least: int = 0
    name: str = ""


@dataclass(frozen=True)
class ResultField:
    """A declared result. `result` explains the fields."""

    dims: str
    dtype: str
    storage: str
    like: str
    accumulates: bool
    in_place: str
    indices_of: str
    name: str = ""


@dataclass(frozen=True)
class Partial:
    """A value of which each device or microbatch computes only a part if they share a contracted
    dim (see `ir.factors.PartialValue`).

    Attributes:
        name: name by which `lower` gets the pending reduction of this value.
        dims: the contracted dims.
        results: names of the results that are computed from the complete value.
        combine: `sum`, `max`, or `or` (every part but one is zero).
        tree: the tree along which parts are combined.
        cut_by: names of the operands whose labels determine where the tree cuts; by default all
            that have the dims.
    """

    name: str
    dims: str
    results: str
    combine: str = "sum"
    tree: str = K_SPLITS
    cut_by: str = ""


def operand(
    dims: str,
    *,
    dtype: str = FLOAT,
    storage: str = "",
    packed: bool = False,
    indexes: str = "",
    shape_only: bool = False,
    advice: str = "",
) -> Any:
    """Declare an operand; its value in an op is the id of a tensor.

    Args:
        dims: names of its dims.
        dtype: its element type. `float` is f32 or bf16, one for all operands of the op; `any` is not checked.
        storage: how its elements must be stored (`ir.graph.TensorSpec`). By default an operand with
            two or more dims has rows.
        packed: whether it may be a weight in panels. All such operands must be stored alike.
        indexes: the dim in which its values, one integer per row, are positions.
        shape_only: whether only its shape is used.
        advice: what to do if it does not fit.
    """
    made = OperandField(dims, dtype, storage, packed or storage == "packed", indexes, shape_only, advice)
    return dataclasses.field(metadata={_FIELD: made})


def optional(dims: str, **how: Any) -> Any:
    """Declare an operand that may be absent: None. The arguments are those of `operand`."""
    field = operand(dims, **how)
    made = replace(field.metadata[_FIELD], is_optional=True)
    return dataclasses.field(metadata={_FIELD: made})


def operands(dims: str, *, least: int = 1, **how: Any) -> Any:
    """Declare a list of at least `least` operands: a tuple of ids. Neighbouring lists have equal
    lengths and alternate in a graph. The other arguments are those of `operand`.
    """
    field = operand(dims, **how)
    made = replace(field.metadata[_FIELD], is_list=True, least=least)
    return dataclasses.field(metadata={_FIELD: made})


def result(
    dims: str = "",
    *,
    dtype: str = FLOAT,
    storage: str = "",
    like: str = "",
    accumulates: bool = False,
    in_place: str = "",
    indices_of: str = "",
    init: Literal[False] = False,
) -> Any:
    """Declare a result; its value in an op of a graph is the id of a tensor.

    Args:
        dims: names of its dims.
        dtype: its element type; `float` is that of the operands.
        storage: how its elements are stored; by default in rows.
        like: an operand whose shape, labels and storage it has.
        accumulates: whether it is a sum over the whole batch, which `lower` writes through
            `low.accumulator` or `low.split_tree`. A sum that is like a weight has the weight's tiles.
        in_place: operands of which it may overwrite one that no later op reads.
        indices_of: an operand from which all its numbers are taken.
        init: never set it; a result is not an argument of the op.
    """
    made = ResultField(dims, dtype, storage, like, accumulates, in_place, indices_of)
    return dataclasses.field(init=init, default=-1, compare=False, metadata={_FIELD: made})


class Declaration:
    """The fields of an op's class.

    Attributes:
        operands, results: the declared tensors, in order.
        attributes: the types of the attributes, in order.
        positions: the position of each operand by name, in a declaration without lists.
        accumulates, shape_of: numbers of results that are sums over the batch, and of operands of
            which only the shape is used.
        in_place, passes_indices: pairs of a result and an operand.
    """

    def __init__(self, cls: type[Op]) -> None:
        self.operands: tuple[OperandField, ...] = ()
        self.results: tuple[ResultField, ...] = ()
        self.attributes: dict[str, type] = {}
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            made = field.metadata.get(_FIELD)
            if isinstance(made, OperandField):
                self.operands += (replace(made, name=field.name),)
            elif isinstance(made, ResultField):
                self.results += (replace(made, name=field.name),)
            else:
                kind = hints[field.name]
                self.attributes[field.name] = get_origin(kind) or kind
        self._by_count: dict[int, tuple[OperandField, ...] | None] = {}
        self.positions = {f.name: i for i, f in enumerate(self.operands)}
        numbers = {f.name: i for i, f in enumerate(self.results)}
        self.accumulates = tuple(numbers[f.name] for f in self.results if f.accumulates)
        self.in_place = self._pairs("in_place")
        self.passes_indices = self._pairs("indices_of")
        self.shape_of = frozenset(i for i, f in enumerate(self.operands) if f.shape_only)

    def _pairs(self, member: str) -> tuple[tuple[int, int], ...]:
        named = ((i, getattr(f, member).split()) for i, f in enumerate(self.results))
        return tuple((i, self.positions.get(name, -1)) for i, names in named for name in names)

    @cached_property
    def groups(self) -> tuple[tuple[bool, tuple[OperandField, ...]], ...]:
        """Adjacent operands, grouped by whether they are lists."""
        groups = groupby(self.operands, key=lambda f: f.is_list)
        return tuple((is_list, tuple(fields)) for is_list, fields in groups)

    @cached_property
    def is_elementwise(self) -> bool:
        """Whether all tensors have the same dims, so that any element may be computed alone."""
        return {f.dims for f in self.operands} == {"..."} and all(
            f.like or f.dims == "..." for f in self.results
        )

    def of_inputs(self, count: int) -> tuple[OperandField, ...] | None:
        """The field of each of so many inputs; None if the op does not take so many."""
        if count not in self._by_count:
            lists = sum(f.is_list for f in self.operands)
            others = count - len(self.operands) + lists
            length, left = divmod(others, lists) if lists else (0, others)
            fits = left == 0 and length >= max((f.least for f in self.operands), default=0)
            self._by_count[count] = tuple(self._flat(length)) if fits else None
        return self._by_count[count]

    def _flat(self, length: int) -> Iterator[OperandField]:
        for is_list, fields in self.groups:
            yield from fields * (length if is_list else 1)

    def flatten(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of the operands in the order of a graph's inputs; absent ones are None."""
        flat: list[Any] = []
        for is_list, fields in self.groups:
            if not is_list:
                flat += [values.get(f.name) for f in fields]
                continue
            lists = [tuple(values.get(f.name) or ()) for f in fields]
            flat += [member for members in zip(*lists, strict=True) for member in members]
        return tuple(flat)

    def by_name(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """The reverse of `flatten`."""
        if all(not is_list for is_list, _ in self.groups):
            return dict(zip(self.positions, inputs))
        values: dict[str, Any] = {f.name: [] for f in self.operands if f.is_list}
        for field, value in zip(self.of_inputs(len(inputs)) or (), inputs):
            if field.is_list:
                values[field.name].append(value)
            else:
                values[field.name] = value
        return {name: tuple(v) if type(v) is list else v for name, v in values.items()}

    def check(self, cls: type[Op], base: type[Op]) -> None:
        """Check the declaration of `cls`, which derives from `base`, where Python does not check it.

        Raises:
            InternalError: names the class and the member.
        """

        def invalid(rule: str, got: object) -> NoReturn:
            _author.invalid("register", rule, f"{got!r} of {cls.name!r}", f"correct {cls.__name__}")

        after_list = False
        for field in self.operands:
            after_list = after_list or field.is_list
            if after_list and (field.shape_only or field.name in {f.in_place for f in self.results}):
                invalid("an operand whose memory or shape is used must come before lists", field.name)
        results = {f.name for f in self.results}
        dims = {d.rstrip("*") for f in self.operands for d in f.dims.split()} | {"...", ""}
        every: tuple[OperandField | ResultField, ...] = (*self.operands, *self.results)
        for one in every:
            if not _DIMS.fullmatch(one.dims):
                invalid(f"dims of {one.name!r} must be names, sizes, `k*`, or `...` in front", one.dims)
            if one.dtype not in (FLOAT, "any", *DTYPES):
                invalid(
                    f"the dtype of {one.name!r} must be float, any or one of {', '.join(DTYPES)}", one.dtype
                )
            if one.storage not in ("", *STORAGES):
                invalid(f"the storage of {one.name!r} must be one of {', '.join(STORAGES)}", one.storage)
        if cls.dims is base.dims:  # an op may have dims of its own, depending on attributes
            texts = [cls.whole, cls.moved, *(p.dims for p in cls.partial_values)]
            if cls.results is base.results:
                texts += [f.dims for f in self.results]
            for name in " ".join(texts).split():
                if name not in dims and not name.isdigit():
                    invalid(
                        "dims of results, `whole`, `moved` and partial values must be dims of operands", name
                    )
            if cls.results is base.results and any(not f.dims and not f.like for f in self.results):
                invalid("a result must have dims or be like an operand", sorted(results))
        for name, kind in self.attributes.items():
            if kind not in _ATTRIBUTES:
                invalid("an attribute must be an int, float, bool, str or tuple", name)
        for made in self.results:
            for member in (*made.like.split(), *made.in_place.split(), *made.indices_of.split()):
                if member not in self.positions:
                    invalid(f"result {made.name!r} must name an operand", member)
        for field in self.operands:
            if field.indexes and field.indexes not in dims:
                invalid(f"operand {field.name!r} must index a declared dim", field.indexes)
        sums = {f.name for f in self.results if f.accumulates}
        for partial in cls.partial_values:
            if partial.combine not in COMBINES or partial.tree not in TREES:
                rule = f"a partial value is combined by {', '.join(COMBINES)} along {', '.join(TREES)}"
                invalid(rule, (partial.combine, partial.tree))
            is_sum = partial.tree == BATCH_SPLITS
            for name in partial.results.split():
                if name not in (sums if is_sum else results):
                    rule = "must name results" + (" with `accumulates`" if is_sum else "")
                    invalid(f"partial value {partial.name!r} {rule}", name)
            for name in partial.cut_by.split():
                if name not in self.positions:
                    invalid(f"partial value {partial.name!r} must be cut by operands", name)
        sources = [i for _, i in self.in_place]
        if cls.must_alias and not len(sources) == len({*sources}) > 0:
            invalid("an op with must_alias needs results in_place, each of another operand", self.in_place)
