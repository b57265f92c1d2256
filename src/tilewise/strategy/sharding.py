"""Sharded state: weights, gradients and optimizer states cut over devices at home, gathered where they are used.

Propagation lays a graph out as if every device of a sharding axis had its weights whole: that is how ops *use* them.
Here each weight gets a *home*, which the sharding axes cut along dim 0 in whole panels, and so do its gradient and its
optimizer's states. What reads the weight reads what a call of `unshard` has gathered from the homes beforehand; a sum
that makes its gradient arrives in shards; its update works at home. Nothing else changes, so no bit does.

Every layer is a unit that is gathered by one call, and so is every run of ops between layers, unless a user or a size
puts several together. The calls are templates: equal layers are gathered by the same instructions. A call stands
`prefetch` units before its reader, which is all that overlapping takes: tasks run when their tiles are there. Memory
for what is gathered comes from the planner, by the time that it lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod

from tilewise.core.dims import upper_bound
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import DeviceMesh
from tilewise.ir.batch import BatchCut
from tilewise.ir.contractions import SeenLayouts, factors_of
from tilewise.ir.graph import PANEL_ROWS, Graph, OpNode, Template, TensorNode, TensorSpec
from tilewise.ir.layout import GraphLayout, Record, TensorLayout, show_layout
from tilewise.ir.op import op_named
from tilewise.strategy.records import make_records
from tilewise.strategy.strategy import StateSharding

__all__ = ["shard_states"]


def shard_states(
    graph: Graph, layout: GraphLayout, sharding: StateSharding, batch: BatchCut
) -> tuple[Graph, GraphLayout]:
    """A graph laid out for use, with homes: gathers as calls, and the layouts of weights, gradients and states.

    Raises:
        LayoutError: no weight is large enough to be cut, or a gradient is made by ops that cannot leave it in shards.
    """
    axes = tuple(axis for axis in sharding.axes if layout.mesh.size(axis) > 1)
    if not axes:
        return graph, layout
    return _Sharding(graph, layout, replace(sharding, axes=axes), batch).run()


@dataclass
class _Unit:
    """Consecutive ops of one phase, a layer's call or a run between layers, and the weights whose values they need."""

    first: int
    last: int
    phase: str
    needs: tuple[int, ...] = ()
    gathered: dict[int, int] = field(default_factory=dict)  # weight -> what stands for it here


class _Sharding:
    """A graph that is given homes; `use` are layouts by tensor, of what gathers make too."""

    def __init__(self, graph: Graph, layout: GraphLayout, sharding: StateSharding, batch: BatchCut) -> None:
        self.graph, self.layout, self.sharding, self.batch = graph, layout, sharding, batch
        self.mesh: DeviceMesh = layout.mesh
        self.tensors = list(graph.tensors)
        self.use: list[TensorLayout] = list(layout.use)
        self.templates: dict[str, Template] = dict(graph.templates)
        self.inner: dict[object, GraphLayout] = {}  # by a template's layout and what changed in it
        self.gathers: dict[object, tuple[Template, GraphLayout]] = {}
        self.fitting: set[str] = set()  # patterns that fit some layer
        self.needed: dict[str, frozenset[int]] = {}  # by template, arguments whose values it needs

    def run(self) -> tuple[Graph, GraphLayout]:
        """Homes first, then calls of `unshard`, then layouts and records of what has changed."""
        weights = [t.id for t in self.graph.of_kind("parameter") if self._is_cut(t.spec, self.use[t.id])]
        if not weights:
            raise LayoutError(
                "[strategy.shard_states] a weight is cut in panels of 32 rows, one or more a device; got no weight of "
                f"{self.graph.name!r} with {self.mesh.size(*self.sharding.axes)} of them; use fewer devices for "
                f"{'*'.join(self.sharding.axes)}"
            )
        self._give_homes(weights)
        units = self._units({*weights})
        before = self._place_gathers(units)
        return self._written(units, before)

    # ---- homes --------------------------------------------------------------------------------------------

    def _is_cut(self, spec: TensorSpec, use: TensorLayout) -> bool:
        """Whether every device gets a panel or more; vectors and small weights stay whole."""
        size = spec.shape[0]
        if spec.storage != "packed" or not isinstance(size, int):
            return False
        twice = [axis for axes in use for axis in axes if axis in self.sharding.axes]
        if twice:
            raise LayoutError(
                "[strategy.shard_states] an axis that cuts weights at home cuts none where it is used; got "
                f"{spec.name!r} as {show_layout(use)} with {twice[0]!r} for homes; drop the hint on it"
            )
        return size // self.mesh.size(*use[0]) // PANEL_ROWS >= self.mesh.size(*self.sharding.axes)

    def _home(self, use: TensorLayout) -> TensorLayout:
        return ((*use[0], *self.sharding.axes), *use[1:])

    def _give_homes(self, weights: Sequence[int]) -> None:
        """A weight, what its update writes on beside it, and its gradient."""
        homes = {weight: self._home(self.use[weight]) for weight in weights}
        pending: list[int] = []
        for op in self.graph.ops:
            if op.phase == "update":
                for group in self._written_alike(self.graph, op):
                    home = next((homes[t] for t in group if t in homes), None)
                    if home is not None:
                        homes.update(dict.fromkeys(group, home))
                        pending += [t for t in group if self.graph.tensors[t].kind == "result"]
        producers = {o: op for op in self.graph.ops for o in op.outputs}
        while pending:
            gradient = pending.pop()
            for source in _sources(self.graph, producers[gradient], gradient):
                if source not in homes:
                    homes[source] = homes[gradient]
                    pending.append(source)
        for tensor, home in homes.items():
            self.use[tensor] = home

    def _written_alike(self, graph: Graph, op: OpNode) -> Iterator[list[int]]:
        """Tensors of the root graph that an update's op writes on or takes element by element."""
        if op.op == "call":
            template = graph.templates[op.attrs["template"]]
            bound = dict(zip(template.arguments, op.inputs))
            for inner in template.graph.ops:
                for group in self._written_alike(template.graph, inner):
                    yield [t for i in group if (t := bound.get(i)) is not None]
        elif not op.outputs:
            names = factors_of(graph, op).inputs
            alike = [t for t, dims in zip(op.inputs, names) if t is not None and dims and dims == names[0]]
            yield alike

    # ---- units --------------------------------------------------------------------------------------------

    def _units(self, weights: set[int]) -> list[_Unit]:
        """Layers and runs between them, with the weights that they need."""
        units: list[_Unit] = []
        for op in self.graph.ops:
            is_run = units and op.op != "call" and self.graph.ops[op.id - 1].op != "call"
            if not is_run or units[-1].phase != op.phase:
                units.append(_Unit(op.id, op.id, op.phase))
            units[-1].last = op.id
        for unit in units:
            if unit.phase != "update":
                ops = self.graph.ops[unit.first : unit.last + 1]
                needs = (t for op in ops for t in self._needs_of(self.graph, op) if t in weights)
                unit.needs = tuple(
                    sorted({*needs})
                )  # in one order in both passes, so that they share a template
        return units

    def _needs_of(self, graph: Graph, op: OpNode) -> list[int]:
        """Operands whose values an op needs, not their shapes alone."""
        if op.op != "call":
            rule = op_named(op.op)
            return [t for i, t in enumerate(op.inputs) if t is not None and i not in rule.shape_of]
        key = op.attrs["template"]
        template = graph.templates[key]
        if key not in self.needed:
            inside = template.graph
            self.needed[key] = frozenset(t for o in inside.ops for t in self._needs_of(inside, o))
        needed = self.needed[key]
        return [t for a, t in zip(template.arguments, op.inputs) if t is not None and a in needed]

    def _place_gathers(self, units: Sequence[_Unit]) -> dict[int, list[OpNode]]:
        """Calls that gather, by the number of the run or layer that they stand before."""
        before: dict[int, list[OpNode]] = {}
        held: dict[int, tuple[int, int]] = {}  # weight -> the unit that last read it, and what stood for it
        groups = self._groups(units)
        for at, group in enumerate(groups):
            phase = units[group[0]].phase
            needs = sorted({weight for number in group for weight in units[number].needs})
            kept = {w: held[w][1] for w in needs if w in held and self._is_kept(held[w][0], at)}
            fresh = [w for w in needs if w not in kept]
            if fresh:
                earlier = [g[0] for g in groups[:at] if units[g[0]].phase == phase]
                place = [*earlier, group[0]][-1 - min(self.sharding.prefetch, len(earlier))]
                call = self._gather(fresh, phase)
                before.setdefault(place, []).append(call)
                kept.update(zip(fresh, call.outputs))
            for number in group:
                units[number].gathered.update(kept)
            held.update({w: (at, kept[w]) for w in needs})
        return before

    def _is_kept(self, last: int, now: int) -> bool:
        """Whether a weight that a unit has read is there for another one."""
        return last == now - 1 or not self.sharding.reshard_after_forward

    def _groups(self, units: Sequence[_Unit]) -> list[list[int]]:
        """Runs and layers that are gathered together, in order: those that need weights, one by one, by the user's
        patterns or by size."""
        groups: list[list[int]] = []
        last: tuple[str, str | None] = ("", None)
        size = 0
        for number, unit in enumerate(units):
            if not unit.needs:
                continue
            mark = unit.phase, self._pattern_of(unit)
            is_small = mark[1] is None and size < self.sharding.unit_elements
            if groups and mark == last and (is_small or mark[1] is not None):
                groups[-1].append(number)
            else:
                groups.append([number])
                size = 0
            last = mark
            size += sum(self._elements(weight) for weight in unit.needs)
        for pattern in self.sharding.units:
            if pattern not in self.fitting:
                raise LayoutError(
                    "[strategy.shard_states] a unit is of layers whose weights all fit its pattern; got "
                    f"{pattern!r}, which fits no layer of {self.graph.name!r}; see the names in print(graph)"
                )
        return groups

    def _pattern_of(self, unit: _Unit) -> str | None:
        """The user's pattern that all weights of a layer fit."""
        names = [self.graph.spec(weight).name for weight in unit.needs]
        for pattern in self.sharding.units:
            if all(fnmatchcase(name, pattern) for name in names):
                self.fitting.add(pattern)
                return pattern
        return None

    def _elements(self, weight: int) -> int:
        return prod(upper_bound(size) for size in self.graph.spec(weight).shape)

    def _gather(self, weights: Sequence[int], phase: str) -> OpNode:
        """A call that gathers some weights; equal ones share a template."""
        template, _ = self._gather_template(weights)
        results = []
        for weight in weights:
            spec = self.graph.spec(weight)
            results.append(len(self.tensors))
            self.tensors.append(TensorNode(results[-1], replace(spec, name=""), "result", -1))
            self.use.append(self.layout.use[weight])
        names = [self.graph.spec(w).name for w in weights]
        label = f"unshard:{_common_path(names) or names[0]}"
        attrs = {"template": template.key, "saved": ()}
        return OpNode(-1, "call", tuple(weights), tuple(results), attrs, phase, label)

    def _gather_template(self, weights: Sequence[int]) -> tuple[Template, GraphLayout]:
        names = [self.graph.spec(w).name for w in weights]
        path = _common_path(names) if len(names) > 1 else ""
        names = [name[len(path) + 1 if path else 0 :] for name in names]
        forms = tuple(
            (name, self.graph.spec(w).form, self.use[w], self.layout.use[w])
            for w, name in zip(weights, names)
        )
        if forms not in self.gathers:
            count = len(weights)
            specs = [replace(self.graph.spec(w), name=name) for w, name in zip(weights, names)]
            tensors = [TensorNode(i, spec, "parameter") for i, spec in enumerate(specs)]
            tensors += [TensorNode(count + i, replace(s, name=""), "result", i) for i, s in enumerate(specs)]
            ops = [
                OpNode(i, "unshard", (i,), (count + i,), {}, "forward", f"unshard:{spec.name}")
                for i, spec in enumerate(specs)
            ]
            key = f"unshard{len(self.gathers)}"
            inside = Graph(key, tuple(tensors), tuple(ops), {}, self.graph.reduction_chunks)
            use = (*(self.use[w] for w in weights), *(self.layout.use[w] for w in weights))
            template = Template(key, inside, tuple(range(count)), tuple(range(count, 2 * count)))
            laid_out = GraphLayout(self.mesh, use, use, home_axes=self.sharding.axes)
            self.gathers[forms] = template, laid_out
            self.templates[key] = template
        return self.gathers[forms]

    # ---- the graph anew -----------------------------------------------------------------------------------

    def _written(
        self, units: Sequence[_Unit], before: Mapping[int, Sequence[OpNode]]
    ) -> tuple[Graph, GraphLayout]:
        ops: list[OpNode] = []
        calls: dict[int, GraphLayout] = {}
        records: dict[tuple[int, str], tuple[Record, ...]] = {}
        by_key = {template.key: layout for template, layout in self.gathers.values()}
        for number, unit in enumerate(units):
            for call in before.get(number, ()):
                calls[len(ops)] = by_key[call.attrs["template"]]
                ops.append(replace(call, id=len(ops)))
            for old in self.graph.ops[unit.first : unit.last + 1]:
                inputs = tuple(None if t is None else unit.gathered.get(t, t) for t in old.inputs)
                op = replace(old, id=len(ops), inputs=inputs)
                ops.append(op)
                if op.op == "call":
                    calls[op.id] = self._inside(op, self.layout.calls[old.id])
        producer = {o: op.id for op in ops for o in op.outputs}
        tensors = tuple(replace(t, producer=producer.get(t.id)) for t in self.tensors)
        graph = replace(self.graph, tensors=tensors, ops=tuple(ops), templates=self.templates)
        for op in ops:
            if op.op != "call":
                seen = SeenLayouts.of(op, self.use)
                records |= make_records(graph, op, factors_of(graph, op), self.mesh, seen, self.batch)
        use = tuple(self.use)
        return graph, GraphLayout(self.mesh, use, use, calls, records, home_axes=self.sharding.axes)

    def _inside(self, op: OpNode, layout: GraphLayout) -> GraphLayout:
        """A template's layout for what its call binds now; one for all calls that bind alike."""
        template = self.templates[op.attrs["template"]]
        seen = (*template.arguments, *template.results, *op.attrs["saved"])
        outside = (*op.inputs, *op.outputs)
        changed = tuple(
            (t, self.use[o]) for t, o in zip(seen, outside) if o is not None and layout.use[t] != self.use[o]
        )
        key = id(layout), changed
        if key not in self.inner:
            self.inner[key] = self._changed(template.graph, layout, dict(changed))
        return self.inner[key]

    def _changed(self, graph: Graph, layout: GraphLayout, changed: Mapping[int, TensorLayout]) -> GraphLayout:
        if not changed:
            return layout
        use = list(layout.use)
        pending = list(changed.items())
        producers = {o: op for op in graph.ops for o in op.outputs}
        while pending:
            tensor, home = pending.pop()
            if use[tensor] == home:
                continue
            use[tensor] = home
            if tensor in producers:
                pending += [(t, home) for t in _sources(graph, producers[tensor], tensor)]
        records: dict[tuple[int, str], tuple[Record, ...]] = {}
        for op in graph.ops:
            seen = SeenLayouts.of(op, use)
            records |= make_records(graph, op, factors_of(graph, op), self.mesh, seen, self.batch)
        return replace(layout, home=tuple(use), use=tuple(use), records=records)


def _sources(graph: Graph, op: OpNode, gradient: int) -> list[int]:
    """What a gradient is made of, up to the sums over the batch, which arrive in shards."""
    if op.op == "call" or op.outputs.index(gradient) in op_named(op.op).accumulates:
        return []
    factors = factors_of(graph, op)
    (dims,) = factors.outputs
    alike = [t for t, names in zip(op.inputs, factors.inputs) if t is not None and names == dims]
    if factors.partials or len(alike) != len(op.given):
        raise LayoutError(
            "[strategy.shard_states] the gradient of a sharded weight is a sum over the batch, or made of such "
            f"element by element; got {op.label!r} ({op.op}); leave that weight out of the graph, or use another "
            "strategy"
        )
    return alike


def _common_path(names: Sequence[str]) -> str:
    """The parts that dotted names begin with; of one name, all."""
    parts = [name.split(".") for name in names]
    least = min(len(p) for p in parts) - (len(names) > 1)
    count = next((i for i, column in enumerate(zip(*parts)) if len({*column}) > 1), least)
    return ".".join(parts[0][: min(count, least)])
