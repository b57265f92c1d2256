"""The operators that the benchmarks of tile programs compare, each as a call on two devices.

The programs of examples 08 to 11; the same products with all data present; the same transfers
without products; and the operators that the planner makes of a graph.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilewise as tw
from tilewise import comm
from tilewise.ir.program import DeviceClass, LoweredTemplate, TileProgram
from tilewise.session.assemble import native_program

__all__ = ["DEVICES", "OPERATORS", "Example", "Operator", "Sizes", "copies", "nothing", "planned", "products"]

Array = NDArray[np.float32]
Call = Callable[[], object]
DEVICES = 2
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class Sizes:
    """Of x [m, k] and w [n, k], and the rows of a tile."""

    m: int
    k: int
    n: int
    rows: int


@dataclass(frozen=True)
class Operator:
    """An operator of two devices.

    Attributes:
        example: file and function of the program.
        is_reduced: whether each device has columns of x, so that products are parts of sums;
            otherwise rows of x, which are gathered.
        transfers: what the bound says of transfers, for people.
    """

    example: tuple[str, str]
    is_reduced: bool
    transfers: str


OPERATORS = {
    "all-gather + matmul": Operator(
        ("08_all_gather_matmul", "all_gather_matmul"), False, "each device puts its rows of x"
    ),
    "rank swizzle": Operator(
        ("11_rank_swizzle", "swizzled"),
        False,
        "each device copies its rows of x, and its products read the other's in place",
    ),
    "matmul + reduce-scatter": Operator(
        ("09_matmul_reduce_scatter", "matmul_reduce_scatter"),
        True,
        "each device reads the other's part of its rows and writes as many; its own part is not counted",
    ),
    "matmul + all-reduce": Operator(
        ("10_matmul_all_reduce", "matmul_all_reduce"),
        True,
        "as reduce-scatter, and each device puts its rows of the sum",
    ),
}


# ---- programs --------------------------------------------------------------------------------------------


@tw.tile_program
def products(x: Any, w: Any, out: Any, rows: int) -> None:
    """out = x · wᵀ, from data that the device has."""
    for t in comm.tiles(x.shape[0] // rows):
        comm.matmul(out.tile(t, rows=rows), x.tile(t, rows=rows), w)


@tw.tile_program
def copies(source: Any, target: Any, rows: int) -> None:
    """Every device puts its tiles into the other's memory."""
    remote = comm.symm_at(target, (comm.rank() + 1) % comm.num_ranks())
    for t in comm.tiles(source.shape[0] // rows):
        comm.put(remote.tile(t, rows=rows), source.tile(t, rows=rows))


@tw.tile_program
def nothing(x: Any) -> None:
    """No task."""


def example_function(operator: Operator, sizes: Sizes) -> Any:
    """The program of an example, for other sizes."""
    file, function = operator.example
    spec = importlib.util.spec_from_file_location(f"example_{file}", EXAMPLES / f"{file}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(M=sizes.m, K=sizes.k, N=sizes.n, ROWS=sizes.rows)
    return getattr(module, function)


# ---- the planner's operators -----------------------------------------------------------------------------


def planned(name: str, x: Array, w: Array, opened: ExitStack) -> tuple[Call, Array]:
    """A call of the planner's operator on the same operands, and its result. The call does not
    gather the result to the first device.
    """
    operator = OPERATORS[name]
    label = tw.DimLabel("mlp")  # which the strategy puts on the axis tp
    graph = tw.ComputeGraph("product", k_splits=DEVICES)
    labels = [None, label] if operator.is_reduced else [label, None]
    if operator.is_reduced:
        a = graph.input([*x.shape], name="x", labels=[None, label])
    else:
        a = graph.input([*x.shape], name="x", labels=[None, None], layout=(None, "tp"))
    y = graph.matmul(a, graph.parameter([*w.shape], name="w", labels=labels), trans_b=True)
    if name == "matmul + reduce-scatter":
        graph.constrain(y, (None, "tp"))
    graph.output(y, "y")
    plan = graph.plan({"tp": DEVICES}, workers_per_device=1)
    model = opened.enter_context(graph.instantiate(plan))
    model.load_parameters({"w": w})
    model.forward(x=x)
    wanted = model.get_tensor("y")
    program = native_program(without_gathers(plan.program), plan.symbol_bounds)
    symbols = model._tensors.store.symbols
    return lambda: model._executor.run(program, symbols, "forward", None), wanted


def without_gathers(program: TileProgram) -> TileProgram:
    """A program without the gathers of outputs to the first device."""

    def without_gather_instructions(template: LoweredTemplate) -> LoweredTemplate:
        gathers = [(c.first, c.last) for c in template.collectives if c.kind == "gather"]
        instructions = tuple(
            instruction
            for number, instruction in enumerate(template.instructions)
            if not any(first <= number < last for first, last in gathers)
        )
        return replace(template, instructions=instructions, collectives=())

    def cut(of: DeviceClass) -> DeviceClass:
        return replace(of, templates=tuple(without_gather_instructions(t) for t in of.templates))

    return replace(program, classes=tuple(cut(of) for of in program.classes))


# ---- examples --------------------------------------------------------------------------------------------


class Example:
    """An operator's tensors on two devices of one worker each, and calls that take turns.

    Args:
        name: of the operator.
        sizes: of its operands.
        opened: closes the devices.

    Attributes:
        operands: x [m, k] and w [n, k].
        group: the devices.
        program, arguments: the example's.
        calls: `nothing`, an empty program; `copies`; `products`; `example`.
        copied_bytes: bytes that each device copies in `copies`.
    """

    def __init__(self, name: str, sizes: Sizes, opened: ExitStack) -> None:
        self.name, self.operator, self.sizes = name, OPERATORS[name], sizes
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal((size, sizes.k), np.float32) for size in (sizes.m, sizes.n))
        self.operands = x, w
        self.group = opened.enter_context(tw.DeviceGroup({"tp": DEVICES}, workers_per_device=1))
        alone = self._reduced() if self.operator.is_reduced else self._gathered()
        source, target = (self.group.symm_tensor(self._copied.shape) for _ in range(2))
        self.copied_bytes = source.num_bytes
        self.program = example_function(self.operator, sizes)
        self.calls: dict[str, Call] = {
            "nothing": lambda: nothing(source),
            "copies": lambda: copies(source, target, sizes.rows),
            "products": lambda: products(*alone, sizes.rows),
            "example": lambda: self.program(*self.arguments),
        }

    def also(self, name: str) -> Call:
        """A call of another example on the same tensors."""
        program = example_function(OPERATORS[name], self.sizes)
        return lambda: program(*self.arguments)

    def _gathered(self) -> Any:
        """Allocate for an all-gather. Returns whole x, the device's w and out."""
        sizes, symm = self.sizes, self.group.symm_tensor
        m, n = sizes.m // DEVICES, sizes.n // DEVICES
        own, every, gathered = symm((m, sizes.k)), symm((sizes.m, sizes.k)), symm((sizes.m, sizes.k))
        weight, out = symm((n, sizes.k), packed=True), symm((sizes.m, n))
        every.write(self.operands[0])
        for tensor, whole in zip((own, weight), self.operands):
            _write_parts(tensor, whole, 0)
        self.arguments = own, gathered, weight, out, self.group.signals(sizes.m // sizes.rows)
        self._copied, self._out, self._dim = own, out, 1
        return every, weight, out

    def _reduced(self) -> Any:
        """Allocate for a sum. Returns the device's x, w and part."""
        sizes, symm, is_whole = self.sizes, self.group.symm_tensor, self.name == "matmul + all-reduce"
        own, weight = (
            symm((sizes.m, sizes.k // DEVICES)),
            symm((sizes.n, sizes.k // DEVICES), packed=True),
        )
        part = symm((sizes.m, sizes.n))
        out = symm((sizes.m if is_whole else sizes.m // DEVICES, sizes.n))
        for tensor, whole in zip((own, weight), self.operands):
            _write_parts(tensor, whole, 1)
        signals = [self.group.signals(count) for count in (sizes.m // sizes.rows, 1)[: 1 + is_whole]]
        self.arguments = own, weight, part, out, *signals
        # two copies of half the rows: those of the sum, and for an all-reduce those of the result
        self._copied, self._out, self._dim = out, out, None if is_whole else 0
        return own, weight, part

    def result_of(self, call: Call) -> Array:
        """What a call computes, of all devices."""
        self._out.write(np.zeros(self._out.shape, np.float32))
        call()
        if self._dim is None:
            return self._out.read(DEVICES - 1)
        return np.concatenate([self._out.read(device) for device in range(DEVICES)], axis=self._dim)


def _write_parts(tensor: tw.SymmTensor, whole: Array, dim: int) -> None:
    for device, part in enumerate(np.split(whole, DEVICES, axis=dim)):
        tensor.write(part, device)
