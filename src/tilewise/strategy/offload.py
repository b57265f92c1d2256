"""Offloading: tensors are stored in a file of each device, and fetched into the device's memory
when they are needed.

Optimizer states are prefetched whole if memory allows (`plan.schedule.prefetched_states`). The update reads
the remaining states block by block (`plan.lower.blocks`). Weights are fetched for each layer in the
forward pass, in the backward pass and by the update. Activations that the backward pass reads are
stored after the layer that computes them and fetched before their reader. Offloading changes no bit
of the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from tilewise.core.dims import upper_bound
from tilewise.core.errors import PlanError
from tilewise.core.validation import Validator
from tilewise.ir.batch import BatchCut
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode
from tilewise.ir.layout import GraphLayout
from tilewise.strategy.prefetch import Prefetching, Unit, UnitChoice, template_of_moves

__all__ = ["OFFLOADS", "NothingToOffload", "check_offload", "offload_tensors", "prefetch_states"]

OFFLOADS = ("optimizer", "activations", "parameters")
_LEAST_BYTES = 1 << 14  # least bytes of a device's part; less is not worth a transfer
_LEAST_UNITS = 4  # between a result and its reader; a nearer reader needs it again too soon


class NothingToOffload(PlanError):
    """No tensor of a kind is large enough to save memory."""


_validate = Validator("plan", PlanError)
_of_kind = Validator("plan", NothingToOffload)


def check_offload(offload: str | Collection[str]) -> frozenset[str]:
    """The kinds of tensors to offload, as a set.

    Raises:
        PlanError: a kind is not in `OFFLOADS`.
    """
    if isinstance(offload, str):
        _validate.choice("plan", "offload", offload, ("none", *OFFLOADS))
        return frozenset() if offload == "none" else frozenset((offload,))
    kinds = _validate.sequence("plan", "offload", offload, ", ".join(OFFLOADS), in_any_order=True)
    return frozenset(_validate.choice("plan", "offload", kind, OFFLOADS) for kind in kinds)


def offload_tensors(
    graph: Graph, layout: GraphLayout, kinds: Collection[str], batch: BatchCut, prefetch: int = 1
) -> tuple[Graph, GraphLayout]:
    """Move tensors of a laid-out graph to files, and add calls that fetch and store them. Return
    the new graph and its layout.

    Args:
        kinds: members of `OFFLOADS`.
        prefetch: how many layers before its reader a tensor is fetched.

    Raises:
        NothingToOffload: no tensor of a kind is large enough to save memory.
    """
    if not kinds:
        return graph, layout
    return _Offloading(graph, layout, frozenset(kinds), batch, prefetch).run()


def prefetch_states(
    graph: Graph, layout: GraphLayout, places: Mapping[int, int], batch: BatchCut
) -> tuple[Graph, GraphLayout]:
    """Add calls that fetch some offloaded states whole before their update, and store them after
    the update. Return the new graph and its layout.

    Args:
        places: per tensor, the op before which it is fetched.
    """
    return _StatePrefetching(graph, layout, places, batch).run() if places else (graph, layout)


class _Fetching(Prefetching):
    """Adds calls that fetch tensors from files. `files` are all tensors in files."""

    def __init__(self, graph: Graph, layout: GraphLayout, batch: BatchCut, prefetch: int = 1) -> None:
        super().__init__(graph, layout, batch, UnitChoice(prefetch), "fetch")
        self.files = {*layout.files}

    def _inside(self, op: OpNode, layout: GraphLayout) -> GraphLayout:
        template = self.templates[op.attrs["template"]]
        files = tuple(a for a, t in zip(template.arguments, op.inputs) if t in self.files)
        if files == layout.files or not self._may_change(op, layout):
            return layout
        key = id(layout), files
        if key not in self.inner:
            self.inner[key] = replace(layout, files=files)
        return self.inner[key]

    def _may_change(self, op: OpNode, layout: GraphLayout) -> bool:
        """Whether the files of a call's template follow from the call's operands."""
        return not layout.files


class _Offloading(_Fetching):
    def __init__(
        self, graph: Graph, layout: GraphLayout, kinds: frozenset[str], batch: BatchCut, prefetch: int
    ) -> None:
        super().__init__(graph, layout, batch, prefetch)
        self.kinds = kinds
        self.stores: dict[object, tuple[Template, GraphLayout]] = {}

    def run(self) -> tuple[Graph, GraphLayout]:
        """Marks offloaded tensors first, then adds calls that store, then calls that fetch."""
        prefetched: set[int] = set()
        for kind in sorted(self.kinds):
            tensors = {*self._of_kind(kind)}
            if not tensors:
                is_far = f", and wait for {_LEAST_UNITS} layers or more" if kind == "activations" else ""
                _of_kind.invalid(
                    "plan",
                    f"offloaded tensors must take {_LEAST_BYTES >> 10} KiB or more on a device{is_far}",
                    f"no {kind} of {self.graph.name!r} that do",
                    "leave it out of offload",
                )
            if kind == "activations":
                tensors = self._store(tensors)
            if kind != "optimizer":
                prefetched |= tensors
            self.files |= tensors
        graph, layout = self.insert_prefetches(prefetched)
        return graph, replace(layout, files=tuple(sorted(self.files)))

    # ---- tensors in files -----------------------------------------------------------------------------------

    def _of_kind(self, kind: str) -> Iterator[int]:
        if kind == "activations":
            yield from self._activations()
        elif kind == "parameters":
            yield from (t.id for t in self.graph.of_kind("parameter") if self._is_worth_it(t))
        else:
            states = {t.id for t in self.graph.of_kind("state") if self._is_worth_it(t)}
            for op in self.graph.ops:
                if op.phase == "update":
                    yield from states.intersection(t for t in op.given)

    def _is_worth_it(self, tensor: TensorNode) -> bool:
        spec = tensor.spec
        if spec.storage not in ("packed", "rows"):
            return False
        elements = prod(upper_bound(size) for size in spec.shape)
        axes = {axis for axes in self.compute[tensor.id] for axis in axes if axis in self.mesh.names}
        parts = self.mesh.size(*axes) * (1 if tensor.kind != "result" else self.batch.microbatches)
        return elements * spec.dtype.itemsize // parts >= _LEAST_BYTES

    def _activations(self) -> Iterator[int]:
        """Results of the forward pass that the backward pass reads much later."""
        made: dict[int, int] = {}  # result -> its unit
        read: dict[int, int] = {}  # result -> the first unit of the backward pass that needs it
        for number, unit in enumerate(self._units(set())):
            for op in self.graph.ops[unit.first : unit.last + 1]:
                if op.phase == "forward":
                    made.update(dict.fromkeys((*op.outputs, *op.given), number))
                elif op.phase == "backward":
                    for t in self._needs_of(self.graph, op):
                        read.setdefault(t, number)
        outputs = {*self.graph.outputs.values()}
        for t, number in read.items():
            node = self.graph.tensors[t]
            is_far = t in made and number - made[t] >= _LEAST_UNITS
            is_result = node.kind == "result" and node.spec.storage == "rows" and t not in outputs
            if is_far and is_result and self._is_worth_it(node):
                yield t

    def _store(self, results: Collection[int]) -> set[int]:
        """Adds a call after each unit that stores its activations. The backward pass reads them
        from the file.
        """
        stored: dict[int, int] = {}  # result -> its copy in the file
        ops: list[OpNode] = []
        calls: dict[int, GraphLayout] = {}
        for unit in self._units(set()):
            own = []
            for op in self.graph.ops[unit.first : unit.last + 1]:
                inputs = op.inputs
                if op.phase == "backward":
                    inputs = tuple(t if t is None else stored.get(t, t) for t in inputs)
                if op.id in self.layout.calls:
                    calls[len(ops)] = self.layout.calls[op.id]
                ops.append(replace(op, id=len(ops), inputs=inputs))
                own += [o for o in op.outputs if o in results]
            if own:
                call, layout = self._call_of_store(own)
                stored.update(zip(own, call.outputs))
                calls[len(ops)] = layout
                ops.append(replace(call, id=len(ops)))
        producer = {o: op.id for op in ops for o in op.outputs}
        tensors = tuple(replace(t, producer=producer.get(t.id)) for t in self.tensors)
        compute = tuple(self.compute)
        self.graph = replace(self.graph, tensors=tensors, ops=tuple(ops), templates=self.templates)
        # `insert_prefetches` makes the pending reductions
        self.layout = replace(self.layout, storage=compute, compute=compute, calls=calls)
        self.tensors = list(tensors)
        return {*stored.values()}

    def _call_of_store(self, results: list[int]) -> tuple[OpNode, GraphLayout]:
        specs = [replace(self.graph.spec(t), name=f"x{i}") for i, t in enumerate(results)]
        forms = tuple((spec.form, self.compute[t]) for spec, t in zip(specs, results))
        count = len(results)
        if forms not in self.stores:
            template = template_of_moves(f"store{len(self.stores)}", "store", specs, self.graph)
            compute = tuple(self.compute[t] for t in results) * 2
            layout = replace(self._layout_of_gather(compute, count), files=tuple(range(count, 2 * count)))
            self.stores[forms] = template, layout
            self.templates[template.key] = template
        template, layout = self.stores[forms]
        return self._call(template, results, "forward", template.key, self.compute), layout


class _StatePrefetching(_Fetching):
    """Adds calls that fetch all or some optimizer states before their updates.

    Args:
        places: per tensor, the op before which it is fetched.
    """

    def __init__(self, graph: Graph, layout: GraphLayout, places: Mapping[int, int], batch: BatchCut) -> None:
        super().__init__(graph, layout, batch)
        self.places = places

    def run(self) -> tuple[Graph, GraphLayout]:
        """Adds a call that fetches and a call that stores for each update."""
        units = self._units(set())
        before: dict[int, list[OpNode]] = {}
        starts = {op: number for number, unit in enumerate(units) for op in range(unit.first, unit.last + 1)}
        for number, unit in enumerate(units):
            if unit.phase != "update":
                continue
            operands = (t for op in self.graph.ops[unit.first : unit.last + 1] for t in op.given)
            in_memory = [t for t in dict.fromkeys(operands) if t in self.places]
            for place in dict.fromkeys(self.places[t] for t in in_memory):
                together = [t for t in in_memory if self.places[t] == place]
                fetch = self._gather(together, "update")
                label = f"fetch:{self.graph.ops[unit.first].label}"
                before.setdefault(starts[place], []).append(replace(fetch, label=label))
                unit.gathered.update(zip(together, fetch.outputs))
            if in_memory:
                before.setdefault(number + 1, []).append(self._put_back(in_memory, unit))
        return self._written(units, before)

    def _put_back(self, in_memory: Sequence[int], unit: Unit) -> OpNode:
        specs = [replace(self.graph.spec(t), name=name) for t, name in zip(in_memory, self._names(in_memory))]
        forms = "put_back", tuple((s.form, self.compute[t]) for s, t in zip(specs, in_memory))
        if forms not in self.gathers:
            count = len(in_memory)
            tensors = [
                TensorNode(i, replace(s, name=f"x{i % count}"), "parameter")
                for i, s in enumerate((*specs, *specs))
            ]
            ops = [
                OpNode(i, "put_back", (i, count + i), (), {}, "forward", f"put_back:x{i}")
                for i in range(count)
            ]
            key = self._key("put_back")
            inside = Graph(key, tuple(tensors), tuple(ops), {}, self.graph.k_splits)
            template = Template(key, inside, tuple(range(2 * count)), ())
            compute = tuple(self.compute[t] for t in in_memory) * 2
            self.gathers[forms] = template, self._layout_of_gather(compute, count)
            self.templates[key] = template
        template, _ = self.gathers[forms]
        attrs = {"template": template.key, "saved": ()}
        values = (unit.gathered[t] for t in in_memory)
        label = f"put_back:{self.graph.ops[unit.first].label}"
        return OpNode(-1, "call", (*in_memory, *values), (), attrs, "update", label)

    def _may_change(self, op: OpNode, layout: GraphLayout) -> bool:
        return op.phase == "update" and bool(layout.files)
