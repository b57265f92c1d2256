"""Groups sharded or offloaded weights into units, and adds the calls that gather each unit before
it is used.

A unit is what is gathered together: the weights of one layer, or of a run of ops between layers. A
user or a minimum size may join several of these to one unit. Each gathering call is the use of a
template, so equal layers use the same instructions. A call is placed `prefetch` units before its
first reader. This is enough for overlap, because tasks run as soon as their tiles are available.
The planner assigns memory to gathered weights by their live intervals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import count
from math import prod

from tilewise.core.dims import upper_bound
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import DeviceMesh
from tilewise.ir.batch import BatchCut
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode, TensorSpec
from tilewise.ir.layout import GraphLayout, TensorLayout
from tilewise.ir.op import op_named
from tilewise.strategy.pending_reductions import make_pending_reductions

__all__ = ["Prefetching", "Unit", "UnitChoice", "template_of_moves"]


@dataclass(frozen=True)
class UnitChoice:
    """How weights are gathered or fetched.

    Attributes:
        prefetch: how many units before its first reader a gathering call is placed.
        is_kept: whether weights that the forward pass read stay in memory for the backward pass.
        patterns: patterns of weight names; adjacent layers whose weights all match one pattern are
            a unit.
        elements: adjacent layers are joined to a unit until the unit has this many elements.
    """

    prefetch: int = 1
    is_kept: bool = False
    patterns: tuple[str, ...] = ()
    elements: int = 0


@dataclass
class Unit:
    """Consecutive ops of one phase (a layer's call, or a run of ops between layers) and the weights
    whose values they read.
    """

    first: int
    last: int
    phase: str
    needs: tuple[int, ...] = ()
    # weight -> the gathered tensor that ops read instead
    gathered: dict[int, int] = field(default_factory=dict)


class Prefetching(ABC):
    """Adds calls that gather or fetch weights to a graph.

    Args:
        graph, layout: the graph and its compute layout.
        batch: how the batch of the graph is divided.
        choice: how layers are joined to units.
        fetch_op: name of the op that fetches a weight.

    Attributes:
        tensors: tensors of the new graph.
        compute: compute layouts of these tensors.
    """

    def __init__(
        self, graph: Graph, layout: GraphLayout, batch: BatchCut, choice: UnitChoice, fetch_op: str
    ) -> None:
        self.graph, self.layout, self.batch = graph, layout, batch
        self.choice, self.fetch_op = choice, fetch_op
        self.mesh: DeviceMesh = layout.mesh
        self.tensors = list(graph.tensors)
        self.compute: list[TensorLayout] = list(layout.compute)
        self.templates: dict[str, Template] = dict(graph.templates)
        self.gathers: dict[object, tuple[Template, GraphLayout]] = {}
        self.inner: dict[object, GraphLayout] = {}  # changed layouts of templates, see `_inside`
        self.fitting: set[str] = set()  # patterns that fit some layer
        self.needed: dict[str, frozenset[int]] = {}  # by template, arguments whose values it needs

    def insert_prefetches(self, weights: Iterable[int]) -> tuple[Graph, GraphLayout]:
        """Return the graph with prefetch calls for some weights, and its layout."""
        units = self._units({*weights})
        return self._written(units, self._place_gathers(units))

    # ---- units --------------------------------------------------------------------------------------------

    def _units(self, weights: set[int]) -> list[Unit]:
        """Layers and runs between them, with the weights that they read."""
        units: list[Unit] = []
        for op in self.graph.ops:
            is_run = units and op.op != "call" and self.graph.ops[op.id - 1].op != "call"
            if not is_run or units[-1].phase != op.phase:
                units.append(Unit(op.id, op.id, op.phase))
            units[-1].last = op.id
        for unit in units:
            if unit.phase != "update":
                ops = self.graph.ops[unit.first : unit.last + 1]
                needs = (t for op in ops for t in self._needs_of(self.graph, op) if t in weights)
                # in one order in both passes, so that they share a template
                unit.needs = tuple(sorted({*needs}))
        return units

    def _needs_of(self, graph: Graph, op: OpNode) -> list[int]:
        """Operands whose values an op reads. Operands of which it uses only the shape are not
        included.
        """
        if op.op != "call":
            shape_of = op_named(op.op).declared.shape_of
            return [t for i, t in enumerate(op.inputs) if t is not None and i not in shape_of]
        key = op.attrs["template"]
        template = graph.templates[key]
        if key not in self.needed:
            inside = template.graph
            self.needed[key] = frozenset(t for o in inside.ops for t in self._needs_of(inside, o))
        needed = self.needed[key]
        return [t for a, t in zip(template.arguments, op.inputs) if t is not None and a in needed]

    def _place_gathers(self, units: Sequence[Unit]) -> dict[int, list[OpNode]]:
        """The gathering calls, by the index of the run or layer before which they are placed."""
        before: dict[int, list[OpNode]] = {}
        # weight -> the unit that last read it, and the gathered tensor
        in_memory: dict[int, tuple[int, int]] = {}
        groups = self._groups(units)
        for at, group in enumerate(groups):
            phase = units[group[0]].phase
            needs = sorted({weight for number in group for weight in units[number].needs})
            reused = {
                w: in_memory[w][1]
                for w in needs
                if w in in_memory and (self.choice.is_kept or in_memory[w][0] == at - 1)
            }
            fresh = [w for w in needs if w not in reused]
            if fresh:
                earlier = [g[0] for g in groups[:at] if units[g[0]].phase == phase]
                place = [*earlier, group[0]][-1 - min(self.choice.prefetch, len(earlier))]
                call = self._gather(fresh, phase)
                before.setdefault(place, []).append(call)
                reused.update(zip(fresh, call.outputs))
            for number in group:
                units[number].gathered.update(reused)
            in_memory.update({w: (at, reused[w]) for w in needs})
        return before

    def _groups(self, units: Sequence[Unit]) -> list[list[int]]:
        """Runs and layers that are gathered together, in order. Those that read weights are
        separate, or joined by the user's patterns or by size.
        """
        groups: list[list[int]] = []
        last: tuple[str, str | None] = ("", None)
        size = 0
        for number, unit in enumerate(units):
            if not unit.needs:
                continue
            mark = unit.phase, self._pattern_of(unit)
            is_small = mark[1] is None and size < self.choice.elements
            if groups and mark == last and (is_small or mark[1] is not None):
                groups[-1].append(number)
            else:
                groups.append([number])
                size = 0
            last = mark
            shapes = (self.graph.spec(weight).shape for weight in unit.needs)
            size += sum(prod(map(upper_bound, shape)) for shape in shapes)
        for pattern in self.choice.patterns:
            if pattern not in self.fitting:
                raise LayoutError(
                    "[strategy.prefetch] a pattern of units must match all weights of a layer; got "
                    f"{pattern!r}, which matches no layer of {self.graph.name!r} that earlier patterns leave; see the "
                    "names in print(graph)"
                )
        return groups

    def _pattern_of(self, unit: Unit) -> str | None:
        """The user's pattern that all weights of a layer match."""
        names = [self.graph.spec(weight).name for weight in unit.needs]
        for pattern in self.choice.patterns:
            if all(fnmatchcase(name, pattern) for name in names):
                self.fitting.add(pattern)
                return pattern
        return None

    def _gather(self, weights: Sequence[int], phase: str) -> OpNode:
        """A call that gathers some weights. Equal calls share a template."""
        template, _ = self._gather_template(weights)
        names = self._names(weights)
        label = f"{self.fetch_op}:{_common_path(names) or names[0]}"
        return self._call(template, weights, phase, label, self.layout.compute)

    def _call(
        self,
        template: Template,
        operands: Sequence[int],
        phase: str,
        label: str,
        layouts: Sequence[TensorLayout],
    ) -> OpNode:
        """A call of a template that copies tensors. The results have the operands' layouts in `layouts`."""
        results = []
        for tensor in operands:
            results.append(len(self.tensors))
            self.tensors.append(
                TensorNode(results[-1], replace(self.graph.spec(tensor), name=""), "result", -1)
            )
            self.compute.append(layouts[tensor])
        attrs = {"template": template.key, "saved": ()}
        return OpNode(-1, "call", tuple(operands), tuple(results), attrs, phase, label)

    def _names(self, weights: Sequence[int]) -> list[str]:
        return [self.graph.spec(w).name or f"x{i}" for i, w in enumerate(weights)]

    def _gather_template(self, weights: Sequence[int]) -> tuple[Template, GraphLayout]:
        names = self._names(weights)
        path = _common_path(names) if len(names) > 1 else ""
        names = [name[len(path) + 1 if path else 0 :] for name in names]
        forms = tuple(
            (name, self.graph.spec(w).form, self.compute[w], self.layout.compute[w])
            for w, name in zip(weights, names)
        )
        if forms not in self.gathers:
            specs = [replace(self.graph.spec(w), name=name) for w, name in zip(weights, names)]
            template = template_of_moves(self._key(self.fetch_op), self.fetch_op, specs, self.graph)
            compute = (*(self.compute[w] for w in weights), *(self.layout.compute[w] for w in weights))
            laid_out = self._layout_of_gather(compute, len(weights))
            self.gathers[forms] = template, laid_out
            self.templates[template.key] = template
        return self.gathers[forms]

    def _key(self, prefix: str) -> str:
        """The key of a new template."""
        keys = (f"{prefix}{number}" for number in count(len(self.gathers)))
        return next(key for key in keys if key not in self.templates)

    # ---- the new graph ------------------------------------------------------------------------------------

    def _written(
        self, units: Sequence[Unit], before: Mapping[int, Sequence[OpNode]]
    ) -> tuple[Graph, GraphLayout]:
        ops: list[OpNode] = []
        calls: dict[int, GraphLayout] = {}
        by_key = {template.key: layout for template, layout in self.gathers.values()}
        for number, unit in enumerate([*units, None]):
            for call in before.get(number, ()):
                calls[len(ops)] = by_key[call.attrs["template"]]
                ops.append(replace(call, id=len(ops)))
            if unit is None:
                break
            for old in self.graph.ops[unit.first : unit.last + 1]:
                inputs = tuple(None if t is None else unit.gathered.get(t, t) for t in old.inputs)
                op = replace(old, id=len(ops), inputs=inputs)
                ops.append(op)
                if op.op == "call":
                    calls[op.id] = self._inside(op, self.layout.calls[old.id])
        producer = {o: op.id for op in ops for o in op.outputs}
        tensors = tuple(replace(t, producer=producer.get(t.id)) for t in self.tensors)
        graph = replace(self.graph, tensors=tensors, ops=tuple(ops), templates=self.templates)
        compute = tuple(self.compute)
        return graph, replace(
            self.layout,
            storage=compute,
            compute=compute,
            calls=calls,
            pending_reductions=make_pending_reductions(graph, compute, self.mesh, self.batch),
        )

    # ---- layouts of templates -----------------------------------------------------------------------------

    def _layout_of_gather(self, compute: tuple[TensorLayout, ...], count: int) -> GraphLayout:
        """The layout of a call's template with `count` weights and as many results."""
        files = tuple(range(count)) if self.fetch_op == "fetch" else ()
        return replace(
            self.layout, storage=compute, compute=compute, calls={}, pending_reductions={}, files=files
        )

    @abstractmethod
    def _inside(self, op: OpNode, layout: GraphLayout) -> GraphLayout:
        """A template's layout for the tensors that its call now binds. Calls that bind alike share
        it.
        """


def template_of_moves(key: str, op: str, specs: Sequence[TensorSpec], of: Graph) -> Template:
    """A template with one op per tensor. The op's result is the same tensor in another place."""
    count = len(specs)
    tensors = [TensorNode(i, spec, "parameter") for i, spec in enumerate(specs)]
    tensors += [TensorNode(count + i, replace(s, name=""), "result", i) for i, s in enumerate(specs)]
    ops = [
        OpNode(i, op, (i,), (count + i,), {}, "forward", f"{op}:{spec.name}") for i, spec in enumerate(specs)
    ]
    inside = Graph(key, tuple(tensors), tuple(ops), {}, of.k_splits)
    return Template(key, inside, tuple(range(count)), tuple(range(count, 2 * count)))


def _common_path(names: Sequence[str]) -> str:
    """The common prefix of dotted names; for a single name, the name."""
    parts = [name.split(".") for name in names]
    least = min(len(p) for p in parts) - (len(names) > 1)
    count = next((i for i, column in enumerate(zip(*parts)) if len({*column}) > 1), least)
    return ".".join(parts[0][: min(count, least)])
