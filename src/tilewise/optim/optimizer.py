"""`Optimizer`: the base class of optimizers, and `ParameterGroup`: parameters with their own
settings.

An optimizer is defined by its states per parameter, its hyper-parameters per step, and the update
of a parameter.

A new optimizer is one class in its own file (see `lion.py`). Session and plan know no optimizer by
name. A bf16 weight has an fp32 copy, its master, which is updated. An fp32 weight is its own
master. All states have the layout and the storage of their weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tilewise.core.dtypes import DTYPES, MAX_F32
from tilewise.core.frozen import FrozenMap
from tilewise.core.validation import Validator, shown
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.templates import call_outlined
from tilewise.ir.graph import TensorFamily, TensorNode, TensorSpec
from tilewise.ir.kinds import Kind
from tilewise.optim.rule import Parameter, record_update

__all__ = ["HYPER", "Optimizer", "ParameterGroup", "is_hyper", "master_name", "state_name"]

_validate = Validator("optim")
HYPER = "optimizer.hyper"
MASTER = "master"  # a state of weights in bf16, for every optimizer


def master_name(parameter: str) -> str:
    """Name of the fp32 master of a parameter."""
    return state_name(MASTER, parameter)


def state_name(state: str, parameter: str) -> str:
    """Name of the tensor that holds one state of a parameter."""
    return f"optimizer.{state}.{parameter}"


def is_hyper(name: str) -> bool:
    """Whether an input with this name has hyper-parameters, which the session sets."""
    return name == HYPER or name.startswith(f"{HYPER}.")


@dataclass(frozen=True)
class ParameterGroup(Kind):
    """Parameters with their own settings.

    Args:
        names: patterns of parameter names, such as `*norm.weight`; the first matching group counts.
            A pattern that matches no parameter of the graph is an error.
        lr: factor by which every step's learning rate is multiplied.
        changes: settings of the optimizer that differ in this group, such as `{"weight_decay":
            0.0}`.

    Raises:
        ConfigError: there is no pattern, or a factor or setting is not a number.
    """

    names: str | tuple[str, ...]
    lr: float = 1.0
    changes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (self.names,) if isinstance(self.names, str) else self.names
        names = tuple(_validate.sequence("ParameterGroup", "names", names, "patterns"))
        if not names or not all(isinstance(n, str) and n for n in names):
            _validate.invalid(
                "ParameterGroup", "names must be patterns", shown(self.names), 'pass "*norm.weight"'
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "lr", _validate.number("ParameterGroup", "lr", self.lr, 0.0, MAX_F32))
        changes = {
            name: _validate.number("ParameterGroup", name, value) for name, value in self.changes.items()
        }
        object.__setattr__(self, "changes", FrozenMap(changes))

    def matches(self, name: str) -> bool:
        """Whether a parameter belongs to the group."""
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def __hash__(self) -> int:
        return hash((self.names, self.lr, tuple(sorted(self.changes.items()))))


@dataclass(frozen=True, kw_only=True)
class Optimizer(Kind, ABC):
    """Base class of optimizers. A subclass is a frozen dataclass of its settings, with `states`,
    `per_step` and two methods. States that are never negative, such as means of squares, are also
    listed in `nonnegative`. Loading negative values into such a state is an error.

    Args:
        weight_decay: decoupled weight decay of weights. Vectors (norms, biases) are not decayed
            unless a group says so.
        max_grad_norm: gradients are scaled down to this global norm; 0 disables clipping.
        groups: parameters with their own settings.

    If the loss or the gradient norm of a step is not finite, the step does not change weights and
    states.

    Raises:
        ConfigError: a setting is out of range, or a group changes a setting that the optimizer does
            not have.
    """

    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    groups: tuple[ParameterGroup, ...] = ()

    states: ClassVar[tuple[str, ...]] = ()
    nonnegative: ClassVar[tuple[str, ...]] = ()
    per_step: ClassVar[tuple[str, ...]] = ("lr",)

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for what, names in (("states", self.states), ("per_step", self.per_step)):
            own = _validate.sequence(kind, what, names, "names")
            are_names = all(isinstance(n, str) and n and n.isprintable() for n in own)
            if not are_names or len({*own}) != len(own):
                _validate.invalid(kind, f"{what} must be unique printable names", shown(names), "rename them")
        taken = [n for n in self.states if n == MASTER or is_hyper(state_name(n, ""))]
        if taken:  # by the tensors of masters, and the hyper-parameters of a step
            _validate.invalid(
                kind,
                "states must not be named 'master' or 'hyper', or begin with 'hyper.'",
                shown(taken[0]),
                "rename it",
            )
        for name in _validate.sequence(kind, "nonnegative", self.nonnegative, "names", in_any_order=True):
            _validate.choice(kind, "a state in nonnegative", name, self.states)
        if not self.per_step:
            _validate.invalid(kind, "per_step must name at least one number", "none", 'keep ("lr",)')
        for setting in self._settings():
            value = _validate.number(kind, setting, getattr(self, setting), 0.0, MAX_F32)
            object.__setattr__(self, setting, value)
        groups = tuple(self.groups)
        object.__setattr__(self, "groups", groups)
        for group in groups:
            for setting in group.changes:
                _validate.choice(
                    kind, "a group's setting", setting, sorted(self._settings() - {"max_grad_norm"})
                )
            replace(self, groups=(), **dict[str, Any](group.changes))  # rejects values out of range

    def _settings(self) -> set[str]:
        """The numeric settings, which groups may change."""
        return {f.name for f in fields(self)} - {"groups"}

    def values(self, step: int, lr: float) -> Sequence[float]:
        """The numbers of `per_step` in training step `step` (from 1 on) at learning rate `lr`."""
        return (lr,)

    @abstractmethod
    def update(self, parameter: Parameter) -> None:
        """Compute the update of one parameter: assign new values to `weight` and every state of
        `parameter`.
        """

    # ---- used by session ----------------------------------------------------------------------------------

    def add_to(self, graph: GraphBuilder, gradients: Mapping[str, int]) -> TensorNode:
        """Append the gradient norm and the update of every parameter to a graph. Returns the tensor
        (norm, scale).

        Raises:
            ConfigError: there is no parameter, a pattern of a group matches no parameter, or
                `update` is invalid.
        """
        for group in self.groups:
            if not any(group.matches(name) for name in gradients):
                _validate.invalid(
                    type(self).__name__,
                    "a group must match parameters",
                    f"{shown(group.names)}, which match none in {graph.name!r}",
                    "see the names in print(graph), or drop the group",
                )
        if not gradients:
            _validate.invalid(
                type(self).__name__,
                "an optimizer needs parameters to train",
                f"none in {graph.name!r}",
                "declare one with graph.parameter, or plan without graph.optimize",
            )
        graph.draft.phase = "update"
        tensors = graph.draft.tensors
        loss = tensors[graph.draft.outputs["loss"]]
        norm = [loss, *(tensors[g] for g in gradients.values())]
        clip = graph.op("global_norm", norm, max_norm=self.max_grad_norm)[0]
        graph.output(clip, "grad_norm")
        programs: dict[tuple[Optimizer, float], tuple[TensorNode, Mapping[str, Any]]] = {}
        chosen: dict[object, _Updates] = {}  # by whether it is a vector, and group
        for name, gradient in gradients.items():
            weight = tensors[graph.draft.names[name]]
            kind = len(weight.spec.shape) == 1, self._group_of(name)
            updates = chosen.get(kind)
            if updates is None:
                own, _ = setting = _setting(self, *kind)
                if setting not in programs:
                    hyper = graph.input(
                        [len(self.per_step)], "f32", name=_hyper_name(len(programs)), storage="vector"
                    )
                    program = record_update(own.update, own.states, own.per_step)
                    programs[setting] = (
                        hyper,
                        {
                            "steps": program.steps,
                            "constants": program.constants,
                            "left": program.left,
                        },
                    )
                updates = chosen[kind] = _Updates(graph, own, clip, *programs[setting])
            updates.add(name, weight, tensors[gradient])
        return clip

    def _group_of(self, name: str) -> ParameterGroup | None:
        return next((g for g in self.groups if g.matches(name)), None)

    def _setting_of(self, name: str, spec: TensorSpec) -> tuple[Optimizer, float]:
        """The optimizer settings of one parameter, and its factor on the learning rate."""
        return _setting(self, len(spec.shape) == 1, self._group_of(name))

    def inputs(
        self, parameters: Mapping[str, TensorSpec], step: int, lr: float
    ) -> dict[str, NDArray[np.float32]]:
        """The values of all inputs that are hyper-parameters, by name, for one training step.

        Raises:
            ConfigError: `values` does not give a finite number for each name of `per_step`.
        """
        name_of_setting: dict[tuple[Optimizer, float], str] = {}
        for name, spec in parameters.items():
            name_of_setting.setdefault(self._setting_of(name, spec), _hyper_name(len(name_of_setting)))
        return {name: own._hyper_values(step, lr * factor) for (own, factor), name in name_of_setting.items()}

    def _hyper_values(self, step: int, lr: float) -> NDArray[np.float32]:
        """A number for each name of `per_step`."""
        kind, values = type(self).__name__, self.values(step, lr)
        if len(_validate.sequence(kind, "values", values, "numbers")) != len(self.per_step):
            _validate.invalid(
                kind,
                f"values must return a number for each of {', '.join(self.per_step)}",
                shown(values),
                "correct values or per_step",
            )
        return np.array([_validate.number(kind, "a value", v, -MAX_F32, MAX_F32) for v in values], np.float32)


class _Updates:
    """Updates of parameters with the same settings. Updates of parameters with equal specs are
    calls of one template.
    """

    def __init__(
        self,
        graph: GraphBuilder,
        optimizer: Optimizer,
        clip: TensorNode,
        hyper: TensorNode,
        attrs: Mapping[str, Any],
    ) -> None:
        self.draft, self.graph, self.optimizer = graph.draft, graph, optimizer
        self.clip, self.hyper, self.attrs = clip, hyper, attrs
        # by the ids of the weight's shared part and of the gradient's spec, which equal layers share
        self._families: dict[tuple[int, int], tuple[list[TensorFamily], Mapping[str, Any]]] = {}

    def add(self, name: str, weight: TensorNode, gradient: TensorNode) -> None:
        """Declare a parameter's states, and append its update."""
        draft = self.draft
        sort = id(weight.spec.family), id(gradient.spec)
        families, call = self._families.get(sort) or (self._states(weight.spec), None)
        states = [draft.declare_renamed("state", family.member(name)) for family in families]
        if call is None:
            operands = [weight, *states, gradient, self.hyper, self.clip]
            if weight.spec.dtype.name != "bf16":
                operands.insert(1, None)  # type: ignore[arg-type]  # an fp32 weight is its own master
            self._families[sort] = families, call_outlined(self.graph, "update", operands, self.attrs, name)
            return
        ids = (weight.id, *[t.id for t in states], gradient.id, self.hyper.id, self.clip.id)
        draft.append("call", ids, (), call, label=name)

    def _states(self, weight: TensorSpec) -> list[TensorFamily]:
        """The states of every weight of one form, named after the weight."""
        alike = TensorSpec(weight.shape, DTYPES["f32"], weight.labels, storage=weight.storage)
        names = [MASTER] if weight.dtype.name == "bf16" else []
        return [alike.named(state_name(name, ""), "") for name in (*names, *self.optimizer.states)]


@lru_cache(maxsize=256)
def _setting(optimizer: Optimizer, is_vector: bool, group: ParameterGroup | None) -> tuple[Optimizer, float]:
    """The optimizer settings of one group, and its factor on the learning rate."""
    own: Optimizer = replace(optimizer, groups=())
    if is_vector:
        own = replace(own, weight_decay=0.0)
    return (own, 1.0) if group is None else (replace(own, **dict[str, Any](group.changes)), group.lr)


def _hyper_name(number: int) -> str:
    return HYPER if number == 0 else f"{HYPER}.{number}"
