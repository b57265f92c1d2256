"""`Op`: what an op declares about itself. Strategy and plan use ops only through this interface.

An op is a small class in `graph/ops/<family>.py` that derives from `Op`. `register` adds an
instance of the class to the table of ops. An op's gradient rule appends backward ops to a `Tape`
(ir/tape.py). Its lowering emits instructions to a `Lowering` (ir/lowering.py).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from tilewise.core.dims import Size
from tilewise.core.dtypes import MAX_F32
from tilewise.core.errors import InternalError, PlanError, ShapeError
from tilewise.core.validation import Validator, shown
from tilewise.ir.declared import Factors, PartialValue, Signature, check_members
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.tape import Gradient, Tape, Term

__all__ = [
    "Factors",
    "Op",
    "PartialValue",
    "Signature",
    "check_call",
    "import_ops",
    "modules_of_ops",
    "op_named",
    "register",
    "registered_ops",
]

_validate = Validator("graph", ShapeError)
_author = Validator("ir", InternalError)


class Op(ABC):
    """Base class of ops. One class says everything about an op: signature, shape rule, factors (the
    names of dims, as in einsum), lowering, and optional members.

    Required are `name`, `signature`, `infer`, `factors` and `lower`. The others are optional:

    | member | declares | default |
    |---|---|---|
    | `gradient` | contributions to gradients of inputs | no loss may depend on the op |
    | `combine`, `combine_rank` | how and when its terms become one gradient | terms are an error |
    | `takes_packed` | operands that may be weights in panels | none |
    | `index_bounds` | operands that hold indices, and their range | none |
    | `passes_indices` | outputs that hold indices taken from an input | none |
    | `accumulates` | outputs that are sums over the whole batch | none: each microbatch has its own |
    | `in_place` | outputs that may overwrite an input that is not read later | none |
    | `must_alias` | whether they must overwrite it | they need not |
    | `shape_of` | operands of which only the shape is used | all operands are read |
    | `is_costly` | whether selective recomputation saves its results | they are recomputed |

    Attributes:
        name: the op's name in graphs and messages.
        accumulates: numbers of outputs that `lower` writes through `low.accumulator` or
            `low.split_tree`.
        in_place: pairs (output, input).
        must_alias: whether outputs in `in_place` always use the memory of their input, because the
            op updates the input.
        passes_indices: pairs (output, input): every number in the output is a number from the
            input.
        shape_of: positions of operands that give a shape and are not read.
        is_costly: whether computing the results takes far longer than moving them, as for matrix
            products.
        combine_rank: the order of `combine`: terms of ops with a lower rank are combined first
            (ir/tape.py).
    """

    name: ClassVar[str] = ""
    accumulates: ClassVar[tuple[int, ...]] = ()
    in_place: ClassVar[tuple[tuple[int, int], ...]] = ()
    must_alias: ClassVar[bool] = False
    passes_indices: ClassVar[tuple[tuple[int, int], ...]] = ()
    shape_of: ClassVar[frozenset[int]] = frozenset()
    is_costly: ClassVar[bool] = False
    combine_rank: ClassVar[int] = 0

    @property
    @abstractmethod
    def signature(self) -> Signature:
        """How the op is called."""

    @abstractmethod
    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """Specs of the outputs. Raises ShapeError for operands that do not fit."""

    @abstractmethod
    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """Names of the dims of operands and outputs."""

    @abstractmethod
    def lower(self, low: Lowering, op: OpNode) -> None:
        """Emit the instructions of this op."""

    def gradient(self, tape: Tape, op: OpNode, grads: Sequence[int | None]) -> Sequence[Gradient]:
        """One contribution per input; None for an input without gradient. `grads` has one gradient
        per output; None for an output that the loss does not depend on.

        Raises:
            PlanError: the op has no gradient.
        """
        raise PlanError(
            f"[graph.gradients] a loss may depend only on ops that have a gradient; got {op.label!r} ({self.name}); "
            "remove it from the path between parameters and loss"
        )

    def combine(self, tape: Tape, terms: Sequence[Term], total: int | None) -> int:
        """Return the gradient of one tensor: the sum of all terms that name this op and of `total`,
        the sum so far (None for the first contribution).

        Raises:
            InternalError: the op combines no terms.
        """
        _author.invalid(
            "combine",
            f"an op that terms name must combine them; {self.name!r} does not",
            f"{len(terms)} terms of {type(terms[0]).__name__}",
            f"write {type(self).__name__}.combine, or correct `combined_by`",
        )

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """Whether this operand may be a weight in panels."""
        return False

    def index_bounds(
        self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]
    ) -> dict[int, tuple[int, Size, Size | None]]:
        """The ranges of operands that hold indices or lengths: position -> (low, high, other).
        Values in [low, high) are allowed, and also the value `other`, if it is not None. To allow
        `high` itself, `other` is `high`.
        """
        return {}


_OPS: dict[str, Op] = {}
_MAX_INT = (1 << 31) - 1
AnyOp = TypeVar("AnyOp", bound=type)


def register(cls: AnyOp) -> AnyOp:
    """Class decorator that registers an instance of `cls` under its name.

    Raises:
        InternalError: the class does not derive from `Op`, lacks a name or a required member, its
            name is taken, or a declaration has the wrong type or is out of range.
    """
    title = shown(cls)
    if not isinstance(cls, type) or not issubclass(cls, Op):
        _author.invalid(
            "register", "an op must be a class that derives from ir.op.Op", title, "derive it from Op"
        )
    title = cls.__name__
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        _author.invalid(
            "register",
            "an op must have signature, infer, factors and lower",
            f"{title} without {missing}",
            "write it",
        )
    if not isinstance(cls.name, str) or not cls.name or not cls.name.isprintable():
        _author.invalid(
            "register", "an op must have a printable name", f"{title} with {shown(cls.name)}", "set `name`"
        )
    if cls.name in _OPS or cls.name == "call":
        _author.invalid(
            "register",
            "an op's name must be unique",
            f"{cls.name!r} of {title}, which exists already",
            "choose another name",
        )
    rule = cls()
    check_members(rule)
    _OPS[cls.name] = rule
    return cls


def op_named(name: str) -> Op:
    """The op with this name.

    Raises:
        InternalError: no op has this name.
    """
    if name not in _OPS:
        raise InternalError(
            f"[ir.op] ops must be registered before use; got {name!r}; registered: {', '.join(sorted(_OPS))}"
        )
    return _OPS[name]


def registered_ops() -> Mapping[str, Op]:
    """All registered ops by name."""
    return MappingProxyType(_OPS)


def modules_of_ops(names: Iterable[str]) -> tuple[str, ...] | None:
    """The modules whose import registers the ops of these names. None if one of these modules is
    the main module, which other processes do not import.
    """
    modules = {type(op_named(name)).__module__ for name in names if name != "call"}
    return None if "__main__" in modules else tuple(sorted(modules))


def import_ops(modules: Iterable[str]) -> None:
    """Import modules that register ops, in a process that may not have them yet."""
    for name in modules:
        import_module(name)


def check_call(name: str, operands: Sequence[object | None], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Check a call against the op's signature, and return the attributes, each of its declared
    type.

    Raises:
        ShapeError: there is no such op, the number of operands is wrong, an operand is missing, or
            an attribute is missing, unknown or of the wrong type.
        InternalError: the op's own count of operands is invalid.
    """
    if not isinstance(name, str) or name not in _OPS:
        _validate.choice("op", "an op's name", name, sorted(_OPS))
    signature = _OPS[name].signature
    odd = sorted({*attrs} ^ {*signature.attributes})
    if odd:
        names = ", ".join(signature.attributes)
        condition = f"attributes are {names}" if names else "it has no attributes"
        _validate.invalid(name, condition, f"{odd[0]!r} missing or unknown", "correct the call")
    checked = {a: _attribute(name, a, attrs[a], kind) for a, kind in signature.attributes.items()}
    count = _count_operands(name, signature, checked)
    if len(operands) != count and (count is not None or not operands):
        _validate.invalid(
            name, f"takes {count or 'at least one'} operands", str(len(operands)), "correct the call"
        )
    for position, operand in enumerate(operands):
        if operand is None and position not in signature.absent:
            _validate.invalid(name, f"operand {position} must be given", "None", "pass a tensor of the graph")
    return checked


def _count_operands(name: str, signature: Signature, attrs: Mapping[str, Any]) -> int | None:
    """The number of operands of a call with these attributes; None for any number from one on."""
    count = signature.operands
    if not callable(count):
        return count
    number = count(attrs)
    if type(number) is not int or number < 0:
        _author.invalid(
            name,
            "the function `signature.operands` must return a number of operands",
            shown(number),
            f"correct {type(_OPS[name]).__name__}.signature",
        )
    return number


def _attribute(op: str, name: str, value: Any, kind: type) -> Any:
    if kind is float:
        return _validate.number(op, name, value, -MAX_F32, MAX_F32)
    if kind is int:
        return _validate.integer(op, name, value, -_MAX_INT - 1, _MAX_INT)
    if kind is bool:
        return _validate.truth(op, name, value)
    if not isinstance(value, kind):
        _validate.invalid(op, f"{name} must be a {kind.__name__}", shown(value), "correct the call")
    try:
        hash(value)
    except TypeError:
        _validate.invalid(op, f"{name} must be hashable: equal ops are one", shown(value), "pass a tuple")
    return value
