"""Emitted instructions are checked against the kernel table in planning: each error names op and kernel."""

from __future__ import annotations

import re

import pytest

from pure.plans import plan_graph
from tilewise.core.dims import BATCH
from tilewise.core.errors import InternalError
from tilewise.graph import GraphBuilder
from tilewise.ir.lowering import Ref
from tilewise.ir.op import op_named
from tilewise.ir.program import Access, Mode, Number, Operand, Wait
from tilewise.kernels import KERNELS
from tilewise.plan.emission import make_instruction, repeat_instruction

ROWS, D, V = 10, 6, 12
REFS = [
    Ref(0, Number(ROWS), D, "f32", 4),  # x and the like
    Ref(1, Number(ROWS), D, "f32", 4),
    Ref(2, Number(ROWS), 1, "f32", 4),  # a number per row
    Ref(3, Number(1), D, "f32", 1),  # a vector
    Ref(4, Number(V), D, "f32", 32, packed=True),  # a weight
    Ref(5, Number(ROWS), V, "f32", 4),
    Ref(6, Number(ROWS), 1, "i32", 4),
    Ref(7, Number(V), D, "f32", 32, packed=True),
    Ref(8, Number(ROWS), D, "bf16", 4),
    Ref(9, Number(7), D, "f32", 4),
    Ref(10, Number(0, 0, 1), D, "f32", 4),  # as many rows as a symbol says
    Ref(11, Number(ROWS), D, "f32", 4),
    Ref(12, Number(ROWS), V, "f32", 4, tile_cols=D),
    Ref(13, Number(V), V, "f32", 32, packed=True),
    Ref(14, Number(ROWS), V, "f32", 4),
]


def row(slot, **changes):
    return Operand(slot, Mode.ROW, **changes)


def whole(slot):
    return Operand(slot, Mode.WHOLE)


NORM = {
    "dtype": "f32",
    "tiles": {"y": row(0), "rstd": row(2), "x": row(1), "gamma": whole(3)},
    "floats": {"eps": 1e-5, "offset": 0.0},
}
PRODUCT = {
    "dtype": "f32",
    "tiles": {"out": row(5), "a": [row(0), row(1)], "w": [whole(4), whole(7)]},
    "ints": {"num_k_splits": 2, "range": [0, 2, 0, 2, 2, 6, 2, 6]},
}


def make(kernel, base, **changes):
    """An instruction of a base call, with changes to its named parts; None removes a part."""
    call = {"ints": {}, "floats": {}, **base}
    for what, named in changes.items():
        if isinstance(named, dict):
            merged = {**call[what], **named}
            call[what] = {k: v for k, v in merged.items() if v is not None or what == "tiles"}
        else:
            call[what] = named
    options = {"extent": Number(ROWS), "step": 4, **call}
    return make_instruction(
        kernel, maker="op 'mine' (l)", label="l", ref_of=REFS.__getitem__, **options
    ).freeze()


def accesses(instruction):
    return [Access(o.access).name for o in instruction.operands]


def test_valid_call():
    """Order, access and name come from the table; lists alternate; counts and types are filled in."""
    norm = make("rms_norm", NORM)
    assert (norm.kernel, [o.slot for o in norm.operands]) == ("rms_norm_f32", [0, 2, 1, 3])
    assert accesses(norm) == ["OUT", "OUT", "IN", "IN"] and norm.floats == (1e-5, 0.0)
    product = make("matmul", PRODUCT)
    assert [None if o.null else o.slot for o in product.operands] == [5, None, 0, 4, 1, 7]
    assert product.ints == (1, 2, 2, 0, 2, 0, 2, 2, 6, 2, 6)


def test_operands_that_view_other_columns_have_their_own_access():
    """Operands that view the same columns of a tensor share an access; views of other columns do not."""

    def copied(slot):
        parts = [Operand(slot, Mode.ROWCOLS, part=p, parts=D) for p in (0, D)]
        return make("copy_pairs", {"dtype": "f32", "tiles": {"dst": parts, "src": [row(0), row(1)]}})

    assert accesses(copied(5)) == ["INOUT", "IN", "NONE", "IN"]
    assert accesses(copied(12)) == ["INOUT", "IN", "INOUT", "IN"]

    def product(slot):
        tiles = {
            "out": Operand(14, Mode.COL),
            "residual": Operand(slot, Mode.COL),
            "a": [whole(slot)],
            "w": [row(13)],
        }
        cut = {"num_k_splits": 1, "range": [0, V]}
        return make("matmul", {"dtype": "f32", "extent": Number(V), "tiles": tiles, "ints": cut})

    assert accesses(product(5)) == ["OUT", "IN", "NONE", "IN"]
    assert accesses(product(12)) == ["OUT", "IN", "IN", "IN"]
    gate = {"h": Operand(12, Mode.COL), "g": Operand(12, Mode.COL), "u": Operand(5, Mode.COL)}
    assert accesses(make("silu_gate", {"dtype": "f32", "extent": Number(V), "tiles": gate})) == [
        "INOUT",
        "NONE",
        "IN",
    ]


REFUSED = {
    "rms_norm": [
        ({"tiles": {"gamma": None}}, r"not optional must be given; got none for operand 'gamma'"),
        ({"tiles": {"beta": whole(3)}}, r"operands of this kernel are gamma, rstd, x, y; got 'beta'"),
        ({"tiles": {"x": 1}}, r"a result of low.row, low.whole or low.col; got 1 for 'x'"),
        ({"floats": {"eps": None}}, r"every float must be given; got none for 'eps'"),
        ({"floats": {"eps": float("inf")}}, r"finite number; got inf for 'eps'"),
        ({"floats": {"eps": True}}, r"finite number; got True for 'eps'"),
        ({"floats": {"scale": 1.0}}, r"floats of this kernel are eps, offset; got 'scale'"),
        ({"ints": {"rows": 1}}, r"this kernel has no integers; got 'rows'"),
        ({"dtype": None}, r"dtype must be one of rms_norm_f32, rms_norm_bf16; got None"),
        ({"dtype": "f64"}, r"dtype must be one of .*; got 'f64'"),
        ({"tiles": {"x": row(8)}}, r"operand 'x' must have elements of f32; got bf16"),
        ({"tiles": {"rstd": row(6)}}, r"operand 'rstd' must have elements of f32; got i32"),
        ({"tiles": {"x": row(4)}}, r"operand 'x' must be stored in rows; got panels"),
        ({"tiles": {"x": row(9)}}, r"'x' must have as many rows.*; got 7 rows under a loop over 10"),
        ({"tiles": {"x": row(5)}}, r"'d' must be one size; got 6 in operand 'y' and 12 in operand 'x'"),
        ({"tiles": {"gamma": whole(9)}}, r"operand 'gamma' must be \[1 g\]; got 1 as 7"),
        ({"tiles": {"gamma": row(0)}}, r"operand 'gamma' must be \[1 g\]; got 1 as a tile of the loop"),
        ({"tiles": {"x": whole(1)}}, r"'m' must be one size; got a tile of the loop in operand 'y' and 10"),
        ({"tiles": {"y": row(0, group=0, member=1)}}, r"its own device's memory; got a peer's tile for operand 'y'"),
        ({"tiles": {"x": Operand(1, Mode.PANELCOLS)}}, r"as they are stored.*got panels of a tensor"),
    ],
    "matmul": [
        ({"tiles": {"w": [whole(4)]}}, r"equal lengths; got 2 of 'a', 1 of 'w'"),
        ({"tiles": {"w": None}}, r"a list of operands must be a list; got None for operand 'w'"),
        ({"tiles": {"a": row(0)}}, r"a list of operands must be a list; got .* for operand 'a'"),
        ({"tiles": {"w": [whole(4), row(0)]}}, r"operand 'w' must be stored in panels; got rows"),
        ({"tiles": {"w": [whole(4), Operand(7, Mode.COL)]}}, r"as they are stored.*got rows of a packed"),
        ({"tiles": {"a": [row(0), row(5)]}}, r"'k' must be one size; got 12 in operand 'a' and 6 in .* 'w'"),
        ({"ints": {"range": [0, 6]}}, r"'range' must have 2\*num_k_splits\*num_terms = 8 integers; got 2"),
        ({"ints": {"num_k_splits": None}}, r"every integer must be given; got none for 'num_k_splits'"),
        ({"ints": {"num_k_splits": 2**63}}, r"64 bits; got 9223372036854775808 for 'num_k_splits'"),
        ({"ints": {"num_k_splits": 2.0}}, r"64 bits; got 2.0 for 'num_k_splits'"),
        ({"ints": {"num_terms": 2}}, r"integers of this kernel are num_k_splits, range; got 'num_terms'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "change", "words"), [(kernel, *case) for kernel, cases in REFUSED.items() for case in cases]
)
def test_invalid_calls_are_rejected(kernel, change, words):
    """Each rule of the table by itself; the call is valid without the change, so the check can pass."""
    base = {"rms_norm": NORM, "matmul": PRODUCT}[kernel]
    make(kernel, base)
    with pytest.raises(InternalError) as error:
        make(kernel, base, **change)
    assert re.search(words, str(error.value)), error.value
    assert f"for kernel '{kernel}' in op 'mine' (l); correct what it emits" in str(error.value)


def test_an_unknown_kernel():
    """A kernel that no table knows."""
    with pytest.raises(InternalError, match="a kernel must be in the table; got 'rms' in op 'mine'"):
        make("rms", NORM)


NORM_OF_AN_EQUAL = {**NORM, "tiles": {**NORM["tiles"], "x": row(11)}}


def norm_draft(call):
    """A draft of a norm."""
    options = {"extent": Number(ROWS), "step": 4, **call}
    return make_instruction("rms_norm", maker="op 'mine' (l)", label="l", ref_of=REFS.__getitem__, **options)


def test_repeated_instruction_equals_an_emitted_one():
    """On tensors of equal form; waits of the first are not repeated."""
    draft = norm_draft(NORM)
    draft.waits.append(Wait(0, True, 1))
    again = repeat_instruction(draft, {"x": row(11)}, REFS.__getitem__)
    assert again.freeze() == norm_draft(NORM_OF_AN_EQUAL).freeze() != norm_draft(NORM).freeze()


@pytest.mark.parametrize(
    ("tiles", "words"),
    [
        ({"x": row(8)}, "operands of the same form; got another for 'x'"),  # bf16
        ({"x": row(9)}, "operands of the same form"),  # fewer rows
        ({"x": row(4)}, "operands of the same form"),  # panels
        ({"x": whole(11)}, "operands of the same form"),
        ({"x": 11}, "a result of low.row, low.whole or low.col; got 11 for 'x'"),
        ({"beta": row(11)}, "got another for 'beta'"),
        ({"x": row(0)}, "as many tensors as before"),
    ],
)
def test_repetition_of_another_form_is_rejected(tiles, words):
    """A check for one tensor does not hold for a tensor of another form."""
    with pytest.raises(InternalError, match=words):
        repeat_instruction(norm_draft(NORM), tiles, REFS.__getitem__)


def test_repetition_has_no_list_names():
    """Indices of a list's members are not names."""
    options = {"extent": Number(ROWS), "step": 4, "ints": {}, "floats": {}, **PRODUCT}
    draft = make_instruction("matmul", maker="op 'm' (l)", label="l", ref_of=REFS.__getitem__, **options)
    with pytest.raises(InternalError, match="got another for 'out'"):
        repeat_instruction(draft, {"out": row(5)}, REFS.__getitem__)


def test_one_access_per_tile():
    """In place, a task's reads and writes of a tile are one access; writing parts of a tile keeps the rest."""
    silu = {"dtype": "f32", "tiles": {"out": row(0), "x": row(0)}}
    assert accesses(make("silu", silu)) == ["INOUT", "NONE"]
    twice = {"dtype": "f32", "tiles": {"out": row(0), "a": row(1), "b": row(1)}}
    assert accesses(make("add", twice)) == ["OUT", "IN", "NONE"]
    part = [Operand(0, Mode.ROWPART, part=i, parts=3) for i in (1, 2)]
    peers = [o._replace(group=0, member=o.part) for o in part]
    copied = make("copy_pairs", {"dtype": "f32", "tiles": {"dst": part, "src": peers}})
    assert accesses(copied) == ["INOUT", "NONE", "NONE", "NONE"]


def test_symbolic_rows_are_compared_as_symbols():
    """A tensor with a symbol's rows fits only a loop over them."""
    tiles = {"out": row(10), "x": row(10)}
    make("silu", {"dtype": "f32", "tiles": tiles, "extent": Number(0, 0, 1)})
    with pytest.raises(InternalError, match="must have as many rows"):
        make("silu", {"dtype": "f32", "tiles": tiles, "extent": Number(0, 0, 2)})


def test_every_kernel_can_be_written_from_its_table_line():
    """The line of every kernel parses into operands with valid roles, and ints that name operands."""
    for spec in KERNELS.values():
        names = {o.name for o in spec.operands}
        assert names and {o.role for o in spec.operands} <= {"in", "out", "inout"}, spec.base
        assert all(i.source is None or i.source[1] in names for i in spec.ints), spec.base
        ints = {i.name for i in spec.ints}
        assert all(f.isdigit() or f in ints for i in spec.ints for f in i.length), spec.base


class Forgetful:
    """A lowering that changes arguments on their way."""

    def __init__(self, low, change):
        self.low, self.change = low, change

    def __getattr__(self, name):
        return getattr(self.low, name)

    def emit(self, kernel, **arguments):
        return self.low.emit(kernel, **self.change(arguments))


@pytest.mark.parametrize(
    "name,what,left_out,words",
    [
        (
            "matmul",
            "ints",
            "accumulate",
            r"none for 'accumulate' for kernel 'gemm' in op 'matmul' \(matmul\)",
        ),
        ("linear", "tiles", "out", r"none for operand 'out' for kernel 'matmul'"),
        ("linear", "ints", "range", r"none for 'range' for kernel 'matmul"),
    ],
)
def test_changed_arguments_are_detected_in_planning(name, what, left_out, words, monkeypatch):
    """An operand, a float or an integer left out of a real op, which would read random memory in a run."""
    cls = op_named(name)
    lower = cls.lower

    def forget(arguments):
        return {**arguments, what: {k: v for k, v in arguments[what].items() if k != left_out}}

    monkeypatch.setattr(cls, "lower", lambda self, low: lower(self, Forgetful(low, forget)))
    graph = GraphBuilder("g")
    x = graph.input([4, 3, 8], name="x", labels=[BATCH, None, None])
    y = graph.rms_norm(x, graph.parameter([8], name="gamma"))
    graph.output(graph.matmul(y, graph.parameter([5, 8], name="w"), trans_b=True), "y")
    a = graph.input([4, 4], name="a")
    graph.output(graph.matmul(a, a), "z")
    with pytest.raises(InternalError, match=words):
        plan_graph(graph.freeze(), {})
