"""What an optimizer's author may say: states and numbers by names of their own, steps of values."""

from __future__ import annotations

import pytest

from tilewise.core.dims import BATCH
from tilewise.core.errors import ConfigError
from tilewise.graph import GraphBuilder, differentiate
from tilewise.nn import linear
from tilewise.optim import SGD, Optimizer, ParameterGroup
from tilewise.optim.rule import fused, maximum, sqrt, take_down


def make(update=lambda self, parameter: None, **members):
    """An optimizer with those members."""
    return type("Own", (Optimizer,), {"update": update, **members})()


@pytest.mark.parametrize("names", [("master",), ("a", "a"), (5,), ("",), "ab"], ids=str)
def test_states_have_names_of_their_own(names):
    """`master` is taken: session would read that state where it asks for the weight."""
    with pytest.raises(ConfigError, match=r"\[optim.Own\] states"):
        make(states=names)
    if "master" not in names:
        with pytest.raises(ConfigError, match=r"\[optim.Own\] per_step"):
            make(per_step=names)


@pytest.mark.parametrize(
    "values", [(0.1,), (0.1, 0.2, 0.3), "ab", (0.1, float("nan")), (0.1, 1e300), (0.1, "b"), None], ids=str
)
def test_each_number_of_a_step_has_a_value(values):
    """Fewer numbers than names, or what is none in fp32: refused before a step runs."""
    own = make(per_step=("lr", "b"), values=lambda self, step, lr: values)
    with pytest.raises(ConfigError, match=r"\[optim.Own\] (a value|values)"):
        own._hyper_values(1, 0.1)


@pytest.mark.parametrize("names", [5, "", (), ("a", 5), {"a"}], ids=str)
def test_a_group_has_patterns(names):
    """Text, or a sequence of texts that are not empty."""
    with pytest.raises(ConfigError, match=r"\[optim.ParameterGroup\] names"):
        ParameterGroup(names)


def test_a_group_without_parameters_is_refused():
    """A slip in a pattern is no silent change of settings."""
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x", labels=[BATCH, None])
    graph.loss(graph.sum(linear(graph, x, "w", 8)))
    described, gradients = differentiate(graph.freeze(), graph.draft.loss_id)
    SGD(groups=(ParameterGroup("w"),)).add_to(GraphBuilder.thaw(described), gradients)
    with pytest.raises(
        ConfigError, match=r"a group has parameters; got \('w\.weight',\), which fit none in 'g'"
    ):
        SGD(groups=(ParameterGroup("w.weight"),)).add_to(GraphBuilder.thaw(described), gradients)


def test_functions_of_an_update_take_values_and_numbers():
    """A number may stand in any place but not in all."""

    def update(parameter):
        parameter.weight = fused(0.5, parameter.weight, maximum(0.0, parameter.gradient))

    assert len(take_down(update, (), ("lr",)).steps) == 8
    with pytest.raises(ConfigError, match=r"sqrt takes a value .*; got 4.0"):
        take_down(lambda parameter: sqrt(4.0), (), ())
