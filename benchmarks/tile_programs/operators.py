"""The operators that the benchmarks of tile programs compare, each as a call on two devices.

The programs of examples 08, 09 and 10; the same products with all data present; the same transfers
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

__all__ = ["OPERATORS", "DEVICES", "Comparison", "Operator", "Sizes", "open_comparison", "random_operands"]

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


@dataclass(frozen=True)
class Comparison:
    """Calls that take turns.

    Attributes:
        group: the devices of the tile programs.
        calls: `example`, `products`, `copies`, `planned`, and `nothing`, an empty program.
        copied_bytes: bytes that each device copies in `copies`.
        result: the example's result after a call.
        wanted: the planner's result.
    """

    group: tw.DeviceGroup
    calls: dict[str, Call]
    copied_bytes: int
    result: Callable[[], Array]
    wanted: Array


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


def planned(operator: Operator, name: str, x: Array, w: Array, opened: ExitStack) -> tuple[Call, Array]:
    """A call of the planner's operator on the same operands, and its result. The call does not
    gather the result to the first device.
    """
    label = tw.DimLabel("mlp")  # which the strategy puts on the axis tp
    graph = tw.ComputeGraph("product", k_splits=DEVICES)
    labels = [None, label] if operator.is_reduced else [label, None]
    if operator.is_reduced:
        a = graph.input([*x.shape], name="x", labels=[None, label])
    else:
        a = graph.input([*x.shape], name="x", labels=[None, None], layout=(None, "tp"))
    y = graph.matmul(a, graph.parameter([*w.shape], name="w", labels=labels), transpose_b=True)
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

    def kept(template: LoweredTemplate) -> LoweredTemplate:
        gathers = [(c.first, c.last) for c in template.collectives if c.kind == "gather"]
        instructions = tuple(
            instruction
            for number, instruction in enumerate(template.instructions)
            if not any(first <= number < last for first, last in gathers)
        )
        return replace(template, instructions=instructions, collectives=())

    def cut(of: DeviceClass) -> DeviceClass:
        return replace(of, templates=tuple(kept(t) for t in of.templates))

    return replace(program, classes=tuple(cut(of) for of in program.classes))


# ---- comparisons -----------------------------------------------------------------------------------------


def random_operands(sizes: Sizes) -> tuple[Array, Array]:
    """x [m, k] and w [n, k]."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((sizes.m, sizes.k), np.float32), rng.standard_normal(
        (sizes.n, sizes.k), np.float32
    )


def open_comparison(name: str, sizes: Sizes, opened: ExitStack) -> Comparison:
    """Allocate an operator's tensors on two devices of one worker each, and plan its counterpart."""
    operator = OPERATORS[name]
    x, w = random_operands(sizes)
    group = opened.enter_context(tw.DeviceGroup({"tp": DEVICES}, workers_per_device=1))
    build = _reduced if operator.is_reduced else _gathered
    example, result, alone, copied, copied_bytes = build(name, sizes, group, x, w)
    call, wanted = planned(operator, name, x, w, opened)
    calls = {
        "nothing": lambda: nothing(alone[0]),
        "copies": copied,
        "products": lambda: products(*alone, sizes.rows),
        "example": example,
        "planned": call,
    }
    return Comparison(group, calls, copied_bytes, result, wanted)


Built = tuple[Call, Callable[[], Array], tuple[Any, Any, Any], Call, int]


def _gathered(name: str, sizes: Sizes, group: tw.DeviceGroup, x: Array, w: Array) -> Built:
    m, n, rows = sizes.m // DEVICES, sizes.n // DEVICES, sizes.rows
    own, every = group.symm_tensor((m, sizes.k)), group.symm_tensor((sizes.m, sizes.k))
    gathered, out = group.symm_tensor((sizes.m, sizes.k)), group.symm_tensor((sizes.m, n))
    weight, landed = group.symm_tensor((n, sizes.k), packed=True), group.symm_tensor((m, sizes.k))
    every.write(x)
    for device in range(DEVICES):
        own.write(np.split(x, DEVICES)[device], device)
        weight.write(np.split(w, DEVICES)[device], device)
    program, ready = example_function(OPERATORS[name], sizes), group.signals(sizes.m // rows)
    return (
        lambda: program(own, gathered, weight, out, ready),
        lambda: np.concatenate([out.read(device) for device in range(DEVICES)], axis=1),
        (every, weight, out),
        lambda: copies(own, landed, rows),
        own.num_bytes,
    )


def _reduced(name: str, sizes: Sizes, group: tw.DeviceGroup, x: Array, w: Array) -> Built:
    m, k, rows = sizes.m // DEVICES, sizes.k // DEVICES, sizes.rows
    is_all = name == "matmul + all-reduce"
    own, part = group.symm_tensor((sizes.m, k)), group.symm_tensor((sizes.m, sizes.n))
    weight, out = group.symm_tensor((sizes.n, k), packed=True), group.symm_tensor((m + m * is_all, sizes.n))
    source, target = (group.symm_tensor(out.shape) for _ in range(2))
    for device in range(DEVICES):
        own.write(np.split(x, DEVICES, axis=1)[device], device)
        weight.write(np.split(w, DEVICES, axis=1)[device], device)
    program, ready = example_function(OPERATORS[name], sizes), group.signals(sizes.m // rows)
    signals = (ready, group.signals(1)) if is_all else (ready,)
    return (
        lambda: program(own, weight, part, out, *signals),
        lambda: out.read(0) if is_all else np.concatenate([out.read(device) for device in range(DEVICES)]),
        (own, weight, part),
        lambda: copies(source, target, rows),
        source.num_bytes,
    )
