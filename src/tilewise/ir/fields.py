"""The fields of an op's class: `operand`, `operands`, `optional` and `result` declare tensors, a
plain annotation declares an attribute.

Dims are written as names in one text, as in `"... k"`. Equal names have equal sizes and are sharded
together:

    k          a dim; names begin with a lower-case letter
    ...        all dims before the others; only in front
    2          a dim of this size
    k*         a dim named k that has a size of its own in every operand
    *          any dims, which no other operand shares
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from tilewise.ir.layout import K_SPLITS

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
        elements: the types of the elements of attributes that are tuples.
        defaults: the values of attributes that a call may leave out.
        positions: the position of each operand by name, counting a list as one.
        accumulates: numbers of the results that are sums over the batch.
        shape_of: positions of the operands of which only the shape is used.
        in_place, passes_indices: pairs of a result's number and an operand's position.
    """

    def __init__(self, cls: type[Op]) -> None:
        self.operands: tuple[OperandField, ...] = ()
        self.results: tuple[ResultField, ...] = ()
        self.attributes: dict[str, type] = {}
        self.elements: dict[str, type] = {}
        self.defaults: dict[str, Any] = {}
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
                if get_origin(kind) is tuple:
                    self.elements[field.name] = get_args(kind)[0]
                if field.default is not dataclasses.MISSING:
                    self.defaults[field.name] = field.default
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
        """The values of the operands in the order of a graph's inputs; None for an absent one."""
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
