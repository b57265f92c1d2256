"""`GraphDraft`: the nodes and names of a graph under construction. Equal ops on the same operands
share one node.

It rejects names that are already used, tensors of another graph, and operands that an op does not
accept. `GraphBuilder`, layer templates and gradients add nodes; `freeze` returns the `ir.Graph`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from tilewise.core.errors import ShapeError
from tilewise.core.frozen import FrozenMap
from tilewise.core.mesh import Axes
from tilewise.core.validation import Validator, shown
from tilewise.ir.graph import Graph, OpNode, Template, TensorFamily, TensorNode, TensorSpec
from tilewise.ir.op import results_of_call

__all__ = ["Declared", "DraftedLayer", "GraphDraft", "ValueNumbers"]

OPTIMIZER = "optimizer."
Declared = tuple[str, TensorFamily | None, int, bool]
"""A tensor that every call of a layer declares: its kind, its spec without the call's path (None for a constant, which
belongs to the graph), its id in the template, and whether it is frozen."""

_validate = Validator("graph", ShapeError)
_READING_S = 10.0  # how long planning waits for a thread that writes


class DraftedLayer(NamedTuple):
    """A template of a layer. The fields are its key, the name of its function, the number of
    earlier templates, the attributes of its calls, and what each call declares.
    """

    key: str
    function: str
    number: int
    attrs: Mapping[str, Any]
    declared: tuple[Declared, ...]


class ValueNumbers:
    """The values seen so far. Equal values have the same number.

    Values are kept alive, so that the same object is recognized without a comparison. (A model's
    configuration may have a thousand entries.) Values that cannot be hashed are copied, because
    their owner may change them. They are compared one by one.
    """

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[object, int]] = {}
        self._by_value: dict[object, int] = {}
        self._others: list[tuple[object, int]] = []

    def number(self, value: object) -> int:
        """The number of a value.

        Raises:
            TypeError: the value can be neither hashed nor compared as a whole.
        """
        entry = self._by_object.get(id(value))
        if entry is not None:
            return entry[1]
        fresh = len(self._by_value) + len(self._others)
        try:
            number = self._by_value.setdefault(value, fresh)
        except TypeError:
            if not _is_equal(value, value):
                raise
            number = next((n for other, n in self._others if _is_equal(other, value)), fresh)
            if number == fresh:
                self._others.append((deepcopy(value), fresh))
            return number
        self._by_object[id(value)] = value, number
        return number


def _is_equal(a: object, b: object) -> bool:
    """Whether two attributes are equal; False for values that cannot be compared as a whole, such
    as arrays.
    """
    try:
        return bool(a == b)
    except (TypeError, ValueError):
        return False


class _Turn:
    """Allows one thread at a time to write to a graph; another one gets an error. A copy has its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[_Turn], tuple[()]]:
        return _Turn, ()

    def of(self, call: str, patience_s: float = 0.0) -> _Turn:
        """The calling thread's turn until the block ends; an error if another thread has a turn
        that does not end in time.
        """
        if not self._lock.acquire(timeout=patience_s):
            _validate.invalid(
                call,
                "only one thread at a time may write to a graph",
                "a call during another thread's call",
                "wait for that call, or describe layers with a ParallelGraphBuilder",
            )
        return self

    def __enter__(self) -> None:
        """Begin the turn."""

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


class GraphDraft:
    """The content of a graph so far. Ids are indices of `tensors` and of `ops`. Only one thread at
    a time may write. If a second thread tries, it gets an error before it has changed anything.

    Attributes:
        owner: the builder to which operators on the tensors append ops.
        layers: templates of layers, by function, operands and attributes (`values`).
        values: numbers for the specs and attributes of layers; equal ones have the same number.
        outlined: attributes of calls of the templates that equal single ops share
            (`templates.call_outlined`), by all that these templates depend on.
        hints: layouts that users ask for, by tensor id.
        frozen: ids of parameters that training does not change.
        phase: phase of the ops that are appended now: forward, backward or update.
        names: ids of inputs, parameters, states and constants, by name.
    """

    def __init__(self, owner: object = None) -> None:
        self.owner = owner
        self.tensors: list[TensorNode] = []
        self.ops: list[OpNode] = []
        self.outputs: dict[str, int] = {}
        self.constant_values: dict[int, Any] = {}
        self.templates: dict[str, Template] = {}
        self.hints: dict[int, tuple[Axes, ...]] = {}
        self.frozen: dict[int, None] = {}  # a set, in the order in which it grew
        self.layers: dict[object, DraftedLayer] = {}
        self.values = ValueNumbers()
        self.outlined: dict[object, Mapping[str, Any]] = {}
        self.phase = "forward"
        self.loss_id: int | None = None
        self.names: dict[str, int] = {}
        self._cache: dict[Any, tuple[int, ...]] = {}
        self._layers_named: dict[str, int] = {}  # how many templates of layers have a function's name
        self._hints_before: list[tuple[int, tuple[Axes, ...] | None]] = []  # what each `hint` replaced
        self._turn = _Turn()

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """A `with` block whose declarations and ops are removed if it raises."""
        with self._turn.of("all_or_nothing"):
            tensors, ops = len(self.tensors), len(self.ops)
            grown = [
                (d, len(d)) for d in (self.outputs, self.templates, self.frozen)
            ]  # entries are only added
            loss_id, layers, hints = self.loss_id, len(self.layers), len(self._hints_before)
            try:
                yield
            except BaseException:
                del self.tensors[tensors:], self.ops[ops:]
                for entries, count in grown:
                    while len(entries) > count:
                        entries.popitem()
                while len(self.layers) > layers:
                    self._layers_named[self.layers.popitem()[1].function] -= 1
                while len(self._hints_before) > hints:
                    tensor, before = self._hints_before.pop()
                    self.hints.pop(tensor)
                    self.hints.update({} if before is None else {tensor: before})
                self.loss_id = loss_id
                self.names = {name: i for name, i in self.names.items() if i < tensors}
                self.constant_values = {i: v for i, v in self.constant_values.items() if i < tensors}
                self._cache = {key: ids for key, ids in self._cache.items() if all(i < tensors for i in ids)}
                raise

    def declare(self, kind: str, spec: TensorSpec) -> TensorNode:
        """Declare an input, parameter, state or constant under a unique name."""
        if not spec.name or not spec.name.isprintable():
            _validate.text(kind, "a name", spec.name)
        return self.declare_renamed(kind, spec)

    def declare_renamed(self, kind: str, spec: TensorSpec) -> TensorNode:
        """Like `declare`, for a spec that was already checked under another name, as a layer's
        parameters are.
        """
        name = spec.name
        with self._turn.of(kind):
            if name in self.names or name in self.outputs:
                _validate.invalid(kind, "names must be unique", f"{name!r}, which is taken", "rename it")
            if name.startswith(OPTIMIZER) and self.phase != "update":
                _validate.invalid(
                    kind, f"names in {OPTIMIZER!r} are reserved for optimizers", repr(name), "rename it"
                )
            node = TensorNode.of_builder(self.owner, len(self.tensors), spec, kind)
            self.tensors.append(node)
            self.names[name] = node.id
        return node

    def hint(self, tensor: int, layout: tuple[Axes, ...]) -> None:
        """Ask for a layout of a tensor. If there are several hints for a tensor, the last one
        counts.
        """
        with self._turn.of("constrain"):
            self._hints_before.append((tensor, self.hints.get(tensor)))
            self.hints[tensor] = layout

    def freeze_parameter(self, tensor: int) -> None:
        """Let training not change a parameter."""
        with self._turn.of("freeze_parameters"):
            self.frozen[tensor] = None

    def new_layer(
        self, signature: object, function: str, template: Template, declared: tuple[Declared, ...]
    ) -> DraftedLayer:
        """Add the template of a new signature. Its key is the name of the layer function. If the
        name is taken in this graph, by another signature or another function, a number is appended.
        """
        number = self._layers_named.get(function, 0)
        key = None
        while key is None or key in self.templates:  # a loaded graph has templates without a function
            number += 1
            key = function if number == 1 else f"{function}#{number}"
        self._layers_named[function] = number
        attrs = FrozenMap({"template": key, "saved": ()})
        made = self.layers[signature] = DraftedLayer(key, function, len(self.templates), attrs, declared)
        self.templates[key] = replace(template, key=key)
        return made

    def name_output(self, name: str, tensor: int) -> None:
        """Make a tensor readable by name after a run."""
        with self._turn.of("output"):
            if name in self.outputs or self.names.get(name, tensor) != tensor:
                _validate.invalid(
                    "output", "output names must be unique", f"{name!r}, which is taken", "rename it"
                )
            self.outputs[name] = tensor

    def own(self, call: str, tensor: TensorNode) -> TensorNode:
        """Check that a tensor belongs to this graph. Without this check, a tensor of another graph
        would be taken for the tensor with the same id in this graph.
        """
        if not isinstance(tensor, TensorNode):
            advice = "declare arrays by graph.constant or as inputs; of several results, pass one"
            _validate.invalid(call, "an operand must be a tensor of the graph", shown(tensor), advice)
        if tensor.id >= len(self.tensors) or self.tensors[tensor.id] is not tensor:
            _validate.invalid(
                call,
                "operands must belong to the graph",
                f"{tensor.spec} {tensor.spec.name!r} of another",
                "make it here",
            )
        return tensor

    def op(self, name: str, ids: tuple[int | None, ...], attrs: Mapping[str, Any]) -> tuple[int, ...]:
        """Append an op on tensor ids, with attributes that were checked against its signature. If
        an equal op exists, nothing is appended, and the outputs of that op are returned.
        """
        key = _key(name, ids, attrs, self.phase)
        if key in self._cache:
            return self._cache[key]
        outputs = self.append(name, ids, self.specs_of(name, ids, attrs), attrs)
        self._cache[key] = outputs
        return outputs

    def specs_of(
        self, name: str, ids: tuple[int | None, ...], attrs: Mapping[str, Any]
    ) -> Sequence[TensorSpec]:
        """The specs of the outputs that `op` would return for these arguments."""
        specs = [None if i is None else self.tensors[i].spec for i in ids]
        return results_of_call(name, specs, attrs)

    def share_ops(self) -> None:
        """Index the existing ops, so that later equal ops are merged with them."""
        for op in self.ops:
            if op.op != "call":
                self._cache.setdefault(_key(op.op, op.inputs, op.attrs, op.phase), op.outputs)

    def append(
        self,
        name: str,
        ids: tuple[int | None, ...],
        specs: Sequence[TensorSpec],
        attrs: Mapping[str, Any],
        *,
        label: str = "",
    ) -> tuple[int, ...]:
        """Append an op with known output specs. The draft takes over the attributes."""
        with self._turn.of(name):
            op_id, first = len(self.ops), len(self.tensors)
            outputs = tuple(range(first, first + len(specs)))
            self.tensors += [
                TensorNode.of_builder(self.owner, i, s, "result", op_id) for i, s in zip(outputs, specs)
            ]
            self.ops.append(
                OpNode(op_id, name, ids, outputs, attrs, self.phase, label or self._label(name, ids))
            )
        return outputs

    def _label(self, name: str, ids: tuple[int | None, ...]) -> str:
        """The op's label in traces and messages: the name of its parameter, if it has one."""
        for i in ids:
            if i is not None and self.tensors[i].kind in ("parameter", "state"):
                return f"{name}:{self.tensors[i].spec.name}"
        return name

    def freeze(self, name: str, k_splits: int) -> Graph:
        """The graph as data."""
        with self._turn.of("plan", _READING_S):  # readers wait for each other
            return Graph(
                name,
                tuple(self.tensors),
                tuple(self.ops),
                self.outputs,
                k_splits,
                self.constant_values,
                self.templates,
                self.hints,
                tuple(sorted(self.frozen)),
            )

    @classmethod
    def of(cls, graph: Graph, owner: object = None) -> GraphDraft:
        """A draft that continues a frozen graph; tensor ids do not change."""
        draft = cls(owner)
        draft.tensors, draft.ops = list(graph.tensors), list(graph.ops)
        draft.outputs, draft.constant_values = dict(graph.outputs), dict(graph.constant_values)
        draft.templates, draft.hints = dict(graph.templates), dict(graph.hints)
        draft.frozen = dict.fromkeys(graph.frozen)
        draft.names = {t.spec.name: t.id for t in graph.tensors if t.spec.name}
        return draft


def _key(name: str, ids: tuple[int | None, ...], attrs: Mapping[str, Any], phase: str) -> tuple[object, ...]:
    """Everything that must be equal for two ops to share one node."""
    return name, ids, tuple(sorted(attrs.items())), phase
