"""`ParallelGraphBuilder`: describes layers on several threads, then writes them into a graph in one order.

There are three phases. *Specification*: functions of the caller describe items (layers, KV caches)
on threads, each with its own handle. *Validation*: the names and operands of all specifications are
checked, against the other specifications and the graph. *Assembly*: each distinct template is
traced once, and the specifications are written into the graph in the order of the items. An error
leaves the graph as it was. The graph does not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tilewise.core.errors import ShapeError
from tilewise.core.progress import Progress, thread_name
from tilewise.core.validation import Validator
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.parallel.specs import Describe, LayerSpec, describe_item, in_words
from tilewise.ir.graph import TensorNode, TensorSpec

__all__ = ["ParallelGraphBuilder"]

Specs = Sequence[LayerSpec]
MAX_THREADS = 256
_validate = Validator("graph", ShapeError)


class ParallelGraphBuilder:
    """Describes layers on several threads, and writes them into graphs.

    Args:
        threads: the number of threads that describe items.
        progress: receives the phases; a `ParallelDebugger` or a `ProgressTracker`.

    Raises:
        ShapeError: `threads` is not between 1 and 256.
    """

    def __init__(self, threads: int = 2, *, progress: Progress | None = None) -> None:
        self.threads = _validate.integer("ParallelGraphBuilder", "threads", threads, 1, MAX_THREADS)
        self.progress = Progress() if progress is None else progress

    def specify(self, describe: Describe, items: Iterable[Any], *, kind: str = "layer") -> Future[Specs]:
        """Call `describe(handle, item)` once for every item, on several threads.

        Args:
            describe: describes one item with the methods of its `SpecHandle`; it must not touch a graph.
            items: for example the numbers of the layers.
            kind: the name of such an item in messages and progress reports.

        Returns:
            A future of the specifications, in the order of the items. If `describe` raises, the future raises a
            ShapeError for the first item that failed. It names the item, the thread and the item's last
            specification.
        """
        item_list = list(items)
        runner = ThreadPoolExecutor(1, thread_name_prefix=f"specify {kind}")
        try:
            return runner.submit(self._specify, describe, item_list, kind)
        finally:
            runner.shutdown(wait=False)

    def assemble(
        self,
        graph: GraphBuilder,
        *groups: Future[Specs] | Specs,
        named: Mapping[str, TensorNode] | None = None,
    ) -> dict[str, TensorNode]:
        """Write specifications into a graph, group by group. After an error the graph is as before.

        Tensors that were described without a layer (`SpecHandle.tensor`) are declared first, unless
        a layer declares a tensor of the same name. Layers follow.

        Args:
            graph: the graph to write to.
            groups: the results of `specify`, in the order of their layers.
            named: further tensors of the graph that specifications read, by the name that they use.

        Returns:
            The result of each layer, by path.

        Raises:
            ShapeError: a name is declared twice, an operand does not exist, or a layer rejects its
                operands. The message names the specification. If a group's future has failed, its
                error is raised.
        """
        spec_groups = [group.result() if isinstance(group, Future) else group for group in groups]
        specs = list(itertools.chain.from_iterable(spec_groups))
        layers = [spec for spec in specs if spec.function is not None]
        tensors = dict(named or {})
        with self.progress.phase("validation", len(specs)) as phase:
            for tensor in tensors.values():
                graph.draft.own("assemble", tensor)
            alone = _check_names(graph, specs, tensors)
            phase.counter().count = len(specs)
        with self.progress.phase("assembly", len(specs)) as phase, graph.all_or_nothing():
            counter, results = phase.counter(), dict[str, TensorNode]()
            declared = _names_declared_by(graph, layers, tensors, alone) if alone else set()
            for name, (kind, spec) in alone.items():
                if name not in declared:
                    graph.draft.declare(kind, spec)
                counter.count += 1
            for layer in layers:
                operands = [results.get(n) or tensors.get(n) or graph.find(n) for n in layer.operands]
                results[layer.path] = _write(graph, layer, alone, operands)
                counter.count += 1
        return results

    def _specify(self, describe: Describe, items: list[Any], kind: str) -> Specs:
        with self.progress.phase("specification", len(items)) as phase:
            numbers = itertools.count()  # `next` is atomic, so two threads never get the same number
            specs_by_item: list[Specs] = [()] * len(items)
            failed: dict[int, ShapeError] = {}

            def work() -> None:
                counter, who, spans = phase.counter(), thread_name(), self.progress.wants_spans
                while not failed and (i := next(numbers)) < len(items):
                    begin = time.perf_counter_ns() if spans else 0
                    try:
                        specs_by_item[i] = describe_item(describe, kind, i, items[i], f"thread {who!r}")
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
        return tuple(itertools.chain.from_iterable(specs_by_item))


def _check_names(
    graph: GraphBuilder, specs: Specs, named: Mapping[str, TensorNode]
) -> dict[str, tuple[str, TensorSpec]]:
    """Check that names are unique and that every operand is defined before it is read.

    Returns:
        Kind and spec of the tensors that were described without a layer, by name.
    """
    alone: dict[str, tuple[str, TensorSpec]] = {}
    for spec in specs:
        for kind, tensor in spec.tensors if spec.function is None else ():
            if tensor.name in alone or graph.has(tensor.name):
                _invalid(
                    spec, "must declare a new name", f"{tensor.name!r}, which exists already", "rename it"
                )
            alone[tensor.name] = kind, tensor
    before = set(named)
    for spec in specs:
        if spec.function is None:
            continue
        for name in spec.operands:
            if name not in before and name not in alone and not graph.has(name):
                _invalid(
                    spec,
                    "must read tensors of the graph or layers described before it",
                    f"{name!r}, which is neither",
                    "correct it",
                )
        if spec.path in before or spec.path in alone or graph.has(spec.path):
            _invalid(spec, "must have a unique path", "one that exists already", "rename it")
        before.add(spec.path)
    return alone


def _names_declared_by(
    graph: GraphBuilder,
    layers: Specs,
    named: Mapping[str, TensorNode],
    alone: Mapping[str, tuple[str, TensorSpec]],
) -> set[str]:
    """The names of parameters and states that layers will declare. Their templates are traced."""
    declared: set[str] = set()
    specs = {name: tensor.spec for name, tensor in named.items()}
    specs |= {name: tensor for name, (_, tensor) in alone.items()}
    for layer in layers:
        assert layer.function is not None
        operands = [specs[n] if n in specs else graph.find(n).spec for n in layer.operands]
        with _blamed_on(layer):
            drafted = layer.function.drafted(graph, operands, layer.attrs, layer.path)
        template = graph.draft.templates[drafted.key]
        specs[layer.path] = template.graph.spec(template.results[0])
        families = [family for _, family, *_ in drafted.declared if family is not None]
        declared.update(family.member(layer.path).name for family in families)
    return declared


def _invalid(spec: LayerSpec, rule: str, got: str, advice: str) -> None:
    _validate.invalid("assemble", f"{spec.kind} {spec.path!r} {rule}", got, advice)


@contextmanager
def _blamed_on(spec: LayerSpec) -> Iterator[None]:
    """A block whose errors name a specification."""
    try:
        yield
    except Exception as error:
        raise ShapeError(
            f"[graph.parallel] {spec.kind} {spec.path!r} must accept its operands; got {in_words(error)}; correct it"
        ) from error


def _write(
    graph: GraphBuilder,
    spec: LayerSpec,
    alone: Mapping[str, tuple[str, TensorSpec]],
    operands: Sequence[TensorNode],
) -> TensorNode:
    """Write one layer into the graph, and check that it declares the tensors that its specification
    lists.
    """
    assert spec.function is not None
    with _blamed_on(spec):
        result = spec.function(graph, *operands, path=spec.path, **spec.attrs)
    call = graph.draft.ops[-1]
    bound = [graph.draft.tensors[i] for i in call.given[len(operands) :]]
    declared = {t.spec.name: t for t in bound if t.kind in ("parameter", "state")}
    for kind, tensor in itertools.chain(spec.tensors, (alone[name] for name in declared if name in alone)):
        node = declared.get(tensor.name)
        if node is None or node.kind != kind or node.spec.form != tensor.form:
            _invalid(
                spec,
                f"must declare the specified {kind} {tensor.name!r} {tensor}",
                "no such tensor" if node is None else f"a {node.kind} {node.spec}",
                "correct the specification or the layer",
            )
    return result
