"""Errors of an op's author are rejected in words that name the op and the rule."""

from __future__ import annotations

from typing import ClassVar

import pytest

from pure.plans import plan_graph
from support.made_ops import make_op
from tilewise.core.dims import BATCH
from tilewise.core.errors import InternalError, PlanError, ShapeError
from tilewise.graph import GraphBuilder, differentiate
from tilewise.graph.ops.elementwise import Scale
from tilewise.graph.ops.linear import LinearTerm, LinearWeightGradient, Matmul
from tilewise.graph.ops.loss import CrossEntropy
from tilewise.graph.ops.reduce import Sum
from tilewise.ir import op as op_table
from tilewise.ir.op import Op, bind, register
from tilewise.ir.tape import Term, terms_of
from tilewise.nn import linear

pytestmark = pytest.mark.usefixtures("same_ops")


def make(name="odd", **members):
    """An elementwise op of one operand whose name is not a kernel's."""
    return make_op(name, "x", **members)


def trained(name="odd"):
    """A loss through the op, and the graph with its gradients."""
    batch = BATCH
    graph = GraphBuilder("g")
    x = graph.input([4, 3, 8], name="x", labels=[batch, None, None])
    labels = graph.input([4, 3], "i32", name="labels", labels=[batch, None], storage="scalars")
    y = linear(graph, x, "w", 8)
    if name:
        (y,) = graph.op(name, [y])
    loss, _ = graph.mean_cross_entropy(linear(graph, y, "head", 5), labels)
    graph.loss(loss)
    return differentiate(graph.freeze(), graph.draft.loss_id)[0]


@pytest.mark.parametrize(
    "cls,rule",
    [
        (type("Plain", (), {"name": "plain"}), "derives from ir.op.Op"),
        (type("Nameless", (Op,), {}), "an op must have a printable name; got Nameless"),
        (type("Line", (Op,), {"name": "a\nb"}), r"an op must have a printable name; got Line with 'a\\nb'"),
        (type("Again", (Op,), {"name": "add"}), "'add' of Again, which exists already"),
        (type("Call", (Op,), {"name": "call"}), "'call' of Call, which exists already"),
    ],
)
def test_invalid_classes_cannot_be_registered(cls, rule):
    """A class that is not an op, lacks a name, or takes a used name; the table is unchanged."""
    before = dict(op_table._OPS)
    with pytest.raises(InternalError, match=rf"\[ir.register\].*{rule}"):
        register(cls)
    assert before == op_table._OPS


@pytest.mark.parametrize(
    "contributions,words",
    [
        ({"y": 1}, r"a dictionary by operands: x; got \['y'\]"),
        (None, r"a dictionary by operands: x; got None"),
        ({"x": "dy"}, r"a tensor id, a Later, a Term or None; got 'dy' for operand 'x'"),
        ({"x": 10**6}, r"a tensor id, a Later, a Term or None; got 1000000 for operand 'x'"),
        ({"x": 1}, r"the shape of its tensor; got i32\[4, 3\] for operand 'x', f32\[4, 3, 8\]"),
    ],
)
def test_invalid_contributions_are_rejected(contributions, words):
    """Of an unknown operand, of a wrong type or shape: the error names the op and what to correct."""
    make(gradient=lambda self, tape, grads: contributions)
    with pytest.raises(InternalError, match=rf"\[graph.odd\].*{words}.*; correct Odd.gradient"):
        trained()


ASKED = [
    (lambda tape, dy: tape.use(10**6), "a used tensor must be one of the forward graph; got 1000000"),
    (
        lambda tape, dy: tape.add(dy, 10**6),
        "operands of 'add' must be ids of the backward graph; got 1000000",
    ),
    (
        lambda tape, dy: tape.multiply(dy, "dy"),
        "operands of 'multiply' must be ids of the backward graph; got 'dy'",
    ),
    (lambda tape, dy: tape.add(dy, None), "operand b must be given"),
    (lambda tape, dy: tape.scale(dy, "2"), "factor must be a finite number; got '2'"),
    (lambda tape, dy: tape.op("add"), "must be an object of an op's class; got 'add'"),
    (lambda tape, dy: tape.later(Sum(x=dy)), r"the shape of its tensor; got f32\[1\] for operand 'x'"),
    (
        lambda tape, dy: tape.later(Matmul(a=dy, b=dy, trans_a=False, trans_b=False)),
        r"fit together; got .*a must be \[m, k\]",
    ),
    (lambda tape, dy: tape.later(Scale(x=dy, factor=[2.0])), "factor must be a finite number"),
    (lambda tape, dy: tape.contribute(10**6, dy), "to a tensor of the forward graph; got 1000000"),
]


@pytest.mark.parametrize("ask,words", ASKED, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_calls_in_gradients_are_rejected(ask, words):
    """The error names the op whose gradient makes the call."""
    make(gradient=lambda self, tape, grads: {"x": ask(tape, grads[0])})
    with pytest.raises(InternalError, match=rf"\[graph.odd\].*{words}.*; correct Odd.gradient"):
        trained()


@pytest.mark.parametrize("total", [None, 10**6, 1], ids=repr)
def test_combined_terms_are_one_tensor(total):
    """A tensor's id, of its shape; without one, the parameters before it would have no gradient."""
    make(gradient=lambda self, tape, grads: {"x": OwnTerm()}, combine=lambda *_: total)
    with pytest.raises(InternalError, match=r"\[graph.odd\].*; correct Odd.combine"):
        trained()


def test_op_without_a_gradient_is_rejected():
    """In a loss that depends on it; no gradient is silently omitted."""
    make()
    with pytest.raises(PlanError, match=r"ops that have a gradient; got 'odd' \(odd\)"):
        trained()


def test_secondary_output_has_no_gradient():
    """A loss through the second output of an op is rejected, not ignored."""
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    labels = graph.input([4], "i32", name="labels", storage="scalars")
    _, rows = graph.mean_cross_entropy(linear(graph, x, "w", 8), labels)
    frozen = graph.freeze()
    with pytest.raises(PlanError, match=r"only on the first result of 'cross_entropy'.*result 1 \(rows\)"):
        differentiate(frozen, rows.id)


class OwnTerm(Term):
    """A term of the op `odd`."""

    combined_by: ClassVar[str] = "odd"


def test_terms_need_an_op_that_combines_them():
    """An op that terms name without combining them is rejected with advice."""
    make(gradient=lambda self, tape, grads: {"x": OwnTerm()})
    with pytest.raises(InternalError, match=r"'odd' does not; got 1 terms of OwnTerm; write Odd.combine"):
        trained()


def test_order_of_combined_terms():
    """The order in which contributions become one gradient: ids and Laters, then ops by rank and name."""
    seen = []

    @classmethod
    def combine(cls, tape, terms, total):
        seen.append((cls.name, len(terms), total is not None))
        return tape.scale(total, 1.0)

    for name, rank in (("z", 0), ("a", 0), ("b", -1)):
        make(name, combine=combine, combine_rank=rank)
    terms = [type("T", (Term,), {"combined_by": n})() for n in ("z", "a", "b", "z")]
    pending = iter([*terms, None])

    def gradient(self, tape, grads):
        term = next(pending)
        return {"x": tape.later(Scale(x=grads[0], factor=2.0)) if term is None else term}

    make("many", gradient=gradient)
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    labels = graph.input([4], "i32", name="labels", storage="scalars")
    y = linear(graph, x, "w", 8)
    sums = None
    for _ in range(5):
        (made,) = _again(graph, y)
        sums = made if sums is None else graph.add(sums, made)
    loss, _ = graph.mean_cross_entropy(sums, labels)
    differentiate(graph.freeze(), loss.id)
    assert seen == [("b", 1, True), ("a", 1, True), ("z", 2, True)]


def _again(graph, y):
    """The same op once more: equal ops on equal operands are one, so it is appended by hand."""
    ids = graph.draft.append("many", (y.id,), [y.spec], {})
    return [graph.draft.tensors[i] for i in ids]


def test_terms_of_one_op_have_one_class():
    """A term of another class that names the same op is rejected."""
    term = LinearTerm(0, 1, True)
    assert terms_of(LinearTerm, [term]) == [term]
    with pytest.raises(
        InternalError, match="all terms of 'linear' must be of one class; got OwnTerm next to LinearTerm"
    ):
        terms_of(LinearTerm, [term, OwnTerm()])


def test_many_terms_take_several_contractions():
    """A tensor used in twenty products has a gradient: two contractions, one after the other."""
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    labels = graph.input([4], "i32", name="labels", storage="scalars")
    h = linear(graph, x, "first", 8)
    total = linear(graph, h, "w0", 8)
    for i in range(1, 20):
        total = graph.add(total, linear(graph, h, f"w{i}", 8))
    loss, _ = graph.mean_cross_entropy(total, labels)
    made, _, _ = differentiate(graph.freeze(), loss.id)
    terms = [len(bind(op).x) for op in made.ops if op.op == "linear" and op.phase == "backward"]
    assert terms == [16, 4]


def test_late_contribution_is_rejected():
    """`combine` may not contribute to a tensor whose gradient has been used."""

    @classmethod
    def combine(cls, tape, terms, total):
        tape.contribute(x_id, total or seen[0])
        return seen[0]

    seen = []

    def gradient(self, tape, grads):
        seen.append(grads[0])
        return {"x": OwnTerm()}

    make(gradient=gradient, combine=combine)
    x_id = 4  # the result of the product in front of the op
    with pytest.raises(InternalError, match=r"before the gradient is used.*parameters only"):
        trained()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("rule,declared", [(LinearWeightGradient, ()), (CrossEntropy, (0, 1))])
def test_accumulates_agrees_with_lower(rule, declared, accumulation, monkeypatch):
    """A sum over the batch that is not declared, or declared and not written, is rejected for any accumulation."""
    monkeypatch.setattr(rule.declared, "accumulates", declared)
    with pytest.raises(InternalError, match=f"`accumulates`.*in op '{rule.name}'"):
        plan_graph(trained(""), {}, accumulation)


def test_elementwise_op_without_a_kernel_is_rejected():
    """Without a kernel of its name and a lowering: planning says where the kernel is missing."""
    make()
    graph = GraphBuilder("g")
    graph.output(graph.op("odd", [graph.input([4, 8], name="x")])[0], "y")
    with pytest.raises(
        InternalError, match=r"a kernel must be in the table; got 'odd' in op 'odd' \(odd\); declare it"
    ):
        plan_graph(graph.freeze(), {})


def test_later_contribution_is_a_tensor():
    """`Later` is appended when the sum is needed: the op's weight gradient comes after the input gradients."""
    made = trained("")
    backward = [op.op for op in made.ops if op.phase == "backward"]
    assert backward.index("linear_dw") > max(i for i, name in enumerate(backward) if name == "linear")


@pytest.mark.parametrize(("kind", "value"), [(tuple, ([1],))])
def test_mutable_attribute_is_rejected(kind, value):
    """By the call: what is in a graph must not change, and equal ops are one."""
    make(given=kind)
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    with pytest.raises(
        ShapeError, match=r"\[graph.odd\] given must be hashable: equal ops are one; got .*; pass a tuple"
    ):
        graph.op("odd", [x], given=value)
    assert not graph.draft.ops
