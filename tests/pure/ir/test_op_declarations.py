"""What an op's class declares, and what its members return, is checked before anything runs."""

from __future__ import annotations

from typing import ClassVar

import pytest

from pure.plans import plan_graph
from support.made_ops import make_op
from tilewise.core.dims import BATCH
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import InternalError, ShapeError
from tilewise.graph import GraphBuilder
from tilewise.ir import op as op_table
from tilewise.ir.contractions import factors_of
from tilewise.ir.factors import Factors, PartialValue
from tilewise.ir.graph import TensorSpec
from tilewise.ir.layout import BATCH_SPLITS, GROUPS
from tilewise.ir.op import Op, Partial, bind, operand, operands, optional, register, result
from tilewise.session.inputs import index_bounds

SPEC = TensorSpec((8, 6), DTYPES["f32"], (BATCH, None))


pytestmark = pytest.mark.usefixtures("same_ops")


def build(**members):
    """A graph with an op of two operands."""
    make_op(**members)
    graph = GraphBuilder("g")
    a, b = (graph.input([8, 6], name=name, labels=[BATCH, None]) for name in "ab")
    graph.output(graph.op("odd", [a, b])[0], "y")
    return graph.freeze()


MEMBERS = [
    ({"out": result(like="c")}, "must be like an operand that is always present; got 'c'"),
    (
        {"a": optional("..."), "out": result(like="a")},
        "must be like an operand that is always present; got 'a'",
    ),
    ({"out": result(like="a", in_place="b c")}, "result 'out' must name an operand that is no list; got 'c'"),
    (
        {"out": result(like="a", indices_of="out")},
        "result 'out' must name an operand that is no list; got 'out'",
    ),
    ({"out": result("...", dtype="any")}, "the dtype of a result must follow from an operand"),
    (
        {"a": operand("...", dtype="i32"), "b": operand("...", dtype="i32")},
        "the dtype of a result must follow",
    ),
    (
        {"a": operand("...", indexes="v")},
        "'a' must index a dim of an operand that is always present; got 'v'",
    ),
    ({"b": operand("v* d"), "a": operand("...", indexes="v")}, "'a' must index a dim of an operand"),
    (
        {"takes": "a b c", "a": operands("..."), "c": operands("..."), "out": result(like="b")},
        "lists of operands must be neighbours",
    ),
    (
        {"takes": "x a b", "x": operands("..."), "out": result(like="a", in_place="a b")},
        "shape or indices are used must come before lists; got 'a'",
    ),
    ({"takes": "declared b"}, "a field must not have the name of a member of Op; got 'declared'"),
    ({"whole": ("d",)}, "`whole` and `moved` must be texts of dims"),
    ({"partial_values": Partial("p", "...", "out")}, "`partial_values` must be a tuple of Partials"),
    (
        {"partial_values": (Partial("p", "...", "out"), Partial("p", "...", "out"))},
        "partial values must have different names",
    ),
    ({"partial_values": (Partial("p", "...", "loss"),)}, "partial value 'p' must name results; got 'loss'"),
    ({"partial_values": (Partial("p", "...", "out", cut_by="w"),)}, "'p' must be cut by operands; got 'w'"),
    (
        {"partial_values": (Partial("p", "...", "out", tree=BATCH_SPLITS),)},
        "partial value 'p' must name results with `accumulates`; got 'out'",
    ),
    ({"must_alias": True}, "must_alias needs results in_place, each of another operand; got ()"),
    (
        {
            "must_alias": True,
            "gives": "x y",
            "x": result(like="a", in_place="a"),
            "y": result(like="a", in_place="a"),
        },
        "must_alias needs results in_place, each of another operand",
    ),
    (
        {"a": operand("... Rows")},
        "must be lower-case names, sizes, `k*`, or `...` in front; got '... Rows'",
    ),
    (
        {"a": operand("d ...")},
        "must be lower-case names, sizes, `k*`, or `...` in front; got 'd ...'",
    ),
    ({"a": operand("...", dtype="f99")}, "the dtype of 'a' must be float, any or one of f32"),
    ({"out": result("...", storage="heap")}, "the storage of 'out' must be one of rows, scalars"),
    ({"out": result("... n")}, "dims of results must be dims of operands that are always present; got 'n'"),
    ({"whole": "z"}, "partial values must name dims of operands; got 'z'"),
    (
        {"partial_values": (Partial("p", "z", "out"),)},
        "partial values must name dims of operands; got 'z'",
    ),
    (
        {"partial_values": (Partial("p", "...", "out", "avg"),)},
        "must be combined by sum, max, or along k_splits",
    ),
    ({"out": result()}, "a result must have dims, or be like an operand; got 'out'"),
    ({"speed": list}, "an attribute must be an int, float, bool, str or tuple; got 'speed'"),
    (
        {"takes": "a b c", "a": operands("..."), "b": operand("...", shape_only=True)},
        "shape or indices are used must come before lists; got 'b'",
    ),
    ({"takes": "lower b"}, "a field must not have the name of a member of Op; got 'lower'"),
]


@pytest.mark.parametrize("members,words", MEMBERS, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_declarations_cannot_be_registered(members, words):
    """Names of tensors and dims in a declaration must exist; the table is unchanged."""
    before = dict(op_table._OPS)
    with pytest.raises(InternalError) as error:
        make_op(**members)
    assert words in str(error.value) and "Odd" in str(error.value) and "\n" not in str(error.value)
    assert before == op_table._OPS


def test_fields_in_the_order_of_a_graph():
    """Lists alternate, an absent operand has a place, and both directions agree for every number of operands."""

    class Many(Op):
        """An op with every kind of operand."""

        name: ClassVar[str] = "many"
        first: int = operand("...")
        x: tuple[int, ...] = operands("... k*", least=0)
        w: tuple[int, ...] = operands("n k*", least=0)
        added: int | None = optional("n")
        factor: float

    made = Many(first=0, x=(1, 3), w=(2, 4), added=None, factor=2.0)
    assert made.inputs == (0, 1, 2, 3, 4, None) and made.attrs == {"factor": 2.0}
    assert Many.of(made.inputs, made.attrs) == made
    without = Many.of((0, None), {"factor": 1.0})
    assert without.x == without.w == () and without.inputs == (0, None)
    assert [Many.declared.of_inputs(n) is not None for n in range(7)] == [n in (2, 4, 6) for n in range(7)]


OPERANDS = [
    ([8, 6], [8, 7], "a and b must have one shape; got f32[8, 6], f32[8, 7]"),
    ([8, 6], [8, 6, 1], "a and b must have one shape; got f32[8, 6], f32[8, 6, 1]"),
    ([8], [8, 6], "a and b must have one shape; got f32[8], f32[8, 6]"),
]


@pytest.mark.parametrize("a,b,words", OPERANDS)
def test_operands_of_other_shapes_are_rejected(a, b, words):
    """Sizes and numbers of dims, in both directions."""
    make_op()
    graph = GraphBuilder("g")
    with pytest.raises(ShapeError) as error:
        graph.op("odd", [graph.input(a, name="a"), graph.input(b, name="b")])
    assert words in str(error.value)


@register
class _Product(Op):
    """An op with every form of dims."""

    name: ClassVar[str] = "product_of_tests"
    whole: ClassVar[str] = "m"
    partial_values = (Partial("p", "k", "out", cut_by="w"), Partial("t", "...", "out", tree=BATCH_SPLITS))
    x: int = operand("... k")
    w: int = operand("n k", storage="packed")
    ids: int = operand("...", indexes="n")
    pair: int = operand("2", dtype="f32", storage="vector")
    mask: int | None = optional("m n", dtype="f32")
    out: int = result("... n", accumulates=True)
    rows: int = result("...", dtype="f32", storage="scalars")
    three: int = result("... 3", dtype="f32")


op_table._OPS.pop("product_of_tests")


def product(**forms):
    """The results of the op on operands of these shapes, or specs."""
    shapes = {"x": (4, 3, 6), "w": (5, 6), "ids": (4, 3), "pair": (2,), "mask": None} | forms
    storage = {"w": "packed", "ids": "scalars", "pair": "vector"}
    specs = []
    for name, form in shapes.items():
        dtype = DTYPES["i32" if name == "ids" else "f32"]
        is_spec = form is None or isinstance(form, TensorSpec)
        specs.append(form if is_spec else TensorSpec(form, dtype, storage=storage.get(name, "rows")))
    op_table._OPS["product_of_tests"] = _Product
    return op_table.results_of_call("product_of_tests", specs, {}), specs


def test_results_and_factors_follow_from_dims():
    """Shapes, dtypes, storage, names of dims, partial values and ranges of indices."""
    (out, rows, three), specs = product()
    assert [str(s) for s in (out, rows, three)] == ["f32[4, 3, 5]", "f32[4, 3]", "f32[4, 3, 3]"]
    assert (out.storage, rows.storage, three.storage) == ("rows", "scalars", "rows")
    bound = _Product.of([0, 1, 2, 3, None], {})
    factors = bound.factors(lambda i: specs[i])
    assert factors.inputs == (("...0", "...1", "k"), ("n", "k"), ("...0", "...1"), ("2",), None)
    assert factors.outputs == (("...0", "...1", "n"), ("...0", "...1"), ("...0", "...1", "3"))
    assert factors.whole == frozenset("m")
    assert factors.partial_values == (
        PartialValue("p", ("k",), (0,), cut_by=(1,)),
        PartialValue("t", ("...0", "...1"), (0,), tree=BATCH_SPLITS),
    )
    assert bound.index_bounds(lambda i: specs[i]) == {"ids": (0, 5, None)}


@pytest.mark.parametrize(
    "forms,words",
    [
        ({"x": (4, 3, 7)}, "x and w must have one size of 'k'; got f32[4, 3, 7], f32[5, 6]"),
        ({"ids": (4, 2)}, "x and ids must have the same rows"),
        ({"ids": (4,)}, "x and ids must have the same rows"),
        ({"pair": (3,)}, "pair must be [2]; got f32[3]"),
        ({"mask": (2, 4)}, "w and mask must have one size of 'n'"),
        ({"mask": (2, 5, 1)}, "mask must be [m, n]"),
        ({"x": (6,)}, "x must be rows of elements"),
        ({"w": TensorSpec((5, 6), DTYPES["f32"])}, "w must be a parameter with two dims"),
        ({"w": TensorSpec((5, 6), DTYPES["bf16"], storage="packed")}, "operands must have one dtype"),
        ({"x": TensorSpec((4, 3, 6), DTYPES["i32"])}, "x must be f32 or bf16"),
        (
            {"x": TensorSpec((4, 6), DTYPES["f32"], storage="packed")},
            "operand x must be a result, not a weight",
        ),
        ({"ids": TensorSpec((4, 3), DTYPES["f32"], storage="scalars")}, "ids must be i32"),
        ({"ids": TensorSpec((4, 3), DTYPES["i32"])}, "ids must be one number per row"),
        (
            {"pair": TensorSpec((2,), DTYPES["f32"])},
            'pair must be [2]; got f32[2]; declare it with storage="vector"',
        ),
    ],
)
def test_operands_that_do_not_fit_are_rejected(forms, words):
    """Each rule that a field states, in its words."""
    with pytest.raises(ShapeError) as error:
        product(**forms)
    assert words in str(error.value)


def lowered(self, low):
    x = low.tensor(self.a)
    tiles = {"out": low.row(self.out), "a": low.row(x), "b": low.row(self.b)}
    low.emit("add", over=x, dtype=x.dtype, tiles=tiles)


RESULTS = [
    ({"results": lambda *_: []}, "`results` returns a spec per result; got 0 for 1"),
    (
        {
            "must_alias": True,
            "out": result(like="a", in_place="a"),
            "results": lambda *_: [TensorSpec((8, 7), DTYPES["f32"], (BATCH, None))],
        },
        "shape, dtype and storage; got result 0 f32[8, 7] rows, and operand 0 f32[8, 6] rows",
    ),
]


@pytest.mark.parametrize("members,words", RESULTS, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_results_are_rejected(members, words):
    """The op's first use rejects them."""
    with pytest.raises(InternalError, match=r"\[ir.odd\] .*; correct Odd\.results") as error:
        build(**members)
    assert words in str(error.value)


def test_results_may_be_any_sequence():
    """Any sequence with a length, everywhere that the op is called."""
    plan_graph(build(results=lambda *_: (SPEC,), lower=lowered), {})


def test_result_does_not_take_the_name_of_an_operand():
    """Its spec may be an operand's unchanged; the optimizer updates the parameter of that name, not the result."""
    make_op(results=lambda self, spec: [spec(self.a)], lower=lowered)
    graph = GraphBuilder("g")
    a, b = (graph.parameter([8], name=name) for name in "ab")
    (y,) = graph.op("odd", [a, b])
    assert y.spec.name == "" and y.spec.shape == (8,)
    graph.output(y, "y")
    assert GraphBuilder.thaw(graph.freeze()).find("a").kind == "parameter"


DIMS = ("r", "d")


@pytest.mark.parametrize(
    "factors,words",
    [
        (Factors((DIMS,), (DIMS,)), "the dims of all operands and results; got names for 1 and 1"),
        (Factors((DIMS, DIMS), ()), "the dims of all operands and results; got names for 2 and 0"),
        (
            Factors((("r",), DIMS), (DIMS,)),
            r"every dim of an operand or result; got \('r',\) for f32\[8, 6\]",
        ),
        (Factors((DIMS, None), (DIMS,)), "every dim of an operand or result; got None for"),
    ],
)
def test_own_factors_must_name_every_dim(factors, words):
    """An op may make its factors itself; missing names are rejected in planning."""
    graph = build(factors=lambda *_: factors)
    with pytest.raises(InternalError, match=rf"\[ir.odd\] `factors` must name {words}"):
        plan_graph(graph, {"dp": 2})


@pytest.mark.parametrize("tree", ["k_splits", GROUPS])
def test_own_factors_are_used(tree):
    """A dim that stays whole, one whose axes may change, a partial value of either tree."""
    partial = PartialValue("p", ("d",), (0,), "max", tree, cut_by=(0, 1))
    factors = Factors((DIMS, DIMS), (DIMS,), frozenset("d"), (partial,), frozenset("r"))
    graph = build(factors=lambda *_: factors)
    assert factors_of(graph, graph.ops[0]) is factors


def test_index_bounds_pass_through_other_ops():
    """Bounds of an output's indices are those of the input that they come from."""
    ids = operand("...", dtype="any")
    make_op(takes="a", a=ids, out=result(like="a", dtype="any", indices_of="a"))
    graph = GraphBuilder("g")
    ids = graph.input([8], "i32", name="ids", storage="scalars")
    (picked,) = graph.op("odd", [ids])
    graph.output(graph.embedding(picked, graph.parameter([11, 4], name="table")), "y")
    frozen = graph.freeze()
    assert index_bounds(frozen) == {"ids": [(0, 11, None)]}
    assert (bind(frozen.ops[0]).out,) == frozen.ops[0].outputs
