"""What an op declares about how it is called and about its dims, and the checks of these
declarations.

A mistake of an op's author raises an error with the op's name before anything runs: when the class
is registered, or when `infer`, `factors` or `index_bounds` returns a wrong value. Users of ops
never see these errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from tilewise.core.dims import Dim
from tilewise.core.errors import InternalError
from tilewise.core.validation import Validator, shown
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import BATCH_SPLITS, GROUPS, K_SPLITS

if TYPE_CHECKING:
    from tilewise.ir.op import Op

__all__ = [
    "Factors",
    "PartialValue",
    "Signature",
    "bounds_of",
    "check_factors",
    "check_members",
    "outputs_of",
]

COMBINES = ("sum", "max", "or")
TREES = (K_SPLITS, BATCH_SPLITS, GROUPS)

_validate = Validator("ir", InternalError)


@dataclass(frozen=True)
class Signature:
    """How an op is called. A call that does not match is rejected before the op's own code runs.

    Attributes:
        operands: number of operands, or a function that computes the number from the attributes.
            None allows any number from one on.
        absent: positions of operands that may be None.
        attributes: type per attribute. All attributes are required. Integers have 32 bits, floats
            are fp32.
    """

    operands: int | Callable[[Mapping[str, Any]], int] | None
    absent: frozenset[int] = frozenset()
    attributes: Mapping[str, type] = field(default_factory=dict)


@dataclass(frozen=True)
class PartialValue:
    """A value of which each device or microbatch computes only a part if they share one of its
    factors. The op's lowering completes the value.

    Attributes:
        name: name by which the lowering gets the pending reduction of this value
            (`Lowering.pending_reductions`).
        factors: the contracted factors. If one is shared, each device or microbatch has a part of
            the value.
        outputs: positions of the outputs that are computed from the complete value.
        combine: how parts are combined: `sum`, `max`, or `or` (every part but one is zero).
        tree: the tree along which parts are combined: `K_SPLITS` of a labelled dim, `BATCH_SPLITS`
            of the batch, or `GROUPS` of query heads. The role of a dim's label decides between k
            splits and batch splits, never its name.
        cut_by: positions of the operands whose labels determine where the tree cuts. Other operands
            may be sliced to match these. None stands for all operands that have the factors.
    """

    name: str
    factors: tuple[str, ...]
    outputs: tuple[int, ...]
    combine: str = "sum"
    tree: str = K_SPLITS
    cut_by: tuple[int, ...] | None = None

    @cached_property
    def contracts(self) -> frozenset[str]:
        """The factors as a set. An op over all gradients has thousands of factors, so lookup must
        be fast.
        """
        return frozenset(self.factors)


@dataclass(frozen=True)
class Factors:
    """Einsum-style names of the dims of every operand. One declaration serves all meshes.

    If an output does not have a factor of the inputs, the op contracts this factor. If devices
    share a contracted factor, the output is a partial value. `ir.validate` rejects a partial value
    unless the op declares a `PartialValue`, which the op's lowering completes.

    Attributes:
        inputs, outputs: per operand or output, the name of each dim; None for an absent operand.
        whole: factors that cannot be sharded.
        partial_values: values that are partial if one of their factors is shared.
        moved: factors that inputs and outputs may share along different axes, because the op
            changes the layout.
    """

    inputs: tuple[tuple[str, ...] | None, ...]
    outputs: tuple[tuple[str, ...], ...]
    whole: frozenset[str] = frozenset()
    partial_values: tuple[PartialValue, ...] = ()
    moved: frozenset[str] = frozenset()


def check_members(rule: Op) -> None:
    """Check the declarations of an op's class that can be checked without calling the op.

    Raises:
        InternalError: names the op and the member.
    """
    name = type(rule).__name__

    def invalid(member: str, must: str, got: object) -> NoReturn:
        rules = f"`{member}` {must}"
        _validate.invalid("register", rules, f"{shown(got)} of {rule.name!r}", f"correct {name}.{member}")

    _check_signature(rule.signature, invalid)
    count = rule.signature.operands
    most = count if isinstance(count, int) else None
    for member in ("in_place", "passes_indices"):
        pairs = getattr(rule, member)
        fits = isinstance(pairs, tuple) and all(_are_positions(pair) and len(pair) == 2 for pair in pairs)
        if not fits or any(most is not None and i >= most for _, i in pairs):
            invalid(member, f"has pairs of an output and an input{_of_so_many(most)}", pairs)
    if not _are_positions(rule.accumulates):
        invalid("accumulates", "has positions of outputs, in a tuple", rule.accumulates)
    shapes = rule.shape_of
    if (
        not isinstance(shapes, frozenset)
        or not _are_positions(tuple(shapes))
        or not all(most is None or p < most for p in shapes)
    ):
        invalid("shape_of", f"has positions of operands{_of_so_many(most)}, in a frozenset", shapes)
    outputs, inputs = [o for o, _ in rule.in_place], [i for _, i in rule.in_place]
    if rule.must_alias and not len(rule.in_place) == len({*outputs}) == len({*inputs}) > 0:
        invalid(
            "in_place",
            "must name the input for each output that shares an input's memory, each once",
            rule.in_place,
        )


def _check_signature(signature: Signature, invalid: Callable[[str, str, object], NoReturn]) -> None:
    count, absent = signature.operands, signature.absent
    if not callable(count) and count is not None and (type(count) is not int or count < 0):
        invalid(
            "signature",
            "has a number of operands, a function of the attributes that gives one, or None",
            count,
        )
    if not isinstance(absent, frozenset | set) or not _are_positions(tuple(absent)):
        invalid("signature", "has positions of operands that may be absent, in a frozenset", absent)


def _are_positions(value: object) -> bool:
    return isinstance(value, tuple) and all(type(p) is int and p >= 0 for p in value)


def _are_names(names: Sequence[object]) -> bool:
    return all(type(name) is str for name in names)


def _of_so_many(most: int | None) -> str:
    return "" if most is None else f" of {most}"


def outputs_of(rule: Op, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
    """The specs of an op's outputs, from `infer`.

    Raises:
        InternalError: there are fewer specs than the class declares.
        ShapeError: the operands do not fit.
    """
    specs = rule.infer(inputs, attrs)
    for member, pairs in (("in_place", rule.in_place), ("passes_indices", rule.passes_indices)):
        for output, source in pairs:
            if output >= len(specs) or source >= len(inputs):
                _invalid_positions(rule, member, pairs, specs, inputs)
    if any(output >= len(specs) for output in rule.accumulates):
        _invalid_positions(rule, "accumulates", rule.accumulates, specs, inputs)
    if any(position >= len(inputs) for position in rule.shape_of):
        _invalid_positions(rule, "shape_of", rule.shape_of, specs, inputs)
    if rule.must_alias:
        _check_aliases(rule, inputs, specs)
    # `infer` may return an operand's spec, but the name belongs to the operand
    return [replace(spec, name="") if spec.name else spec for spec in specs]


def _check_aliases(rule: Op, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec]) -> None:
    """Check that an output that must share an input's memory has the form of this input."""
    for output, source in rule.in_place:
        own, other = outputs[output], inputs[source]
        if other is not None and (own.shape, own.dtype, own.storage) != (
            other.shape,
            other.dtype,
            other.storage,
        ):
            _validate.invalid(
                rule.name,
                "an output in an input's memory must have its shape, dtype and storage",
                f"output {output} {own} {own.storage}, and input {source} {other} {other.storage}",
                f"correct {type(rule).__name__}.infer or its `in_place`",
            )


def _invalid_positions(
    rule: Op, member: str, got: object, outputs: Sequence[object], inputs: Sequence[object]
) -> NoReturn:
    _validate.invalid(
        rule.name,
        f"`{member}` names operands and outputs that the op has",
        f"{shown(got)} with {len(inputs)} operands and {len(outputs)} outputs",
        f"correct {type(rule).__name__}.{member}",
    )


def _invalid_result(rule: Op, method: str, what: str, got: object) -> NoReturn:
    advice = f"correct {type(rule).__name__}.{method}"
    _validate.invalid(rule.name, f"`{method}` returns {what}", shown(got), advice)


def check_factors(
    rule: Op, factors: Factors, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec]
) -> None:
    """Check the factors that an op declares against its operands and outputs.

    Raises:
        InternalError: names the op and the mismatch.
    """

    def invalid(what: str, got: object) -> NoReturn:
        _invalid_result(rule, "factors", what, got)

    for kind, names, specs in (("operand", factors.inputs, inputs), ("output", factors.outputs, outputs)):
        if not isinstance(names, tuple) or len(names) != len(specs):
            invalid(f"a tuple with names for each of {len(specs)} {kind}s", names)
        for position, (dims, spec) in enumerate(zip(names, specs)):
            if spec is None or (type(dims) is tuple and len(dims) == len(spec.shape)):
                continue
            invalid(f"a tuple with a name for each dim of {kind} {position}, {spec}", dims)
    every = [name for dims in (*factors.inputs, *factors.outputs) for name in dims or ()]
    if not _are_names(every):
        invalid("names that are text", every)
    dim_names = frozenset(every)
    for member, named in (("whole", factors.whole), ("moved", factors.moved)):
        if not isinstance(named, frozenset) or not named <= dim_names:
            invalid(f"`{member}` with names of dims, in a frozenset", named)
    for partial in factors.partial_values:
        _check_partial_value(partial, dim_names, len(inputs), len(outputs), invalid)


def _check_partial_value(
    partial: PartialValue,
    dim_names: frozenset[str],
    inputs: int,
    outputs: int,
    invalid: Callable[[str, object], NoReturn],
) -> None:
    what = f"partial {shown(partial.name)} "
    names = partial.factors
    if not isinstance(names, tuple) or not _are_names(names) or not partial.contracts <= dim_names:
        invalid(f"{what}with names of dims, in a tuple", partial.factors)
    if not _are_positions(partial.outputs) or any(p >= outputs for p in partial.outputs):
        invalid(f"{what}with positions of its {outputs} outputs, in a tuple", partial.outputs)
    if partial.combine not in COMBINES:
        invalid(f"{what}that is combined by one of {', '.join(COMBINES)}", partial.combine)
    if partial.tree not in TREES:
        invalid(f"{what}along one of the trees {', '.join(TREES)}", partial.tree)
    cut = () if partial.cut_by is None else partial.cut_by
    if not _are_positions(cut) or any(p >= inputs for p in cut):
        invalid(f"{what}cut by positions of its {inputs} operands, in a tuple", partial.cut_by)


def bounds_of(
    rule: Op, op: OpNode, inputs: Sequence[TensorSpec | None]
) -> Mapping[int, tuple[Any, Any, Any]]:
    """The ranges of an op's operands that hold indices.

    Raises:
        InternalError: the op returned something other than ranges, or ranges of operands that it
            does not have.
    """
    bounds = rule.index_bounds(inputs, op.attrs)
    what = "(low, high, other allowed value or None) per position of an operand"
    for position, limits in bounds.items():
        is_position = type(position) is int and 0 <= position < len(inputs)
        if not is_position or not isinstance(limits, tuple) or len(limits) != 3 or not _are_sizes(*limits):
            _invalid_result(rule, "index_bounds", what, bounds)
    return bounds


def _are_sizes(low: object, high: object, other: object) -> bool:
    sizes = (low, high) if other is None else (low, high, other)
    return all(isinstance(size, int | Dim) and not isinstance(size, bool) for size in sizes)
