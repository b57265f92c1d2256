"""Numbers for values: equal ones share one, whatever their types."""

from __future__ import annotations

import pytest

from tilewise.core.errors import ShapeError
from tilewise.graph import GraphBuilder, layer
from tilewise.graph.draft import ValueNumbers


def test_equal_values_share_a_number():
    """Whether they are one object or several, hashable or not."""
    numbers = ValueNumbers()
    first = (1, "a")
    ids = [numbers.number(v) for v in (first, first, (1, "a"), [1], [1], [2], {"k": [3]}, {"k": [3]}, (2,))]
    assert ids == [0, 0, 0, 1, 1, 2, 3, 3, 4]


def test_list_changed_by_its_owner_is_another_value():
    """A layer's attribute that is changed between two calls makes another template."""

    @layer
    def scaled(graph, x, *, factors):
        return graph.scale(x, factors[0])

    g, factors = GraphBuilder(), [2.0]
    x = scaled(g, g.input([4, 8], name="x"), path="a", factors=factors)
    factors[0] = 3.0
    scaled(g, x, path="b", factors=factors)
    (two, three) = (t.graph.ops[0].attrs["factor"] for t in g.draft.templates.values())
    assert (two, three) == (2.0, 3.0)


def test_failed_layer_leaves_no_number_and_no_hint():
    """A block is undone when it raises: the next template has the failed one's name, hints are as before."""

    @layer
    def block(graph, x, *, good):
        if not good:
            raise ShapeError("no")
        return graph.scale(x, 2.0)

    g = GraphBuilder()
    x = g.input([4, 8], name="x", layout=("dp", None))
    with pytest.raises(ShapeError), g.all_or_nothing():
        g.constrain(x, (None, "dp"))
        block(g, x, path="a", good=True)
        block(g, x, path="b", good=False)
    assert g.draft.hints == {x.id: (("dp",), ())} and not g.draft.templates and not g.draft.layers
    block(g, x, path="a", good=True)
    with pytest.raises(ShapeError):
        block(g, x, path="b", good=False)
    y = g.input([2, 8], name="y")
    block(g, y, path="c", good=True)
    assert [key.rpartition(".")[2] for key in g.draft.templates] == ["block", "block#2"]
