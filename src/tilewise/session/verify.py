"""Verifies a strategy: runs the same steps on one device and over a mesh, and compares the results
to the bit.

It compares the loss, the gradient norm and every gradient of each step, and after the last step
every parameter and optimizer state. It also checks that devices which hold the same part hold the
same bits. The report says "equal", or names the first difference. It holds for the sizes and steps
that ran, and for this machine's instruction-set level.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewise.core.dtypes import MAX_F32
from tilewise.core.errors import PlanError
from tilewise.core.mesh import DeviceMesh
from tilewise.core.validation import Validator, shown
from tilewise.plan import PlanTables
from tilewise.session.compute_graph import ComputeGraph
from tilewise.session.instance import GraphInstance
from tilewise.strategy import DistributionStrategy

__all__ = ["VerifyReport", "first_difference", "verify_strategy"]

_SPREAD = 0.1  # of the weights; with small ones, a residual's rounding would hide another order of additions
_validate = Validator("session", PlanError)
Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class VerifyReport:
    """Whether two runs were equal to the bit, and in words what was compared or the first difference."""

    equal: bool
    text: str


def first_difference(name: str, expected: np.ndarray, actual: np.ndarray) -> str | None:
    """The first difference of two arrays, to the bit; None if they are equal."""
    a, b = np.ascontiguousarray(expected), np.ascontiguousarray(actual)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{name}: {a.dtype}{list(a.shape)} on one device, {b.dtype}{list(b.shape)} over the mesh"
    different = np.flatnonzero(
        (a.view(np.uint8).reshape(a.size, -1) != b.view(np.uint8).reshape(b.size, -1)).any(axis=1)
    )
    if different.size == 0:
        return None
    at = tuple(int(i) for i in np.unravel_index(different[0], a.shape))
    values = f"{float(a[at])!r} on one device, {float(b[at])!r} over the mesh"
    return f"{name}{list(at)}: {values} ({different.size} of {a.size} differ)"


def verify_strategy(
    graph: ComputeGraph,
    mesh: DeviceMesh | Mapping[str, int],
    batches: Sequence[Batch],
    *,
    strategy: DistributionStrategy | None = None,
    accumulation: int = 1,
    batch_splits: int | None = None,
    recompute: str | Sequence[str] = "none",
    offload: str | Collection[str] = "none",
    offload_directory: str | Path | None = None,
    seed: int = 0,
    lr: float = 1e-3,
    report: Callable[[str], None] = lambda text: None,
    change: Callable[[PlanTables], PlanTables] = lambda plan: plan,
) -> VerifyReport:
    """Run the same steps on one device and over `mesh`, and compare every bit.

    Args:
        graph: a graph with a loss and an optimizer; its strategy is not changed.
        mesh: the devices to compare with one.
        strategy: how they are used; by default the strategy of the mesh's axis names (`dp`, `fsdp`,
            `tp`).
        batches: inputs of one step each.
        accumulation: microbatches per step over the mesh; the single device always uses one.
        batch_splits: as in `ComputeGraph.plan`.
        recompute: over the mesh, as in `ComputeGraph.plan`; the single device saves everything.
        offload: over the mesh, as in `ComputeGraph.plan`; the single device has everything in
            memory.
        offload_directory: directory of the devices' files, as in `GraphInstance`.
        seed: seed of the weights.
        lr: learning rate of every step.
        report: called with a description of the current work.
        change: applied to the plan over the mesh before it runs; tests plant a fault with it.

    Raises:
        LayoutError, PlanError: the mesh is not possible for this graph.
    """
    if len(batches) == 0:
        _validate.invalid("verify", "batches must be one or more", shown(batches), "pass a list of them")
    device_mesh = DeviceMesh(mesh) if isinstance(mesh, Mapping) else mesh
    _validate.integer("verify", "seed", seed, 0, (1 << 64) - 1)
    _validate.number("verify", "lr", lr, 0.0, MAX_F32)
    if strategy is None:
        strategy = DistributionStrategy.for_mesh(device_mesh)
    own = graph.distribution
    try:
        graph.set_distribution(DistributionStrategy.single())
        one = graph.plan({}, batch_splits=batch_splits)
        graph.set_distribution(strategy)
        options = {
            "accumulation": accumulation,
            "batch_splits": batch_splits,
            "recompute": recompute,
            "offload": offload,
        }
        mesh_plan = change(graph.plan(device_mesh, **options))  # type: ignore[arg-type]
    finally:
        graph.set_distribution(own)
    compared = 0
    with (
        graph.instantiate(one) as expected,
        graph.instantiate(mesh_plan, offload_directory=offload_directory) as distributed,
    ):
        expected.initialize(seed, _SPREAD)
        distributed.initialize(seed, _SPREAD)
        for number, batch in enumerate(batches):
            report(f"step {number + 1} of {len(batches)}: one device, then {device_mesh}")
            results = [model.step(batch, lr) for model in (expected, distributed)]
            pairs = {"loss": _pair(*(result.loss for result in results))}
            pairs |= {
                f"gradient of {n}": (expected.get_tensor(f"{n}.grad"), distributed.get_tensor(f"{n}.grad"))
                for n in expected.trainable_names()
            }
            pairs["norm of all gradients"] = _pair(*(result.grad_norm for result in results))
            difference = _compare(pairs) or _replicas(
                distributed, [f"{n}.grad" for n in distributed.trainable_names()]
            )
            if difference:
                return VerifyReport(False, f"NOT equal, first at step {number + 1}: {difference}")
            compared += len(pairs)
        states = expected.state_dict(), distributed.state_dict()
        difference = _compare({n: (states[0][n], states[1][n]) for n in states[0]})
        difference = difference or _replicas(distributed, distributed.lasting_names())
        if difference:
            return VerifyReport(False, f"NOT equal after {len(batches)} steps: {difference}")
        compared += len(states[0])
    what = f"{len(batches)} steps, {compared} tensors compared (losses, gradients, parameters, moments)"
    return VerifyReport(True, f"{device_mesh} equals one device to the bit: {what}")


def _pair(one: float, other: float) -> tuple[np.ndarray, np.ndarray]:
    return np.array([one], np.float32), np.array([other], np.float32)


def _replicas(model: GraphInstance, names: Sequence[str]) -> str | None:
    """The first tensor whose copies on several devices differ in a bit."""
    for name in names:
        pair = model.differing_replicas(name)
        if pair:
            return f"{name}: the copies on devices {pair[0]} and {pair[1]} differ"
    return None


def _compare(pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> str | None:
    return next((d for n, (a, b) in pairs.items() if (d := first_difference(n, a, b))), None)
