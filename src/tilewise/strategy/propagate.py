"""Derives a layout of every tensor from a graph, a mesh and a strategy.

An input, parameter or state takes its layout from a hint of the user, or from the strategy's rule
for its labels. Hints on results are propagated backwards through ops that contract nothing. Then
ops are visited in order. For each op, `strategy.agree` chooses the axes of the op's factors (its
named dims). Hints are strongest, then rules, then layouts that have passed through ops, then
layouts that result from contractions.

A reshard (a change of layout) is recorded if an operand has another layout than the op needs, or if
an op cannot deliver the hinted layout of its result. A sum can be delivered in shards directly. A
template (the structure of a layer) is laid out once per distinct layout of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from tilewise.core.dims import DimLabel
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import MICRO, Axes, DeviceMesh
from tilewise.core.tree import allowed_widths
from tilewise.ir.batch import BatchCut
from tilewise.ir.contractions import SeenLayouts, factors_of
from tilewise.ir.counts import counts
from tilewise.ir.factors import Factors
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode
from tilewise.ir.hints import as_tensor_layout
from tilewise.ir.layout import (
    K_SPLITS,
    GraphLayout,
    PendingReduction,
    Reshard,
    TensorLayout,
    in_space,
    show_layout,
)
from tilewise.strategy.agree import (
    ASKED,
    CONTRACTED,
    FREE,
    PASSED,
    RULED,
    Choice,
    Choices,
    OpDims,
    agree,
    as_layout,
    label_for,
    require_equal_cuts,
)
from tilewise.strategy.alone import lay_out_alone
from tilewise.strategy.pending_reductions import pending_reductions_of
from tilewise.strategy.strategy import DistributionStrategy

__all__ = ["lay_out_template", "propagate_layouts"]


def propagate_layouts(
    graph: Graph, mesh: DeviceMesh, strategy: DistributionStrategy, batch: BatchCut
) -> GraphLayout:
    """Derive the layouts of a whole graph, with the reshards that its ops need.

    Raises:
        LayoutError: an axis shards two dims of a tensor, a device's part of a sum is not a node of
            the sum's tree, operands are shared along the same axes but cut at different elements,
            or a name pattern of the strategy's layouts matches no tensor.
    """
    every = _Propagation(mesh, strategy, batch)
    if mesh.num_devices == 1 and batch.microbatches == 1:
        layout = lay_out_alone(graph, mesh, every.hints)
        every.require_fits(graph)
        return layout
    hints = every.hints(graph)
    outside = {t.id: hints.get(t.id) or every.ruled(t) for t in graph.tensors if t.kind != "result"}
    if mesh.num_devices > 1:  # else there is nothing to share
        _share_updates(graph, outside)
    layout, _ = every.lay_out(graph, outside, hints)
    every.require_fits(graph)
    return layout


def _share_updates(
    graph: Graph,
    outside: dict[int, Choices],
    names: Mapping[int | None, int] | None = None,
) -> None:
    """Gives all states that an update writes the same layout, also in templates: the strongest
    choice per dim.

    `names` maps a template's tensors to those of `outside` that they are bound to.
    """
    names = {t: t for t in outside} if names is None else names
    for op in graph.ops:
        if op.op == "call":
            template = graph.templates[op.attrs["template"]]
            if op.phase == "update":
                bound: dict[int | None, int] = {
                    a: names[i] for a, i in zip(template.arguments, op.inputs) if i in names
                }
                _share_updates(template.graph, outside, bound)
        elif not op.outputs:
            factors, best = factors_of(graph, op), dict[str, Choice]()
            mine = [(names[t], dims) for t, dims in zip(op.inputs, factors.inputs) if t in names and dims]
            for tensor, dims in mine:
                for name, choice in zip(dims, outside[tensor]):
                    best[name] = min(best.get(name, choice), choice, key=lambda c: c.rank)
            for tensor, dims in mine:
                outside[tensor] = tuple(best[name] for name in dims)


@dataclass
class _Propagation:
    """Data that all templates share, and the templates laid out so far."""

    mesh: DeviceMesh
    strategy: DistributionStrategy
    batch: BatchCut
    cache: dict[object, tuple[GraphLayout, dict[int, Choices]]] = field(default_factory=dict)
    calls: dict[object, tuple[GraphLayout, tuple[Choices, ...], object]] = field(default_factory=dict)
    # by the id of a template's choices, and its saved tensors
    passed: dict[object, tuple[Choices, ...]] = field(default_factory=dict)
    layouts: dict[str, list[GraphLayout]] = field(default_factory=dict)
    rules: dict[DimLabel | None, Choice] = field(default_factory=dict)
    free: dict[tuple[DimLabel | None, ...], Choices] = field(default_factory=dict)  # by labels without a rule
    fitting: set[str] = field(default_factory=set)  # patterns of the strategy's layouts that fit some name

    def hints(self, graph: Graph) -> dict[int, Choices]:
        """The layout hints of tensors: those in the graph, and those by name in the strategy."""
        if not graph.hints and not self.strategy.layouts:
            return {}
        names = {t: n for n, t in graph.outputs.items()}
        choices = {}
        for tensor in graph.tensors:
            name = tensor.spec.name or names.get(tensor.id, "")
            asked = graph.hints.get(tensor.id)
            for pattern, layout in self.strategy.layouts.items():
                if name and fnmatchcase(name, pattern):
                    self.fitting.add(pattern)
                    if asked is None:
                        asked = as_tensor_layout("strategy", layout, len(tensor.shape), name)
            if asked is not None:
                choices[tensor.id] = self._placed(tensor, asked, name or f"result {tensor.id}")
        return choices

    def require_fits(self, graph: Graph) -> None:
        """Reject a name pattern of the strategy's layouts that no tensor has matched."""
        for pattern in self.strategy.layouts:
            if pattern not in self.fitting:
                raise LayoutError(
                    "[strategy.propagate] a layout by name must match a tensor from outside or an output; got "
                    f"{pattern!r}, which matches none in {graph.name!r}; see the names in print(graph), or drop it"
                )

    def _placed(self, tensor: TensorNode, asked: TensorLayout, name: str) -> Choices:
        labels = tensor.spec.labels
        placed = [self._timed(label, axes) for label, axes in zip(labels, asked)]
        origin = f"the hint on {name}"
        return tuple(
            Choice(axes, ASKED, origin, is_asked=True) for axes in _require_unique(name, tuple(placed))
        )

    def _timed(self, label: DimLabel | None, axes: Axes) -> Axes:
        sharding = self.strategy.sharding
        inside = sharding.axes if sharding is not None and sharding.reduce == "microbatch" else ()
        return _place_time(label, axes, self.mesh, self.batch, inside)

    def ruled(self, tensor: TensorNode) -> Choices:
        """The choice that the strategy's rules make for an input, parameter or state."""
        if tensor.spec.labels in self.free:
            return self.free[tensor.spec.labels]
        choices = tuple(self._rule(label, tensor.spec.name) for label in tensor.spec.labels)
        _require_unique(tensor.spec.name, as_layout(choices))
        if all(choice.rank == FREE for choice in choices):  # no choice names this tensor
            self.free[tensor.spec.labels] = choices
        return choices

    def _rule(self, label: DimLabel | None, name: str) -> Choice:
        if label not in self.rules:
            axes = self._timed(label, self.strategy.axes_for(label.name) if label is not None else ())
            is_ruled = label is not None and bool(in_space(axes))
            self.rules[label] = Choice(axes, RULED if is_ruled else FREE, "no rule")
        rule = self.rules[label]
        if rule.rank == FREE or label is None:
            return rule
        return replace(rule, origin=f"the rule for {label.name!r} of {name}")

    def lay_out(
        self, graph: Graph, outside: Mapping[int, Choices], hints: Mapping[int, Choices]
    ) -> tuple[GraphLayout, dict[int, Choices]]:
        """The layout of one graph or template, and the choices of its tensors."""
        choices: dict[int, Choices] = dict(outside)
        calls: dict[int, GraphLayout] = {}
        reshards: list[Reshard] = []
        wishes = _backwards(graph, hints)
        for op in graph.ops:
            if op.op == "call":
                calls[op.id] = self._call(graph, op, choices)
            else:
                reshards += _through(graph, op, choices, wishes)
            for tensor in op.outputs:
                if tensor in hints:
                    reshards += _asked(graph, op, tensor, choices, hints[tensor])
        made: dict[int, TensorLayout] = {}  # equal layers share choices
        for of in choices.values():
            if id(of) not in made:
                made[id(of)] = as_layout(of)
        layouts = tuple([made[id(choices[t.id])] if t.id in choices else () for t in graph.tensors])
        pending_reductions: dict[tuple[int, str], tuple[PendingReduction, ...]] = {}
        changed: dict[int, list[Reshard]] = {}
        for reshard in reshards:
            changed.setdefault(reshard.op, []).append(reshard)
        for op in graph.ops:
            if op.op != "call":
                factors, mine = factors_of(graph, op), changed.get(op.id, ())
                read = _as_read(op, layouts, mine)
                relabelled = {r.position: r.labels for r in mine if r.position is not None}
                require_equal_cuts(graph, op, factors, read, relabelled, self.mesh)
                pending_reductions |= pending_reductions_of(graph, op, self.mesh, read, self.batch)
        layout = GraphLayout(self.mesh, layouts, layouts, calls, pending_reductions, tuple(reshards))
        return layout, choices

    def _call(self, graph: Graph, op: OpNode, choices: dict[int, Choices]) -> GraphLayout:
        template = graph.templates[op.attrs["template"]]
        arguments = tuple([choices[i] for i in op.inputs if i is not None])
        mark = id(template), op.attrs["saved"], *map(id, arguments)
        cached = self.calls.get(mark)
        if cached is None:
            layout, inner_choices = self._template(template, arguments)
            sort = id(inner_choices), op.attrs["saved"]
            if sort not in self.passed:
                results = (*template.results, *op.attrs["saved"])
                self.passed[sort] = tuple(tuple(c.through(PASSED) for c in inner_choices[t]) for t in results)
            # stored, so that their ids are not reused
            cached = self.calls[mark] = (layout, self.passed[sort], arguments)
        choices.update(zip(op.outputs, cached[1]))
        return cached[0]

    def _template(
        self, template: Template, arguments: tuple[Choices, ...]
    ) -> tuple[GraphLayout, dict[int, Choices]]:
        """The layout of a template for its arguments. Arguments whose choices differ only in the
        words of their origins share one layout.
        """
        key = (template.key, tuple((c.axes, c.rank, c.is_asked) for tensor in arguments for c in tensor))
        if key not in self.cache:
            counts.sharded += 1
            layout, choices, fitting = lay_out_template(
                self.mesh, self.strategy, self.batch, template, arguments
            )
            self.fitting |= fitting
            # equal layouts share one object and are lowered once
            layouts = self.layouts.setdefault(template.key, [])
            layout = next((other for other in layouts if other == layout), layout)
            layouts.append(layout)
            self.cache[key] = layout, choices
        return self.cache[key]


def lay_out_template(
    mesh: DeviceMesh,
    strategy: DistributionStrategy,
    batch: BatchCut,
    template: Template,
    arguments: Sequence[Choices],
) -> tuple[GraphLayout, dict[int, Choices], set[str]]:
    """The layout of a template for its arguments' choices. A pure function.

    Returns:
        The layout, the choices of its tensors, and the strategy's patterns that match a name in it.
    """
    every = _Propagation(mesh, strategy, batch)
    hints = every.hints(template.graph)
    inner = {t: h for t, h in hints.items() if t not in template.arguments}
    layout, choices = every.lay_out(template.graph, dict(zip(template.arguments, arguments)), inner)
    return layout, choices, every.fitting


def _backwards(graph: Graph, hints: Mapping[int, Choices]) -> dict[int, Choices]:
    """Layouts wanted for results: hints, propagated backwards through ops that contract nothing."""
    wishes = {t: hint for t, hint in hints.items() if graph.tensors[t].kind == "result"}
    if not wishes:
        return wishes
    for op in reversed(graph.ops):
        if op.op == "call" or not wishes.keys() & {*op.outputs}:
            continue
        factors = factors_of(graph, op)
        if factors.partial_values or factors.moved:
            continue
        wanted = {
            name: wish.through(PASSED)
            for tensor, dims in zip(op.outputs, factors.outputs)
            for name, wish in zip(dims, wishes.get(tensor, ()))
        }
        for tensor, dims in zip(op.inputs, factors.inputs):
            is_result = tensor is not None and dims is not None and graph.tensors[tensor].kind == "result"
            if is_result and tensor not in wishes and all(name in wanted for name in dims or ()):
                wishes[tensor or 0] = tuple(wanted[name] for name in dims or ())
    return wishes


def _through(
    graph: Graph, op: OpNode, choices: dict[int, Choices], wishes: Mapping[int, Choices]
) -> list[Reshard]:
    """Choose the layouts of an op's outputs, and find the operands that need a reshard."""
    factors = factors_of(graph, op)
    op_dims = OpDims(graph, op, factors)
    agreed = agree(op_dims, choices, wishes)
    reshards = []
    for position, (tensor, dims) in enumerate(zip(op.inputs, factors.inputs)):
        if tensor is None or dims is None:
            continue
        wanted = tuple(have if n in factors.moved else agreed[n] for n, have in zip(dims, choices[tensor]))
        if as_layout(wanted) == as_layout(choices[tensor]):
            continue
        spec = graph.spec(tensor)
        labels = tuple(
            own if choice.axes == have.axes else label_for(op_dims, choices, name, size) or own
            for name, size, own, have, choice in zip(dims, spec.shape, spec.labels, choices[tensor], wanted)
        )
        reshards.append(_reshard(op, position, tensor, choices[tensor], wanted, labels))
    rank = CONTRACTED if factors.partial_values else PASSED
    for tensor, dims in zip(op.outputs, factors.outputs):
        natural = tuple(agreed[name].through(rank) for name in dims)
        choices[tensor] = _arrival(op, factors, tensor, natural, agreed, wishes.get(tensor))
        _require_unique(op.label, as_layout(choices[tensor]))
        arrived = {n: c for n, c, was in zip(dims, choices[tensor], natural) if c is not was}
        reshards += _added_where_it_arrives(graph, op, factors, choices, arrived)
    return reshards


def _added_where_it_arrives(
    graph: Graph, op: OpNode, factors: Factors, choices: Mapping[int, Choices], arrived: Mapping[str, Choice]
) -> list[Reshard]:
    """A tensor that is added to a sum (a residual or a bias) is sharded like the delivered sum."""
    summed = {f for partial in factors.partial_values for f in partial.factors}
    reshards = []
    for position, (tensor, dims) in enumerate(zip(op.inputs, factors.inputs)):
        if tensor is None or not dims or summed & {*dims} or not arrived.keys() & {*dims}:
            continue
        have = choices[tensor]
        wanted = tuple(arrived.get(name, choice) for name, choice in zip(dims, have))
        reshard = _reshard(op, position, tensor, have, wanted, graph.spec(tensor).labels)
        reshards.append(replace(reshard, is_asked_for=True))  # by the hint on the sum
    return reshards


def _arrival(
    op: OpNode,
    factors: Factors,
    tensor: int,
    natural: Choices,
    agreed: Mapping[str, Choice],
    wish: Choices | None,
) -> Choices:
    """The layout in which an output is delivered. A sum over k splits may be delivered in the
    shards that a hint asks for, if these are shards of its last dim over its own device group.
    """
    if wish is None:
        return natural
    number = op.outputs.index(tensor)
    sums = [
        p for p in factors.partial_values if number in p.outputs and p.combine == "sum" and p.tree == K_SPLITS
    ]
    groups = {
        in_space(agreed[f].axes)
        for p in sums
        for f in p.factors
        if f in agreed and f not in factors.outputs[number]
    }
    changed = [d for d, (have, want) in enumerate(zip(natural, wish)) if have.axes != want.axes]
    if len(changed) == 1 and len(sums) == 1:
        (dim,) = changed
        have, want = natural[dim].axes, wish[dim].axes
        if dim == len(natural) - 1 and want[: len(have)] == have and want[len(have) :] in groups:
            return (*natural[:dim], wish[dim], *natural[dim + 1 :])
    return natural


def _asked(
    graph: Graph, op: OpNode, tensor: int, choices: dict[int, Choices], hint: Choices
) -> list[Reshard]:
    """Satisfy the hint on a result, by a reshard after its producer if the layouts differ."""
    have = choices[tensor]
    choices[tensor] = hint
    if as_layout(have) == as_layout(hint):
        return []
    return [_reshard(op, None, tensor, have, hint, graph.spec(tensor).labels)]


def _reshard(
    op: OpNode, position: int | None, tensor: int, have: Choices, want: Choices, labels: Sequence[object]
) -> Reshard:
    changed = [(a, b) for a, b in zip(have, want) if a.axes != b.axes]
    origins = (
        "; ".join(dict.fromkeys(a.origin for a, _ in changed)),
        "; ".join(dict.fromkeys(b.origin for _, b in changed)),
    )
    asked = all(ASKED in (a.rank, b.rank) for a, b in changed)
    if op.phase != "forward":  # hints do not reach these results, so those on the forward graph count
        asked = all(a.is_asked or b.is_asked for a, b in changed)
    return Reshard(op.id, position, tensor, as_layout(have), as_layout(want), tuple(labels), origins, asked)  # type: ignore[arg-type]


def _as_read(op: OpNode, layouts: Sequence[TensorLayout], reshards: Sequence[Reshard]) -> SeenLayouts:
    """Layouts of an op's operands after reshards, and of its results before a reshard that a hint
    requires.
    """
    inputs = [None if t is None else layouts[t] for t in op.inputs]
    outputs = [layouts[t] for t in op.outputs]
    for reshard in reshards:
        if reshard.position is not None:
            inputs[reshard.position] = reshard.after
        else:
            outputs[op.outputs.index(reshard.tensor)] = reshard.before
    return SeenLayouts(tuple(inputs), tuple(outputs))


def _require_unique(name: str, layout: TensorLayout) -> TensorLayout:
    """Reject a layout that uses an axis twice.

    Raises:
        LayoutError: an axis appears twice.
    """
    used = [axis for axes in layout for axis in axes]
    if len(set(used)) != len(used):
        raise LayoutError(
            f"[strategy.propagate] an axis may shard only one dim of a tensor; got {show_layout(layout)} of {name!r}; "
            "label its dims differently"
        )
    return layout


def _place_time(
    label: DimLabel | None, axes: Axes, mesh: DeviceMesh, batch: BatchCut, inside: Axes = ()
) -> Axes:
    """The axes of a dim that have more than one device. If the dim counts the batch, `MICRO` is
    added at the right place.

    Sums over devices along an axis before `MICRO` are completed once per step. An axis is placed
    there if each of its devices then has a node of the tree over batch splits. The devices along
    the other axes share every microbatch, and their sums are completed once per microbatch (inside
    of time). If a strategy asks for one axis inside of time, all axes are placed there.
    """
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if label is None or not label.is_summed_by_batch_splits or batch.microbatches == 1:
        return axes
    most = 0 if {*axes} & {*inside} else len(axes)
    outside = max(n for n in range(most + 1) if mesh.size(*axes[:n]) in allowed_widths(batch.batch_splits))
    return (*axes[:outside], MICRO, *axes[outside:])
