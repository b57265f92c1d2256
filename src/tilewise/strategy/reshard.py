"""Inserts an op for every recorded reshard (change of layout), so that each op's operands have the
layouts that the op needs.

A dim that loses axes is gathered up to the common prefix of both layouts; a dim that gains axes is
sliced. A change needs at most one gather and one slice. Readers in one phase that need the same
layout share these ops. If layers of one template need different reshards, the template is copied,
once per layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tilewise.core.dims import DimLabel
from tilewise.core.errors import LayoutError
from tilewise.core.mesh import Axes
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode, TensorSpec
from tilewise.ir.layout import GraphLayout, Reshard, TensorLayout, in_space, show_axes, show_layout
from tilewise.ir.op import results_of_call

__all__ = ["insert_reshards"]


def insert_reshards(graph: Graph, layout: GraphLayout, *, strict: bool = False) -> tuple[Graph, GraphLayout]:
    """Return the graph, in which reshards are now ops `all_gather` and `slice`, and its layout.

    Args:
        strict: reject reshards that no hint asks for.

    Raises:
        LayoutError: the batch is shared in two ways, or a weight would have to change its layout.
            With `strict`, also if an op needs a reshard that no hint asks for.
    """
    return _Inserting(strict).insert(graph, layout)


class _Resharded(NamedTuple):
    """A template with its reshards, its layout, and the replacements of tensors that a hint
    reshards.
    """

    template: Template
    layout: GraphLayout
    now: Mapping[int, int]


@dataclass
class _Inserting:
    strict: bool
    done: dict[tuple[str, int], _Resharded] = field(default_factory=dict)

    def insert(self, graph: Graph, layout: GraphLayout) -> tuple[Graph, GraphLayout]:
        """Insert the reshards of one graph and of the templates that it calls."""
        if not _has_reshards(layout):
            return graph, layout
        for reshard in layout.reshards:
            self._check(graph, reshard)
        return _Rewrite(self, graph, layout).run()

    def template(self, template: Template, layout: GraphLayout) -> _Resharded:
        """A template with its reshards, under a new name if it has any."""
        key = template.key, id(layout)
        if key not in self.done:
            if not _has_reshards(layout):
                self.done[key] = _Resharded(template, layout, {})
            else:
                rewrite = _Rewrite(self, template.graph, layout)
                for reshard in layout.reshards:
                    self._check(template.graph, reshard)
                graph, inner = rewrite.run()
                number = sum(k == template.key for k, _ in self.done) + 1
                results = tuple(rewrite.now.get(r, r) for r in template.results)
                renamed = Template(f"{template.key}+reshards{number}", graph, template.arguments, results)
                self.done[key] = _Resharded(renamed, inner, rewrite.now)
        return self.done[key]

    def _check(self, graph: Graph, reshard: Reshard) -> None:
        op, spec = graph.ops[reshard.op], graph.spec(reshard.tensor)
        what = "result" if reshard.position is None else f"operand {reshard.position}"
        got = (
            f"{what} of {op.label!r} ({op.op}), {_called(spec, reshard)} {spec}, as "
            f"{show_layout(reshard.before)} from {reshard.origins[0]} and as {show_layout(reshard.after)} from "
            f"{reshard.origins[1]}"
        )
        for label, before, after in zip(spec.labels, reshard.before, reshard.after):
            if label is None or not label.is_summed_by_batch_splits or before == after:
                continue
            if any(origin.startswith("the hint") for origin in reshard.origins):
                raise LayoutError(
                    f"[strategy.insert_reshards] dims that count the batch must be shared alike; got {got}; drop the "
                    "hint on one of them"
                )
            axes = show_axes(in_space(tuple(sorted({*before} ^ {*after}))))
            raise LayoutError(
                "[strategy.insert_reshards] an op that combines rows of the whole batch cannot be sharded along the "
                f"batch; got {got}; leave {axes} out of the mesh, and shard other dims: label them, for example "
                'tw.DimLabel("mlp"), and give the mesh an axis tp'
            )
        if spec.is_packed:
            raise LayoutError(
                "[strategy.insert_reshards] a weight or its gradient must be read in its own layout: no op "
                f"slices or gathers it; got {got}; drop the hint, or label the dims of {_called(spec, reshard)} "
                "like those that they meet"
            )
        if self.strict and not reshard.is_asked_for:
            raise LayoutError(
                f"[strategy.insert_reshards] strict=True allows only reshards that a hint asks for; got {got}; "
                "label both dims alike, or ask for one of the layouts"
            )


def _called(spec: TensorSpec, reshard: Reshard) -> str:
    return spec.name or f"result {reshard.tensor}"


def _has_reshards(layout: GraphLayout) -> bool:
    return bool(layout.reshards) or any(_has_reshards(inner) for inner in layout.calls.values())


class _Rewrite:
    """Writes a graph again, op by op. `now` maps each tensor that was resharded for a hint to the
    tensor that replaces it.
    """

    def __init__(self, owner: _Inserting, graph: Graph, layout: GraphLayout) -> None:
        self.owner, self.graph, self.layout = owner, graph, layout
        self.tensors = list(graph.tensors)
        self.compute = list(layout.compute)
        self.ops: list[OpNode] = []
        self.now: dict[int, int] = {}
        self.templates = dict(graph.templates)
        self.made: dict[tuple[int, TensorLayout, tuple[DimLabel | None, ...], str], int] = {}

    def run(self) -> tuple[Graph, GraphLayout]:
        """Copy all ops, each after the reshards of its operands and before those of its results."""
        wanted: dict[tuple[int, int | None, int], Reshard] = {
            (r.op, r.position, r.tensor): r for r in self.layout.reshards
        }
        calls: dict[int, GraphLayout] = {}
        numbers: dict[int, int] = {}
        for op in self.graph.ops:
            inputs = list(op.inputs)
            for position, tensor in enumerate(op.inputs):
                if tensor is not None:
                    reshard = wanted.get((op.id, position, tensor))
                    source = self.now.get(tensor, tensor)
                    inputs[position] = source if reshard is None else self._reshard(source, reshard, op)
            new = replace(op, id=len(self.ops), inputs=tuple(inputs))
            if op.op == "call":
                new, calls[new.id] = self._call(op, new)
            numbers[op.id] = new.id
            self.ops.append(new)
            for tensor in op.outputs:
                reshard = wanted.get((op.id, None, tensor))
                if reshard is not None:
                    self.compute[tensor] = reshard.before
                    self.now[tensor] = self._reshard(tensor, reshard, op)
        return self._frozen(numbers), self._laid_out(calls, numbers)

    def _call(self, op: OpNode, new: OpNode) -> tuple[OpNode, GraphLayout]:
        """Copy a call. Results that are read later have the layout of their hint."""
        made = self.owner.template(self.graph.templates[op.attrs["template"]], self.layout.calls[op.id])
        self.templates[made.template.key] = made.template
        saved = tuple(made.now.get(tensor, tensor) for tensor in new.attrs["saved"])
        return replace(new, attrs={"template": made.template.key, "saved": saved}), made.layout

    def _reshard(self, source: int, reshard: Reshard, op: OpNode) -> int:
        """The tensor in the wanted layout."""
        spec = self.graph.spec(reshard.tensor)
        relabelled = (a is not b for a, b in zip(spec.labels, reshard.labels))
        shared = tuple(
            () if other else _common(a, b) for a, b, other in zip(reshard.before, reshard.after, relabelled)
        )
        for name, after, labels in (
            ("all_gather", shared, spec.labels),
            ("slice", reshard.after, reshard.labels),
        ):
            if after == self.compute[source]:
                continue
            key = source, after, labels, op.phase
            if key not in self.made:
                self.made[key] = self._changed(name, source, replace(spec, labels=labels, name=""), after, op)
            source = self.made[key]
        return source

    def _changed(self, name: str, source: int, spec: TensorSpec, after: TensorLayout, op: OpNode) -> int:
        """The tensor after a gather or a slice. Rows change along their last dim. To change another
        dim, it is merged with those behind it.
        """
        before, last = self.compute[source], len(spec.shape) - 1
        changed = [d for d, (a, b) in enumerate(zip(before, after)) if a != b]
        for d in changed if spec.storage == "rows" else ():
            size = 1
            for other in spec.shape[d:]:
                size *= other if isinstance(other, int) else 0
            if d in (0, last) or not size or spec.labels[d] is None or any(before[d + 1 :] + after[d + 1 :]):
                continue
            attrs = {"source": spec.shape, "shape": (*spec.shape[:d], size)}
            (merged,) = results_of_call("reshape", [spec], attrs)
            wide = self._append("reshape", source, merged, before[: d + 1], op, attrs)
            wide = self._append(name, wide, merged, (*before[:d], after[d]), op)
            before = (*before[:d], after[d], *before[d + 1 :])
            attrs = {"source": attrs["shape"], "shape": spec.shape}
            source = self._append("reshape", wide, spec, before, op, attrs)
        return source if before == after else self._append(name, source, spec, after, op)

    def _append(
        self,
        name: str,
        source: int,
        spec: TensorSpec,
        layout: TensorLayout,
        op: OpNode,
        attrs: Mapping[str, Any] | None = None,
    ) -> int:
        """Append an op on one tensor, in front of `op`."""
        tensor = len(self.tensors)
        label = f"{name}:{self.tensors[source].spec.name or op.label}"
        self.tensors.append(TensorNode(tensor, spec, "result", len(self.ops)))
        self.ops.append(OpNode(len(self.ops), name, (source,), (tensor,), attrs or {}, op.phase, label))
        self.compute.append(layout)
        return tensor

    def _frozen(self, numbers: Mapping[int, int]) -> Graph:
        producer = {o: op.id for op in self.ops for o in op.outputs}
        tensors = tuple(replace(t, producer=producer.get(t.id)) for t in self.tensors)
        outputs = {name: self.now.get(t, t) for name, t in self.graph.outputs.items()}
        used = {op.attrs["template"] for op in self.ops if op.op == "call"}
        templates = {key: t for key, t in self.templates.items() if key in used}
        return replace(self.graph, tensors=tensors, ops=tuple(self.ops), outputs=outputs, templates=templates)

    def _laid_out(self, calls: Mapping[int, GraphLayout], numbers: Mapping[int, int]) -> GraphLayout:
        pending_reductions = {
            (numbers[op], name): tuple(replace(r, op=numbers[op]) for r in group)
            for (op, name), group in self.layout.pending_reductions.items()
        }
        compute = tuple(self.compute)
        return GraphLayout(self.layout.mesh, compute, compute, calls, pending_reductions)


def _common(a: Axes, b: Axes) -> Axes:
    """The common prefix of two dims' axes."""
    count = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:count]
