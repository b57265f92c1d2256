"""Divides the backward pass of each layer into two calls: the gradients of the layer's input, for which
the layer before waits, and the gradients of its weights, for which nothing waits until the update.

A pipeline schedule runs the second call later, when its devices would otherwise wait. Ops, their
operands and the order of sums stay the same, so no bit of a result changes. What both parts need is
a result of the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewise.core.frozen import FrozenMap
from tilewise.graph.draft import GraphDraft
from tilewise.graph.gradients import BackwardTemplate, Differentiated
from tilewise.ir.graph import OpNode, Template, TensorNode
from tilewise.ir.tape import WEIGHT_PART

__all__ = ["split_backward"]


@dataclass(frozen=True)
class _Part:
    """One part of a backward template.

    Attributes:
        template: the part as a template.
        arguments, results: the tensors of the whole template that are its arguments and results.
    """

    template: Template
    arguments: tuple[int, ...]
    results: tuple[int, ...]


def split_backward(made: Differentiated) -> Differentiated:
    """Divide the backward pass of every layer that has weights. A pass: it returns a new graph, in
    which tensors keep their ids.
    """
    graph = made.graph
    layer_of = {back: (graph.ops[call], gradient) for call, (back, gradient) in made.layers.items()}
    parts_of: dict[str, tuple[_Part, _Part] | None] = {}
    tensors, ops = list(graph.tensors), list[OpNode]()
    numbers: dict[int, int] = {}
    for op in graph.ops:
        numbers[op.id] = len(ops)
        parts = None
        if op.id in layer_of:
            key = op.attrs["template"]
            if key not in parts_of:
                call, gradient = layer_of[op.id]
                parts_of[key] = _parts(graph.templates[call.attrs["template"]], gradient)
            parts = parts_of[key]
        if parts is None:
            ops.append(replace(op, id=len(ops)))
        else:
            ops += _calls(tensors, op, graph.templates[op.attrs["template"]], parts, len(ops))
    own = {part.template.key: part.template for parts in parts_of.values() for part in parts or ()}
    templates, used = {**graph.templates, **own}, {op.attrs["template"] for op in ops if op.op == "call"}
    producer = {o: op.id for op in ops for o in op.outputs}
    whole = replace(
        graph,
        tensors=tuple(replace(t, producer=producer.get(t.id)) for t in tensors),
        ops=tuple(ops),
        templates={key: template for key, template in templates.items() if key in used},
    )
    layers = {numbers[call]: (numbers[back], gradient) for call, (back, gradient) in made.layers.items()}
    return Differentiated(whole, made.gradients, layers)


def _parts(forward: Template, gradient: BackwardTemplate) -> tuple[_Part, _Part] | None:
    """Both parts of a backward template; None if it computes only one kind of gradients."""
    whole = gradient.template
    kinds: dict[int, set[bool]] = {}  # per result: whether it is the gradient of a weight, of something else
    for argument, source in zip(gradient.wanted, gradient.sources):
        if source >= 0:
            is_weight = forward.graph.tensors[argument].kind == "parameter"
            kinds.setdefault(whole.results[source], set()).add(is_weight)
    others = [r for r in whole.results if False in kinds.get(r, {False})]
    needed = set(others)
    for op in reversed(whole.graph.ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.given)
    first = [op for op in whole.graph.ops if not needed.isdisjoint(op.outputs)]
    second = [op for op in whole.graph.ops if needed.isdisjoint(op.outputs)]
    if not others or not second:
        return None
    made = {o for op in first for o in op.outputs}
    read = {t for op in second for t in op.given}
    results = [r for r in whole.results if r in made]
    passed = [t for op in first for t in op.outputs if t in read and t not in results]
    late = [r for r in whole.results if r not in made]
    return (
        _part(whole, ".inputs", first, [*results, *passed]),
        _part(whole, WEIGHT_PART, second, late),
    )


def _part(whole: Template, name: str, ops: Sequence[OpNode], results: Sequence[int]) -> _Part:
    """Some ops of a template as a template. Tensors that they read and do not compute are its arguments."""
    graph, draft = whole.graph, GraphDraft()
    draft.phase = "backward"
    outputs = {o for op in ops for o in op.outputs}
    read = dict.fromkeys(t for op in ops for t in op.given if t not in outputs)
    # in the order of the whole template, then what the other part computes
    arguments = [*(a for a in whole.arguments if a in read), *(t for t in read if t not in whole.arguments)]
    made: dict[int, int] = {}
    for t in arguments:
        node = graph.tensors[t]
        kind = node.kind if node.kind != "result" else "input"
        made[t] = draft.declare(kind, node.spec.renamed(node.spec.name or f"passed{t}")).id
    for op in ops:
        inputs = tuple(None if i is None else made[i] for i in op.inputs)
        specs = [graph.spec(o) for o in op.outputs]
        made.update(zip(op.outputs, draft.append(op.op, inputs, specs, op.attrs, label=op.label)))
    for tensor, layout in graph.hints.items():
        if tensor in outputs:
            draft.hint(made[tensor], layout)
    names = {tensor: name for name, tensor in graph.outputs.items()}
    for r in results:
        draft.name_output(names.get(r, f"passed{r}"), made[r])
    frozen = draft.freeze(f"{graph.name}{name}", graph.k_splits)
    template = Template(
        f"{whole.key}{name}", frozen, tuple(made[a] for a in arguments), tuple(made[r] for r in results)
    )
    return _Part(template, tuple(arguments), tuple(results))


def _calls(
    tensors: list[TensorNode], op: OpNode, whole: Template, parts: tuple[_Part, _Part], number: int
) -> list[OpNode]:
    """The calls of both parts in place of a call of the whole. Tensors that the first passes to the
    second are appended.
    """
    bound = {**dict(zip(whole.arguments, op.inputs)), **dict(zip(whole.results, op.outputs))}
    calls = []
    for part, suffix in zip(parts, ("", WEIGHT_PART)):
        for inside, r in zip(part.template.results, part.results):
            if r not in bound:
                bound[r] = len(tensors)
                spec = replace(part.template.graph.spec(inside), name="")
                tensors.append(TensorNode(len(tensors), spec, "result", -1))
        attrs = FrozenMap({"template": part.template.key, "saved": ()})
        outputs = tuple(t for r in part.results if (t := bound[r]) is not None)
        inputs = tuple(bound[a] for a in part.arguments)
        calls.append(
            replace(op, id=number, inputs=inputs, outputs=outputs, attrs=attrs, label=op.label + suffix)
        )
        number += 1
    return calls
