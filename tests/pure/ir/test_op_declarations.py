"""Members of an op's class, and what its `infer`, `factors` and `index_bounds` return, are checked."""

from __future__ import annotations

import pytest

from pure.plans import plan_graph
from tilewise.core.dims import BATCH
from tilewise.core.dtypes import DTYPES
from tilewise.core.errors import InternalError
from tilewise.graph import GraphBuilder
from tilewise.graph.ops.common import Elementwise
from tilewise.ir import op as op_table
from tilewise.ir.contractions import factors_of
from tilewise.ir.graph import TensorSpec
from tilewise.ir.layout import GROUPS
from tilewise.ir.op import Factors, PartialValue, Signature, register
from tilewise.session.inputs import index_bounds

SPEC = TensorSpec((8, 6), DTYPES["f32"], (BATCH, None))
DIMS = ("r", "d")


pytestmark = pytest.mark.usefixtures("same_ops")


def make(**members):
    """An op of two operands and one output."""
    return register(type("Odd", (Elementwise,), {"name": "odd", "num_inputs": 2, **members}))


def build(**members):
    """A graph with that op."""
    make(**members)
    graph = GraphBuilder("g")
    a, b = (graph.input([8, 6], name=name, labels=[BATCH, None]) for name in "ab")
    graph.output(graph.op("odd", [a, b])[0], "y")
    return graph.freeze()


MEMBERS = [
    ({"signature": Signature("2")}, "`signature` has a number of operands.*got '2'"),
    (
        {"signature": Signature(2, absent=[0, "b"])},
        "`signature` has positions of operands that may be absent",
    ),
    ({"accumulates": ("a",)}, r"`accumulates` has positions of outputs.*got \('a',\)"),
    ({"in_place": (0, 0)}, r"`in_place` has pairs of an output and an input of 2; got \(0, 0\)"),
    ({"in_place": ((0, 9),)}, r"`in_place` has pairs of an output and an input of 2; got \(\(0, 9\),\)"),
    ({"must_alias": True}, r"`in_place` must name the input for each output.*once; got \(\)"),
    (
        {"must_alias": True, "in_place": ((0, 0), (0, 1))},
        "`in_place` must name the input for each output.*once",
    ),
    (
        {"must_alias": True, "in_place": ((0, 0), (1, 0))},
        "`in_place` must name the input for each output.*once",
    ),
    (
        {"passes_indices": ((9, 9),)},
        r"`passes_indices` has pairs of an output and an input of 2; got \(\(9, 9\),\)",
    ),
    ({"shape_of": [0]}, r"`shape_of` has positions of operands of 2, in a frozenset; got \[0\]"),
    ({"shape_of": frozenset({9})}, "`shape_of` has positions of operands of 2"),
]


@pytest.mark.parametrize("members,words", MEMBERS, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_members_cannot_be_registered(members, words):
    """Each member of a class has a type and a range; the table is unchanged."""
    before = dict(op_table._OPS)
    with pytest.raises(InternalError, match=rf"\[ir.register\] {words}.* of 'odd'; correct Odd\.") as error:
        make(**members)
    assert before == op_table._OPS and "\n" not in str(error.value)


def test_every_existing_op_can_be_registered():
    """The rules accept all ops of the package."""
    ops = dict(op_table._OPS)
    op_table._OPS.clear()
    for rule in ops.values():
        register(type(rule))
    assert ops.keys() == op_table._OPS.keys()


INFERRED = [
    (
        {"in_place": ((9, 0),)},
        r"`in_place` names operands and outputs that the op has; got \(\(9, 0\),\) with 2 op",
    ),
    ({"passes_indices": ((1, 0),)}, "`passes_indices` names operands and outputs that the op has"),
    (
        {"accumulates": (5,)},
        r"`accumulates` names operands and outputs that the op has; got \(5,\) with 2 operands",
    ),
    (
        {"in_place": ((0, 3),), "signature": Signature(None)},
        "`in_place` names operands and outputs that the op has",
    ),
    (
        {"shape_of": frozenset({3}), "signature": Signature(None)},
        "`shape_of` names operands and outputs that the op has",
    ),
    (
        {
            "must_alias": True,
            "in_place": ((0, 0),),
            "infer": lambda *_: [TensorSpec((8, 7), DTYPES["f32"], (BATCH, None))],
        },
        r"an output .* shape, dtype and storage; got output 0 f32\[8, 7\] rows, and input 0 f32\[8, 6\]",
    ),
]


@pytest.mark.parametrize("members,words", INFERRED, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_outputs_are_rejected(members, words):
    """The op's first use rejects them and declarations that do not fit them."""
    with pytest.raises(InternalError, match=rf"\[ir.odd\] {words}.*; correct Odd\."):
        build(**members)


def lowered(self, low, op):
    a, b = op.given
    x = low.tensor(a)
    tiles = {"out": low.row(op.outputs[0]), "a": low.row(a), "b": low.row(b)}
    low.emit("add", op, over=x, dtype=x.dtype, tiles=tiles)


def test_outputs_may_be_any_sequence():
    """Any sequence with a length, everywhere that the op is called."""
    plan_graph(build(infer=lambda *_: (SPEC,), lower=lowered), {})


def test_output_does_not_take_the_name_of_an_operand():
    """Its spec may be an operand's unchanged; the optimizer updates the parameter of that name, not the result."""
    make(infer=lambda self, inputs, attrs: [inputs[0]], lower=lowered)
    graph = GraphBuilder("g")
    a, b = (graph.parameter([8], name=name) for name in "ab")
    (y,) = graph.op("odd", [a, b])
    assert y.spec.name == "" and y.spec.shape == (8,)
    graph.output(y, "y")
    assert GraphBuilder.thaw(graph.freeze()).find("a").kind == "parameter"


@pytest.mark.parametrize("count", [None, -1], ids=repr)
def test_invalid_count_of_operands_is_the_op_s_error(count):
    """The message addresses the op's author, not its caller."""
    with pytest.raises(
        InternalError, match=r"\[ir.odd\] the function `signature.operands` must.*correct Odd.signature"
    ):
        build(signature=Signature(lambda attrs: count))


def one_partial(*args, **changes):
    return Factors((DIMS, DIMS), (DIMS,), partial_values=(PartialValue(*args, **changes),))


FACTORS = [
    (Factors((DIMS,), (DIMS,)), "a tuple with names for each of 2 operands; got"),
    (Factors([DIMS, DIMS], (DIMS,)), "a tuple with names for each of 2 operands"),
    (Factors((DIMS, DIMS), ()), r"a tuple with names for each of 1 outputs; got \(\)"),
    (Factors((("r",), DIMS), (DIMS,)), r"a name for each dim of operand 0, f32\[8, 6\]; got \('r',\)"),
    (Factors((DIMS, DIMS), (("r",),)), "a name for each dim of output 0"),
    (Factors(("rd", "rd"), ("rd",)), "a name for each dim of operand 0.*got 'rd'"),
    (Factors(((None, []), DIMS), (DIMS,)), r"names that are text; got \[None"),
    (Factors((DIMS, DIMS), (DIMS,), whole=frozenset("z")), "`whole` with names of dims.*got frozenset"),
    (Factors((DIMS, DIMS), (DIMS,), moved=frozenset("z")), "`moved` with names of dims"),
    (one_partial("p", ("z",), (0,)), r"partial 'p' with names of dims, in a tuple; got \('z',\)"),
    (one_partial("p", ("d",), (5,)), r"partial 'p' with positions of its 1 outputs, in a tuple; got \(5,\)"),
    (one_partial("p", ("d",), (0,), "avg"), "partial 'p' that is combined by one of sum, max, or; got 'avg'"),
    (
        one_partial("p", ("d",), (0,), tree="zz"),
        "partial 'p' along one of the trees k_splits, batch_splits, groups; got 'zz'",
    ),
    (
        one_partial("p", ("d",), (0,), cut_by=(7,)),
        r"partial 'p' cut by positions of its 2 operands.*got \(7,\)",
    ),
]


@pytest.mark.parametrize("factors,words", FACTORS, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_factors_are_rejected(factors, words):
    """They name every dim of every operand and output; partial values are of named dims."""
    graph = build(factors=lambda *_: factors)
    with pytest.raises(
        InternalError, match=rf"\[ir.odd\] `factors` returns .*{words}.*; correct Odd.factors"
    ) as error:
        plan_graph(graph, {"dp": 2})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tree", ["k_splits", GROUPS])
def test_valid_factors_are_accepted(tree):
    """A dim that stays whole, one whose axes may change, a partial value of either tree."""
    partial = PartialValue("p", ("d",), (0,), "max", tree, cut_by=(0, 1))
    factors = Factors((DIMS, DIMS), (DIMS,), frozenset("d"), (partial,), frozenset("r"))
    graph = build(factors=lambda *_: factors)
    assert factors_of(graph, graph.ops[0]) is factors


BOUNDS = [{5: (0, 1, None)}, {0: (0, 1)}, {0: ("0", 1, None)}]


@pytest.mark.parametrize("bounds", BOUNDS, ids=repr)
def test_invalid_index_bounds_are_rejected(bounds):
    """A range for each position of an operand: anything else is rejected before a run."""
    graph = build(index_bounds=lambda *_: bounds)
    with pytest.raises(
        InternalError, match=r"\[ir.odd\] `index_bounds` returns \(low, high.*; correct Odd.index"
    ):
        index_bounds(graph)


def test_index_bounds_pass_through_other_ops():
    """Bounds of an output's indices are those of the input that they come from."""
    make(num_inputs=1, passes_indices=((0, 0),), infer=lambda self, inputs, attrs: [inputs[0]])
    graph = GraphBuilder("g")
    ids = graph.input([8], "i32", name="ids", storage="scalars")
    (picked,) = graph.op("odd", [ids])
    graph.output(graph.embedding(picked, graph.parameter([11, 4], name="table")), "y")
    assert index_bounds(graph.freeze()) == {"ids": [(0, 11, None)]}
