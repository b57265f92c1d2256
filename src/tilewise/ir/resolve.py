"""Derives from an op's declared dims what planning needs: whether operands fit together, the specs
of the results, and the factors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from tilewise.core.dims import DimLabel, Size
from tilewise.core.dtypes import DTYPES, DType
from tilewise.core.errors import InternalError, ShapeError
from tilewise.core.validation import Validator
from tilewise.ir.factors import Factors, PartialValue
from tilewise.ir.fields import FLOAT, OperandField, ResultField
from tilewise.ir.graph import TensorSpec

if TYPE_CHECKING:
    from tilewise.ir.op import Op, Specs

__all__ = ["FLOATS", "check_operands", "factors_of", "require", "require_indices", "results_of", "sizes_of"]

FLOATS = ("f32", "bf16")
_author = Validator("ir", InternalError)
Names = tuple[str, ...]


def require(
    holds: bool, op: str, rule: str, *specs: TensorSpec | None, advice: str = "check the operands"
) -> None:
    """Raise a ShapeError with the op, the rule and the specs unless `holds`."""
    if not holds:
        got = ", ".join(str(s) for s in specs) or "another"
        raise ShapeError(f"[graph.{op}] {rule}; got {got}; {advice}")


def require_indices(op: str, what: str, spec: TensorSpec, *specs: TensorSpec) -> None:
    """Check that a spec is one of indices: i32, one per row."""
    is_i32 = spec.dtype.name == "i32"
    require(is_i32, op, f"{what} must be i32", spec, *specs, advice=f'declare the {what} with dtype "i32"')
    require(
        spec.storage == "scalars" or (spec.storage == "rows" and len(spec.shape) == 1),
        op,
        f"{what} must be one number per row",
        spec,
        *specs,
        advice='declare them with storage="scalars"',
    )


class _Seen(NamedTuple):
    """Where the size of a dim was first seen."""

    size: Size
    label: DimLabel | None
    operand: str
    spec: TensorSpec


@lru_cache(maxsize=4096)
def _named(dims: str, rank: int) -> tuple[Names, Names, int]:
    """Names of the dims of a tensor of this rank, their spelling, and how many dims `...` stands for (-1
    if it does not occur).
    """
    parts = tuple(dims.split())
    if parts[:1] != ("...",):
        return tuple(dim.rstrip("*") for dim in parts), parts, -1
    lead = max(rank - len(parts) + 1, 0)
    rows = tuple(f"...{i}" for i in range(lead))
    return (*rows, *(dim.rstrip("*") for dim in parts[1:])), ("...",) * lead + parts[1:], lead


@dataclass
class _Dims:
    """The dims of an op's operands.

    Attributes:
        op: the op.
        spec: specs of tensors by id.
        lead: number of dims that `...` stands for; -1 before it is known.
        sizes: the first operand with each dim.
        names: per input, the names of its dims; None for an absent one.
        own: names of the dims of single operands.
        dtype, first: the element type of the operands whose type is not fixed, and the first one.
    """

    op: Op
    spec: Specs
    lead: int = -1
    sizes: dict[str, _Seen] = field(default_factory=dict)
    names: list[Names | None] = field(default_factory=list)
    own: dict[str, Names] = field(default_factory=dict)
    dtype: DType | None = None
    first: TensorSpec | None = None

    def read(self, checks: bool) -> _Dims:
        """Name the dims of all operands, and check that they fit together if `checks`."""
        op, inputs, sizes = self.op, self.op.inputs, self.sizes
        other = op.dims(self.spec)
        odd = other.keys() - {*op.declared.positions, *(f.name for f in op.declared.results)} if other else ()
        if odd:
            got = ", ".join(sorted(odd))
            _author.invalid(
                op.name, "`dims` must name operands and results", got, f"correct {type(op).__name__}"
            )
        packed: TensorSpec | None = None
        for f, tensor in zip(op.declared.of_inputs(len(inputs)) or (), inputs):
            if tensor is None:
                self.names.append(None)
                continue
            spec, dims = self.spec(tensor), other.get(f.name, f.dims)
            shape = spec.shape
            if f.dtype == FLOAT and not f.indexes and self.first is None:
                self.dtype, self.first = spec.dtype, spec
            if dims == "*":
                if checks and spec.dtype.name != f.dtype:
                    self._check_type(f, spec)
                number = len(self.names)
                self.names.append(() if checks else tuple([f"{number}.{i}" for i in range(len(shape))]))
                continue
            names, spelled, lead = _named(dims, len(shape))
            if checks:
                self._check_form(f, dims, spelled, spec)
                if f.packed and f.storage != "packed":
                    packed = packed or spec
                    if spec.storage != packed.storage:
                        advice = "a weight and a result are stored differently"
                        require(False, op.name, "operands must have one storage", packed, spec, advice=advice)
                if -1 != lead != self.lead != -1:
                    self._misfit(f, "...", next(iter(sizes.values()), _Seen(0, None, f.name, spec)), spec)
            if lead != -1:
                self.lead = lead
            self.names.append(names)
            self.own[f.name] = names
            for dim, name, size, label in zip(spelled, names, shape, spec.labels):
                first = sizes.get(name)
                if first is None:
                    sizes[name] = _Seen(size, label, f.name, spec)
                elif checks and first.size != size and not dim.endswith("*"):
                    self._misfit(f, dim, first, spec)
        return self

    def _misfit(self, f: OperandField, dim: str, first: _Seen, spec: TensorSpec) -> NoReturn:
        """Raise an error about two operands that do not have one size of a dim."""
        what = f"one size of {dim!r}" if dim != "..." else "the same rows"
        if self.op.declared.is_elementwise:
            what = "one shape"
        rule = f"{first.operand} and {f.name} must have {what}"
        advice = f.advice or "declare them with equal sizes"
        raise ShapeError(f"[graph.{self.op.name}] {rule}; got {first.spec}, {spec}; {advice}")

    def _check_type(self, f: OperandField, spec: TensorSpec) -> None:
        """Check the element type of an operand."""
        name = self.op.name
        if f.indexes:
            require_indices(name, f.name, spec)
        elif f.dtype == FLOAT:
            advice = "declare the tensor as f32 or bf16"
            require(spec.dtype.name in FLOATS, name, f"{f.name} must be f32 or bf16", spec, advice=advice)
            advice = "convert one of them with graph.cast(x, dtype)"
            is_one = spec.dtype == self.dtype
            require(is_one, name, "operands must have one dtype", self.first, spec, advice=advice)
        elif f.dtype not in ("any", spec.dtype.name):
            require(False, name, f"{f.name} must be {f.dtype}", spec)

    def _check_form(self, f: OperandField, dims: str, spelled: Names, spec: TensorSpec) -> None:
        """Check an operand alone: element type, storage, number of dims and fixed sizes."""
        self._check_type(f, spec)
        storage, shape, advice = spec.storage, spec.shape, f.advice or "check the operands"
        rule = ""
        if f.storage == "packed":
            rule = "" if spec.is_packed else "a parameter with two dims"
        elif f.storage:
            if storage != f.storage:
                rule, advice = f"[{', '.join(dims.split())}]", f'declare it with storage="{f.storage}"'
        elif " " in dims and not f.packed and f.dtype != "any":
            rule = "rows of elements" if storage != "rows" or len(shape) < 2 else ""
        is_fixed = all(not d.isdigit() or int(d) == size for d, size in zip(spelled, shape))
        if not rule and (len(spelled) != len(shape) or not is_fixed):
            rule = f"[{', '.join(dims.split())}]"
        if rule:
            require(False, self.op.name, f"{f.name} must be {rule}", spec, advice=advice)

    def names_of(self, f: ResultField, dims: str) -> Names:
        """Names of the dims of a result."""
        if f.like and not dims:
            return self.own[f.like]
        return _named(dims, max(self.lead, 0) + len(dims.split()) - 1)[0]

    def result(self, f: ResultField, dims: str) -> TensorSpec:
        """The spec of a result."""
        dtype = self.dtype if f.dtype == FLOAT else DTYPES.get(f.dtype)
        if f.like:
            like = self.spec(getattr(self.op, f.like))
            if f.accumulates:
                return replace(like, dtype=dtype or like.dtype, name="")
            return TensorSpec(like.shape, dtype or like.dtype, like.labels, storage=like.storage)
        seen = [(int(n), None) if n.isdigit() else self.sizes[n][:2] for n in self.names_of(f, dims)]
        assert dtype is not None
        return TensorSpec(
            tuple(size for size, _ in seen),
            dtype,
            tuple(label for _, label in seen),
            storage=f.storage or "rows",
        )


def check_operands(op: Op, spec: Specs) -> None:
    """Check the operands of an op against their declared dims, storage and element types.

    Raises:
        ShapeError: they do not fit together.
    """
    # `results_of`, which is called next, need not read the dims again
    object.__setattr__(op, "_read", _Dims(op, spec).read(True))


def results_of(op: Op, spec: Specs) -> list[TensorSpec]:
    """The specs of an op's results that follow from its dims."""
    dims, other = getattr(op, "_read", None), op.dims(spec)
    if dims is None or dims.spec is not spec:
        dims = _Dims(op, spec).read(False)
    return [dims.result(f, other.get(f.name, f.dims)) for f in op.declared.results]


def sizes_of(op: Op, spec: Specs) -> dict[str, Size]:
    """The sizes of the dims of an op whose operands fit together, by name."""
    return {name: seen.size for name, seen in _Dims(op, spec).read(False).sizes.items()}


def factors_of(op: Op, spec: Specs) -> Factors:
    """The factors of an op whose operands fit together."""
    dims, other = _Dims(op, spec).read(False), op.dims(spec)
    rows = tuple([f"...{i}" for i in range(dims.lead)])

    def expanded(names: str) -> Names:
        return tuple([n for name in names.split() for n in (rows if name == "..." else (name,))])

    numbers = {f.name: i for i, f in enumerate(op.declared.results)}
    fields = op.declared.of_inputs(len(dims.names)) or ()
    partial_values = tuple(
        PartialValue(
            p.name,
            expanded(p.dims),
            tuple(numbers[r] for r in p.results.split()),
            p.combine,
            p.tree,
            tuple(i for i, f in enumerate(fields) if f.name in p.cut_by.split()) if p.cut_by else None,
        )
        for p in op.partial_values
    )
    return Factors(
        tuple(dims.names),
        tuple(dims.names_of(f, other.get(f.name, f.dims)) for f in op.declared.results),
        frozenset(expanded(op.whole)),
        partial_values,
        frozenset(expanded(op.moved)),
    )
