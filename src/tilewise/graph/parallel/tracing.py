"""`TemplateTable`: the templates that a list of layers needs, each traced once, here or in other processes.

A layer's template depends on its function, the forms of its operands and its attributes. The form of a layer's result
is known once it is traced; until then it is taken to be that of its first operand, as in any residual stream. Where
that was wrong, what was traced is not used, and the right template is traced in its turn.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tilewise.core.errors import ShapeError
from tilewise.core.progress import Phase
from tilewise.core.workers import ENOUGH, WorkerPool, is_portable
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.templates import LayerFunction, trace_layer
from tilewise.ir.graph import Template, TensorNode, TensorSpec
from tilewise.ir.layer_spec import LayerSpec

__all__ = ["TemplateTable"]

_Key = tuple[object, ...]
_Calls = dict[_Key, tuple[LayerSpec, tuple[TensorSpec, ...]]]
_ROUNDS = 3  # of guessing results' forms


class TemplateTable:
    """Templates by signature.

    Args:
        graph: that the layers will be written into; it is read.
        layers: in order.
        named: what layers read besides the graph's own tensors, by name.
    """

    def __init__(
        self, graph: GraphBuilder, layers: Sequence[LayerSpec], named: Mapping[str, TensorSpec]
    ) -> None:
        self._graph = graph
        self._layers = layers
        self._named = named
        self._picklable: dict[int, tuple[object, bool]] = {}
        self._known: dict[_Key, Template | None] = {}  # None: it raised, and will again where it is recorded

    def missing(self) -> _Calls:
        """The first layer of each signature that is not traced yet, as far as forms are foreseen; its operands."""
        specs: dict[str, TensorSpec] = {}
        found: _Calls = {}
        for layer in self._layers:
            operands = self._operands(layer, specs)
            if operands is None:
                continue
            key = self._key(layer, operands)
            template = None if key is None else self._known.get(key)
            if template is not None:
                specs[layer.path] = template.graph.spec(template.results[0])
            elif operands:
                specs[layer.path] = operands[0]
            if key is not None and key not in self._known:
                found.setdefault(key, (layer, operands))
        return found

    def trace(self, pool: WorkerPool, missing: _Calls, phase: Phase, note: Callable[[str], None]) -> None:
        """Trace what is missing: in the pool what it can import, where that is much, and the rest here."""
        counter = phase.counter()
        for _ in range(_ROUNDS):
            apart: _Calls = {}
            if len(missing) >= ENOUGH:
                apart = {key: call for key, call in missing.items() if self._is_portable(call[0])}
                here = len(missing) - len(apart)
                if here:
                    names = sorted({_name(call[0].function) for k, call in missing.items() if k not in apart})
                    note(
                        f"{here} templates of {', '.join(names)} are not importable by name: traced here, one by one"
                    )
            if not apart:
                break  # those that are left are traced when they are recorded
            k_splits = self._graph.k_splits
            calls = [(call[0].function, call[1], call[0].attrs, k_splits) for call in apart.values()]

            def count(num: int) -> None:
                phase.counter().count = num  # one of its own: several threads call this

            for (key, call), answer in zip(apart.items(), pool.map(_trace, calls, count)):
                self._known[key], who, begin, end = answer
                counter.spans.append((who, call[0].path, begin, end))
            missing = self.missing()

    def record(self, graph: GraphBuilder, spec: LayerSpec, operands: tuple[TensorNode, ...]) -> TensorNode:
        """Write a layer's call, with the template of its signature if that has been traced."""
        function = spec.function
        assert isinstance(function, LayerFunction)
        key = self._key(spec, tuple(t.spec for t in operands))
        return function.record(
            graph, operands, spec.path, spec.attrs, None if key is None else self._known.get(key)
        )

    def declared_names(self, wanted: Collection[str]) -> set[str]:
        """Which of these names layers will declare, as far as templates are traced."""
        if not wanted:
            return set()
        found: set[str] = set()
        specs: dict[str, TensorSpec] = {}
        for layer in self._layers:
            operands = self._operands(layer, specs)
            key = None if operands is None else self._key(layer, operands)
            template = None if key is None else self._known.get(key)
            if operands is not None and key not in self._known and isinstance(layer.function, LayerFunction):
                template = _trace(layer.function, operands, layer.attrs, self._graph.k_splits)[0]
                if key is not None:
                    self._known[key] = template
            if template is None:
                continue
            specs[layer.path] = template.graph.spec(template.results[0])
            formal = (template.graph.tensors[i] for i in template.arguments[len(layer.operands) :])
            found.update(f"{layer.path}.{t.spec.name}" for t in formal if t.kind in ("parameter", "state"))
        return found & set(wanted)

    def _operands(self, layer: LayerSpec, specs: Mapping[str, TensorSpec]) -> tuple[TensorSpec, ...] | None:
        """What the layer reads; None where one of them is not known yet."""
        found = []
        for name in layer.operands:
            if name in specs:
                found.append(specs[name])
            elif name in self._named:
                found.append(self._named[name])
            elif self._graph.has(name):
                found.append(self._graph.find(name).spec)
            else:
                return None
        return tuple(found)

    def _key(self, layer: LayerSpec, operands: tuple[TensorSpec, ...]) -> _Key | None:
        """The signature; None for one that is refused, with its reason, when the layer is recorded."""
        assert isinstance(layer.function, LayerFunction)
        try:
            return layer.function.signature(self._graph.draft, operands, layer.attrs)
        except ShapeError:
            return None

    def _is_portable(self, layer: LayerSpec) -> bool:
        """Whether another process can be told to trace it."""
        return is_portable(layer.function) and all(self._can_travel(value) for value in layer.attrs.values())

    def _can_travel(self, value: Any) -> bool:
        known = self._picklable.get(id(value))
        if known is None or known[0] is not value:
            try:
                pickle.dumps(value)
                known = value, True
            except Exception:  # whatever the value's own code raises
                known = value, False
            self._picklable[id(value)] = known
        return known[1]


def _trace(
    function: LayerFunction, operands: tuple[TensorSpec, ...], attrs: Mapping[str, Any], k_splits: int
) -> tuple[Template | None, str, int, int]:
    """A template, or None where the function raised (operands may be foreseen wrongly); by whom, begin and end."""
    begin, template = time.perf_counter_ns(), None
    with suppress(Exception):
        template = trace_layer(function, operands, attrs, k_splits)
    return template, f"process {os.getpid()}", begin, time.perf_counter_ns()


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", function))
