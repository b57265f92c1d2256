"""The optimizer's update of one parameter, element by element, as a small program of arithmetic
steps.

`optim.rule` writes the program. The op and its kernel (native/kernels/update.cc) do not know which
optimizer it belongs to. The op runs once per step, after all microbatches. It writes the weight and
the states in place and has no gradient. If the clipping scale is NaN (`global_norm`), it leaves
every tensor unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.graph.ops.common import require
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.lowering import Lowering
from tilewise.ir.op import Factors, Op, Signature, register
from tilewise.kernels import find_update_problem

__all__: list[str] = []


def _num_operands(attrs: Mapping[str, Any]) -> int:
    return 5 + int(attrs["num_states"])


@register
class Update(Op):
    """Updates one parameter and its optimizer states. Inputs are weight, master (the fp32 value of
    a bf16 weight; None if the weight is fp32), states, gradient, hyper-parameters and clip. There
    is no output.

    Attributes of a call are `steps`, `constants` and `left`. A step is four integers: its kind and
    the numbers of three values. Values are numbered in this order: weight, states, gradient,
    hyper-parameters, constants, results of steps. `left` has the numbers of the values to which the
    weight and each state are set.
    """

    name = "update"
    signature = Signature(
        _num_operands,
        absent=frozenset({1}),
        attributes={"num_states": int, "steps": tuple, "constants": tuple, "left": tuple},
    )

    def takes_packed(self, position: int, attrs: Mapping[str, Any]) -> bool:
        """All states are stored like the weight."""
        return True

    def infer(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> list[TensorSpec]:
        """No output: weight and states are written in place."""
        weight, master, *rest = inputs
        assert weight is not None
        states, gradient, hyper = rest[: attrs["num_states"]], rest[-3], rest[-2]
        alike = [s for s in (weight, master, *states, gradient) if s is not None]
        require(
            all(s.shape == weight.shape and s.storage == weight.storage for s in alike),
            self.name,
            "weight, states and gradient must have one shape and storage",
            *alike,
        )
        require(
            all(s.dtype.name == "f32" for s in (*alike[1:], *([weight] if master is None else []))),
            self.name,
            "the weight or its master, states and gradient must be f32",
            *alike,
        )
        num_hyper = hyper.shape[0] if hyper is not None else 0
        assert isinstance(num_hyper, int)
        first = attrs["num_states"] + 2 + num_hyper + len(attrs["constants"])
        problem = find_update_problem(first, attrs["num_states"] + 1, attrs["steps"], attrs["left"])
        require(
            not problem,
            self.name,
            "steps must be of known kinds and use values that exist before them",
            advice=f"{problem}: write the program with optim.rule",
        )
        return []

    def factors(self, inputs: Sequence[TensorSpec | None], attrs: Mapping[str, Any]) -> Factors:
        """States have the layout of their weight."""
        assert inputs[0] is not None
        names = tuple(f"w{i}" for i in range(len(inputs[0].shape)))
        every = tuple(names if spec is not None else None for spec in inputs[:-2])
        return Factors((*every, ("h",), ("c",)), ())

    def lower(self, low: Lowering, op: OpNode) -> None:
        """One task per block of rows, elementwise over the weight's storage."""
        weight, master, *rest = op.inputs
        *states, gradient, hyper, clip = (i for i in rest if i is not None)
        assert weight is not None
        flat = low.flat(weight)
        attrs = op.attrs
        low.emit(
            "update",
            op,
            over=flat,
            step=flat.tile_rows,
            dtype=low.tensor(weight).dtype,
            tiles={
                "weight": None if master is None else low.row(flat),
                "master": low.row(flat if master is None else low.flat(master)),
                "state": [low.row(low.flat(s)) for s in states],
                "grad": low.row(low.flat(gradient)),
                "hyper": low.whole(hyper),
                "clip": low.whole(clip),
            },
            ints={
                "packed": int(low.spec(weight).storage == "packed"),
                "num_steps": len(attrs["steps"]) // 4,
                "step": attrs["steps"],
                "left": attrs["left"],
            },
            floats={"constant": attrs["constants"]},
        )
