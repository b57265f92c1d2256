"""Errors in a user's op's lowering are rejected in planning, in one line that names the op; nothing runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pure.plans import plan_graph, with_update
from support.made_ops import make_op
from tilewise.core.dims import BATCH, Dim
from tilewise.core.errors import InternalError, PlanError
from tilewise.graph import GraphBuilder
from tilewise.ir import op as op_table
from tilewise.ir.loop_parts import ALL_ROWS
from tilewise.ir.op import operand, result
from tilewise.ir.program import Number
from tilewise.nn import linear
from tilewise.plan import make_plan
from tilewise.strategy import one_stage

pytestmark = pytest.mark.usefixtures("same_ops")


def plan(lower, axes=None, *, rows=(8,), **members):
    """The plan of a graph with an op of two operands `[8, 6]`, or another number of rows, with this lowering."""
    make_op(lower=lambda self, low: lower(low, self), **members)
    graph = GraphBuilder("g")
    labels = [BATCH, *[None] * len(rows)]
    a, b = (graph.input([*rows, 6], name=name, labels=labels) for name in "ab")
    graph.output(graph.op("odd", [a, b])[0], "y")
    return plan_graph(graph.freeze(), axes or {})


def adding(tiles=None, /, **changes):
    """A lowering that adds its operands, with other tiles and settings in some calls."""

    def lower(low, op):
        x = low.tensor(op.a)
        views = {"out": low.row(op.out), "a": low.row(op.a), "b": low.row(op.b)}
        views |= {name: view(low, op.a, op.out) for name, view in (tiles or {}).items()}
        settings = {"over": x, "dtype": x.dtype, "tiles": views}
        settings |= {name: value(low, x) if callable(value) else value for name, value in changes.items()}
        low.emit("add", **settings)

    return lower


def over_columns(low, op, **changes):
    """A lowering that adds its operands by columns."""
    tiles = {"out": low.col(op.out), "a": low.col(op.a), "b": low.col(op.b)}
    over = Number(low.tensor(op.a).cols)
    low.emit("add", **{"over": over, "dtype": "f32", "step": 2, "tiles": tiles, **changes})


def by_quarters(*parts, over=1):
    """A lowering that adds its operands in parts of fixed rows: so many quarters of them from each first one on."""

    def lower(low, op):
        refs = [low.tensor(t) for t in (op.out, op.a, op.b)]
        quarter = refs[0].extent.upper(low.shapes.bounds) // 4
        for first, count in parts:
            views = [low.rows_at(ref, first * quarter, count * quarter) for ref in refs]
            tiles = dict(zip(("out", "a", "b"), views))
            low.emit("add", over=Number(over), step=0, dtype="f32", tiles=tiles)

    return lower


RIGHT = {
    "rows": adding(),
    "one task": adding(step=0),
    "more rows than there are": adding(step=100),
    "columns": over_columns,
    "fixed rows": adding(
        {"a": lambda low, a, out: low.rows_at(low.tensor(a), 0, low.tensor(a).extent.constant)}, step=0
    ),
    "all rows in fixed parts": by_quarters((2, 2), (0, 2), (1, 2)),
}

PARTS = [
    ("out a b", lambda low, t: low.col(t), "columns of operand 'out'.*6 columns with div 1 under a loop over {rows}"),
    ("a", lambda low, t: low.row(t, div=2), "rows of operand 'a'.*got {rows} rows with div 2 under a loop over {rows}"),
    ("a", lambda low, t: low.row(t, div=0), "div 0"),
    ("a", lambda low, t: low.row(t, div=-1), "div -1"),
    ("a", lambda low, t: low.row(t, div=Number(2)), "rows of operand 'a'.*div 2"),
    ("a", lambda low, t: low.row(t, div="2"), "`div` of operand 'a' must be an integer or a Number; got '2'"),
    ("a", lambda low, t: low.rows_at(low.tensor(t), 10**7, 8), "lie in operand 'a'; got 8 rows from 10000000.*{rows}"),
    ("a", lambda low, t: low.rows_at(low.tensor(t), -5, 8), "lie in operand 'a'; got 8 rows from -5 on"),
    ("a", lambda low, t: low.rows_at(low.tensor(t), 0, 0), "lie in operand 'a'; got 0 rows"),
    ("out", lambda low, t: low.rows_at(low.tensor(t), 8, 8), "fixed rows must lie in operand 'out'"),
    ("a", lambda low, t: low.rows_at(low.tensor(t), 0, 2), "must be one size; got a tile of .* and 2 in operand 'a'"),
]  # fmt: skip


@pytest.mark.parametrize("axes", [{}, {"dp": 2}], ids=["one", "dp"])
@pytest.mark.parametrize("lower", RIGHT.values(), ids=RIGHT)
def test_valid_lowerings(lower, axes):
    """Each way to view what the loop runs over."""
    plan(lower, axes)


@pytest.mark.parametrize("axes", [{}, {"dp": 2}], ids=["one", "dp"])
@pytest.mark.parametrize("names,view,words", PARTS, ids=lambda v: v if isinstance(v, str) else "")
def test_mismatched_parts_are_rejected(names, view, words, axes):
    """Columns under a loop over rows, divisions with a remainder, rows out of range."""
    tiles = {
        name: lambda low, a, out, of=name: view(low, out if of == "out" else a) for name in names.split()
    }
    with pytest.raises(
        InternalError, match=rf"{words.format(rows=4 if axes else 8)}.* in op 'odd' \(odd\); correct"
    ):
        plan(adding(tiles), axes)


def one_row(low, a):
    """A temporary of one row."""
    return low.temp(1, low.tensor(a).cols, "f32", tile_rows=1, name="row")


GROWING = [
    (lambda low, a: low.row(a, div=low.size(low.spec(a).shape[1])), "rows of operand 'a' times its `div`"),
    (lambda low, a: low.row(a, div=Number(2)), "rows of operand 'a' times its `div`"),
    (lambda low, a: low.row(one_row(low, a), div=8), "rows of operand 'a' times its `div`"),
    (lambda low, a: low.row(one_row(low, a), div=ALL_ROWS), "must be one size; got a tile of the loop in .* loop over"),
]  # fmt: skip


@pytest.mark.parametrize("axes", [{}, {"dp": 2}], ids=["one", "dp"])
@pytest.mark.parametrize("view,words", GROWING, ids=lambda v: v if isinstance(v, str) else "")
def test_parts_of_symbolic_rows(view, words, axes):
    """A division is exact for every length or for none; a kernel reads equally many rows of each operand."""
    rows = (8, Dim("seq", 1, 12))
    plan(adding(), axes, rows=rows)
    op_table._OPS.pop("odd")
    with pytest.raises(InternalError, match=rf"{words}.* in op 'odd' \(odd\); correct"):
        plan(adding({"a": lambda low, a, out: view(low, a)}), axes, rows=rows)


def over_an_operand(low, op):
    """Valid except for one added instruction."""
    adding()(low, op)
    adding({"out": lambda low, a, out: low.row(a)})(low, op)


def reading_another(low, op):
    """An addition that also reads a tensor of the graph that is not an operand."""
    adding({"b": lambda low, a, out: low.row(len(low.graph.tensors) - 1)})(low, op)


def test_only_operands_and_outputs_are_read():
    """A read of another tensor would not be ordered after its writes."""
    make_op(lower=lambda self, low: reading_another(low, self))
    graph = GraphBuilder("g")
    a, b = (graph.input([8, 6], name=name) for name in "ab")
    graph.output(graph.op("odd", [a, b])[0], "y")
    graph.input([8, 6], name="c")
    with pytest.raises(InternalError, match=r"a use of another tensor, f32\[8, 6\] in op 'odd'"):
        plan_graph(graph.freeze(), {})


@pytest.mark.parametrize(
    "lower,words",
    [
        (
            lambda low, op: None,
            r"every output must be written; got none of 0 instructions that writes f32\[8, 6\]",
        ),
        (over_an_operand, r"the operands of results `in_place`; got a write to f32\[8, 6\]"),
    ],
)
def test_exactly_the_outputs_are_written(lower, words):
    """All of them, and no operand."""
    with pytest.raises(InternalError, match=rf"{words} in op 'odd' \(odd\); correct its lowering"):
        plan(lower)


@pytest.mark.parametrize(
    "parts,of_eight,of_four",
    [
        ([(0, 2)], "rows 4 to 7", "rows 2 to 3"),
        ([(3, 1), (0, 1), (0, 2)], "rows 4 to 5", "row 2"),
        ([(1, 1), (3, 1)], "rows 0 to 1, 4 to 5", "rows 0, 2"),
        ([(1, 3)], "rows 0 to 1", "row 0"),
    ],
)
def test_unwritten_rows_are_rejected(parts, of_eight, of_four):
    """They would hold old memory: named by number, for each device."""
    for axes, words in (({}, of_eight), ({"dp": 2}, of_four)):
        with pytest.raises(
            InternalError,
            match=rf"row of an output must be written; got none of \d instructions that writes {words} of output 0, "
            r"f32\[8, 6\] in op 'odd' \(odd\); correct its lowering",
        ):
            plan(by_quarters(*parts), axes)
        op_table._OPS.pop("odd")


def test_rows_of_any_length_are_written():
    """With a symbolic number of rows, fixed ones reach to the bound or are rejected."""
    rows = (8, Dim("seq", 1, 12))
    plan(by_quarters((0, 4)), rows=rows)
    op_table._OPS.pop("odd")
    with pytest.raises(InternalError, match="that writes rows 72 to 95 of output 0"):
        plan(by_quarters((0, 3)), rows=rows)


def test_a_loop_over_no_rows_writes_nothing():
    """It has no task."""
    with pytest.raises(InternalError, match=r"every output must be written; got none of 1 instructions"):
        plan(by_quarters((0, 4), over=0))


def test_output_is_not_read_before_it_is_written():
    """Old memory would be part of the result."""
    reading = adding({"b": lambda low, a, out: low.row(out)})
    with pytest.raises(
        InternalError,
        match=r"an output must be written before it is read; got a read of f32\[8, 6\] before in op 'odd'",
    ):
        plan(reading)
    op_table._OPS.pop("odd")
    plan(lambda low, op: (adding()(low, op), reading(low, op)))


def make_two():
    """An op of two results, in place of two operands."""

    def lower(self, low):
        for out, x in ((self.y, self.a), (self.z, self.b)):
            tiles = {"out": low.row(out), "x": low.row(x)}
            low.emit("scale", over=low.tensor(out), dtype="f32", tiles=tiles, floats={"factor": 2.0})

    y, z = result(like="a", in_place="a"), result(like="b", in_place="b")
    make_op(gives="y z", y=y, z=z, must_alias=True, lower=lower)


def test_aliased_operand_may_be_read():
    """An operand of which only the shape is used, where the other operand has its memory."""
    make_two()
    reads_other = lambda self, low: adding({"a": lambda low, a, out: low.row(self.b)})(low, self)  # noqa: E731
    make_op("seen", a=operand("...", shape_only=True), lower=reads_other)
    graph = GraphBuilder("g")
    x, other = (graph.state([8, 6], name=name) for name in ("x", "other"))
    graph.output(graph.op("seen", [x, graph.op("odd", [x, other])[0]])[0], "y")
    plan_graph(graph.freeze(), {})


def test_one_operand_for_two_outputs_in_place_is_rejected():
    """One of them has its own memory."""
    make_two()
    graph = GraphBuilder("g")
    x = graph.input([8, 6], name="x")
    graph.output(graph.op("odd", [x, x])[0], "y")
    with pytest.raises(
        InternalError, match=r"an operand each; got 'x' twice in op 'odd' \(odd\); pass it once"
    ):
        plan_graph(graph.freeze(), {})


SETTINGS = [
    ({"over": 8}, "the rows of a loop must.*got 8 for kernel 'add'"),
    ({"over": Number(-8)}, "the rows of a loop must"),
    ({"step": -1}, "rows per task must be at least 1.*got -1"),
    ({"step": (1 << 63) - 1}, "rows per task.*below 2.40"),  # the number of tasks would overflow
    ({"step": Number(-4)}, r"rows per task.*got Number\("),
    ({"label": "\ud800"}, "a label must be printable text"),
    ({"priority": 1 << 70}, "a priority must be an integer of at most 1048576; got 1180591620717411303424"),
    ({"ints": [1]}, r"integers must be a dictionary by name; got \[1\]"),
    ({"tiles": None}, "operands must be a dictionary by name; got None"),
]


@pytest.mark.parametrize("changes,words", SETTINGS, ids=lambda v: "" if isinstance(v, dict) else v)
def test_wrong_settings_of_an_instruction_are_rejected(changes, words):
    """Each setting of `emit` has a type; a wrong one raises no other exception."""
    with pytest.raises(InternalError, match=rf"{words}.* in op 'odd' \(odd\); correct"):
        plan(adding(**changes))


def temp(low, **changes):
    return low.row(low.temp(**{"rows": 8, "cols": 6, "dtype": "f32", "tile_rows": 1, "name": "t", **changes}))


ASKED = [
    (lambda low, op: low.row(999), "a tensor must be an id.*got 999"),
    (lambda low, op: low.whole([0]), r"a tensor must be an id.*got \[0\]"),
    (lambda low, op: low.flat(999), "a tensor must be an id.*got 999"),
    (lambda low, op: low.spec(999), "a tensor must be an id.*got 999"),
    (lambda low, op: low.rows_at("a", 0, 1), "a tensor must be an id.*got 'a'"),
    (lambda low, op: temp(low, tile_rows=0), "tile_rows of a temporary must be at least 1.*got 0 for 't'"),
    (lambda low, op: temp(low, rows=Number(8.0)), "rows of a temporary must be at least 0 and below"),
    (lambda low, op: temp(low, cols=0), "cols of a temporary must be a fixed number, at least 1.*got 0"),
    (
        lambda low, op: temp(low, dtype="f99"),
        "a temporary.s dtype must be one of f32, bf16, i32, f64; got 'f99' for 't'",
    ),
    (lambda low, op: low.first_element(op.a, 9), r"a dim must be one of f32\[8, 6\]; got 9"),
    (
        lambda low, op: low.local_splits(op.a, 1),
        r"k splits need a labelled dim.*got dim 1 of f32\[8, 6\]",
    ),
    (
        lambda low, op: temp(low, max_bytes=4),
        "max_bytes of a temporary must be at least its 192 bytes; got 4 for 't'",
    ),
    (
        lambda low, op: temp(low, packed=True, max_bytes=192),
        "max_bytes of a temporary must be at least its 768 bytes; got 192",
    ),
    (
        lambda low, op: low.temp_like(low.split_temp(6, "split"), dtype="f32", name="t"),
        r"temp_like needs a Ref.*got Ref\(",
    ),
    (
        lambda low, op: low.temp_like(low.tensor(op.a), dtype="f32", name="t", pending=5),
        "a pending reduction must be a result of low.pending_reduction.*got 5",
    ),
    (
        lambda low, op: low.pending_reduction("zz"),
        "a partial value must be one of the op's: none; got 'zz'",
    ),
    (lambda low, op: low.first_of_sum(op.a), "a sum must be a result of the op; got"),
    (
        lambda low, op: low.finish_accumulation(None),
        "finish_accumulation needs a result of low.accumulator; got None",
    ),
    (lambda low, op: low.slice(0, "y"), "a tensor must be an id.*got 'y'"),
    (lambda low, op: low.all_gather_parameters(999, 0), "a tensor must be an id.*got 999"),
    (
        lambda low, op: low.contraction_splits([(low.spec(op.a), None, 2)], None),
        "terms must be .spec, label, dim.*got",
    ),
    (
        lambda low, op: low.label_splits(None, 8, "dp"),
        "a pending reduction must be a result of low.pending_reduction.*got 'dp'",
    ),
    (
        lambda low, op: low.all_reduce(op.a, op.out, None, None),
        "all_reduce needs a result of low.pending_reduction.*got None",
    ),
]


@pytest.mark.parametrize("ask,words", ASKED, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_requests_of_a_lowering_are_rejected(ask, words):
    """Unknown tensors and dims, temporaries without size, sums without a pending reduction."""
    with pytest.raises(
        InternalError, match=rf"\[plan.lower\] {words}.* in op 'odd' \(odd\); correct its lowering"
    ):
        plan(ask)


HELD = [
    (lambda low, x: (x, 1, low.row(x)), r"the rows of a loop must.*got Ref\("),
    (lambda low, x: (x.extent, 1, x), r"a result of low.row, low.whole or low.col; got Ref\("),
    (lambda low, x: (Number(3), 1, low.row(x)), "as many rows as the loop; got 8 rows under a loop over 3"),
]


@pytest.mark.parametrize("arguments,words", HELD, ids=lambda v: v if isinstance(v, str) else "")
def test_holds_of_other_types_are_rejected(arguments, words):
    """`hold` follows the same rules as `emit`."""

    def lower(low, op):
        adding()(low, op)
        low.hold(*arguments(low, low.tensor(op.a)), "odd/held")

    with pytest.raises(
        InternalError, match=rf"{words}.* for a hold in op 'odd' \(odd\); correct what it emits"
    ):
        plan(lower)


@pytest.mark.parametrize("name", ["a", "b"])
def test_operand_used_for_its_shape_is_not_read(name):
    """Its values may be elsewhere when the op runs, so no instruction reads it."""
    shape_only = {name: operand("...", shape_only=True)}
    with pytest.raises(InternalError, match=r"must not read.*`shape_only`; got a read of .* in op 'odd'"):
        plan(adding(), **shape_only)
    op_table._OPS.pop("odd")
    plan(adding({"a": lambda low, a, out: low.row(a + 1)}), a=operand("...", shape_only=True))


def test_sum_over_the_batch_in_other_shards_than_those_of_storage_is_rejected():
    """No strategy gives such a layout; lowered as storage shards, the rows would be wrong."""
    builder = GraphBuilder("g")
    x = builder.input([4, 64], name="x", labels=[BATCH, None])
    builder.loss(builder.mean(linear(builder, x, "w", 64)))
    plan = plan_graph(with_update(builder), {"dp": 2})
    (key,) = (key for key in plan.layout.pending_reductions if plan.graph.ops[key[0]].op == "linear_dw")
    (pending,) = plan.layout.pending_reductions[key]
    shards = {**plan.layout.pending_reductions, key: (replace(pending, arrives=((("dp",), ()),)),)}
    layout = replace(plan.layout, pending_reductions=shards)
    with pytest.raises(PlanError, match="a sum over the batch must be whole on its devices"):
        make_plan(plan.graph, layout, plan.settings, one_stage)
