"""Reverse-mode differentiation of a graph, one template at a time.

A template is differentiated once. The backward template takes the tensors saved by the forward
pass, the gradients of the layer's results, and the layer's arguments that it needs. It returns the
gradients of the layer's arguments. A later pass makes it compute some of the saved tensors again
(`recompute`).

All contributions to a gradient are collected before any op is added, so that they are summed in one
fixed order (ir/tape.py). This module knows only the ops of the tape: a contribution names the op
that combines it with others of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, TypeGuard

import numpy as np

from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import InternalError, PlanError, ShapeError
from tilewise.core.frozen import FrozenMap
from tilewise.core.validation import Validator, shown
from tilewise.graph.builder import GraphBuilder
from tilewise.graph.declarations import SEED
from tilewise.graph.draft import GraphDraft
from tilewise.graph.passes import drop_dead_ops
from tilewise.ir.counts import counts
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode, TensorSpec
from tilewise.ir.op import Op, bind, check_call, import_ops, modules_of_ops, op_named
from tilewise.ir.tape import Gradient, Later, Term
from tilewise.ir.validate import validate_graph
from tilewise.processes.workers import ENOUGH, WorkerPool

__all__ = [
    "BackwardTemplate",
    "Differentiated",
    "Imports",
    "calls_before",
    "differentiate",
    "differentiate_template",
]

_FITS = "operands of an appended op must fit together"
_author = Validator("graph", InternalError)


class _Tape:
    """`ir.tape.Tape` over a draft of the backward graph, and the contributions to gradients of forward
    tensors, which are summed to one tensor when the gradient is needed.

    Attributes:
        author: the op's method that is being called, for error messages.
    """

    def __init__(self, graph: Graph, draft: GraphDraft, use: Callable[[int], int]) -> None:
        self.graph, self.draft = graph, draft
        self.author: tuple[type[Op], str] | None = None
        self._use = use
        self._lists: dict[int, list[Gradient]] = {}  # contributions, by forward tensor
        self._waiting: list[list[Gradient]] = []  # lists that contain a `Later`
        self._totals: dict[int, int | None] = {}

    def invalid(self, rule: str, got: str) -> NoReturn:
        """Raise an error that names the op and what its author must correct."""
        op, method = self.author or (None, "gradient")
        title = "gradients" if op is None else op.name
        _author.invalid(title, rule, got, f"correct {op.__name__ if op else title}.{method}")

    def use(self, tensor: int) -> int:
        if not _is_id(tensor, self.graph.tensors):
            self.invalid("a used tensor must be one of the forward graph", shown(tensor))
        return self._use(tensor)

    def op(self, op: Op) -> list[int]:
        return self.append(self.checked(op))

    def spec(self, tensor: int) -> TensorSpec:
        return self.draft.tensors[tensor].spec

    def later(self, op: Op) -> Later:
        return Later(self.checked(op))

    def append(self, op: Op) -> list[int]:
        """Append an op that has been checked, and return its results."""
        try:
            return list(self.draft.op(op.name, op.inputs, op.attrs))
        except ShapeError as error:
            self.invalid(_FITS, str(error))

    def result_of(self, op: Op) -> TensorSpec:
        """The spec of the result that the op would have."""
        try:
            return self.draft.specs_of(op.name, op.inputs, op.attrs)[0]
        except ShapeError as error:
            self.invalid(_FITS, str(error))

    def checked(self, op: Op) -> Op:
        """The op, after a check of its tensors and attributes."""
        if not isinstance(op, Op):
            self.invalid("an appended op must be an object of an op's class", shown(op))
        try:
            inputs = op.inputs
        except (TypeError, ValueError):
            self.invalid(f"lists of operands of {op.name!r} must be tuples of one length", shown(op))
        odd = [i for i in inputs if i is not None and not _is_id(i, self.draft.tensors)]
        if odd:
            self.invalid(f"operands of {op.name!r} must be ids of the backward graph", shown(odd[0]))
        try:
            return op.of(op.inputs, check_call(op.name, op.inputs, op.attrs))
        except ShapeError as error:
            self.invalid("an appended op must match its fields", str(error))

    def contribute(self, tensor: int, contribution: Gradient) -> None:
        if not _is_id(tensor, self.graph.tensors):
            self.invalid("a contribution must be to a tensor of the forward graph", shown(tensor))
        _check_contribution(self, tensor, contribution, f"tensor {tensor}")
        self.collect(tensor, contribution)

    def add(self, a: int, b: int) -> int:
        return self._named("add", a, b)

    def multiply(self, a: int, b: int) -> int:
        return self._named("multiply", a, b)

    def scale(self, x: int, factor: float) -> int:
        return self._named("scale", x, factor=factor)

    def matmul(self, a: int, b: int, trans_a: bool, trans_b: bool) -> int:
        return self._named("matmul", a, b, trans_a=trans_a, trans_b=trans_b)

    def _named(self, name: str, *inputs: int, **attrs: Any) -> int:
        return self.op(op_named(name).of(inputs, attrs))[0]

    def collect(self, tensor: int, contribution: Gradient) -> None:
        """Add a contribution to the gradient of a tensor, which must not have been summed yet."""
        if tensor in self._totals:
            _author.invalid(
                "gradients",
                "a contribution must come before the gradient is used",
                f"one more for {self.graph.spec(tensor)} {self.graph.spec(tensor).name!r}",
                "let Op.combine contribute to parameters only",
            )
        contributions = self._lists.setdefault(tensor, [])
        contributions.append(contribution)
        if isinstance(contribution, Later):
            self._waiting.append(contributions)

    def has_terms(self, tensor: int) -> bool:
        """Whether an op combines contributions to the gradient of a tensor. It may contribute to
        gradients of other tensors too.
        """
        return any(isinstance(c, Term) for c in self._lists.get(tensor, ()))

    def settle(self) -> None:
        """Append delayed ops now; the order of contributions does not change."""
        for contributions in self._waiting:
            for i, c in enumerate(contributions):
                if isinstance(c, Later):
                    contributions[i] = self.append(c.op)[0]
        self._waiting = []

    def total(self, tensor: int) -> int | None:
        """The gradient of a tensor; None if there is no contribution."""
        if tensor not in self._totals:
            self._totals[tensor] = None  # no contribution may come while its own terms are combined
            self._totals[tensor] = self._sum(tensor, self._lists.get(tensor, []))
        return self._totals[tensor]

    def _sum(self, tensor: int, contributions: list[Gradient]) -> int | None:
        """The sum of tensors in reverse order of use, then of the terms, op by op."""
        total: int | None = None
        for i, c in enumerate(contributions):
            if isinstance(c, Later):
                contributions[i] = c = self.append(c.op)[0]
            if isinstance(c, int):
                c = self._in_dtype_of(tensor, c)
                total = c if total is None else self.add(total, c)
        terms: dict[str, list[Term]] = {}
        for c in contributions:
            if isinstance(c, Term):
                terms.setdefault(c.combined_by, []).append(c)
        for op in sorted((op_named(name) for name in terms), key=lambda op: (op.combine_rank, op.name)):
            before, self.author = self.author, (op, "combine")
            total = op.combine(self, terms[op.name], total)
            if not _is_id(total, self.draft.tensors):
                self.invalid("Op.combine must return a tensor id", shown(total))
            _check_contribution(self, tensor, total, f"tensor {tensor}")
            self.author = before
        return total

    def _in_dtype_of(self, tensor: int, gradient: int) -> int:
        """A contribution to the gradient of a tensor that ops compute, in the tensor's dtype: sums over
        the batch are in fp32, which only gradients of parameters keep.
        """
        forward, own = self.graph.tensors[tensor], self.draft.tensors[gradient].spec.dtype
        if forward.kind != "result" or forward.spec.dtype == own:
            return gradient
        return self._named("cast", gradient, dtype=forward.spec.dtype.name)


def _run_backward(
    ops: Sequence[OpNode],
    tape: _Tape,
    on_call: Callable[[OpNode, list[int | None]], Sequence[Gradient]],
) -> None:
    """Visit ops in reverse order and collect the contributions of each."""
    for op in reversed(ops):
        grads = [tape.total(o) for o in op.outputs]
        if all(g is None for g in grads):
            continue
        if op.op == "call":
            contributions = on_call(op, grads)
        else:
            bound = bind(op)
            if type(bound).gradient is Op.gradient:
                raise PlanError(
                    "[graph.gradients] a loss may depend only on ops that have a gradient; got "
                    f"{op.label!r} ({op.op}); remove it from the path between parameters and loss"
                )
            tape.author = type(bound), "gradient"
            contributions = _contributions(tape, bound, bound.gradient(tape, grads))
        for tensor, contribution in zip(op.inputs, contributions):
            if tensor is not None and contribution is not None:
                tape.collect(tensor, contribution)


def _is_id(value: object, tensors: Sequence[TensorNode]) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < len(tensors)


def _contributions(tape: _Tape, op: Op, by_name: object) -> tuple[Gradient, ...]:
    """The contributions that a gradient rule returned, one per input.

    Raises:
        InternalError: names the op and what its author must correct.
    """
    names = {f.name: f for f in op.declared.operands}
    if not isinstance(by_name, Mapping) or not by_name.keys() <= names.keys():
        got = shown(sorted(by_name, key=str) if isinstance(by_name, Mapping) else by_name)
        tape.invalid(f"a gradient must be a dictionary by operands: {', '.join(names)}", got)
    every: dict[str, object] = {}
    for name, field in names.items():
        length = len(getattr(op, name)) if field.is_list else 0
        value = by_name.get(name, (None,) * length if field.is_list else None)
        if field.is_list and (not isinstance(value, list | tuple) or len(value) != length):
            tape.invalid(f"the gradient of {name!r} must be a list with one contribution each", shown(value))
        every[name] = value
    flat: tuple[Gradient, ...] = op.declared.flatten(every)
    for tensor, c, field in zip(op.inputs, flat, op.declared.of_inputs(len(op.inputs)) or ()):
        if tensor is None and c is not None:
            tape.invalid("a gradient must be of an operand that is present", f"one of {field.name!r}")
        _check_contribution(tape, tensor, c, f"operand {field.name!r}")
    return flat


def _check_contribution(tape: _Tape, tensor: int | None, c: object, place: str) -> None:
    """Check one contribution to a tensor of the forward graph."""
    if c is None or isinstance(c, Term):
        return
    tensors = tape.draft.tensors
    if isinstance(c, Later):
        result = tape.result_of(c.op)
    elif _is_id(c, tensors):
        result = tensors[c].spec
    else:
        tape.invalid("a contribution must be a tensor id, a Later, a Term or None", f"{shown(c)} for {place}")
    wanted = tape.graph.spec(tensor) if tensor is not None else None
    if wanted is None or result.shape != wanted.shape:
        tape.invalid("a gradient must have the shape of its tensor", f"{result} for {place}, {wanted}")


@dataclass(frozen=True)
class BackwardTemplate:
    """A template's gradient, as a template. Its arguments are the gradients of the forward results,
    followed by forward tensors. Its results are gradients of forward tensors.

    Attributes:
        sources: per wanted gradient, where it comes from. A number from 0 up is an index of the
            template's results. A number from -1 down stands for the gradient of one of the layer's
            results, which is passed on unchanged.
        imports: the forward tensors among its arguments, in order.
        saved: the imports that the forward call must save.
    """

    template: Template
    imports: tuple[int, ...]
    wanted: tuple[int, ...]
    sources: tuple[int, ...]
    saved: tuple[int, ...]


class Differentiated(NamedTuple):
    """A graph with the backward pass of its loss.

    Attributes:
        graph: the graph.
        gradients: the id of every parameter's gradient, by the parameter's name.
        layers: per forward call, by id: the id of its backward call, and the gradient of its template.
    """

    graph: Graph
    gradients: Mapping[str, int]
    layers: Mapping[int, tuple[int, BackwardTemplate]]


class Imports:
    """Tensors of a layer that its backward template has as arguments."""

    def __init__(self, forward: Graph, draft: GraphDraft) -> None:
        self.forward, self.draft = forward, draft
        self.imported: dict[int, int] = {}

    def use(self, tensor: int) -> int:
        """The id of a forward tensor in the backward template."""
        if tensor not in self.imported:
            node = self.forward.tensors[tensor]
            kind = node.kind if node.kind != "result" else "input"
            spec = node.spec.renamed(node.spec.name or f"saved{tensor}")
            self.imported[tensor] = self.draft.declare(kind, spec).id
        return self.imported[tensor]

    def keep_only(self, used: Collection[int]) -> None:
        """Forget tensors that no op of the backward template reads."""
        self.imported = {tensor: own for tensor, own in self.imported.items() if own in used}

    def saved(self, forward: Template) -> tuple[int, ...]:
        """The imports that the forward call must save: those that are not in its interface."""
        available = {*forward.arguments, *forward.results}
        return tuple(t for t in self.imported if t not in available)


def differentiate_template(
    forward: Template, needed: frozenset[int] | None = None, key: str | None = None
) -> BackwardTemplate:
    """The gradient of a template. A pure function.

    Args:
        needed: the arguments whose gradients a call may need; by default all but constants.
        key: of the template that it returns; by default the forward template's with `.backward`.
    """
    if needed is None:
        needed = frozenset(a for a in forward.arguments if forward.graph.tensors[a].kind != "constant")
    graph = forward.graph
    builder = GraphBuilder(f"{graph.name}.backward", k_splits=graph.k_splits)
    builder.draft.phase = "backward"
    seeds = {
        r: builder.draft.declare("input", replace(graph.spec(r), name=f"grad{i}")).id
        for i, r in enumerate(forward.results)
    }
    inside = Imports(graph, builder.draft)
    tape = _Tape(graph, builder.draft, inside.use)
    for r, seed in seeds.items():
        tape.collect(r, seed)
    _run_backward(graph.ops, tape, _no_nested_call)
    # inputs before parameters: a norm's dgamma appears when its input's gradient is emitted
    order = sorted(forward.arguments, key=lambda a: graph.tensors[a].kind == "parameter")
    totals = {
        a: tape.total(a)
        for a in order
        if graph.spec(a).dtype.name in ("f32", "bf16") and (a in needed or tape.has_terms(a))
    }
    wanted = tuple(a for a in forward.arguments if a in needed and totals.get(a) is not None)
    passed_on = {seed: ~i for i, seed in enumerate(seeds.values())}
    places: dict[int, int] = {}  # index of each result, once: both terms of a sum share a gradient
    for a in wanted:
        total = totals[a]
        if total is not None and total not in passed_on:
            places.setdefault(total, len(places))
            builder.output(builder.draft.tensors[total], f"grad.{graph.spec(a).name}")
    sources = tuple({**places, **passed_on}[t] for t in (totals[a] for a in wanted) if t is not None)
    backward = drop_dead_ops(builder.freeze())
    inside.keep_only({*places, *(i for op in backward.ops for i in op.given)})
    arguments = (*seeds.values(), *inside.imported.values())
    own_key = f"{forward.key}.backward" if key is None else key
    template = Template(own_key, backward, arguments, tuple(places))
    return BackwardTemplate(template, tuple(inside.imported), wanted, sources, inside.saved(forward))


def calls_before(graph: Graph, tensor: int) -> list[OpNode]:
    """The calls on which a tensor depends (indices do not count), last first."""
    needed, calls = {tensor}, list[OpNode]()
    for op in reversed(graph.ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(i for i in op.given if graph.spec(i).dtype.name != "i32")
            if op.op == "call":
                calls.append(op)
    return calls


def _no_nested_call(op: OpNode, grads: list[int | None]) -> Sequence[Gradient]:
    raise PlanError(
        f"[graph.gradients] layers inside layers have no gradient; got {op.label!r}; inline the inner one"
    )


def tensors_with_gradient(graph: Graph) -> frozenset[int]:
    """The tensors that depend on a parameter that is trained. Only they have gradients."""
    trained = {t.id for t in graph.trainable()}
    for op in graph.ops:
        if not trained.isdisjoint(op.given):
            trained.update(op.outputs)
    return frozenset(trained)


def _differentiate_all(
    graph: Graph, calls: Sequence[OpNode], with_gradient: frozenset[int], pool: WorkerPool | None
) -> dict[int, BackwardTemplate]:
    """The gradient of the template of each call, by the call's id. Calls that need gradients of
    the same arguments share it. Calls that need none are left out. Worker processes compute the
    gradients if there are many.
    """
    wanted: dict[int, tuple[str, frozenset[int]]] = {}
    for op in calls:
        template = graph.templates[op.attrs["template"]]
        pairs = zip(template.arguments, op.inputs)
        needed = frozenset(formal for formal, actual in pairs if actual in with_gradient)
        if needed:
            wanted[op.id] = template.key, needed
    variants = dict.fromkeys(wanted.values())
    counts.differentiated += len(variants)
    keys, numbers = set(graph.templates), dict[str, int]()
    forward = []
    for template_key, needed in variants:
        key = None
        while key is None or key in keys:
            numbers[template_key] = number = numbers.get(template_key, 0) + 1
            key = f"{template_key}.backward" + (f"#{number}" if number > 1 else "")
        forward.append((graph.templates[template_key], needed, key))
    modules = modules_of_ops({op.op for template, *_ in forward for op in template.graph.ops})
    if pool is None or modules is None or len(forward) < ENOUGH:
        made = [_validated_gradient(*one) for one in forward]
    else:
        made = [*pool.map(_differentiate_in_worker, [(modules, *one) for one in forward])]
    by_variant = dict(zip(variants, made))
    return {call: by_variant[variant] for call, variant in wanted.items()}


def _validated_gradient(forward: Template, needed: frozenset[int], key: str) -> BackwardTemplate:
    """The gradient of a template. Both are validated by the rules of graphs."""
    validate_graph(forward.graph)
    backward = differentiate_template(forward, needed, key)
    validate_graph(backward.template.graph)
    return backward


def _differentiate_in_worker(
    modules: Sequence[str], forward: Template, needed: frozenset[int], key: str
) -> BackwardTemplate:
    import_ops(modules)
    return _validated_gradient(forward, needed, key)


def differentiate(graph: Graph, loss: int, pool: WorkerPool | None = None) -> Differentiated:
    """Append the backward pass of `loss` to a graph. All tensors that it reads are saved.

    The templates that the loss depends on, and their gradients, are validated (`ir.validate`) when they are
    differentiated; the graph itself is not.

    Args:
        graph: the simplified graph.
        loss: id of the tensor.
        pool: worker processes that differentiate templates, if there are many.

    Raises:
        PlanError: a trained parameter does not influence the loss, or is used by an op that has no
            gradient; or every parameter is frozen.
    """
    builder = GraphBuilder.thaw(graph)
    builder.draft.phase = "backward"
    with_gradient = tensors_with_gradient(graph)
    if graph.frozen and loss not in with_gradient:
        raise PlanError(
            "[graph.gradients] a loss must depend on a parameter that is trained; got only frozen ones in "
            f"{graph.name!r}; freeze fewer, or plan a graph without a loss"
        )
    backward = _differentiate_all(graph, calls_before(graph, loss), with_gradient, pool)
    layers: dict[int, tuple[int, BackwardTemplate]] = {}
    tape = _Tape(graph, builder.draft, lambda tensor: tensor)

    def on_call(op: OpNode, grads: list[int | None]) -> list[int | None]:
        tape.settle()  # before the next layer, so that operands of weight gradients (logits) can be freed
        own = backward[op.id]
        layers[op.id] = len(builder.draft.ops), own
        return _call_backward(builder.draft, op, graph.templates[op.attrs["template"]], own, grads)

    one = builder.draft.declare(
        "constant", TensorSpec((1,), DTYPES["f32"], name=SEED, storage=graph.spec(loss).storage)
    )
    builder.draft.constant_values[one.id] = np.ones(1, np.float32)
    tape.collect(loss, one.id)
    _run_backward([op for op in graph.ops if not with_gradient.isdisjoint(op.outputs)], tape, on_call)
    for t in graph.tensors:
        if t.id not in with_gradient and tape.has_terms(t.id):
            tape.total(t.id)  # an op that combines terms contributes to parameters too
    gradients = {}
    for t in graph.trainable():
        total = tape.total(t.id)
        if total is None:
            raise PlanError(
                f"[graph.gradients] every trained parameter must influence the loss; got {t.spec.name!r}; remove it, "
                "or declare it with trainable=False"
            )
        gradients[t.spec.name] = total
        builder.output(builder.draft.tensors[total], f"{t.spec.name}.grad")
    return _without_dead_ops(Differentiated(builder.freeze(), gradients, layers))


def _without_dead_ops(made: Differentiated) -> Differentiated:
    """The same without ops that only lead to gradients of inputs and constants."""
    graph = drop_dead_ops(made.graph)
    numbers = {op.outputs: op.id for op in graph.ops if op.outputs}
    layers = {}
    for forward, (backward, template) in made.layers.items():
        pair = [numbers.get(made.graph.ops[number].outputs) for number in (forward, backward)]
        if pair[0] is not None and pair[1] is not None:
            layers[pair[0]] = pair[1], template
    return Differentiated(graph, made.gradients, layers)


def _call_backward(
    draft: GraphDraft,
    op: OpNode,
    forward: Template,
    backward: BackwardTemplate,
    grads: list[int | None],
) -> list[int | None]:
    """Append the backward call of one layer, and make the forward call also return the tensors to
    save.
    """
    bound = {**dict(zip(forward.arguments, op.inputs)), **dict(zip(forward.results, op.outputs))}
    first = len(draft.tensors)
    saved = tuple(range(first, first + len(backward.saved)))
    for i, t in zip(saved, backward.saved):
        draft.tensors.append(TensorNode(i, forward.graph.spec(t), "result", op.id))
        bound[t] = i
    saving = FrozenMap({"template": forward.key, "saved": backward.saved})
    draft.ops[op.id] = replace(op, outputs=(*op.outputs, *saved), attrs=saving)
    draft.templates[backward.template.key] = backward.template
    arguments = (*grads, *(bound[t] for t in backward.imports))
    specs = [backward.template.graph.spec(r) for r in backward.template.results]
    attrs = FrozenMap({"template": backward.template.key, "saved": ()})
    results = draft.append("call", arguments, specs, attrs, label=f"{op.label}.backward")
    by_argument = {
        a: results[source] if source >= 0 else grads[~source]
        for a, source in zip(backward.wanted, backward.sources)
    }
    return [by_argument.get(a) for a in forward.arguments]
