"""Graphs whose layers are described in parallel equal those of the same calls in sequence."""

import hashlib
import pickle
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))  # also for workers, which get this path
import layers_of_tests as own

from tilewise.core.errors import ShapeError
from tilewise.graph.parallel import LayerSpec, ParallelGraphBuilder
from tilewise.ir.graph import TensorSpec
from tilewise.ir.show import show_graph


def digest(graph):
    return hashlib.sha256(show_graph(graph.freeze()).encode()).hexdigest()


def in_turn(items):
    """The same layers, one after the other."""
    graph = own.start()
    x = graph.find("x")
    for number, width, power, scaled, _ in items:
        operands = (x, graph.find("scale")) if scaled else (x,)
        x = own.block(graph, *operands, path=f"layers.{number}", width=width, power=power)
    return graph


def build_in_parallel(items, threads):
    graph = own.start()
    builder = ParallelGraphBuilder(threads)
    builder.assemble(graph, builder.specify(own.describe, items))
    return graph


LAYERS = st.lists(
    st.tuples(
        st.sampled_from([8, 16, 24]), st.integers(1, 2), st.booleans(), st.sampled_from([0, 0, 1e-4, 2e-3])
    ),
    max_size=12,
)


@settings(max_examples=40)
@given(LAYERS, st.integers(2, 16))
def test_any_threads_build_the_same_graph(layers, threads):
    """For any layers, with threads delayed anywhere."""
    items = [(number, *layer) for number, layer in enumerate(layers)]
    expected = in_turn(items)
    for num_threads in (1, threads, threads):
        built = build_in_parallel(items, num_threads)
        assert built.freeze() == expected.freeze() and digest(built) == digest(expected)


def test_planted_fault_is_detected():
    """The twin: the same layers in another order, and one with another width, are other graphs."""
    items = [(number, 16, 1, False, 0) for number in range(4)]
    other = [*items[:3], (3, 24, 1, False, 0)]
    assert digest(build_in_parallel(items, 2)) != digest(build_in_parallel(other, 2))


def test_error_names_layer_and_thread():
    """The error is that of the first item that fails, for any threads."""
    with pytest.raises(
        ShapeError,
        match=r"layer 7 \(7\) must be described.*KeyError: .*seven.* in thread 'layer_\d', after 'layers\.7'",
    ):
        ParallelGraphBuilder(3).specify(own.fail_at_seven, range(12)).result()


def test_failed_assembly_leaves_the_graph_unchanged():
    """Whatever is wrong."""
    graph = own.start()
    before = graph.freeze()
    builder = ParallelGraphBuilder()
    good = LayerSpec("a", operands=("x",), function=own.block)
    state = ("state", TensorSpec((4, own.WIDTH), "f32", name="lone"))
    for specs, words in (
        ([good, LayerSpec("b", operands=("nothing",), function=own.block)], "'nothing', which is neither"),
        ([LayerSpec("b", operands=("a",), function=own.block), good], "'a', which is neither"),
        ([good, replace(good, operands=("x",))], "a unique path"),
        ([good, LayerSpec("b", operands=("a",), function=own.wrong)], "layer 'b' must accept its operands"),
        ([good, replace(good, path="x")], "a unique path"),
        (
            [LayerSpec("c", tensors=(state,)), LayerSpec("d", tensors=(state,))],
            "'lone', which exists already",
        ),
        ([LayerSpec("c", tensors=(("state", replace(state[1], name="x")),))], "'x', which exists already"),
    ):
        with pytest.raises(ShapeError, match=words):
            builder.assemble(graph, specs)
        assert graph.freeze() == before
    builder.assemble(graph, [good])
    assert len(graph.freeze().ops) == 1


def test_declarations_of_layers_are_checked():
    """KV caches that are described alone, next to the layers that declare them."""

    def graph_of():
        graph = own.start()
        graph.input([4], "i32", name="slots", storage="scalars")
        return graph

    def cache(rows, name="layers.0.cache"):
        return LayerSpec(
            name, "kv_cache", tensors=(("state", TensorSpec((rows, own.WIDTH), "f32", name=name)),)
        )

    call = LayerSpec("layers.0", operands=("x", "slots"), function=own.caching, attrs={"rows": 64})
    builder, graph, other = ParallelGraphBuilder(), graph_of(), graph_of()
    builder.assemble(graph, [cache(64)], [call])
    own.caching(other, other.find("x"), other.find("slots"), path="layers.0", rows=64)
    assert graph.freeze() == other.freeze()
    with pytest.raises(ShapeError, match=r"must declare the specified state 'layers\.0\.cache'"):
        builder.assemble(graph_of(), [cache(65)], [call])
    with pytest.raises(ShapeError, match="must declare the specified"):
        builder.assemble(graph_of(), [replace(call, tensors=cache(64, "layers.0.other").tensors)])
    lone = graph_of()
    builder.assemble(lone, [cache(64, "shared")], [replace(call, operands=("x", "slots"))])
    assert lone.find("shared").kind == "state"


def test_groups_are_futures_that_run_concurrently():
    """Two groups meet in the middle: each waits for the other's first item."""
    barrier = threading.Barrier(2, timeout=20)

    def describe(handle, name):
        barrier.wait()
        handle.layer(own.block, "x", path=name)

    builder, graph = ParallelGraphBuilder(1), own.start()
    groups = [builder.specify(describe, [name], kind=name) for name in ("a", "b")]
    assert list(builder.assemble(graph, *groups)) == ["a", "b"]


@pytest.mark.parametrize(
    "fields",
    [
        {"path": ""},
        {"operands": "x"},
        {"tensors": (("constant", TensorSpec((1,), "f32", name="a")),)},
        {"function": None},
        {
            "function": None,
            "operands": (),
            "attrs": {"a": 1},
            "tensors": (("state", TensorSpec((1,), "f32", name="a")),),
        },
    ],
    ids="-".join,
)
def test_wrong_specifications_are_rejected_on_creation(fields):
    """Before there is a graph."""
    with pytest.raises(ShapeError):
        LayerSpec(**{"path": "a", "operands": ("x",), "function": own.block, **fields})


def test_specifications_are_frozen_and_picklable():
    """In a pickle, a layer function is its name."""
    spec = LayerSpec("a", operands=("x",), function=own.block, attrs={"width": 8})
    with pytest.raises(AttributeError):
        spec.path = "b"
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_other_functions_and_graphs_are_rejected():
    """A layer is a function that `layer` made; a named operand belongs to the graph."""
    builder = ParallelGraphBuilder()
    with pytest.raises(ShapeError, match="layer"):
        builder.specify(lambda handle, n: handle.layer(print, path="a"), [1]).result()
    with pytest.raises(ShapeError, match="belong to the graph"):
        builder.assemble(own.start(), named={"y": own.start().find("x")})
    for threads in (0, 257):
        with pytest.raises(ShapeError):
            ParallelGraphBuilder(threads)
