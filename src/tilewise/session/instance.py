"""`GraphInstance`: a plan with memory, weights and workers. It holds the state of a model.

Only one thread may make blocking calls at a time (`session/one_call.py`); a second one gets an
error, and nothing has changed. Asynchronous calls run on a thread of the instance, in the order in
which they were made, and blocking calls take their turn among them. Access to tensors by name, and
the checks of new values, are in `session/tensors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint import (
    FileTensor,
    LazyTensor,
    PartedTensor,
    Tensor,
    is_distributed,
    open_distributed,
    open_weights,
)
from tilewise.core.dtypes import MAX_F32
from tilewise.core.errors import CheckpointError, NotFinite, PlanError
from tilewise.core.open_objects import note_open
from tilewise.core.validation import Validator, shown
from tilewise.ir.graph import TensorSpec
from tilewise.observe import Trace
from tilewise.optim import Optimizer
from tilewise.plan import PlanTables
from tilewise.runtime import CallHandle
from tilewise.runtime.timelines import ExecutorTimeline
from tilewise.session.assemble import assemble_program, make_executor
from tilewise.session.inputs import as_array, check_constants
from tilewise.session.loading import LoadReport, Progress, is_loaded_from_file, load_tensors
from tilewise.session.one_call import OneCall
from tilewise.session.tensors import NamedTensors, RunInputs

__all__ = ["GraphInstance", "StepResult"]

Array = NDArray[Any]
_STEP = "optimizer.step"
_MAX_STEPS = 1 << 53
_MAX_BYTES = 1 << 62
_LONGEST_S = 1e9
_FARTHEST = 16.0  # standard deviations; no initial value is farther from 0
_validate = Validator("session", PlanError)


@dataclass(frozen=True)
class StepResult:
    """The result of a training step.

    Attributes:
        loss: mean over the counted labels.
        grad_norm: norm of all gradients before clipping.
        is_skipped: one of the two was not finite, and the step changed no weight.
    """

    loss: float
    grad_norm: float
    is_skipped: bool = False


class GraphInstance:
    """A running model; close it, or use it with `with`.

    It needs only a plan: `ComputeGraph.instantiate` uses the graph's own,
    `GraphInstance(Plan.load(path))` one from a file, in a process without the graph. It belongs to
    the process that created it, and executes one call at a time, in the order in which calls are
    made. `step_async`, `forward_async` and `backward_async` return at once, and any thread may make
    them; every other call waits until they have ended. If two threads make such blocking calls at
    the same time, the second one raises PlanError and changes nothing.

    Args:
        plan: what to run.
        memory_limit_bytes: over all devices; 0 for the machine's own limit.
        deadline_s: longest time without progress before a run is aborted.
        offload_directory: directory of the devices' unnamed files; by default the system's
            directory of temporary files. Used if the plan offloads something.

    Raises:
        ResourceError: not enough memory, or no room in the directory.
        PlanError: it is not a plan; a limit, deadline or directory is invalid; or the program's
            devices would block each other.
        ShapeError: a constant used as an index is out of range.
    """

    def __init__(
        self,
        plan: PlanTables,
        *,
        memory_limit_bytes: int = 0,
        deadline_s: float = 60.0,
        offload_directory: str | Path | None = None,
    ) -> None:
        _validate.integer("instantiate", "memory_limit_bytes", memory_limit_bytes, 0, _MAX_BYTES)
        _validate.number("instantiate", "deadline_s", deadline_s, 1e-3, _LONGEST_S)
        if offload_directory is not None:
            offload_directory = _validate.path("instantiate", "offload_directory", offload_directory)
        plan.require_memory(memory_limit_bytes)
        check_constants(plan.graph)
        self.plan = plan
        self._program = assemble_program(plan)
        self._executor = make_executor(plan, memory_limit_bytes, deadline_s, offload_directory)
        self._timeline = ExecutorTimeline(self._executor, plan.settings.workers_per_device)
        self._tensors = NamedTensors(plan, self._executor)
        self.step_count = 0
        self.seed = 0
        self.is_training = False
        self._alone = OneCall()
        self._writes_at_forward: int | None = None
        note_open(self)

    def train(self, mode: bool = True, *, seed: int | None = None) -> GraphInstance:
        """Let `forward` drop elements (`GraphBuilder.dropout`) as in the next step. `step` always does.

        Args:
            mode: False for evaluation, as at the beginning; `eval()` is the same.
            seed: seed of the masks, in [0, 2^31); by default that of `initialize`, or 0.
        """
        self.is_training = _validate.truth("train", "mode", mode)
        if seed is not None:
            self.seed = _validate.integer("train", "seed", seed, 0, (1 << 31) - 1)
        return self

    def eval(self) -> GraphInstance:
        """Let `forward` drop nothing."""
        return self.train(False)

    # ---- weights and other tensors ------------------------------------------------------------------------

    def parameter_names(self) -> list[str]:
        """Names of all parameters, in order of declaration."""
        return self._tensors.parameter_names()

    def trainable_names(self) -> list[str]:
        """Names of the parameters that training changes, in order of declaration."""
        return self._tensors.trainable_names()

    def lasting_names(self) -> list[str]:
        """Names of everything that a step updates: weights, masters, optimizer states."""
        return self._tensors.lasting_names()

    def differing_replicas(self, name: str) -> tuple[int, int] | None:
        """Two devices whose copies of a tensor differ in a bit; None if all agree or there are no
        copies.
        """
        with self._alone("differing_replicas"):
            return self._tensors.differing_replicas(name)

    def get_tensor(self, name: str, *, copy: bool = True) -> Array:
        """A whole tensor: a parameter (its fp32 master in training), state, input, or an output of
        the last run.

        Args:
            name: the tensor's name.
            copy: False to read an input or output without a copy if it is contiguous; it is valid
                until the next run. For a parameter this reads the weight, not its master.
                `torch.from_dlpack` and `numpy.from_dlpack` share the array's memory; for bf16, pass
                `tilewise.to_dlpack(array)`.

        Raises:
            ShapeError: no tensor has that name.
            PlanError: a gradient is read after another forward pass, whose activations have
                overwritten it.
        """
        with self._alone("get_tensor"):
            return self._tensors.read(name) if copy else self._tensors.view(name)

    def set_tensor(self, name: str, value: Array) -> None:
        """Write a whole input, parameter (with its master) or state. Like all arrays that a model
        accepts, the value may be an array of another library that has `__dlpack__`, such as a
        tensor of PyTorch on the CPU.

        Raises:
            ShapeError: there is no such tensor; or the value has another shape or kind, is beyond
                the dtype's range, has an index out of range, or is negative for a mean of squares.
        """
        with self._alone("set_tensor"):
            self._tensors.set(name, value)

    def _write_all(self, values: Mapping[str, Tensor], on_progress: Progress | None = None) -> LoadReport:
        """Write many parameters and states. Each part is converted once and broadcast to the
        devices that share it. After an error in the middle, only another call of this kind makes
        the model usable again.
        """
        self._alone.is_torn = True
        report = load_tensors(self._tensors, values, on_progress)
        if "broadcast" in self.plan.programs:
            self._run("broadcast")
        self._alone.is_torn = False
        return report

    def initialize(self, seed: int = 0, scale: float = 0.02) -> None:
        """Set initial weights: random, ones or zeros (`GraphBuilder.parameter`). They depend only
        on seed and name.

        Args:
            seed: seed of the random numbers.
            scale: the weights' standard deviation, times each one's `init_scale`
                (`GraphBuilder.parameter`). All values must be finite in fp32.

        Raises:
            PlanError: seed or scale is invalid, or another thread's call is in progress.
        """
        _validate.integer("initialize", "seed", seed, 0, (1 << 64) - 1)
        specs = self._tensors.parameter_specs().values()
        widest = max((1.0, *(s.init_scale for s in specs)))
        _validate.number("initialize", "scale", scale, 0.0, MAX_F32 / _FARTHEST / widest)
        with self._alone("initialize"):
            self.seed = seed % (1 << 31)
            self._write_all(
                {
                    s.name: LazyTensor(
                        _fixed_shape(s), np.dtype(np.float32), partial(_random, s, seed, scale)
                    )
                    for s in specs
                }
            )

    def load_parameters(
        self,
        source: str | Path | Mapping[str, Tensor],
        *,
        on_progress: Progress | None = None,
    ) -> LoadReport:
        """Load all parameters from a safetensors file, a Hugging Face directory, a state dict of
        `torch.save`, a distributed checkpoint of PyTorch (a directory), or a mapping of names (with
        or without the prefix `model.`) to arrays or tensors in files, such as `StoredWeights` or
        the result of `open_distributed(directory, "model")`.

        Names, shapes and dtypes of all are checked before anything is changed, and so are the
        values of arrays. Values in files are checked while they are read into place. If one is not
        finite, or reading fails, the model rejects all calls until its parameters are loaded or
        initialized again.

        Args:
            source: fp32, bf16, fp16 or fp64; rounded to the parameter's dtype.
            on_progress: called with the bytes read so far and in total.

        Returns:
            The bytes that each device has read.

        Raises:
            CheckpointError: a parameter is missing, has another shape, is not a floating-point
                array, or has a value that is not finite in the parameter's dtype; or the source has
                a tensor for which the graph has no parameter.
        """
        _validate.function("load_parameters", "on_progress", on_progress)
        with self._alone("load_parameters"):
            weights = source if isinstance(source, Mapping) else _open(Path(source))
            names = self.parameter_names()
            stored_names = {name: name if name in weights else f"model.{name}" for name in names}
            _require_only("load_parameters", "the graph's parameters", weights, stored_names.values())
            return self._load("load_parameters", weights, stored_names, on_progress)

    def _load(
        self,
        call: str,
        stored: Mapping[str, Tensor],
        stored_names: Mapping[str, str],
        on_progress: Progress | None = None,
    ) -> LoadReport:
        """Check everything, then write everything."""
        for name, key in stored_names.items():
            _require_entry(call, stored, name, key)
            value = stored[key]
            if not is_loaded_from_file(value, self._tensors, name):
                value = as_array(call, key, value)
            self._tensors.check_stored(call, name, value)
        for key in stored_names.values():
            value = stored[key]
            if isinstance(value, (FileTensor, PartedTensor)):
                value.verify()
        return self._write_all(_Renamed(stored, stored_names), on_progress)

    def parameters(self) -> dict[str, LazyTensor]:
        """All parameters (fp32 masters, in training) by name. Each is assembled when it is
        converted to an array, so that models larger than one device's memory can be saved.
        """
        return {
            name: LazyTensor(_fixed_shape(spec), spec.dtype.numpy, partial(self.get_tensor, name))
            for name, spec in self._tensors.master_specs().items()
        }

    def state_dict(self) -> dict[str, Array]:
        """Trainable parameters in fp32, optimizer states and the step count, by name: everything that
        training changes, and so all that resuming needs besides frozen parameters. It is a copy;
        later steps do not change it.
        """
        with self._alone("state_dict"):
            tensors = self._tensors
            names = tensors.trainable_names()
            state = {name: tensors.read(name).astype(np.float32, copy=False) for name in names}
            state |= {s: tensors.read(s) for name in names for s in tensors.state_names(name)}
            state[_STEP] = np.array([self.step_count], np.int64)
            return state

    def copy_state(self, *, lazily: bool = False) -> dict[str, Array | PartedTensor]:
        """The content of `state_dict`, each tensor in the parts that its devices write, for a
        training checkpoint.

        A part that several devices hold is copied from one of them. The copies take the memory that
        `plan(checkpoints=True)` counts for them, on each device and in total.

        Args:
            lazily: copy each part only when it is converted to an array, and keep no copy. The
                state is then valid until the next call that changes weights or optimizer states.
        """
        with self._alone("copy_state"):
            return {**self._tensors.copy_state(lazily), _STEP: np.array([self.step_count], np.int64)}

    def load_state_dict(self, state: Mapping[str, Array | FileTensor | PartedTensor]) -> None:
        """The inverse of `state_dict` and of `copy_state`; the meshes may differ. Frozen parameters
        stay as `load_parameters` or `initialize` has set them. Tensors in files
        are read as `load_parameters` reads them; of tensors in parts, each device reads its own
        region.

        Raises:
            CheckpointError: an entry is missing, belongs to another model or optimizer, has another
                shape or kind, is not finite, or is an array with negative means of squares. Nothing
                is changed then, except if a value in a file is not finite.
        """
        with self._alone("load_state_dict"):
            _require_entry("load_state_dict", state, _STEP, _STEP)
            count = as_array("load_state_dict", _STEP, state[_STEP])
            if count.shape != (1,) or count.dtype.kind not in "iu" or not 0 <= count[0] < _MAX_STEPS:
                raise CheckpointError(
                    f"[session.load_state_dict] {_STEP!r} must be one count of steps; got {shown(count)}; nothing was "
                    "changed"
                )
            names = self._tensors.trainable_names()
            wanted = [n for p in names for n in (p, *self._tensors.state_names(p))]
            _require_only("load_state_dict", "this model's state", state, (*wanted, _STEP))
            self._load("load_state_dict", state, {name: name for name in wanted})
            self.step_count = int(count[0])

    # ---- running ------------------------------------------------------------------------------------------

    def _run(self, name: str, meanwhile: Callable[[], object] | None = None) -> None:
        self._tensors.lost_gradients = self.plan.gradients_in_passing
        symbols = self._tensors.store.symbols
        self._timeline.run(name, lambda: self._executor.run(self._program, symbols, name, meanwhile))
        if name != "forward":
            self._tensors.lost_gradients = frozenset()

    def step(self, batch: Mapping[str, Array], lr: float, *, on_nonfinite: str = "stop") -> StepResult:
        """One training step: all microbatches, reductions, clipping, update.

        If the loss or the gradient norm is not finite, the step changes neither weights nor
        optimizer states.

        Args:
            batch: inputs by name; the whole global batch. Symbolic sizes may have any value within
                their bounds.
            lr: learning rate of this step; finite in fp32, at least 0.
            on_nonfinite: what happens then: `stop` raises, and the step does not count; `skip`
                counts it and sets `is_skipped` in the result.

        Raises:
            PlanError: the rate is invalid, or another thread's call is in progress.
            ShapeError: an input has another shape, or its name is unknown.
            NotFinite: loss or gradient norm is not finite; names the step and the first tensor that
                is not.
            TaskFailed: a task failed; parameters may be partly updated.
        """
        rate = _check_step("step", lr, on_nonfinite)
        with self._alone("step"):
            self._require_step()
            return self._step(self._tensors.prepare(batch), rate, on_nonfinite)

    def step_async(
        self,
        batch: Mapping[str, Array],
        lr: float,
        *,
        on_nonfinite: str = "stop",
        deadline: float | None = None,
    ) -> CallHandle:
        """Like `step`, in the background: check and copy the batch, and return at once. The step
        runs after all calls that were made before, also while this thread prepares the next batch.

        A step that fails cancels the asynchronous calls behind it, so no later batch is trained on.

        Args:
            batch: as for `step`. It is copied during this call, so its arrays may be reused.
            lr: as for `step`.
            on_nonfinite: as for `step`.
            deadline: seconds from now. A step that has not started by then fails with TaskFailed
                when its turn comes, and changes nothing.

        Returns:
            A handle, whose `result` is the StepResult. Its `wait` raises what `step` would.

        Raises:
            PlanError: the model is closed, or an argument is invalid.
            ShapeError: an input has another shape, or its name is unknown.
        """
        rate = _check_step("step_async", lr, on_nonfinite)
        self._alone.require("step_async")
        self._require_step()
        inputs = self._tensors.prepare(batch, is_copied=True)
        return self._alone.start("step_async", lambda: self._step(inputs, rate, on_nonfinite), deadline)

    def _require_step(self) -> None:
        self._optimizer()
        _require_program(self.plan, "step")

    def _step(self, inputs: RunInputs, rate: float, on_nonfinite: str) -> StepResult:
        optimizer = self._optimizer()
        t = self.step_count + 1
        self._tensors.feed(inputs, (self.seed, t))
        for name, value in optimizer.inputs(self._tensors.trainable_specs(), t, rate).items():
            self._tensors.write(name, value)
        self._run("step")
        loss, norm = (float(self._tensors.read(name)[0]) for name in ("loss", "grad_norm"))
        is_lost = not np.isfinite([loss, norm]).all()
        if is_lost and on_nonfinite == "stop":
            first = self._tensors.first_nonfinite()
            raise NotFinite(
                f"[session.step] loss and gradients must stay finite; got loss {loss}, gradient norm {norm} in "
                f"step {t}, first in {first}; no weight was changed; lower the learning rate, or "
                'pass on_nonfinite="skip"'
            )
        self.step_count = t
        return StepResult(loss, norm, is_lost)

    def _optimizer(self) -> Optimizer:
        if not isinstance(self.plan.optimizer, Optimizer):
            raise PlanError(
                "[session.step] a step needs an optimizer; got none; call graph.optimize before planning"
            )
        return self.plan.optimizer

    def forward(self, meanwhile: Callable[[], object] | None = None, /, **inputs: Array) -> None:
        """Run the forward pass; read results with `get_tensor`.

        Args:
            meanwhile: called once on this thread while the devices compute, unless inputs are
                rejected. It must not call this model. An exception of it is raised after the
                devices have finished.
            inputs: by name, each for the whole batch. Symbolic sizes may have any value within
                their bounds.

        Raises:
            PlanError: another thread's call is in progress.
            ShapeError: an input has another shape, or its name is unknown.
            TaskFailed: a task failed.
        """
        if meanwhile is not None and not callable(meanwhile):
            rule, advice = "meanwhile must be a function", "pass inputs by name"
            _validate.invalid("forward", rule, shown(meanwhile), advice)
        with self._alone("forward"):
            _require_program(self.plan, "forward")
            self._forward(self._tensors.prepare(inputs), meanwhile)

    def forward_async(
        self, read: Sequence[str] = (), deadline: float | None = None, /, **inputs: Array
    ) -> CallHandle:
        """Like `forward`, in the background: check and copy the inputs, and return at once. The
        pass runs after all calls that were made before.

        Args:
            read: names of tensors that the handle's result contains. They are copied when the pass
                has ended, before the next call runs.
            deadline: as for `step_async`.
            inputs: as for `forward`. They are copied during this call.

        Returns:
            A handle, whose `result` is a dictionary from the names in `read` to arrays.

        Raises:
            PlanError: the model is closed, or an argument is invalid.
            ShapeError: an input has another shape, or a name is unknown.
        """
        names = self._check_async("forward", read)
        prepared = self._tensors.prepare(inputs, is_copied=True)

        def call() -> dict[str, Array]:
            self._forward(prepared)
            return self._read(names)

        return self._alone.start("forward_async", call, deadline)

    def _check_async(self, program: str, read: Sequence[str]) -> list[str]:
        """Check an asynchronous call; returns the names of the tensors that it reads."""
        call = f"{program}_async"
        self._alone.require(call)
        _require_program(self.plan, program)
        names = [*_validate.sequence(call, "read", read, "names of tensors")]
        self._tensors.require(call, names)
        return names

    def _read(self, names: Sequence[str]) -> dict[str, Array]:
        return {name: self._tensors.read(name) for name in names}

    def _forward(self, inputs: RunInputs, meanwhile: Callable[[], object] | None = None) -> None:
        self._tensors.feed(inputs, (self.seed, self.step_count + 1 if self.is_training else -1))
        self._run("forward", meanwhile)
        self._writes_at_forward = self._tensors.num_writes

    def backward(self) -> None:
        """Run the backward pass of the last `forward`; read gradients as `<parameter>.grad`.

        Raises:
            PlanError: there was no `forward` since the last `backward` (which overwrites what it
                needs), or since a tensor was written.
        """
        with self._alone("backward"):
            _require_program(self.plan, "backward")
            self._backward()

    def backward_async(self, read: Sequence[str] = (), deadline: float | None = None, /) -> CallHandle:
        """Like `backward`, in the background, after all calls that were made before.

        Args:
            read: names of tensors, such as `<parameter>.grad`, that the handle's result contains,
                as for `forward_async`.
            deadline: as for `step_async`.

        Returns:
            A handle, whose `result` is a dictionary from the names in `read` to arrays. Its `wait`
            raises PlanError if no `forward` or `forward_async` came before.

        Raises:
            PlanError: the model is closed, or an argument is invalid.
            ShapeError: a name is unknown.
        """
        names = self._check_async("backward", read)

        def call() -> dict[str, Array]:
            self._backward()
            return self._read(names)

        return self._alone.start("backward_async", call, deadline)

    def _backward(self) -> None:
        if self._writes_at_forward != self._tensors.num_writes:
            raise PlanError(
                "[session.backward] each backward must follow a forward; got none; call forward first"
            )
        self._writes_at_forward = None
        self._run("backward")

    def state_memory(self) -> list[NDArray[np.uint8]]:
        """The bytes of every state on every device of this process, without a copy; the rows of a
        device are contiguous. The arrays stay valid after the model is closed.
        """
        with self._alone("state_memory"):
            return [memory for state in self._tensors.states() for memory in state]

    # ---- observation --------------------------------------------------------------------------------------

    def memory_usage(self) -> list[dict[str, int]]:
        """Bytes allocated per device. `total` is what the device holds, with its share of the copy
        for checkpoints if planned; the other categories show how the plan uses it.
        """
        with self._alone("memory_usage"):
            usage = self.plan.estimate_memory_usage()
            for device, allocated in zip(usage, self._executor.allocated_bytes()):
                device["total"] = allocated + device["checkpoints"]
            return usage

    def trace(self, enable: bool) -> None:
        """Start or stop recording the timeline of the following runs.

        Raises:
            PlanError: another thread's call is in progress.
        """
        with self._alone("trace"):
            self._timeline.trace(enable)

    def timeline(self) -> Trace:
        """The tasks of the last run, by start, if it was traced. `tilewise.observe.Profile` measures
        how its transfers and computation overlapped, and writes a page and a file for Perfetto.

        Raises:
            PlanError: another thread's call is in progress.
        """
        with self._alone("timeline"):
            return self._timeline.read()

    def transfers(self) -> dict[str, list[int]]:
        """Elements read from or written to other devices' memory since the start or
        `reset_transfers`, per label and device.
        """
        with self._alone("transfers"):
            return dict(self._executor.transfers())

    def reset_transfers(self) -> None:
        """Set the counts of `transfers` to zero."""
        with self._alone("reset_transfers"):
            self._executor.reset_transfers()

    def file_traffic(self) -> dict[str, int]:
        """The traffic between memory and the devices' files: `bytes_read`, `bytes_written`, and
        `busy_ns`, the time with a transfer in progress. Zeros if nothing is offloaded.
        """
        with self._alone("file_traffic"):
            return dict(self._executor.file_traffic())

    def close(self) -> None:
        """Wait until asynchronous calls have ended, stop the workers and free the memory; the model
        cannot be used afterwards. A `with` block that raises cancels asynchronous calls that have
        not started. So does the end of the program, if the model is still open.

        Raises:
            PlanError: another thread's call is in progress; the model stays open.
        """
        if self._alone.is_closed:
            return
        if self._alone.is_forked():  # a fork has no workers; only its copy is dropped
            self._alone.is_closed = True
            return
        with self._alone("close"):
            self._timeline.close()
            self._executor.close()
            self._alone.close()
            del self._executor, self._timeline, self._program, self._tensors.store

    def __enter__(self) -> GraphInstance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._alone.is_forked():
            self._alone.cancel()
        self.close()


def _check_step(call: str, lr: float, on_nonfinite: str) -> float:
    _validate.choice(call, "on_nonfinite", on_nonfinite, ("stop", "skip"))
    return _validate.number(call, "lr", lr, 0.0, MAX_F32)


def _require_program(plan: PlanTables, name: str) -> None:
    if name not in plan.programs:
        raise PlanError(
            f"[session.{name}] the plan must have this program; got programs {', '.join(plan.programs)}; "
            "a step needs a loss and an optimizer, backward alone needs a loss and accumulation 1"
        )


def _require_entry(call: str, stored: Mapping[str, Tensor], name: str, key: str) -> None:
    if key not in stored:
        raise CheckpointError(f"[session.{call}] every entry must be present; got none for {name!r}; add it")


def _require_only(call: str, what: str, stored: Mapping[str, Tensor], expected: Collection[str]) -> None:
    expected = {*expected}
    odd = next((name for name in stored if name not in expected), None)
    if odd is not None:
        raise CheckpointError(
            f"[session.{call}] the entries must be {what}, and nothing else; got {odd!r}; load the model it belongs "
            "to, or drop it"
        )


def _fixed_shape(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(s for s in spec.shape if isinstance(s, int))


def _open(path: Path) -> Mapping[str, Tensor]:
    return open_distributed(path) if is_distributed(path) else open_weights(path)


class _Renamed(Mapping[str, Any]):
    """Stored values under the graph's names; each is fetched on request."""

    def __init__(self, stored: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names

    def __getitem__(self, name: str) -> Any:
        return self._stored[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _random(spec: TensorSpec, seed: int, scale: float) -> np.ndarray:
    """The initial value of a parameter: a function of seed, name and element, never of placement."""
    shape = _fixed_shape(spec)
    if spec.init != "normal":
        return np.full(shape, {"ones": 1, "zeros": 0}[spec.init], np.float32)
    generator = np.random.Generator(np.random.Philox(key=[seed, crc32(spec.name.encode())]))
    return generator.standard_normal(shape, np.float32) * np.float32(scale * spec.init_scale)
