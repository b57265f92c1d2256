"""Layouts as users write them: two spellings, one form; invalid ones are rejected."""

from __future__ import annotations

import pytest

from tilewise.core.errors import ConfigError, LayoutError
from tilewise.graph import GraphBuilder, simplify
from tilewise.ir.hints import Replicate, Shard, as_tensor_layout
from tilewise.strategy import DistributionStrategy, ParallelismMode


@pytest.mark.parametrize(
    ("hint", "layout"),
    [
        (("dp", None, "tp"), (("dp",), (), ("tp",))),
        ([("dp", "fsdp"), "tp"], (("dp", "fsdp"), ("tp",), ())),
        ((), ((), (), ())),
        ({"dp": Shard(0), "tp": Replicate(), "cp": Shard(2)}, (("dp",), (), ("cp",))),
        ({"fsdp": Shard(1), "dp": Shard(1)}, ((), ("fsdp", "dp"), ())),
        ({}, ((), (), ())),
    ],
)
def test_two_spellings_have_one_form(hint, layout):
    """Per dim as a PartitionSpec, or per mesh axis; several axes of a dim are major first."""
    assert as_tensor_layout("test", hint, 3, "x") == layout


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (("a", "b", "c", "d"), "at most one entry per dim of 'x'"),
        ({"a": Shard(3)}, "at most one entry per dim"),
        (("a", "a"), "name each mesh axis only once"),
        ((("a", "b"), "b"), "name each mesh axis only once"),
        (("micro",), "must not name 'micro'"),
        ("dp", "one of two forms"),
        (7, "one of two forms"),
        ((1,), "one of two forms"),
        ((["a"],), "one of two forms"),
        ({"a": 0}, "one of two forms"),
        ({1: Shard(0)}, "one of two forms"),
    ],
)
def test_invalid_layouts_are_rejected(hint, words):
    """By the public call, with both spellings in the message."""
    with pytest.raises(LayoutError, match=words):
        as_tensor_layout("test", hint, 3, "x")
    with pytest.raises(LayoutError, match=r"dim must lie in \[0, 63\]"):
        Shard(-1)


def test_hints_stay_with_their_tensors():
    """Declared with a tensor or added later, through passes and thawing; a rejected one changes nothing."""
    g = GraphBuilder("g")
    x = g.input([4, 8], name="x", layout=("a", None))
    w = g.parameter([6, 8], name="w", layout={"b": Shard(0)})
    y = g.output(g.constrain(g.matmul(x, w, trans_b=True), (None, "b")), "y")
    with pytest.raises(LayoutError):
        g.input([4], name="z", layout=("a", "b"))
    assert not g.has("z")
    hints = {x.id: (("a",), ()), w.id: (("b",), ()), y.id: ((), ("b",))}
    assert (
        g.freeze().hints
        == simplify(g.freeze()).hints
        == GraphBuilder.thaw(g.freeze()).freeze().hints
        == hints
    )


def test_layouts_of_a_strategy_name_its_axes():
    """A pattern's layout is checked when the strategy is declared."""
    for layouts, words in (
        ({"w*": ("c",)}, "must name axes of the strategy; got 'c' for 'w"),
        ({"w*": ("a", "a")}, "name each mesh axis only once; got .* for 'w"),
        ({"w*": ("micro",)}, "must not name 'micro'"),
        ({"w*": "a"}, "one of two forms"),
        ({"": ("a",)}, "a pattern of names"),
    ):
        with pytest.raises(LayoutError, match=words):
            DistributionStrategy(ParallelismMode.HYBRID, {"a": 2}, {}, layouts)


def test_strategy_copies_its_arguments():
    """Later changes of the caller's lists and dictionaries have no effect, and the strategy is immutable."""
    by_dim, by_axis = ["tp", None], {"dp": Shard(0)}
    axes, rules, layouts = {"dp": 2, "tp": 2}, {"batch": "dp"}, {"a": by_dim, "b": by_axis}
    strategy = DistributionStrategy(ParallelismMode.HYBRID, axes, rules, layouts)
    axes["dp"], rules["batch"] = 3, "nowhere"
    by_dim.append("nonsense")
    by_axis["nonsense"] = Shard(1)
    layouts["c"] = ()
    assert strategy.layouts == {"a": ("tp", None), "b": {"dp": Shard(0)}}
    assert strategy.axes == {"dp": 2, "tp": 2} and strategy.axes_for("batch") == ("dp",)
    assert strategy.axes_for("mlp") == ()
    for mapping in (strategy.axes, strategy.rules, strategy.layouts, strategy.layouts["b"]):
        with pytest.raises(ConfigError, match="are read-only"):
            mapping["zz"] = 1
