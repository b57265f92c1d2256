"""Derives from an op's declared dims what planning needs: whether operands fit together, the specs
of the results, and the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from tilewise.core.dims import DimLabel, Size
from tilewise.core.dtypes import DTYPES, DType
from tilewise.core.errors import ShapeError
from tilewise.ir.factors import Factors, PartialValue
from tilewise.ir.fields import FLOAT, OperandField, ResultField
from tilewise.ir.graph import TensorSpec

if TYPE_CHECKING:
    from tilewise.ir.op import Op, Specs

__all__ = ["FLOATS", "check_operands", "factors_of", "require", "require_indices", "results_of"]

FLOATS = ("f32", "bf16")
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
        dtype: the element type of the operands whose type is not fixed.
    """

    op: Op
    spec: Specs
    lead: int = -1
    sizes: dict[str, _Seen] = field(default_factory=dict)
    names: list[Names | None] = field(default_factory=list)
    own: dict[str, Names] = field(default_factory=dict)
    dtype: DType | None = None

    def read(self, checks: bool) -> _Dims:
        """Name the dims of all operands, and check that they fit together if `checks`."""
        op, inputs = self.op, self.op.inputs
        other = op.dims(self.spec)
        packed: tuple[str, TensorSpec] | None = None
        for f, tensor in zip(op.declared.of_inputs(len(inputs)) or (), inputs):
            if tensor is None:
                self.names.append(None)
                continue
            spec, dims = self.spec(tensor), other.get(f.name, f.dims).split()
            if f.dtype == FLOAT and not f.indexes:
                self.dtype = self.dtype or spec.dtype
            if checks:
                self._check_form(f, dims, spec)
                if f.packed and f.storage != "packed" and dims != ["*"]:
                    packed = packed or (f.name, spec)
                    alike = spec.storage == packed[1].storage
                    advice = "a weight and a result are stored differently"
                    require(alike, op.name, "operands must have one storage", packed[1], spec, advice=advice)
            lead, first_rows = self.lead, next(iter(self.sizes.values()), _Seen(0, None, f.name, spec))
            names = self._name(dims, len(spec.shape))
            if checks and dims[0] == "..." and lead not in (-1, self.lead):
                self._misfit(f, "...", first_rows, spec)
            if dims == ["*"]:
                names = tuple([f"{len(self.names)}.{i}" for i in range(len(spec.shape))])
            self.names.append(names)
            self.own[f.name] = names
            for dim, name, size, label in zip(
                self._spelled(dims, len(names)), names, spec.shape, spec.labels
            ):
                first = self.sizes.setdefault(name, _Seen(size, label, f.name, spec))
                if checks and first.size != size and not dim.endswith("*"):
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

    def _name(self, dims: Sequence[str], rank: int) -> Names:
        if "..." not in dims:
            return tuple([dim.rstrip("*") for dim in dims])
        self.lead = max(rank - len(dims) + 1, 0)
        return (*[f"b{i}" for i in range(self.lead)], *[dim.rstrip("*") for dim in dims[1:]])

    def _spelled(self, dims: Sequence[str], rank: int) -> list[str]:
        if dims == ["*"]:
            return ["*"] * rank
        return ["..."] * self.lead + list(dims[1:]) if dims and dims[0] == "..." else list(dims)

    def _check_form(self, f: OperandField, dims: Sequence[str], spec: TensorSpec) -> None:
        """Check an operand alone: element type, storage, number of dims and fixed sizes."""
        name, rank = self.op.name, len(spec.shape)
        if f.indexes:
            require_indices(name, f.name, spec)
        elif f.dtype == FLOAT:
            advice = "declare the tensor as f32 or bf16"
            require(spec.dtype.name in FLOATS, name, f"{f.name} must be f32 or bf16", spec, advice=advice)
            advice = "convert one of them with graph.cast(x, dtype)"
            require(spec.dtype == self.dtype, name, "operands must have one dtype", spec, advice=advice)
        elif f.dtype != "any":
            require(spec.dtype.name == f.dtype, name, f"{f.name} must be {f.dtype}", spec)
        text = f"{f.name} must be [{', '.join(dims)}]"
        advice = f.advice or "check the operands"
        if f.storage == "packed":
            require(
                spec.storage == "packed",
                name,
                f"{f.name} must be a parameter with two dims",
                spec,
                advice=advice,
            )
        elif f.storage:
            is_stored = spec.storage == f.storage
            require(is_stored, name, text, spec, advice=f'declare it with storage="{f.storage}"')
        elif len(dims) > 1 and not f.packed and f.dtype != "any":
            is_rows = spec.storage == "rows" and rank > 1
            require(is_rows, name, f"{f.name} must be rows of elements", spec, advice=advice)
        if dims == ["*"]:
            return
        fits = rank >= len(dims) - 1 if "..." in dims else rank == len(dims)
        fixed = [(size, int(d)) for d, size in zip(dims[::-1], spec.shape[::-1]) if d.isdigit()]
        require(fits and all(a == b for a, b in fixed), name, text, spec, advice=advice)

    def names_of(self, f: ResultField, dims: str) -> Names:
        """Names of the dims of a result."""
        if f.like and not dims:
            return self.own[f.like]
        parts = dims.split()
        return self._name(parts, max(self.lead, 0) + len(parts) - 1)

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
    _Dims(op, spec).read(True)


def results_of(op: Op, spec: Specs) -> list[TensorSpec]:
    """The specs of an op's results that follow from its dims."""
    dims, other = _Dims(op, spec).read(False), op.dims(spec)
    return [dims.result(f, other.get(f.name, f.dims)) for f in op.declared.results]


def factors_of(op: Op, spec: Specs) -> Factors:
    """The factors of an op whose operands fit together."""
    dims, other = _Dims(op, spec).read(False), op.dims(spec)
    rows = tuple([f"b{i}" for i in range(dims.lead)])

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
