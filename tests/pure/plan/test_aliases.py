"""Results in an operand's memory: in at most one, and never in one that a later op reads."""

from __future__ import annotations

import pytest

from support.made_ops import make_op
from tilewise.core.dtypes import DTYPES
from tilewise.graph import GraphBuilder
from tilewise.ir import op as op_table
from tilewise.ir.graph import TensorSpec
from tilewise.ir.op import result
from tilewise.plan.schedule import alias_roots

pytestmark = pytest.mark.usefixtures("same_ops")


def aliases(*in_place, is_kept, shape=(4, 8)):
    """Roots where results of `odd` may be in such operands: those are results `a` and `b`, its results `y0`, `y1`."""
    results = {f"y{i}": result(like="a", in_place=names) for i, names in enumerate(in_place)}
    specs = [TensorSpec(shape, DTYPES["f32"])] * len(results)
    make_op(gives=" ".join(results), **results, **{"results": lambda self, spec: specs})
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    a, b = graph.scale(x, 2.0), graph.scale(x, 3.0)
    outputs = graph.op("odd", [a, b])
    names = {x.id: "x", a.id: "a", b.id: "b"} | {y.id: f"y{i}" for i, y in enumerate(outputs)}
    frozen = graph.freeze()
    keep = frozenset(y.id for y in outputs) if is_kept else frozenset()
    return {names[t]: names[root] for t, root in alias_roots(frozen, frozen.ops, keep).items() if t in names}


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("names,first", [("a b", "a"), ("b a", "b")])
def test_result_aliases_one_operand(names, first, is_kept):
    """Two operands are alternatives: the first possible one is used, also where the result is kept."""
    pairs_by_name = aliases(names, is_kept=is_kept)
    assert pairs_by_name == ({first: "y0"} if is_kept else {"y0": first})


def test_second_alternative_is_used_where_the_first_is_read_later():
    """An operand that a later op reads keeps its memory; the other one is reused."""
    make_op(out=result(like="a", in_place="a b"))
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    a, b = graph.scale(x, 2.0), graph.scale(x, 3.0)
    (y,) = graph.op("odd", [a, b])
    z = graph.mul(y, a)
    frozen = graph.freeze()
    assert alias_roots(frozen, frozen.ops, frozenset({z.id}))[y.id] in (b.id, z.id)
    assert alias_roots(frozen, frozen.ops, frozenset({z.id})).get(a.id) is None


@pytest.mark.parametrize("is_kept", [False, True])
def test_operand_is_aliased_by_one_output(is_kept):
    """Two outputs in one operand would overlap; two in one each do not."""
    (one,) = aliases("a", "a", is_kept=is_kept).items()
    assert one == (("a", "y0") if is_kept else ("y0", "a"))
    op_table._OPS.pop("odd")
    both = aliases("a", "b", is_kept=is_kept)
    assert both == ({"a": "y0", "b": "y1"} if is_kept else {"y0": "a", "y1": "b"})


@pytest.mark.parametrize("is_kept", [False, True])
def test_result_of_another_form_has_its_own_memory(is_kept):
    """An operand's memory fits only results of its form."""
    assert aliases("a", is_kept=is_kept, shape=(4, 12)) == {}


def test_tensor_written_in_place_is_not_overwritten():
    """A cache that an op wrote still belongs to the caller: a later op that could work in place does not."""
    make_op("write", "a", out=result(like="a", in_place="a"), must_alias=True)
    graph = GraphBuilder("g")
    cache = graph.input([4, 8], name="cache")
    (written,) = graph.op("write", [cache])
    y = graph.add(written, graph.input([4, 8], name="x"))
    frozen = graph.freeze()
    assert alias_roots(frozen, frozen.ops, frozenset()) == {written.id: cache.id}
    assert alias_roots(frozen, frozen.ops, frozenset({y.id})) == {written.id: cache.id}
