"""Recomputation (activation checkpointing): chooses which results of a layer the backward pass
computes again instead of reading saved results.

A user gives one word for all layers, or patterns of layer names. `Recomputation` turns this request
into a `Choice` for each call of a layer, and `choose_ops` turns a choice into ops of the layer's
template. `recompute` puts the chosen ops into the backward template, which `differentiate` has made
to read saved results.

This module knows no op by name. The results of ops that sum over the batch, write in place or read
a state are always saved. Results of a step have the same bits with and without recomputation,
because the same kernels run on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

from tilewise.core.dims import upper_bound
from tilewise.core.errors import PlanError
from tilewise.core.frozen import FrozenMap
from tilewise.core.validation import Validator, shown
from tilewise.graph.draft import GraphDraft
from tilewise.graph.gradients import BackwardTemplate, Differentiated, Imports
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode, TensorSpec
from tilewise.ir.op import op_named
from tilewise.ir.validate import validate_graph

__all__ = [
    "FULL",
    "MODES",
    "NONE",
    "SAVE_ALL",
    "SELECTIVE",
    "Choice",
    "Recomputation",
    "choose_ops",
    "recompute",
]

NONE, SELECTIVE, FULL = "none", "selective", "full"
MODES = (NONE, SELECTIVE, FULL)

Choice = str | tuple[str, ...]
"""Of one layer: one of `MODES`, or patterns of the labels and names of its ops."""

_validate = Validator("graph", PlanError)
_ADVICE = (
    f"pass {', '.join(map(repr, MODES))}, or a list of names such as 'layers.[0-3]' or 'layers.*/silu_gate'"
)


@dataclass(frozen=True)
class Recomputation:
    """What a user asks to recompute.

    Attributes:
        mode: the mode of all layers; `none` if the request consists of patterns.
        layers: patterns of names of layers, which are recomputed as with `full`.
        ops: pairs of a pattern of layers and a pattern of ops. In these layers only these ops are
            recomputed.
    """

    mode: str = NONE
    layers: tuple[str, ...] = ()
    ops: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, request: object) -> Recomputation:
        """Parse the argument of `ComputeGraph.plan(recompute=...)`.

        Raises:
            PlanError: `request` is neither one of the words nor a list of patterns.
        """
        if isinstance(request, str):
            if request not in MODES:
                _validate.invalid(
                    "recompute",
                    f"a string must be one of {', '.join(MODES)}; names go into a list",
                    shown(request),
                    _ADVICE,
                )
            return cls(request)
        names = _validate.sequence("recompute", "recompute", request, "names", in_any_order=True)
        layers, ops = [], []
        for pattern in names:
            of, slash, inside = _validate.text("recompute", "a pattern of names", pattern).partition("/")
            if not of or (slash and not inside):
                _validate.invalid(
                    "recompute",
                    "a pattern must be LAYERS or LAYERS/OPS",
                    shown(pattern),
                    _ADVICE,
                )
            if slash:
                ops.append((of, inside))
            else:
                layers.append(of)
        return cls(layers=tuple(layers), ops=tuple(ops))

    def as_argument(self) -> str | tuple[str, ...]:
        """The argument of `of` that gives this."""
        return (*self.layers, *(f"{of}/{inside}" for of, inside in self.ops)) or self.mode

    def choice(self, layer: str) -> Choice:
        """The choice for one layer, by its name. Equal choices share a backward template."""
        if any(fnmatchcase(layer, pattern) for pattern in self.layers):
            return FULL
        return tuple(dict.fromkeys(inside for of, inside in self.ops if fnmatchcase(layer, of))) or self.mode

    def require_fit(self, graph: Graph, calls: Sequence[OpNode]) -> None:
        """Reject a request that has no effect on a graph whose loss depends on these calls of
        layers.

        Raises:
            PlanError: there is no layer, or a pattern matches no layer or op. The message names the
                pattern.
        """
        if self != SAVE_ALL and not calls:
            _validate.invalid(
                "recompute",
                "recompute needs a layer that the loss depends on",
                f"no layer in {graph.name!r}",
                "mark repeated functions with tw.layer, or leave it out",
            )
        names = [call.label for call in calls]
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                self._invalid_pattern(pattern, "names of layers", names)
        for of, pattern in self.ops:
            keys = {call.attrs["template"]: None for call in calls if fnmatchcase(call.label, of)}
            ops = [op for key in keys for op in graph.templates[key].graph.ops]
            if not keys:
                self._invalid_pattern(f"{of}/{pattern}", "names of layers", names)
            if not any(_fits(op, (pattern,)) for op in ops):
                self._invalid_pattern(f"{of}/{pattern}", "labels of ops", [op.label for op in ops])

    def _invalid_pattern(self, pattern: str, what: str, choices: Iterable[str]) -> None:
        names = list(dict.fromkeys(choices))
        some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        _validate.invalid(
            "recompute",
            f"a pattern must match {what} on which the loss depends",
            repr(pattern),
            f"choose from {some}",
        )


SAVE_ALL = Recomputation()


def recompute(made: Differentiated, recomputation: Recomputation) -> Differentiated:
    """Let the backward pass compute results of layers again instead of reading saved ones. A pass:
    it returns a new graph, in which tensors keep their ids.

    Raises:
        PlanError: `recomputation` matches nothing.
    """
    graph, layers = made.graph, dict(made.layers)
    recomputation.require_fit(graph, [graph.ops[call] for call in layers])
    if recomputation == SAVE_ALL:
        return made
    tensors, ops, templates = list(graph.tensors), list(graph.ops), dict(graph.templates)
    by_choice: dict[tuple[str, Choice], BackwardTemplate] = {}
    shared: dict[tuple[str, frozenset[int]], BackwardTemplate] = {}
    for call, (backward_call, saving) in layers.items():
        op = graph.ops[call]
        forward, choice = templates[op.attrs["template"]], recomputation.choice(op.label)
        wanted = saving.template.key, choice
        if wanted not in by_choice:
            again = choose_ops(forward, saving.imports, choice)
            key = saving.template.key
            if (key, again) not in shared:
                own_key = _new_key(key, choice, templates) if again else key
                own = _recomputing(forward, saving, again, own_key) if again else saving
                shared[key, again], templates[own_key] = own, own.template
                validate_graph(own.template.graph)
            by_choice[wanted] = shared[key, again]
        own = by_choice[wanted]
        if own is not saving:
            calls = _rewire(tensors, forward, saving, own, op, graph.ops[backward_call])
            ops[call], ops[backward_call] = calls
            layers[call] = backward_call, own
    used = {op.attrs["template"] for op in ops if op.op == "call"}
    templates = {key: template for key, template in templates.items() if key in used}
    graph = replace(graph, tensors=tuple(tensors), ops=tuple(ops), templates=templates)
    return Differentiated(graph, made.gradients, layers)


def _rewire(
    tensors: list[TensorNode],
    forward: Template,
    saving: BackwardTemplate,
    own: BackwardTemplate,
    call: OpNode,
    backward_call: OpNode,
) -> tuple[OpNode, OpNode]:
    """The forward and the backward call of a layer with another gradient (`own` instead of
    `saving`). Tensors that are newly saved are appended; tensors that are no longer saved stay,
    without a producer.
    """
    count = len(forward.results)
    saved = dict(zip(call.attrs["saved"], call.outputs[count:]))
    for t in own.saved:
        if t not in saved:
            saved[t] = len(tensors)
            tensors.append(TensorNode(saved[t], forward.graph.spec(t), "result", call.id))
    for t in saved.keys() - {*own.saved}:
        tensors[saved[t]] = replace(tensors[saved[t]], producer=None)
    bound = dict(zip(forward.arguments, call.inputs)) | dict(zip(forward.results, call.outputs)) | saved
    outputs = (*call.outputs[:count], *(saved[t] for t in own.saved))
    grads = backward_call.inputs[: len(backward_call.inputs) - len(saving.imports)]
    attrs = FrozenMap({"template": forward.key, "saved": own.saved})
    backward_attrs = FrozenMap({"template": own.template.key, "saved": ()})
    return (
        replace(call, outputs=outputs, attrs=attrs),
        replace(backward_call, inputs=(*grads, *(bound[t] for t in own.imports)), attrs=backward_attrs),
    )


def _new_key(key: str, choice: Choice, taken: Container[str]) -> str:
    """A key for a backward template that recomputes: the saving one's, and the choice."""
    name = base = f"{key}.{choice if isinstance(choice, str) else 'named'}"
    number = 1
    while name in taken:
        number += 1
        name = f"{base}#{number}"
    return name


def _recomputing(
    forward: Template, saving: BackwardTemplate, again: frozenset[int], key: str
) -> BackwardTemplate:
    """A layer's gradient that runs the forward ops `again`, each right before its results are first
    read, so that they do not stay in memory longer than needed.
    """
    graph, arguments = saving.template.graph, saving.template.arguments
    draft = GraphDraft()
    draft.phase = "backward"
    inside = _Recomputed(forward.graph, draft, again)
    first = len(arguments) - len(saving.imports)
    made = {grad: draft.declare("input", graph.spec(grad)).id for grad in arguments[:first]}
    of_forward = dict(zip(arguments[first:], saving.imports))

    def use(tensor: int) -> int:
        if tensor not in made:
            made[tensor] = inside.use(of_forward[tensor])
        return made[tensor]

    for op in graph.ops:
        inputs: tuple[int | None, ...] = tuple([None if i is None else use(i) for i in op.inputs])
        specs = [graph.spec(o) for o in op.outputs]
        made.update(zip(op.outputs, draft.append(op.op, inputs, specs, op.attrs, label=op.label)))
    for tensor, layout in graph.hints.items():
        if tensor in made:
            draft.hint(made[tensor], layout)
    for name, tensor in graph.outputs.items():
        draft.name_output(name, use(tensor))
    results = tuple(use(t) for t in saving.template.results)
    frozen = draft.freeze(graph.name, graph.k_splits)
    own_arguments = (*map(made.__getitem__, arguments[:first]), *inside.imported.values())
    template = Template(key, frozen, own_arguments, results)
    return replace(saving, template=template, imports=tuple(inside.imported), saved=inside.saved(forward))


class _Recomputed(Imports):
    """Tensors of a layer in its backward template: computed again, or passed as arguments."""

    def __init__(self, forward: Graph, draft: GraphDraft, again: frozenset[int]) -> None:
        super().__init__(forward, draft)
        self.again = again
        self.recomputed: dict[int, int] = {}

    def use(self, tensor: int) -> int:
        """The id of a forward tensor in the backward template. If the tensor is recomputed, its ops
        are appended first.
        """
        if tensor in self.recomputed:
            return self.recomputed[tensor]
        if self.forward.tensors[tensor].producer not in self.again:
            return super().use(tensor)
        wanted, missing = {tensor}, []
        for op in reversed(self.forward.ops):
            is_made = self.recomputed.keys() >= {*op.outputs}
            if op.id in self.again and not is_made and not wanted.isdisjoint(op.outputs):
                missing.append(op)
                wanted.update(op.given)
        for op in reversed(missing):
            self._repeat(op)
        return self.recomputed[tensor]

    def _repeat(self, op: OpNode) -> None:
        """Append the op again, on tensors of the backward template, with the hints of its results."""
        inputs = [
            None if i is None else self.recomputed[i] if i in self.recomputed else Imports.use(self, i)
            for i in op.inputs
        ]
        specs = [self.forward.spec(o) for o in op.outputs]
        made = self.draft.append(op.op, tuple(inputs), specs, op.attrs, label=f"recomputed {op.label}")
        self.recomputed.update(zip(op.outputs, made))
        for old, new in zip(op.outputs, made):
            if old in self.forward.hints:
                self.draft.hint(new, self.forward.hints[old])


def choose_ops(template: Template, needed: Iterable[int], choice: Choice) -> frozenset[int]:
    """Choose the ops of a layer that its backward pass recomputes.

    Args:
        template: the layer.
        needed: the layer's tensors that the gradient uses.
        choice: the request.

    Returns:
        Ids of the chosen ops. Gradients or other chosen ops need their results. The results of all
        other ops are saved if they are needed.
    """
    if choice == NONE:
        return frozenset()
    graph, used = template.graph, frozenset(needed)
    if choice == FULL:
        return _needed_ops(template, used, lambda op: True)
    if choice == SELECTIVE:
        again = _needed_ops(template, used, lambda op: not op_named(op.op).is_costly)
        return _without_idle(graph, used, again)
    return _needed_ops(template, used, lambda op: _fits(op, choice))


def _fits(op: OpNode, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches an op's label, such as `linear:mlp.up_proj.weight`, or its name,
    such as `linear`.
    """
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in (op.label, op.op))


def _needed_ops(template: Template, needed: frozenset[int], may: Callable[[OpNode], bool]) -> frozenset[int]:
    """The ops accepted by `may` whose results are needed, directly or by other such ops. Arguments
    and results of the layer are never recomputed.
    """
    outside, wanted = {*template.arguments, *template.results}, set(needed)
    again = set()
    for op in reversed(template.graph.ops):
        if _is_repeatable(template.graph, op) and may(op) and not wanted.isdisjoint({*op.outputs} - outside):
            again.add(op.id)
            wanted.update(op.given)
    return frozenset(again)


def _is_repeatable(graph: Graph, op: OpNode) -> bool:
    """Whether an op may run twice in a step with the same result."""
    if op.op == "call":
        return False
    cls = op_named(op.op)
    reads_state = any(graph.tensors[i].kind == "state" for i in op.given)
    return not cls.declared.accumulates and not cls.must_alias and not reads_state


def _without_idle(graph: Graph, needed: frozenset[int], again: frozenset[int]) -> frozenset[int]:
    """Remove ops whose recomputation saves no memory, because their result is no larger than the
    tensors that must be saved only to recompute it (such as rotated queries). Their results are
    saved instead.
    """
    made = {o: op.id for op in graph.ops for o in op.outputs}
    left = set(again)
    for op in graph.ops:
        if op.id not in left:
            continue
        others = {i for other in left - {op.id} for i in graph.ops[other].given}
        alone = {i for i in op.given if i in made and made[i] not in left and i not in needed | others}
        results = {o for o in op.outputs if o in needed | others}
        if _num_bytes(graph, results) <= _num_bytes(graph, alone):
            left.discard(op.id)
    return frozenset(left)


def _num_bytes(graph: Graph, tensors: Iterable[int]) -> int:
    return sum(_bytes_of(graph.spec(t)) for t in tensors)


def _bytes_of(spec: TensorSpec) -> int:
    return prod(upper_bound(size) for size in spec.shape) * spec.dtype.itemsize
