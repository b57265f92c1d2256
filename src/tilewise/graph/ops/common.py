"""What all families of ops use: checks whose messages contain the shapes of the operands, names of
leading dims, and the base class of elementwise ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from tilewise.core.dims import Size
from tilewise.core.errors import PlanError, ShapeError
from tilewise.core.validation import Validator
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, Op, Signature
from tilewise.ir.program import Number
from tilewise.kernels.table import KERNELS

__all__ = [
    "FLOATS",
    "Elementwise",
    "fixed",
    "incoming",
    "leading",
    "require",
    "require_floats",
    "require_indices",
    "require_positive",
    "same_shape",
]

FLOATS = ("f32", "bf16")
_validate = Validator("graph", ShapeError)


def require(
    holds: bool, op: str, rule: str, *specs: TensorSpec | None, advice: str = "check the operands"
) -> None:
    """Raise a ShapeError with the op, the rule and the specs unless `holds`."""
    if not holds:
        got = ", ".join(str(s) for s in specs) or "another"
        raise ShapeError(f"[graph.{op}] {rule}; got {got}; {advice}")


def require_floats(op: str, *specs: TensorSpec | None) -> None:
    """Check that all specs have the same dtype, and that kernels compute in it."""
    present = [s for s in specs if s is not None]
    require(
        present[0].dtype.name in FLOATS,
        op,
        "operands must be f32 or bf16",
        *present,
        advice="declare the tensor as f32 or bf16",
    )
    require(
        all(s.dtype == present[0].dtype for s in present),
        op,
        "operands must have one dtype",
        *present,
        advice="convert one of them with graph.cast(x, dtype)",
    )


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


def require_positive(op: str, **values: float) -> None:
    """Check that attributes are above 0."""
    for name, value in values.items():
        if value <= 0:
            _validate.invalid(op, f"{name} must be above 0", f"{value}", "correct it")


def leading(spec: TensorSpec) -> tuple[str, ...]:
    """Factor names of all dims but the last: `b0`, `b1`, …"""
    return tuple(f"b{i}" for i in range(len(spec.shape) - 1))


def same_shape(op: str, *specs: TensorSpec | None) -> None:
    """Check that all specs have the same shape and dtype."""
    present = [s for s in specs if s is not None]
    has_one_shape = all(s.shape == present[0].shape for s in present)
    require(
        has_one_shape, op, "operands must have one shape", *present, advice="declare them with equal sizes"
    )
    has_one_dtype = all(s.dtype == present[0].dtype for s in present)
    advice = "convert one of them with graph.cast(x, dtype)"
    require(has_one_dtype, op, "operands must have one dtype", *present, advice=advice)
    alike = all(s.storage == present[0].storage for s in present)
    require(
        alike,
        op,
        "operands must have one storage",
        *present,
        advice="a weight and a result are stored differently",
    )


def fixed(size: Size) -> int:
    """A size as an integer. `infer` must have checked that it is not a symbol."""
    assert isinstance(size, int)
    return size


def incoming(op: OpNode, grads: Sequence[int | None]) -> int:
    """The gradient of an op's first output, for ops whose other outputs have no gradient.

    Raises:
        PlanError: the loss depends on another output.
    """
    first, *others = grads
    if first is None or any(g is not None for g in others):
        number = next((i for i, g in enumerate(others, 1) if g is not None), 0)
        raise PlanError(
            f"[graph.gradients] a loss may depend only on the first output of {op.op!r}; got one that depends on "
            f"output {number} of {op.label!r}; compute it by other ops"
        )
    return first


class Elementwise(Op):
    """Base of elementwise ops: all operands share shape, dtype and factors.

    The kernel with the op's name defines the rest (kernels/table.py): the kernel's `in` operands
    are the op's inputs, its `out` operands are the outputs, and its floats are the attributes. A
    subclass sets `name` and writes `gradient`. An op without a kernel of its name sets `num_inputs`
    and `attributes` itself and writes `lower`.
    """

    num_inputs: ClassVar[int] = 1
    num_outputs: ClassVar[int] = 1
    attributes: ClassVar[Mapping[str, type]] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.name in KERNELS:
            kernel = KERNELS[cls.name]
            cls.num_inputs = sum(o.role == "in" for o in kernel.operands)
            cls.num_outputs = sum(o.role == "out" for o in kernel.operands)
            cls.attributes = MappingProxyType(dict.fromkeys(kernel.floats, float))

    @property
    def signature(self) -> Signature:
        """The number of operands, none of which may be absent."""
        return Signature(self.num_inputs, attributes=self.attributes)

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """Every output has the spec of the first input."""
        same_shape(self.name, *inputs)
        first = inputs[0]
        assert first is not None
        require_floats(self.name, *inputs)
        return [TensorSpec(first.shape, first.dtype, first.labels, storage=first.storage)] * self.num_outputs

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """Weights in panels may be processed element by element."""
        return True

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """One factor per dim, shared by all operands."""
        assert inputs[0] is not None
        dims = tuple(f"d{i}" for i in range(len(inputs[0].shape)))
        return Factors((dims,) * self.num_inputs, (dims,) * self.num_outputs)

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per row tile, or per block of panels for a weight. If there may be few rows, and
        an element does not depend on other elements of its row, one task per tile of columns.
        """
        is_packed = low.spec(op.given[0]).storage == "packed"
        views = [low.flat(t) if is_packed else low.tensor(t) for t in (*op.outputs, *op.given)]
        x = views[-1]
        operands = KERNELS[self.name].operands if self.name in KERNELS else ()
        columns = 0 if self._takes_rows(low, op) else views[0].tile_cols
        low.emit(
            self.name,
            op,
            over=Number(x.cols) if columns else x,
            step=columns or (x.tile_rows if is_packed else None),
            dtype=x.dtype,
            tiles={o.name: low.col(v) if columns else low.row(v) for o, v in zip(operands, views)},
            floats=op.attrs,
        )

    def _takes_rows(self, low: Lowering, op: OpNode) -> bool:
        """Whether an element may depend on its whole row. Then the last dim of an operand is not
        sharded.
        """
        factors = self.factors([low.spec(t) for t in op.given], op.attrs)
        every = (*factors.inputs, *factors.outputs)
        return any(dims[-1] in factors.whole for dims in every if dims)
