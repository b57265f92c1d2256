"""Optimizers written by users: names of states and numbers, values of steps."""

from __future__ import annotations

import numpy as np
import pytest

from pure.plan.plan_bytes import make as make_plan
from tilewise.core.dims import BATCH
from tilewise.core.errors import ConfigError
from tilewise.graph import GraphBuilder, differentiate
from tilewise.nn import linear
from tilewise.optim import SGD, AdamW, Optimizer, ParameterGroup
from tilewise.optim.rule import fused, maximum, record_update, sqrt


def make(update=lambda self, parameter: None, **members):
    """An optimizer with those members."""
    return type("Own", (Optimizer,), {"update": update, **members})()


@pytest.mark.parametrize(
    "names", [("master",), ("hyper",), ("a", "hyper.1"), ("a", "a"), (5,), ("",), ("a\nb",), "ab"], ids=str
)
def test_states_have_valid_names(names):
    """`master` and `hyper` are reserved for the master weights and a step's numbers."""
    with pytest.raises(ConfigError, match=r"\[optim.Own\] states"):
        make(states=names)
    if names not in (("master",), ("hyper",), ("a", "hyper.1")):
        with pytest.raises(ConfigError, match=r"\[optim.Own\] per_step"):
            make(per_step=names)


def test_non_negative_values_are_states():
    """Another name would have no effect."""
    with pytest.raises(
        ConfigError, match=r"\[optim.Own\] a state in nonnegative must be one of a, b; got 'c'"
    ):
        make(states=("a", "b"), nonnegative=("b", "c"))


@pytest.mark.parametrize("values", [(0.1,), "ab", (0.1, float("nan")), (0.1, 1e300)], ids=str)
def test_each_number_of_a_step_has_a_value(values):
    """Fewer numbers than names, or values that fp32 cannot hold: rejected before a step runs."""
    own = make(per_step=("lr", "b"), values=lambda self, step, lr: values)
    with pytest.raises(ConfigError, match=r"\[optim.Own\] (a value|values)"):
        own._hyper_values(1, 0.1)


@pytest.mark.parametrize("names", ["", (), ("a", 5)], ids=str)
def test_group_has_patterns(names):
    """Text, or a sequence of non-empty texts."""
    with pytest.raises(ConfigError, match=r"\[optim.ParameterGroup\] names"):
        ParameterGroup(names)


def test_settings_of_a_group_are_plain_numbers():
    """Any real number is accepted, and a plan with it has a digest; the caller's dictionary is copied."""
    for value in (2, np.int64(2), np.float32(0.5)):
        changes = {"eps": value}
        group = ParameterGroup("*norm.weight", changes=changes)
        changes["eps"] = "nonsense"
        assert group.changes == {"eps": float(value)} and type(group.changes["eps"]) is float
    assert len(make_plan(optimizer=AdamW(groups=(group,))).digest()) == 64
    for wrong in (True, float("nan")):
        with pytest.raises(ConfigError, match="eps must be a finite number"):
            ParameterGroup("*norm.weight", changes={"eps": wrong})


def test_group_without_parameters_is_rejected():
    """A typo in a pattern must not silently change settings."""
    graph = GraphBuilder("g")
    x = graph.input([4, 8], name="x", labels=[BATCH, None])
    graph.loss(graph.sum(linear(graph, x, "w", 8)))
    described, gradients, _ = differentiate(graph.freeze(), graph.draft.loss_id)
    SGD(groups=(ParameterGroup("w"),)).add_to(GraphBuilder.thaw(described), gradients)
    with pytest.raises(
        ConfigError, match=r"a group must match parameters; got \('w\.weight',\), which match none in 'g'"
    ):
        SGD(groups=(ParameterGroup("w.weight"),)).add_to(GraphBuilder.thaw(described), gradients)


def test_functions_of_an_update_take_values_and_numbers():
    """A number may be any argument but not every one."""

    def update(parameter):
        parameter.weight = fused(0.5, parameter.weight, maximum(0.0, parameter.gradient))

    assert len(record_update(update, (), ("lr",)).steps) == 8
    for odd in (1e39, -1e39, float("nan")):  # not finite in fp32
        with pytest.raises(ConfigError, match=r"\[optim.rule\] a constant must"):
            record_update(lambda parameter, odd=odd: parameter.weight * odd, (), ("lr",))
    with pytest.raises(ConfigError, match=r"sqrt needs a value .*; got 4.0"):
        record_update(lambda parameter: sqrt(4.0), (), ())


@pytest.mark.parametrize(
    ("operation", "got"),
    [
        (lambda v: v == 0, "=="),
        (lambda v: v != v, "!="),  # noqa: PLR0124  # as one asks for NaN
        (lambda v: np.float32(1) < v, "numpy.less"),
        (np.sqrt, "numpy.sqrt"),
        (np.abs, "numpy.absolute"),
        (np.add.reduce, "numpy.add"),
        *((function, "a function of NumPy") for function in (np.mean, np.median, np.where, np.asarray)),
    ],
)
def test_operations_that_no_program_has_are_refused(operation, got):
    """A comparison would be one of objects, and decide nothing; each says what there is."""
    words = rf"\[optim.rule\] an update may use only .* fused, .* and sqrt .*; got {got}; write it with these"
    with pytest.raises(ConfigError, match=words):
        record_update(lambda parameter: operation(parameter.weight), (), ())


def test_numpy_numbers_are_accepted():
    """On either side; arrays are invalid. Values are hashable and distinct."""

    def update(parameter):
        w = parameter.weight
        assert len({w, parameter.gradient}) == 2 and w in (w,)
        parameter.weight = np.float32(1) * (np.float64(2) + w) - np.int64(2) - (w / np.float32(2)) * 0.0

    assert len(record_update(update, (), ()).steps) == 24
    for wrong in (lambda w: np.ones(3) * w, lambda w: w * np.ones(3)):
        with pytest.raises(ConfigError, match="a constant must be a finite number; got array"):
            record_update(lambda parameter, wrong=wrong: wrong(parameter.weight), (), ())


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (lambda p: setattr(p, "states", None), r"every state \(weight\); got states = None; assign them"),
        (lambda p: setattr(p, "states", [p.weight]), r"got states = \[a value of an update\]"),
        (lambda p: p.states.clear(), "got states = {}"),
        (lambda p: p.states.update(q=p.weight), "got states = {'weight': .*, 'q': "),
        (lambda p: p.states.update(weight=1.0), "got weight = 1.0"),
        (lambda p: setattr(p, "weight", 2), "got weight = 2"),
        (lambda p: delattr(p, "weight"), "got weight = None"),
        (lambda p: delattr(p, "states"), "got states = None"),
        (lambda p: p.states["zz"], "got 'zz'; declared: weight; declare it in `states` or `per_step`"),
        (lambda p: p.hyper["zz"], "got 'zz'; declared: lr; declare it"),
        (lambda p: p.hyper[1], "got 1; declared: lr; declare it"),
    ],
)
def test_update_returns_what_its_optimizer_names(update, words):
    """Whatever it does to its parameter argument; a state may have any name."""
    with pytest.raises(ConfigError, match=r"\[optim.rule\] an update .*" + words):
        record_update(update, ("weight",), ("lr",))


def test_per_step_must_name_a_number():
    """Without any there is no input to bring it."""
    with pytest.raises(ConfigError, match=r"\[optim.Own\] per_step must name at least one number"):
        make(per_step=())


def test_optimizer_needs_trainable_parameters():
    """The error comes from the optimizer, not from the op that would add their gradients."""
    graph = GraphBuilder("g")
    graph.loss(graph.sum(graph.input([4, 8], name="x", labels=[BATCH, None])))
    described, gradients, _ = differentiate(graph.freeze(), graph.draft.loss_id)
    with pytest.raises(
        ConfigError, match=r"\[optim.SGD\] an optimizer needs parameters to train; got none in 'g'"
    ):
        SGD().add_to(GraphBuilder.thaw(described), gradients)
