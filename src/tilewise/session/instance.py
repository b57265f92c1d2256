"""`GraphInstance`: a plan with memory, weights and workers. State really lives here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from zlib import crc32

import numpy as np

from tilewise.core.dims import Dim
from tilewise.core.errors import CheckpointError, PlanError, ShapeError
from tilewise.graph.builder import INV_COUNT
from tilewise.ir.graph import TensorSpec
from tilewise.optim import AdamW
from tilewise.optim.adamw import HYPER, master_name, moment_names
from tilewise.plan import Plan
from tilewise.session.assemble import assemble_program, make_executor
from tilewise.session.inputs import check_inputs, input_bounds
from tilewise.session.local import TensorStore

__all__ = ["GraphInstance", "StepResult"]

_STEP = "optimizer.step"


@dataclass(frozen=True)
class StepResult:
    """What a training step reports: mean loss over counted labels, and the gradient norm before clipping."""

    loss: float
    grad_norm: float


class GraphInstance:
    """A running model. Made by `ComputeGraph.instantiate`; close it, or use it with `with`.

    Args:
        plan: what to run.
        memory_limit_bytes: as in `ComputeGraph.instantiate`.
        deadline_s: the same.
        counted_labels: id of the labels and the index that is not counted, for graphs with a loss.
    """

    def __init__(
        self, plan: Plan, memory_limit_bytes: int, deadline_s: float, counted_labels: tuple[int, int] | None
    ) -> None:
        self.plan = plan
        self._programs = {name: assemble_program(plan, name) for name in plan.programs}
        self._executor = make_executor(plan, memory_limit_bytes, deadline_s)
        self._store = TensorStore(plan, self._executor)
        self._ids = {t.spec.name: t.id for t in plan.graph.tensors if t.spec.name and t.kind != "result"}
        self._counted = counted_labels
        self.step_count = 0
        self._closed = False
        self._bounds = input_bounds(plan.graph)
        self._can_go_back = False
        self._closed = False
        for tensor, value in plan.graph.constant_values.items():
            self._store.write(tensor, value)

    # ---- weights and other tensors ------------------------------------------------------------------------

    def parameter_names(self) -> list[str]:
        """Names of all parameters, in order of declaration."""
        return [t.spec.name for t in self.plan.graph.of_kind("parameter")]

    def lasting_names(self) -> list[str]:
        """Names of everything a step updates: weights, masters, moments."""
        names = [n for p in self.parameter_names() for n in (p, master_name(p), *moment_names(p))]
        return [n for n in names if n in self._ids]

    def differing_replicas(self, name: str) -> tuple[int, int] | None:
        """Two devices whose copies of a tensor differ in a bit; None when all agree (or there are none)."""
        return self._store.differing_replicas(self._id(name))

    def _id(self, name: str) -> int:
        if self._closed:
            raise PlanError(
                "[session.tensor] the model must be open; got a closed one; instantiate the graph again"
            )
        found = self._ids.get(name, self.plan.graph.outputs.get(name))
        if found is None:
            known = ", ".join([*self._ids, *self.plan.graph.outputs][:12])
            raise ShapeError(
                f"[session.tensor] the graph must have the tensor; got {name!r}; it has {known}, …"
            )
        return found

    def get_tensor(self, name: str) -> np.ndarray:
        """A tensor as a whole: a parameter (its fp32 master in training), state, input, or an output of the last run.

        Raises:
            ShapeError: no tensor has that name.
        """
        tensor = self._id(master_name(name) if master_name(name) in self._ids else name)
        return self._store.read(tensor)

    def set_tensor(self, name: str, value: np.ndarray) -> None:
        """Write a whole tensor; a parameter's master along with it.

        Raises:
            ShapeError: no tensor has that name, or the shape differs.
        """
        self._write(name, value, once=False)

    def _write_all(self, values: Iterable[tuple[str, np.ndarray]]) -> None:
        """Many parameters and states: each part is laid out once and broadcast to the devices that share it."""
        for name, value in values:
            self._write(name, value, once=True)
        if "broadcast" in self._programs:
            self._run("broadcast")

    def _write(self, name: str, value: np.ndarray, *, once: bool) -> None:
        tensor = self._id(name)
        shape = self.plan.graph.spec(tensor).shape
        if len(shape) != value.ndim or any(
            s != v for s, v in zip(shape, value.shape) if not isinstance(s, Dim)
        ):
            raise ShapeError(
                f"[session.set_tensor] shapes must agree; got {value.shape} for {name!r} {shape}; reshape it"
            )
        self._store.write(tensor, value, once=once)
        if master_name(name) in self._ids:
            self._store.write(self._ids[master_name(name)], value, once=once)

    def initialize(self, seed: int = 0, scale: float = 0.02) -> None:
        """Random weights (normal, standard deviation `scale`), ones for vectors; a function of seed and name alone."""
        self._write_all(
            (t.spec.name, _random(t.spec, seed, scale)) for t in self.plan.graph.of_kind("parameter")
        )

    def load_parameters(self, source: str | Path | Mapping[str, np.ndarray]) -> None:
        """All parameters from a safetensors file, a Hugging Face directory, or arrays by name (with or without the
        prefix `model.`).

        Raises:
            CheckpointError: a parameter is missing or has another shape; nothing is changed then.
        """
        from tilewise.checkpoint import open_weights

        weights = source if isinstance(source, Mapping) else open_weights(Path(source))
        found = {}
        for t in self.plan.graph.of_kind("parameter"):
            name = t.spec.name if t.spec.name in weights else f"model.{t.spec.name}"
            if name not in weights:
                raise CheckpointError(
                    f"[session.load_parameters] every parameter is needed; got none for {t.spec.name!r}"
                )
            found[t.spec.name] = name
        for name, stored in found.items():
            self._check_stored(name, np.shape(weights[stored]))
        self._write_all((name, np.asarray(weights[stored])) for name, stored in found.items())

    def _check_stored(self, name: str, shape: tuple[int, ...]) -> None:
        expected = self.plan.graph.spec(self._id(name)).shape
        if tuple(shape) != expected:
            raise CheckpointError(
                f"[session.load] shapes must agree; got {tuple(shape)} for {name!r} {expected}; nothing was changed"
            )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Parameters in fp32, optimizer moments and the step count, by name: all that resuming needs."""
        state = {name: self.get_tensor(name).astype(np.float32) for name in self.parameter_names()}
        for name in list(state):
            for moment in moment_names(name):
                if moment in self._ids:
                    state[moment] = self.get_tensor(moment)
        state[_STEP] = np.array([self.step_count], np.int64)
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """The inverse of `state_dict`; the two may have been on different meshes.

        Raises:
            CheckpointError: an entry is missing or has another shape; nothing is changed then.
        """
        wanted = [n for p in self.parameter_names() for n in (p, *moment_names(p)) if n in self._ids]
        missing = [n for n in (*wanted, _STEP) if n not in state]
        if missing:
            raise CheckpointError(
                f"[session.load_state_dict] every entry is needed; got none for {missing[0]!r}"
            )
        for name in wanted:
            self._check_stored(name, np.shape(state[name]))
        self._write_all((name, np.asarray(state[name])) for name in wanted)
        self.step_count = int(state[_STEP][0])

    # ---- running ------------------------------------------------------------------------------------------

    def _feed(self, inputs: Mapping[str, np.ndarray]) -> None:
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        symbols = check_inputs(self.plan.graph, arrays, self._bounds)
        for size, given in symbols.items():
            self._store.symbols[self.plan.shapes.symbols.index(size)] = given
        for name, value in arrays.items():
            self._store.write(self._id(name), value)
        if self._counted is not None:
            labels, ignored = arrays[self.plan.graph.spec(self._counted[0]).name], self._counted[1]
            count = int(np.count_nonzero(labels != ignored))
            self.set_tensor(INV_COUNT, np.array([1.0 / max(count, 1)], np.float32))

    def _run(self, name: str) -> None:
        if name not in self._programs:
            raise PlanError(
                f"[session.{name}] this plan has no such program; got programs {', '.join(self._programs)}; "
                "a step needs a loss and an optimizer, forward and backward alone need accumulation 1"
            )
        if self._closed:
            raise PlanError(
                "[session.run] the model must be open; got a closed one; instantiate the graph again"
            )
        self._executor.run(self._programs[name], self._store.symbols)

    def step(self, batch: Mapping[str, np.ndarray], lr: float) -> StepResult:
        """One training step: all microbatches, reductions, clipping, update.

        Args:
            batch: inputs by name; the whole global batch.
            lr: learning rate of this step.

        Raises:
            ShapeError: an input has another shape.
            TaskFailed: a task failed; parameters may be partly updated.
        """
        optimizer = self._optimizer()
        self._feed(batch)
        t = self.step_count + 1
        hyper = [
            lr,
            optimizer.beta1,
            optimizer.beta2,
            optimizer.eps,
            1 - optimizer.beta1**t,
            1 - optimizer.beta2**t,
            0,
            0,
        ]
        self.set_tensor(HYPER, np.array(hyper, np.float32))
        self._can_go_back = False
        self._run("step")
        self.step_count = t
        return StepResult(float(self.get_tensor("loss")[0]), float(self.get_tensor("grad_norm")[0]))

    def _optimizer(self) -> AdamW:
        if not isinstance(self.plan.optimizer, AdamW):
            raise PlanError(
                "[session.step] a step needs an optimizer; got none; call graph.optimize before planning"
            )
        return self.plan.optimizer

    def forward(self, **inputs: np.ndarray) -> None:
        """Run the forward pass; read results with `get_tensor`."""
        self._feed(inputs)
        self._run("forward")
        self._can_go_back = True

    def backward(self) -> None:
        """Run the backward pass of the last `forward`; read gradients as `<parameter>.grad`.

        Raises:
            PlanError: there was no `forward` since the last `backward`, which writes over what it needs.
        """
        if not self._can_go_back:
            raise PlanError(
                "[session.backward] each backward needs a forward of its own; got none; call forward first"
            )
        self._can_go_back = False
        self._run("backward")

    # ---- looking inside -----------------------------------------------------------------------------------

    def memory_usage(self) -> list[dict[str, int]]:
        """Bytes allocated per device; `total` counts the arena itself, the rest is how the plan fills it."""
        usage = self.plan.estimate_memory_usage()
        for device, allocated in zip(usage, self._executor.allocated_bytes()):
            device["total"] = allocated
        return usage

    def trace(self, enable: bool) -> None:
        """Record the timeline of the following runs."""
        self._executor.trace(enable)

    def timeline(self) -> list[tuple[Any, ...]]:
        """Tasks of the last run, when traced: (device, worker, label, row, submit, ready, start, end in ns)."""
        return list(self._executor.timeline())

    def transfers(self) -> dict[str, list[int]]:
        """Elements read from other devices' memory since the start or `reset_transfers`, per label and device."""
        return dict(self._executor.transfers())

    def reset_transfers(self) -> None:
        """Count transfers anew."""
        self._executor.reset_transfers()

    def inject(self, kind: str, device: int, label: str, index: int) -> None:
        """For tests: make a task `throw` or its worker `stall` in the next run."""
        self._executor.inject(kind, device, label, index)

    def close(self) -> None:
        """Stop the workers and give the memory back; the model cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self._executor.close()
            del self._executor, self._store, self._programs

    def __enter__(self) -> GraphInstance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _random(spec: TensorSpec, seed: int, scale: float) -> np.ndarray:
    """First value of a parameter: a function of seed, name and element, never of placement."""
    shape = tuple(s for s in spec.shape if isinstance(s, int))
    if spec.storage == "vector":
        return np.ones(shape, np.float32)
    generator = np.random.Generator(np.random.Philox(key=[seed, crc32(spec.name.encode())]))
    return generator.standard_normal(shape, np.float32) * np.float32(scale)
