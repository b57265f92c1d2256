"""`ParallelGraphBuilder`: describes layers on several threads, then writes them into a graph in one order.

There are three phases. *Specification*: functions of the caller describe items (layers, KV caches)
on threads, each with its own handle. *Validation*: names, operands and references of all
specifications are checked against each other and the graph. *Assembly*: distinct templates are
traced, and everything is written into the graph in the order of the items, kind by kind, all of it
or nothing. The graph is the one that the same calls make one after the other, for any number of
threads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tilewise.core.errors import ShapeError
from tilewise.core.progress import Progress, thread_name
from tilewise.core.validation import Validator, shown
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.parallel.handle import Describe, describe_item, in_words
from tilewise.graph.parallel.tracing import TemplateTable
from tilewise.ir.graph import TensorNode, TensorSpec
from tilewise.ir.layer_spec import LayerSpec

__all__ = ["ParallelGraphBuilder"]

Specs = Sequence[LayerSpec]
MAX_THREADS = 256
_validate = Validator("graph", ShapeError)


class ParallelGraphBuilder:
    """Describes layers on several threads, and writes them into graphs.

    Args:
        threads: that describe; by default 2.
        progress: receives the phases; a `ParallelDebugger` or a `ProgressTracker`.

    Raises:
        ShapeError: threads are not between 1 and 256, or the others are invalid.
    """

    def __init__(self, threads: int = 2, *, progress: Progress | None = None) -> None:
        call = "ParallelGraphBuilder"
        self.threads = _validate.integer(call, "threads", threads, 1, MAX_THREADS)
        if progress is not None:
            _validate.instance(
                call, "a progress", progress, Progress, "pass a ParallelDebugger or ProgressTracker"
            )
        self.progress = Progress() if progress is None else progress

    def specify(self, describe: Describe, items: Iterable[Any], *, kind: str = "layer") -> Future[Specs]:
        """Have `describe(handle, item)` called for every item, each once, by several threads.

        Args:
            describe: describes one item with the methods of its `SpecHandle`; it must not touch a graph.
            items: such as the numbers of layers.
            kind: what they are counted as in messages and progress.

        Returns:
            A future of the specifications, in the order of the items. What `describe` raises for the first of the items
            that fail is the future's ShapeError, which names item, thread and last specification.
        """
        _validate.text("specify", "a kind", kind)
        if not callable(describe):
            _validate.invalid(
                "specify", "items are described by a function", shown(describe), "pass describe(handle, item)"
            )
        try:
            walked = iter(items)
        except TypeError:
            _validate.invalid(
                "specify", "items can be walked", shown(items), "pass range(num_layers) or a list"
            )
        given = list(walked)
        runner = ThreadPoolExecutor(1, thread_name_prefix=f"specify {kind}")
        try:
            return runner.submit(self._specify, describe, given, kind)
        finally:
            runner.shutdown(wait=False)

    def assemble(
        self,
        graph: GraphBuilder,
        *groups: Future[Specs] | Specs,
        named: Mapping[str, TensorNode] | None = None,
    ) -> dict[str, TensorNode]:
        """Write specifications into a graph, group by group; all of them or none.

        Tensors that stand alone come first, in their order, unless a layer declares one of that name; then layers.

        Args:
            graph: written to.
            groups: what `specify` returned; earlier ones come first.
            named: tensors of the graph that specifications read under other names than their own, or that have none.

        Returns:
            Every layer's result, by path.

        Raises:
            ShapeError: a name stands twice, an operand is not there, or a layer does not fit what it reads; names the
                specification. What a group's future raises.
        """
        _validate.instance("assemble", "the first argument", graph, GraphBuilder, "pass the graph")
        found = [group.result() if isinstance(group, Future) else group for group in groups]
        specs = [
            spec
            for group in found
            for spec in _validate.sequence("assemble", "a group", group, "specifications")
        ]
        for spec in specs:
            _validate.instance("assemble", "a specification", spec, LayerSpec, "pass what specify returned")
        layers = [spec for spec in specs if spec.function is not None]
        with self.progress.phase("validation", len(specs)) as phase:
            tensors = dict(_validate.mapping("assemble", "named tensors", named or {}, "tensors by name"))
            for tensor in tensors.values():
                graph.draft.own("assemble", tensor)
            alone = _check_names(graph, specs, tensors)
            phase.counter().count = len(specs)
        table = TemplateTable(
            graph, layers, {**{n: t.spec for n, t in tensors.items()}, **{n: t[1] for n, t in alone.items()}}
        )
        with self.progress.phase("assembly", len(specs)) as phase, graph.all_or_nothing():
            counter, results = phase.counter(), dict[str, TensorNode]()
            used = table.declared_names(alone)
            for name, (kind, tensor) in alone.items():
                if name not in used:
                    graph.draft.declare(kind, tensor)
                counter.count += 1
            for layer in layers:
                operands = tuple(_find(graph, name, results, tensors) for name in layer.operands)
                results[layer.path] = _write(graph, layer, table, alone, operands)
                counter.count += 1
        return results

    def _specify(self, describe: Describe, items: list[Any], kind: str) -> Specs:
        with self.progress.phase("specification", len(items)) as phase:
            numbers = itertools.count()  # its `next` is one step: no two threads get the same
            found: list[Specs] = [()] * len(items)
            failed: dict[int, ShapeError] = {}

            def work() -> None:
                counter, who, spans = phase.counter(), thread_name(), self.progress.wants_spans
                while not failed and (i := next(numbers)) < len(items):
                    begin = time.perf_counter_ns() if spans else 0
                    try:
                        found[i] = describe_item(describe, kind, i, items[i], f"thread {who!r}")
                    except ShapeError as error:
                        failed[i] = error
                    if spans:
                        counter.spans.append((who, f"{kind} {i}", begin, time.perf_counter_ns()))
                    counter.count += 1

            with ThreadPoolExecutor(self.threads, thread_name_prefix=kind) as pool:
                for done in [pool.submit(work) for _ in range(self.threads)]:
                    done.result()
        if failed:
            raise failed[min(failed)]
        return tuple(spec for specs in found for spec in specs)


def _check_names(
    graph: GraphBuilder, specs: Specs, given: Mapping[str, TensorNode]
) -> dict[str, tuple[str, TensorSpec]]:
    """That every name stands once and every operand before it is read; the tensors that stand alone, by name."""
    alone: dict[str, tuple[str, TensorSpec]] = {}
    for spec in specs:
        for kind, tensor in spec.tensors if spec.function is None else ():
            if tensor.name in alone or graph.has(tensor.name):
                _refuse(spec, "declares a name that is free", f"{tensor.name!r}, which is taken", "rename it")
            alone[tensor.name] = kind, tensor
    before = set(given)
    for spec in specs:
        if spec.function is None:
            continue
        for name in spec.operands:
            if name not in before and name not in alone and not graph.has(name):
                _refuse(
                    spec,
                    "reads tensors of the graph and layers before it",
                    f"{name!r}, which is not one",
                    "correct it",
                )
        if spec.path in before or spec.path in alone or graph.has(spec.path):
            _refuse(spec, "has a path of its own", "one that is taken", "rename it")
        before.add(spec.path)
    return alone


def _find(
    graph: GraphBuilder, name: str, results: Mapping[str, TensorNode], given: Mapping[str, TensorNode]
) -> TensorNode:
    return results.get(name) or given.get(name) or graph.find(name)


def _refuse(spec: LayerSpec, rule: str, got: str, advice: str) -> None:
    _validate.invalid("assemble", f"{spec.kind} {spec.path!r} {rule}", got, advice)


def _write(
    graph: GraphBuilder,
    spec: LayerSpec,
    table: TemplateTable,
    alone: Mapping[str, tuple[str, TensorSpec]],
    operands: tuple[TensorNode, ...],
) -> TensorNode:
    """Record one layer; what it declares must be what was said of it."""
    try:
        result = table.record(graph, spec, operands)
    except Exception as error:
        raise ShapeError(
            f"[graph.parallel] {spec.kind} {spec.path!r} must fit what it reads; got {in_words(error)}; correct it"
        ) from error
    declared = {t.spec.name: t for t in _declared_by(graph, spec)}
    for kind, tensor in itertools.chain(spec.tensors, (alone[name] for name in declared if name in alone)):
        node = declared.get(tensor.name)
        if node is None or node.kind != kind or node.spec.form != tensor.form:
            found = "none" if node is None else f"a {node.kind} {node.spec}"
            _refuse(
                spec,
                f"declares what is said of it, the {kind} {tensor.name!r} {tensor}",
                found,
                "correct one of them",
            )
    return result


def _declared_by(graph: GraphBuilder, spec: LayerSpec) -> Iterator[TensorNode]:
    """The tensors that the last call has declared."""
    call = graph.draft.ops[-1]
    for i in call.inputs[len(spec.operands) :]:
        if i is not None and graph.draft.tensors[i].kind in ("parameter", "state"):
            yield graph.draft.tensors[i]
