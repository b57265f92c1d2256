"""Results in an operand's memory: in at most one, and never in one that a later op reads."""

from __future__ import annotations

import pytest

from tilewise.core.dtypes import DTYPES
from tilewise.graph import GraphBuilder
from tilewise.graph.ops.common import Elementwise
from tilewise.ir import op as op_table
from tilewise.ir.graph import TensorSpec
from tilewise.ir.op import register
from tilewise.plan.schedule import alias_roots

pytestmark = pytest.mark.usefixtures("same_ops")


def aliases(pairs, *, is_kept, num_outputs=1, shape=(4, 8), **members):
    """Roots where `odd` has such pairs, by names: its operands are results `a` and `b`, its outputs `y0`, `y1`."""

    def infer(self, inputs, attrs):
        return [TensorSpec(shape, DTYPES["f32"])] * num_outputs

    attributes = {"name": "odd", "num_inputs": 2, "in_place": pairs, "infer": infer, **members}
    register(type("Odd", (Elementwise,), attributes))
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    a, b = graph.scale(x, 2.0), graph.scale(x, 3.0)
    outputs = graph.op("odd", [a, b])
    names = {x.id: "x", a.id: "a", b.id: "b"} | {y.id: f"y{i}" for i, y in enumerate(outputs)}
    frozen = graph.freeze()
    keep = frozenset(y.id for y in outputs) if is_kept else frozenset()
    return {names[t]: names[root] for t, root in alias_roots(frozen, frozen.ops, keep).items() if t in names}


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("pairs,first", [(((0, 0), (0, 1)), "a"), (((0, 1), (0, 0)), "b")])
def test_result_aliases_one_operand(pairs, first, is_kept):
    """Two pairs of one output are alternatives: the first possible one is used, also where the output is kept."""
    pairs_by_name = aliases(pairs, is_kept=is_kept)
    assert pairs_by_name == ({first: "y0"} if is_kept else {"y0": first})


def test_second_alternative_is_used_where_the_first_is_read_later():
    """An operand that a later op reads keeps its memory; the other one is reused."""
    register(type("Odd", (Elementwise,), {"name": "odd", "num_inputs": 2, "in_place": ((0, 0), (0, 1))}))
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x")
    a, b = graph.scale(x, 2.0), graph.scale(x, 3.0)
    (y,) = graph.op("odd", [a, b])
    z = graph.multiply(y, a)
    frozen = graph.freeze()
    assert alias_roots(frozen, frozen.ops, frozenset({z.id}))[y.id] in (b.id, z.id)
    assert alias_roots(frozen, frozen.ops, frozenset({z.id})).get(a.id) is None


@pytest.mark.parametrize("is_kept", [False, True])
def test_operand_is_aliased_by_one_output(is_kept):
    """Two outputs in one operand would overlap; two in one each do not."""
    (one,) = aliases(((0, 0), (1, 0)), is_kept=is_kept, num_outputs=2).items()
    assert one == (("a", "y0") if is_kept else ("y0", "a"))
    op_table._OPS.pop("odd")
    both = aliases(((0, 0), (1, 1)), is_kept=is_kept, num_outputs=2)
    assert both == ({"a": "y0", "b": "y1"} if is_kept else {"y0": "a", "y1": "b"})


@pytest.mark.parametrize("is_kept", [False, True])
def test_result_of_another_form_has_its_own_memory(is_kept):
    """An operand's memory fits only results of its form."""
    assert aliases(((0, 0),), is_kept=is_kept, shape=(4, 12)) == {}


def test_tensor_written_in_place_is_not_overwritten():
    """A cache that an op wrote still belongs to the caller: a later op that could work in place does not."""
    members = {"name": "write", "num_inputs": 1, "in_place": ((0, 0),), "must_alias": True}
    register(type("Write", (Elementwise,), members))
    graph = GraphBuilder("g")
    cache = graph.input([4, 8], name="cache")
    (written,) = graph.op("write", [cache])
    y = graph.add(written, graph.input([4, 8], name="x"))
    frozen = graph.freeze()
    assert alias_roots(frozen, frozen.ops, frozenset()) == {written.id: cache.id}
    assert alias_roots(frozen, frozen.ops, frozenset({y.id})) == {written.id: cache.id}
