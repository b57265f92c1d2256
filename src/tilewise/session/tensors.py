"""A model's tensors by name: reads, checks and writes them.

All values are checked (`session/inputs.py`) before the first one is written to the devices' parts
(`session/local.py`). The instance decides who may call when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint import (
    Box,
    FileTensor,
    LazyTensor,
    PartedTensor,
    QuantisedTensor,
    TensorPart,
)
from tilewise.comm.group_executor import GroupExecutor
from tilewise.core.dims import Dim
from tilewise.core.dtypes import is_float
from tilewise.core.errors import CheckpointError, PlanError, ShapeError
from tilewise.core.limits import num_cores
from tilewise.core.validation import Validator
from tilewise.graph.declarations import INV_COUNT, POSITIONS, is_dropout_key
from tilewise.ir.graph import TensorSpec
from tilewise.optim.optimizer import Optimizer, master_name, state_name
from tilewise.plan import PlanTables
from tilewise.plan.stored_parts import StoredPart
from tilewise.runtime import Executor
from tilewise.session.inputs import (
    as_array,
    check_inputs,
    check_value,
    counted_labels,
    index_bounds,
    inputs_of,
    is_finite,
)
from tilewise.session.local import Place, TensorStore

__all__ = ["NamedTensors", "RunInputs"]

Array = NDArray[Any]
_validate = Validator("session", PlanError)


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run, checked.

    Attributes:
        arrays: the values by name, with the inputs that are computed from them.
        symbols: values of the symbolic sizes.
    """

    arrays: Mapping[str, Array]
    symbols: Mapping[Dim, int]


class NamedTensors:
    """The tensors of a plan's graph by name. A parameter that is trained in bf16 is written
    together with its fp32 master.

    Args:
        plan: says which tensors exist; its constants are written at once.
        executor: the devices' memory.

    Attributes:
        ids: ids of inputs, parameters, states and constants, by name.
        num_writes: number of writes so far; results computed before the last one are outdated.
    """

    def __init__(self, plan: PlanTables, executor: Executor | GroupExecutor) -> None:
        self.plan = plan
        self.store = TensorStore(plan, executor)
        self.ids = {t.spec.name: t.id for t in plan.graph.tensors if t.spec.name and t.kind != "result"}
        self.num_writes = 0
        self.lost_gradients = frozenset[int]()  # gradients whose memory the last run reused
        self._counted = counted_labels(plan.graph)
        self._bounds = index_bounds(plan.graph)
        self._inputs = inputs_of(plan.graph)
        self._dropout_keys = [name for name in self.ids if is_dropout_key(name)]
        for tensor, value in plan.graph.constant_values.items():
            self.store.write(tensor, value)

    def parameter_names(self) -> list[str]:
        """Names of all parameters, in order of declaration."""
        return [t.spec.name for t in self.plan.graph.of_kind("parameter")]

    def trainable_names(self) -> list[str]:
        """Names of the parameters that training changes, in order of declaration."""
        return [*self.trainable_specs()]

    def trainable_specs(self) -> dict[str, TensorSpec]:
        """The spec of every parameter that training changes, by name, in order of declaration."""
        return {t.spec.name: t.spec for t in self.plan.graph.trainable()}

    def lasting_names(self) -> list[str]:
        """Names of everything that a step updates: weights, masters, optimizer states."""
        names = [n for p in self.trainable_names() for n in (p, master_name(p), *self.state_names(p))]
        return [n for n in names if n in self.ids]

    def states(self) -> list[list[NDArray[np.uint8]]]:
        """The memory of every state, by device."""
        return [self.store.memory(t.id) for t in self.plan.graph.of_kind("state")]

    def parameter_specs(self) -> dict[str, TensorSpec]:
        """The spec of every parameter by name, in order of declaration."""
        return {t.spec.name: t.spec for t in self.plan.graph.of_kind("parameter")}

    def master_specs(self) -> dict[str, TensorSpec]:
        """The spec of what `read` returns for every parameter: of its master, if it has one."""
        masters = {name: self.ids.get(master_name(name), self.ids[name]) for name in self.parameter_names()}
        return {name: self.plan.graph.spec(tensor) for name, tensor in masters.items()}

    def state_names(self, parameter: str) -> list[str]:
        """Names of the optimizer states of a trainable parameter; none without an optimizer."""
        optimizer = self.plan.optimizer
        return (
            [state_name(s, parameter) for s in optimizer.states] if isinstance(optimizer, Optimizer) else []
        )

    def _existing(self, call: str, name: str) -> int:
        tensor = self.ids.get(name, self.plan.graph.outputs.get(name))
        if tensor is None:
            names = ", ".join([*self.ids, *self.plan.graph.outputs][:12])
            raise ShapeError(
                f"[session.{call}] the graph must have the tensor; got {name!r}; it has {names}, …"
            )
        return tensor

    def _id(self, call: str, name: str) -> int:
        tensor = self._existing(call, name)
        if tensor in self.lost_gradients:
            raise PlanError(
                f"[session.{call}] a gradient must be read before activations of the next run reuse its memory; got "
                f"{name!r} after a forward pass or a failed run; read it after step or backward"
            )
        return tensor

    def differing_replicas(self, name: str) -> tuple[int, int] | None:
        """Two devices whose copies of a tensor differ in a bit; None if all agree."""
        return self.store.differing_replicas(self._id("differing_replicas", name))

    def require(self, call: str, names: Sequence[str]) -> None:
        """Check that tensors with these names exist.

        Raises:
            ShapeError: one does not.
        """
        for name in names:
            self._existing(call, name)

    def read(self, name: str) -> Array:
        """A whole tensor; for a parameter the master, if it has one."""
        self._id("get_tensor", name)
        master = master_name(name)
        return self.store.read(self._id("get_tensor", master if master in self.ids else name))

    def view(self, name: str) -> Array:
        """A tensor like `read`, without a copy if it is contiguous; the next run changes it."""
        return self.store.view(self._id("get_tensor", name))

    def copy_state(self, lazily: bool) -> dict[str, PartedTensor]:
        """Copies of trainable parameters in fp32 and of optimizer states: of each, the part that the device
        writes (`Plan.stored_parts`).

        Several parts are copied at a time; with `lazily`, each is copied when it is converted to an
        array.
        """
        names = self.trainable_names()
        state_ids = {name: self.ids.get(master_name(name), self.ids[name]) for name in names}
        state_ids |= {state: self.ids[state] for name in names for state in self.state_names(name)}
        stored_parts = [
            (name, part) for name, tensor in state_ids.items() for part in self.plan.stored_parts[tensor]
        ]

        def fetch(name: str, part: StoredPart) -> Array:
            array = self.store.copy_stored_part(state_ids[name], part)
            return array.astype(np.float32, copy=False) if name in parameters else array

        def copy(one: tuple[str, StoredPart]) -> TensorPart:
            name, part = one
            own = self.plan.graph.spec(state_ids[name]).dtype.numpy
            dtype = np.dtype(np.float32) if name in parameters else own
            array = LazyTensor(part.sizes, dtype, partial(fetch, *one)) if lazily else fetch(*one)
            return TensorPart(Box(part.begin, part.sizes), array, part.device)

        parameters, parts = {*names}, dict[str, list[TensorPart]]()
        with ThreadPoolExecutor(num_cores(), thread_name_prefix="copying a state") as pool:
            for (name, _), part in zip(stored_parts, pool.map(copy, stored_parts)):
                parts.setdefault(name, []).append(part)
        shapes = {name: self.plan.graph.spec(tensor).shape for name, tensor in state_ids.items()}
        return {
            name: PartedTensor(
                tuple(s for s in shapes[name] if isinstance(s, int)),
                own_parts[0].values.dtype,
                tuple(own_parts),
            )
            for name, own_parts in parts.items()
        }

    def write(self, name: str, value: Array, *, once: bool = False) -> None:
        """Write a whole tensor that was checked, and its master; with `once`, only to the first
        device that holds a part.
        """
        self.num_writes += 1
        self.store.write(self.ids[name], value, once=once)
        if master_name(name) in self.ids:
            self.store.write(self.ids[master_name(name)], value, once=once)

    def places(self, name: str) -> list[list[Place]]:
        """The parts of a tensor, each on the first device that holds it, with the part of its
        master that covers the same elements.
        """
        parts = [[place] for place in self.store.places(self.ids[name])]
        master = self.ids.get(master_name(name))
        for place in () if master is None else self.store.places(master):
            like = (p for p in parts if (p[0].device, p[0].slices) == (place.device, place.slices))
            copies = next(like, None)
            if copies is None:
                parts.append([place])
            else:
                copies.append(place)
        return parts

    def set(self, name: str, value: object) -> None:
        """Check a user's value for an input, parameter or state, and write it."""
        tensor = self._id("set_tensor", name)
        node = self.plan.graph.tensors[tensor]
        if node.kind in ("result", "constant"):
            raise ShapeError(
                f"[session.set_tensor] inputs, parameters and states can be written; got {name!r}, a {node.kind}; "
                "declare it as one of them"
            )
        array = as_array("set_tensor", name, value)
        # an input has the sizes of the last run; a state is used by runs of any size
        sizes = [s.min for s in self.plan.shapes.symbols] if node.kind == "state" else self.store.symbols
        symbols = dict(zip(self.plan.shapes.symbols, sizes))
        check_value("set_tensor", node.spec, array, self._bounds.get(name, []), symbols)
        if not self._is_nonnegative_where_due(name, array):
            raise ShapeError(f"[session.set_tensor] {_sign_of(name)}; correct it")
        self.write(name, array)

    def prepare(self, inputs: Mapping[str, object], *, is_copied: bool = False) -> RunInputs:
        """Check all inputs of a run, and compute those that follow from them. This reads no device,
        so it may happen during a run.

        Args:
            inputs: by name.
            is_copied: copy values into memory of their own, in the types of the graph, so that the
                caller may change its arrays afterwards.

        Raises:
            ShapeError: an input is invalid.
        """
        values, symbols = check_inputs(self._inputs, inputs, self._bounds)
        arrays: dict[str, Array] = dict(values)
        if self._counted is not None:
            labels, ignored = self._counted
            count = int(np.count_nonzero(arrays[labels] != ignored))
            arrays[INV_COUNT] = np.array([1.0 / max(count, 1)], np.float32)
        if is_copied:
            for name in values:
                dtype = self.plan.graph.spec(self.ids[name]).dtype.numpy
                arrays[name] = np.array(arrays[name], dtype, order="C")
        if POSITIONS in self.ids:
            sizes = self.plan.graph.spec(self.ids[POSITIONS]).shape
            shape = [symbols.get(s, s.max) if isinstance(s, Dim) else s for s in sizes]
            arrays[POSITIONS] = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
        return RunInputs(arrays, symbols)

    def feed(self, inputs: RunInputs, dropout: tuple[int, int]) -> None:
        """Write all inputs of a run.

        Args:
            dropout: the seed of masks, and the step; a negative step drops nothing.
        """
        for symbol, size in inputs.symbols.items():
            self.store.symbols[self.plan.shapes.symbols.index(symbol)] = size
        for name, value in inputs.arrays.items():
            self.write(name, value)
        seed, step = dropout
        for name in self._dropout_keys:
            rows = self.plan.graph.spec(self.ids[name]).shape[0]
            words = np.array([crc32(name.encode()), seed, step], np.int64).astype(np.int32)
            assert isinstance(rows, int)
            numbers = np.arange(rows, dtype=np.int32)[:, None]
            self.write(name, np.hstack([numbers, np.broadcast_to(words, (rows, 3))]))

    def check_stored(
        self, call: str, name: str, value: Array | FileTensor | PartedTensor | QuantisedTensor
    ) -> None:
        """Check a value from a file or a state dict against its tensor. Elements in a file are
        checked when they are read.

        Raises:
            CheckpointError: it has another shape or kind, is not finite, or is negative in a state
                whose square root the optimizer takes.
        """
        spec = self.plan.graph.spec(self.ids[name])
        problem = ""
        if value.shape != spec.shape:
            problem = f"shapes must agree; got {value.shape} for {name!r} {spec.shape}"
        elif not is_float(value.dtype):
            problem = f"weights must be floating-point numbers; got {value.dtype} for {name!r}"
        elif spec.format is not None and not isinstance(value, QuantisedTensor):
            problem = f"{name!r} is planned in the format {spec.format}; got {value.dtype}"
        elif isinstance(value, (FileTensor, PartedTensor, QuantisedTensor)):
            pass
        elif not is_finite(value, spec.dtype):
            problem = f"weights must be finite in {spec.dtype}; got others in {name!r}"
        elif not self._is_nonnegative_where_due(name, value):
            problem = _sign_of(name)
        if problem:
            raise CheckpointError(f"[session.{call}] {problem}; nothing was changed")

    def _is_nonnegative_where_due(self, name: str, value: Array) -> bool:
        """False if a tensor is a state whose square root the optimizer takes and has a negative
        value, which would make the weight NaN after a step with correct loss and gradients.
        """
        optimizer = self.plan.optimizer
        rooted = optimizer.nonnegative if isinstance(optimizer, Optimizer) else ()
        begins = [state_name(state, "") for state in rooted]
        is_due = any(name.startswith(begin) and name[len(begin) :] in self.ids for begin in begins)
        return not is_due or not value.size or bool(value.min() >= 0)  # False for NaN

    def first_nonfinite(self) -> str:
        """The first tensor with a value that is not finite: weights, then the loss, then gradients,
        in order of declaration.
        """
        for name, words in (
            *((n, f"the weight {n!r}") for n in self.parameter_names()),
            ("loss", "the loss"),
            *((f"{n}.grad", f"the gradient of {n!r}") for n in self.trainable_names()),
        ):
            if not is_finite(self.read(name), None):
                return words
        return "the norm itself"


def _sign_of(name: str) -> str:
    return f"states that are means of squares must be numbers of at least 0; got others in {name!r}"
