"""An op whose kernel is the user's own (`tilewise.tile_kernel`): native code that computes rows of a
result from the same rows of its operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewise.core.errors import PlanError
from tilewise.graph.ops.common import incoming, require
from tilewise.graph.ops.items import named
from tilewise.ir.graph import TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Gradients, Op, Specs, operands, register, result
from tilewise.ir.program import Operand
from tilewise.ir.tape import Gradient, Tape
from tilewise.kernels.table import KERNELS

__all__: list[str] = []


@register
class Kernel(Op):
    """A kernel over row tiles. Rows may be shared among devices; the last dim is whole.

    Attributes:
        kernel: its name.
        backward: per operand, the kernel of its gradient, or an empty name. Such a kernel has the operands
            dx (out), dy, and those of the forward kernel.
        widths: the last dim of each operand.
        out_features: the last dim of the result.
        ints, floats: values of the kernels' attributes, in the order of the declaration.
    """

    name = "kernel"
    x: tuple[int, ...] = operands("... k*")
    kernel: str
    backward: tuple[str, ...]
    widths: tuple[int, ...]
    out_features: int
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    out: int = result("... n")

    def check(self, spec: Specs) -> None:
        """The kernels are registered and take these operands."""
        specs = [spec(x) for x in self.x]
        rows = all(s.storage == "rows" and len(s.shape) > 1 for s in specs)
        require(rows, self.name, "operands must be rows of elements", *specs)
        widths = tuple(s.shape[-1] for s in specs)
        require(widths == self.widths, self.name, f"operands must be {list(self.widths)} wide", *specs)
        require(self.out_features > 0, self.name, f"out_features must be positive, not {self.out_features}")
        is_each = len(self.backward) in (0, len(self.x))
        require(is_each, self.name, "backward must name a kernel per operand", *specs)
        for kernel, count in ((self.kernel, len(specs)), *((b, len(specs) + 1) for b in self.backward if b)):
            declared = KERNELS.get(kernel)
            roles = [] if declared is None else sorted(o.role for o in declared.operands)
            rule = f"kernel {kernel!r} must be registered with {count} operands `in` and one `out`"
            require(
                roles == ["in"] * count + ["out"], self.name, rule, *specs, advice="use tilewise.tile_kernel"
            )
            if declared is not None:
                fits = (len(declared.ints), len(declared.floats)) == (len(self.ints), len(self.floats))
                rule = (
                    f"kernel {kernel!r} has {len(declared.ints)} integers and {len(declared.floats)} floats"
                )
                require(fits, self.name, rule, *specs, advice="pass all of them by name")

    def dims(self, spec: Specs) -> Mapping[str, str]:
        """The width of the result is its own."""
        rows = " ".join(named(spec(self.x[0]).shape[:-1]))
        return {"x": f"{rows} k*", "out": f"{rows} n"}

    def results(self, spec: Specs) -> list[TensorSpec]:
        """The rows of the operands."""
        x = spec(self.x[0])
        return [TensorSpec((*x.shape[:-1], self.out_features), x.dtype, (*x.labels[:-1], None))]

    def gradient(self, tape: Tape, grads: Sequence[int | None]) -> Gradients:
        """By the kernels in `backward`."""
        if not self.backward:
            raise PlanError(
                f"[graph.gradients] a loss may depend only on ops that have a gradient; got {self.kernel!r} (kernel); "
                "pass backward= to graph.kernel"
            )
        dy, forward = incoming(self, grads), tuple(map(tape.use, self.x))
        widths, dx = (self.out_features, *self.widths), list[Gradient]()
        for kernel, width in zip(self.backward, self.widths):
            if not kernel:
                dx.append(None)
                continue
            made = Kernel(
                x=(dy, *forward),
                kernel=kernel,
                backward=(),
                widths=widths,
                out_features=width,
                ints=self.ints,
                floats=self.floats,
            )
            dx += tape.op(made)
        return {"x": dx}

    def lower(self, low: Lowering) -> None:
        """One task per row tile."""
        declared, out = KERNELS[self.kernel], low.tensor(self.out)
        sources = iter(self.x)
        tiles: dict[str, Operand] = {
            o.name: low.row(out) if o.role == "out" else low.row(next(sources)) for o in declared.operands
        }
        low.emit(
            self.kernel,
            over=out,
            tiles=tiles,
            ints={i.name: value for i, value in zip(declared.ints, self.ints)},
            floats=dict(zip(declared.floats, self.floats)),
        )
