"""The digest of a graph: every field of every record counts, and texts cannot collide."""

from __future__ import annotations

import enum
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.dims import BATCH, Dim, DimLabel
from tilewise.core.dtypes import DTYPES
from tilewise.graph import GraphBuilder, layer
from tilewise.ir import digest
from tilewise.ir.digest import digest_graph
from tilewise.ir.graph import Graph, OpNode, Template, TensorNode, TensorSpec
from tilewise.nn import linear


@layer
def block(graph, x, *, factor):
    """A layer with a parameter, a constant and an attribute."""
    table = graph.constant(np.ones((4, 8), np.float32), name="table")
    return graph.scale(graph.add(linear(graph, x, "weight", 8), table), factor)


def small() -> Graph:
    """A graph in which no field is empty."""
    graph = GraphBuilder("small")
    x = graph.input([4, 8], name="x", labels=[BATCH, None], layout=("dp",))
    for i in range(2):
        x = block(graph, x, path=f"layers.{i}", factor=2.0)
    graph.constrain(x, ("dp", "tp"))
    graph.output(x, "y")
    graph.output(graph.scale(x, 3.0), "z")
    return graph.freeze()


def _with_tensor(graph, change, which=0):
    tensors = list(graph.tensors)
    tensors[which] = change(tensors[which])
    return replace(graph, tensors=tuple(tensors))


def _with_op(graph, which=-1, **changes):
    ops = list(graph.ops)
    ops[which] = replace(ops[which], **changes)
    return replace(graph, ops=tuple(ops))


def _with_template(graph, change):
    (key,) = graph.templates
    return replace(graph, templates={key: change(graph.templates[key])})


def _with_spec(**changes):
    return lambda t: replace(t, spec=replace(t.spec, **changes))


GRAPH = {
    "name": lambda g: replace(g, name="other"),
    "tensors": lambda g: replace(g, tensors=g.tensors[:-1]),
    "ops": lambda g: replace(g, ops=g.ops[:-1]),
    "outputs": lambda g: replace(g, outputs=dict(reversed(g.outputs.items()))),
    "k_splits": lambda g: replace(g, k_splits=4),
    "constant_values": lambda g: replace(
        g, constant_values={t: np.nextafter(v, 9) for t, v in g.constant_values.items()}
    ),
    "templates": lambda g: replace(g, templates={}),
    "hints": lambda g: replace(g, hints={0: ("dp",)}),
    "frozen": lambda g: replace(g, frozen=(0,)),
}
SPEC = {
    "shape": {"shape": (8, 8)},
    "dtype": {"dtype": DTYPES["bf16"]},
    "labels": {"labels": (BATCH, DimLabel("a"))},
    "name": {"name": "X"},
    "tile_hint": {"tile_hint": 2},
    "storage": {"storage": "packed"},
    "init": {"init": "zeros"},
    "init_scale": {"init_scale": 0.5},
}
NODE = {"id": 1, "kind": "state", "producer": 0, "spec": None}
OP = {
    "id": 7,
    "op": "silu",
    "inputs": (0,),
    "outputs": (0,),
    "attrs": {},
    "phase": "update",
    "label": "other",
}
TEMPLATE = {"key": "other", "arguments": (), "results": (), "graph": None}
CHANGES = {
    **{f"Graph.{name}": change for name, change in GRAPH.items()},
    **{f"TensorSpec.{n}": lambda g, c=change: _with_tensor(g, _with_spec(**c)) for n, change in SPEC.items()},
    **{
        f"TensorNode.{n}": lambda g, n=n, v=v: _with_tensor(
            g, (lambda t: replace(t, **{n: v})) if v is not None else _with_spec(name="spec")
        )
        for n, v in NODE.items()
    },
    **{f"OpNode.{n}": lambda g, n=n, v=v: _with_op(g, **{n: v}) for n, v in OP.items()},
    **{
        f"Template.{n}": lambda g, n=n, v=v: _with_template(
            g, lambda t: replace(t, **{n: v if v is not None else _with_op(t.graph, attrs={"factor": 2.5})})
        )
        for n, v in TEMPLATE.items()
    },
    "bounds of a symbol": lambda g: _with_tensor(g, _with_spec(shape=(Dim("s", max=4), 8))),
    "other bounds": lambda g: _with_tensor(g, _with_spec(shape=(Dim("s", max=5), 8))),
    "atom of a label": lambda g: _with_tensor(g, _with_spec(labels=(replace(BATCH, atom=2), None))),
    "group of a label": lambda g: _with_tensor(g, _with_spec(labels=(replace(BATCH, group=2), None))),
    "role of a label": lambda g: _with_tensor(
        g, _with_spec(labels=(replace(BATCH, is_summed_by_batch_splits=False), None))
    ),
    "an axis of a hint": lambda g: replace(g, hints={**g.hints, 0: (("tp",), ())}),
    "a constant's shape": lambda g: replace(
        g, constant_values={t: v.reshape(8, 4) for t, v in g.constant_values.items()}
    ),
    "a constant's dtype": lambda g: replace(
        g, constant_values={t: v.view(np.int32) for t, v in g.constant_values.items()}
    ),
    "a key of a template": lambda g: replace(g, templates={"k": next(iter(g.templates.values()))}),
    "a constant inside a layer": lambda g: _with_template(
        g, lambda t: replace(t, graph=GRAPH["constant_values"](t.graph))
    ),
    **{
        f"factor as {type(v).__name__} {v}": lambda g, v=v: _with_op(g, attrs={"factor": v})
        for v in (3, "3.0", True, -3.0, None, (3.0,), ((3.0,),), "None", "True", np.float32(0.1), 0.1)
    },
}


def test_every_field_has_a_change():
    """A new field of a record must be changed here, and so be part of the digest."""
    for record in (Graph, TensorSpec, TensorNode, OpNode, Template):
        names = {f"{record.__name__}.{f.name}" for f in fields(record) if f.init}
        assert names == {name for name in CHANGES if name.startswith(f"{record.__name__}.")}


def test_all_changes_have_different_digests():
    """One field changed, another digest; different changes, different digests."""
    graph = small()
    digests = {name: digest_graph(change(graph)) for name, change in CHANGES.items()}
    digests |= {
        "as it is": digest_graph(graph),
        "loss": digest_graph(graph, 3),
        "other": digest_graph(graph, 4),
    }
    assert len(set(digests.values())) == len(digests)
    assert digests["as it is"] == digest_graph(small())


def test_omitted_field_is_detected(monkeypatch):
    """The twin: without the hint on tiles, the test before this one fails."""
    form = digest._form
    monkeypatch.setattr(digest, "_form", lambda spec: form(replace(spec, tile_hint=None)))
    with pytest.raises(AssertionError):
        test_all_changes_have_different_digests()


def test_equal_graphs_have_equal_digests():
    """The order of hints and attributes, and types of the same number or text, do not count."""
    graph = small()
    hints = replace(graph, hints=dict(reversed(graph.hints.items())))
    shared = _with_tensor(graph, lambda t: replace(t, spec=replace(t.spec, shape=(np.int64(4), 8))))
    named = _with_tensor(graph, lambda t: replace(t, spec=replace(t.spec, name=np.str_("x"))))
    numpy = _with_op(graph, attrs={"factor": np.float64(3.0)})
    copied = _with_tensor(graph, lambda t: replace(t, spec=replace(t.spec, shape=[*t.spec.shape])), -2)
    assert copied.tensors[-2].spec.shape is not graph.tensors[-2].spec.shape
    assert len({digest_graph(g) for g in (graph, hints, shared, named, numpy, copied)}) == 1
    both = {"a": 1, "b": 2}
    orders = [_with_op(graph, attrs=attrs) for attrs in (both, dict(reversed(both.items())))]
    assert len({digest_graph(g) for g in orders}) == 1


class Colour(enum.Enum):
    """An attribute of a user's op."""

    RED = 1
    BLUE = 2


def test_attributes_of_any_class_count():
    """Enumerations, sets, mappings, records, arrays, and objects by their text."""
    values = [
        Colour.RED, Colour.BLUE, frozenset({1, 2}), frozenset({1}), (1, 2), {"a": 1}, {"a": 2}, DTYPES["f32"],
        DTYPES["bf16"], Dim("s"), DimLabel("s"), np.ones(2), np.ones(3), np.ones(2, np.int8), 1j, 2j, b"1", "b'1'",
    ]  # fmt: skip
    digests = [digest_graph(_with_op(small(), attrs={"factor": value})) for value in values]
    assert len(set(digests)) == len(values)
    assert digests[2] == digest_graph(_with_op(small(), attrs={"factor": frozenset({2, 1})}))


NAMES = st.text(st.sampled_from("ab'\"\\\n,()#%= é\u2028"), min_size=1, max_size=8)


@given(st.lists(NAMES, min_size=2, max_size=3), st.lists(NAMES, min_size=2, max_size=3))
def test_names_do_not_collide(first, second):
    """Two graphs that differ only in their names, whatever these are."""
    digests = []
    for names in (first, second):
        spec = TensorSpec((1,), DTYPES["f32"])
        nodes = tuple(TensorNode(i, replace(spec, name=name), "input") for i, name in enumerate(names))
        digests.append(digest_graph(Graph("g", nodes, (), {})))
    assert (digests[0] == digests[1]) == (first == second)


def test_layer_is_hashed_once():
    """For any number of calls and callers: a chain of doublings is not walked in full."""
    graph = small()
    (template,) = graph.templates.values()
    for _ in range(64):  # 2 ** 64 if every way counted
        graph = replace(graph, templates={"a": template, "b": template})
        template = replace(template, graph=graph)
    assert len(digest_graph(graph)) == 64


def test_digest_is_linear_in_calls(monkeypatch):
    """Counted, not timed: every further layer hashes the same number of bytes."""
    hashed = []

    class Counting:
        def __init__(self, *args):
            self.count = 0
            hashed.append(self)

        def update(self, content):
            self.count += len(content)

        def hexdigest(self):
            return "0" * 64

    monkeypatch.setattr(digest.hashlib, "sha256", Counting)
    sizes = []
    for count in (100, 200, 300):
        graph = GraphBuilder("deep")
        x = graph.input([4, 8], name="x")
        for i in range(count):
            x = block(graph, x, path=f"layers.{1000 + i}", factor=2.0)
        hashed.clear()
        digest_graph(graph.freeze())
        sizes.append(sum(h.count for h in hashed))
    growth = [b - a for a, b in pairwise(sizes)]
    assert abs(growth[1] - growth[0]) <= 0.02 * growth[0] < 0.02 * 100 * 600
