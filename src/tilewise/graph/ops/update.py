"""The optimizer's update of one parameter, element by element, as a small program of arithmetic
steps.

`optim.rule` writes the program. The op and its kernel (native/kernels/update.cc) do not know which
optimizer it belongs to. The op runs once per step, after all microbatches. It writes the weight and
the states in place and has no gradient. If the clipping scale is NaN (`global_norm`), it leaves
every tensor unchanged.
"""

from __future__ import annotations

from tilewise.graph.ops.common import fixed, require
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Op, Specs, operand, operands, optional, register
from tilewise.kernels import find_update_problem

__all__: list[str] = []


@register
class Update(Op):
    """Updates one parameter and its optimizer states. `master` is the fp32 value of a bf16 weight;
    it is absent if the weight is fp32.

    A step is four integers: its kind and the numbers of three values. Values are numbered in this
    order: weight, states, gradient, hyper-parameters, constants, results of steps. `left` has the
    numbers of the values to which the weight and each state are set.
    """

    name = "update"
    weight: int = operand("...", packed=True)
    master: int | None = optional("...", dtype="f32", packed=True)
    state: tuple[int, ...] = operands("...", least=0, dtype="f32", packed=True)
    grad: int = operand("...", dtype="f32", packed=True)
    hyper: int = operand("h", dtype="f32")
    clip: int = operand("2", dtype="f32")
    steps: tuple[int, ...]
    constants: tuple[float, ...]
    left: tuple[int, ...]

    def check(self, spec: Specs) -> None:
        """The program uses values that exist."""
        weight = spec(self.weight)
        is_f32 = weight.dtype.name == "f32" or self.master is not None
        require(is_f32, self.name, "the weight or its master must be f32", weight)
        count = len(self.state)
        first = count + 2 + fixed(spec(self.hyper).shape[0]) + len(self.constants)
        problem = find_update_problem(first, count + 1, self.steps, self.left)
        rule = "steps must be of known kinds and use values that exist before them"
        require(not problem, self.name, rule, advice=f"{problem}: write the program with optim.rule")

    def lower(self, low: Lowering) -> None:
        """One task per block of rows, elementwise over the weight's storage."""
        flat = low.flat(self.weight)
        low.emit(
            "update",
            over=flat,
            step=flat.tile_rows,
            dtype=low.tensor(self.weight).dtype,
            tiles={
                "weight": None if self.master is None else low.row(flat),
                "master": low.row(flat if self.master is None else low.flat(self.master)),
                "state": [low.row(low.flat(s)) for s in self.state],
                "grad": low.row(low.flat(self.grad)),
                "hyper": low.whole(self.hyper),
                "clip": low.whole(self.clip),
            },
            ints={
                "packed": int(low.spec(self.weight).storage == "packed"),
                "num_steps": len(self.steps) // 4,
                "step": self.steps,
                "left": self.left,
            },
            floats={"constant": self.constants},
        )
