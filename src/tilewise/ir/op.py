"""`Op`: what an operation declares about itself. Strategy and plan use ops only through this
interface.

An op is a small frozen dataclass in `graph/ops/<family>.py` that derives from `Op`. Its fields are
its operands, attributes and results (ir/fields.py). `register` adds the class to the table of ops.
An op's gradient rule appends backward ops to a `Tape` (ir/tape.py). Its lowering emits instructions
to a `Lowering` (ir/lowering.py).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from tilewise.core.dims import Size
from tilewise.core.dtypes import MAX_F32
from tilewise.core.errors import InternalError, ShapeError
from tilewise.core.validation import Validator, nearest, shown
from tilewise.ir.declarations import check_declaration
from tilewise.ir.factors import Factors
from tilewise.ir.fields import Declaration, OperandField, Partial, operand, operands, optional, result
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.resolve import check_operands, factors_of, results_of, sizes_of
from tilewise.ir.tape import Gradient, Tape, Term

if sys.version_info >= (3, 11):
    from typing import Self, dataclass_transform
else:
    from typing_extensions import Self, dataclass_transform

__all__ = [
    "Bounds",
    "Gradients",
    "Op",
    "Partial",
    "Specs",
    "bind",
    "check_call",
    "import_ops",
    "modules_of_ops",
    "op_named",
    "operand",
    "operands",
    "optional",
    "register",
    "registered_ops",
    "result",
    "results_of_call",
]

Specs = Callable[[int], TensorSpec]
"""The spec of a tensor, by id."""

Bounds = tuple[int, Size, Size | None]
"""The range of an operand's numbers: (low, high, other). Numbers in [low, high) are allowed, and also `other`, if it is
not None. To allow `high` itself, `other` is `high`."""

Gradients = Mapping[str, Gradient | Sequence[Gradient]]
"""Contributions to the gradients of operands, by the operands' names; a list for a list of operands. An operand that is
not in it gets no gradient."""

_validate = Validator("graph", ShapeError)
_author = Validator("ir", InternalError)
_put = object.__setattr__  # results of an op that is otherwise frozen


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    field_specifiers=(operand, operands, optional, result),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
    """Base class of ops. One class says everything about an op.

    Fields declare operands and results with the names of their dims, and attributes. The tensors
    are ids of a graph. Shapes of results, checks of operands, and factors (the dims that strategies
    shard) follow from the dims. The class adds what does not follow:

    | member | declares | default |
    |---|---|---|
    | `gradient` | contributions to gradients of operands | no loss may depend on the op |
    | `lower` | its instructions | one call of the kernel of its name per row tile |
    | `check` | further conditions on operands and attributes | no others |
    | `results` | specs of results that do not follow from the dims | they follow |
    | `dims` | dims that depend on attributes or on specs | the declared dims |
    | `combine`, `combine_rank` | how and when its terms become one gradient | terms are an error |
    | `index_bounds` | ranges of operands with indices | those of the indexed dims |

    Attributes:
        name: the op's name in graphs and messages.
        whole: dims that cannot be sharded.
        moved: dims whose layout the op changes.
        partial_values: values that are partial if devices or microbatches share a contracted dim.
        must_alias: whether results declared `in_place` always use the memory of their operand,
            because the op updates the operand.
        is_costly: whether computing the results takes far longer than moving them, as for matrix
            products; selective recomputation saves them.
        combine_rank: the order of `combine`: terms of ops with a lower rank are combined first
            (ir/tape.py).
        declared: the fields.
    """

    name: ClassVar[str] = ""
    whole: ClassVar[str] = ""
    moved: ClassVar[str] = ""
    partial_values: ClassVar[tuple[Partial, ...]] = ()
    must_alias: ClassVar[bool] = False
    is_costly: ClassVar[bool] = False
    combine_rank: ClassVar[int] = 0
    declared: ClassVar[Declaration]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls.declared = Declaration(cls)

    @classmethod
    def of(cls, inputs: Sequence[int | None], attrs: Mapping[str, Any], outputs: Sequence[int] = ()) -> Self:
        """The op with these tensors, in the order of a graph, and these attributes."""
        made = cls(**cls.declared.by_name(inputs), **attrs)
        for field, tensor in zip(cls.declared.results, outputs):
            _put(made, field.name, tensor)
        return made

    @cached_property
    def inputs(self) -> tuple[int | None, ...]:
        """The operands in the order of a graph's inputs; None for an absent one."""
        return self.declared.flatten(self.__dict__)

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes by name."""
        return {name: getattr(self, name) for name in self.declared.attributes}

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """Dims of operands and results that differ from the declared ones, by name. It is called
        before the operands are checked.
        """
        return {}

    def check(self, spec: Specs) -> None:
        """Raise ShapeError for operands or attributes that do not fit. The declared dims, storage and
        element types have been checked.
        """

    def results(self, spec: Specs) -> list[TensorSpec]:
        """Specs of the results. The operands have been checked."""
        return results_of(self, spec)

    def factors(self, spec: Specs) -> Factors:
        """Names of the dims of operands and results, for strategies."""
        return factors_of(self, spec)

    def index_bounds(self, spec: Specs) -> dict[str, Bounds]:
        """The ranges of operands that hold indices or lengths."""
        sizes = sizes_of(self, spec)
        indexed = (f for f in self.declared.operands if f.indexes and getattr(self, f.name) is not None)
        return {f.name: (0, sizes[f.indexes], None) for f in indexed}

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """Contributions to the gradients of operands. `grads` has one gradient per result; None for
        a result that the loss does not depend on. No loss may depend on an op without this method.
        """
        return {}

    @classmethod
    def combine(cls, tape: Tape, terms: Sequence[Term], total: int | None) -> int:
        """Return the gradient of one tensor: the sum of all terms that name this op and of `total`,
        the sum so far (None for the first contribution).

        Raises:
            InternalError: the op combines no terms.
        """
        _author.invalid(
            "combine",
            f"an op that terms name must combine them; {cls.name!r} does not",
            f"{len(terms)} terms of {type(terms[0]).__name__}",
            f"write {cls.__name__}.combine, or correct `combined_by`",
        )

    def lower(self, low: Lowering) -> None:
        """Emit the instructions of this op: by default one task per row tile, of the kernel with the
        op's name.
        """
        low.by_rows(self)


_OPS: dict[str, type[Op]] = {}
_MEMBERS = frozenset([*dir(Op), *Op.__annotations__, "self", "_read"])
_MAX_INT = (1 << 31) - 1
AnyOp = TypeVar("AnyOp", bound=type[Op])


def register(cls: AnyOp) -> AnyOp:
    """Class decorator that registers `cls` under its name.

    Raises:
        InternalError: the class does not derive from `Op`, its name is taken, or a declaration is
            inconsistent.
    """
    if not isinstance(cls, type) or not issubclass(cls, Op):
        rule = "an op must be a class that derives from ir.op.Op"
        _author.invalid("register", rule, shown(cls), "derive it from Op")
    title = cls.__name__
    if not isinstance(cls.name, str) or not cls.name or not cls.name.isprintable():
        got = f"{title} with {shown(cls.name)}"
        _author.invalid("register", "an op must have a printable name", got, "set `name`")
    if cls.name in _OPS or cls.name == "call":
        got = f"{cls.name!r} of {title}, which exists already"
        _author.invalid("register", "an op's name must be unique", got, "choose another name")
    check_declaration(cls, Op)
    taken = sorted(_MEMBERS & {f.name for f in dataclasses.fields(cls)})
    if taken:
        got = f"{taken[0]!r} of {title}"
        _author.invalid("register", "a field must not have the name of a member of Op", got, "rename it")
    _OPS[cls.name] = cls
    return cls


def op_named(name: str) -> type[Op]:
    """The op with this name.

    Raises:
        InternalError: no op has this name.
    """
    if name not in _OPS:
        raise InternalError(f"[ir.op] ops must be registered before use; got {name!r}; {_suggested(name)}")
    return _OPS[name]


def _suggested(name: str) -> str:
    """What to do about an unknown name of an op."""
    similar = nearest(name, _OPS)
    return f"do you mean {similar!r}?" if similar is not None else "import the module that registers it"


def bind(node: OpNode) -> Op:
    """The op of a graph's node, with its tensors and attributes."""
    return op_named(node.op).of(node.inputs, node.attrs, node.outputs)


def registered_ops() -> Mapping[str, type[Op]]:
    """All registered ops by name."""
    return MappingProxyType(_OPS)


def modules_of_ops(names: Iterable[str]) -> tuple[str, ...] | None:
    """The modules whose import registers the ops of these names. None if one of these modules is
    the main module, which other processes do not import.
    """
    modules = {op_named(name).__module__ for name in names if name != "call"}
    return None if "__main__" in modules else tuple(sorted(modules))


def import_ops(modules: Iterable[str]) -> None:
    """Import modules that register ops, in a process that may not have them yet."""
    for name in modules:
        import_module(name)


def check_call(name: str, operands: Sequence[object | None], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Check a call against the op's fields, and return the attributes, each of its declared type.

    Raises:
        ShapeError: there is no such op, the number of operands is wrong, an operand is missing, or
            an attribute is missing, unknown or of the wrong type.
    """
    if not isinstance(name, str) or name not in _OPS:
        advice = _suggested(name) if isinstance(name, str) else "pass a str"
        _validate.invalid("op", "an op's name must be that of a registered op", shown(name), advice)
    declared = _OPS[name].declared
    attrs = {**declared.defaults, **attrs}
    odd = sorted({*attrs} ^ {*declared.attributes})
    if odd:
        names = ", ".join(declared.attributes)
        condition = f"attributes are {names}" if names else "it has no attributes"
        what = "unknown" if odd[0] in attrs else "missing"
        _validate.invalid(name, condition, f"{odd[0]!r} {what}", "correct the call")
    checked = {
        a: _attribute(name, a, attrs[a], kind, declared.elements.get(a))
        for a, kind in declared.attributes.items()
    }
    fields = declared.of_inputs(len(operands))
    if fields is None:
        takes = ", ".join(_in_words(is_list, group) for is_list, group in declared.groups)
        advice = "pass None for one that is absent" if any(f.is_optional for f in declared.operands) else ""
        got = str(len(operands))
        _validate.invalid(name, f"takes the operands {takes}", got, advice or "correct the call")
    for field, value in zip(fields, operands):
        if value is None and not field.is_optional:
            _validate.invalid(
                name, f"operand {field.name} must be given", "None", "pass a tensor of the graph"
            )
    return checked


def results_of_call(
    name: str, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]
) -> list[TensorSpec]:
    """The specs of the results of a call on operands with these specs.

    Raises:
        ShapeError: the operands do not fit, or the op does not accept a weight in panels.
        InternalError: the op returns fewer specs than it has results, or a result that must be in
            an operand's memory has another form.
    """
    cls = op_named(name)
    for field, spec in zip(cls.declared.of_inputs(len(inputs)) or (), inputs):
        if spec is None or not spec.is_packed:
            continue
        if spec.format is not None and field.storage != "packed":
            raise ShapeError(
                f"[graph.{name}] a quantised weight can only be multiplied or looked up; got {spec} {spec.name!r} in "
                f"{spec.storage} as {field.name}; load the weight without quantisation"
            )
        if not field.packed:
            raise ShapeError(
                f"[graph.{name}] operand {field.name} must be a result, not a weight; got {spec} {spec.name!r}; "
                "weights go into products, embeddings and, among themselves, elementwise ops; a layer declares its own"
            )
    positions = [None if spec is None else i for i, spec in enumerate(inputs)]
    op = cls.of(positions, attrs)
    spec_of: Specs = inputs.__getitem__  # type: ignore[assignment]  # an absent operand has no position
    check_operands(op, spec_of)
    op.check(spec_of)
    specs = op.results(spec_of)
    if len(specs) != len(cls.declared.results):
        got = f"{len(specs)} for {len(cls.declared.results)}"
        _author.invalid(name, "`results` returns a spec per result", got, f"correct {cls.__name__}.results")
    for output, source in cls.declared.in_place if cls.must_alias else ():
        own, other = specs[output], inputs[source]
        if other is not None and own.form[:2] + own.form[3:4] != other.form[:2] + other.form[3:4]:
            _author.invalid(
                name,
                "a result in an operand's memory must have its shape, dtype and storage",
                f"result {output} {own} {own.storage}, and operand {source} {other} {other.storage}",
                f"correct {cls.__name__}.results or its `in_place`",
            )
    # `results` may return an operand's spec, but the name belongs to the operand
    return [dataclasses.replace(spec, name="") if spec.name else spec for spec in specs]


def _in_words(is_list: bool, group: Sequence[OperandField]) -> str:
    """Adjacent operands as a call passes them."""
    if not is_list:
        return ", ".join(f.name for f in group)
    return ", ".join(f"{f.name}{i}" for i in range(2) for f in group) + ", ..."


def _attribute(op: str, name: str, value: Any, kind: type, element: type | None = None) -> Any:
    if kind is float:
        return _validate.number(op, name, value, -MAX_F32, MAX_F32)
    if kind is int:
        return _validate.integer(op, name, value, -_MAX_INT - 1, _MAX_INT)
    if kind is bool:
        return _validate.truth(op, name, value)
    if not isinstance(value, kind):
        _validate.invalid(op, f"{name} must be a {kind.__name__}", shown(value), "correct the call")
    if isinstance(value, tuple) and element is not None and element in (int, float, bool):
        return tuple([_attribute(op, f"an element of {name}", one, element) for one in value])
    try:
        hash(value)
    except TypeError:
        _validate.invalid(op, f"{name} must be hashable: equal ops are one", shown(value), "pass a tuple")
    return value
