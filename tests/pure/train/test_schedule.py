"""Schedules of the learning rate: values of transformers, warm-ups in shares, keys that replace each other."""

import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.train.schedule import SCHEDULERS, check_scheduler, scheduled_rate
from tilewise.train.train_config import TrainConfig, load_config, with_steps_of_epochs

_SHARE = st.floats(0, 1, width=32)
_SHAPE = st.sampled_from(["linear", "cosine", "1-sqrt"])
_SETTINGS = {
    "constant": st.just({}),
    "constant_with_warmup": st.just({}),
    "linear": st.just({}),
    "cosine": st.fixed_dictionaries({}, optional={"num_cycles": st.floats(0.1, 4)}),
    "cosine_with_restarts": st.fixed_dictionaries({}, optional={"num_cycles": st.integers(1, 4)}),
    "polynomial": st.fixed_dictionaries(
        {}, optional={"lr_end": st.floats(0, 1e-4), "power": st.floats(0.5, 3)}
    ),
    "inverse_sqrt": st.fixed_dictionaries({}, optional={"timescale": st.integers(20, 500)}),
    "cosine_with_min_lr": st.fixed_dictionaries(
        {"min_lr_rate": _SHARE}, optional={"num_cycles": st.floats(0.1, 4)}
    ),
    "cosine_warmup_with_min_lr": st.fixed_dictionaries(
        {"min_lr": st.floats(0, 1e-3)}, optional={"warmup_lr_rate": _SHARE}
    ),
    "warmup_stable_decay": st.fixed_dictionaries(
        {"num_decay_steps": st.integers(0, 20)},
        optional={
            "num_stable_steps": st.integers(0, 20),
            "warmup_type": _SHAPE,
            "decay_type": _SHAPE,
            "min_lr_ratio": _SHARE,
            "num_cycles": st.floats(0.1, 2),
        },
    ),
}
_RUNS = st.sampled_from([*SCHEDULERS]).flatmap(
    lambda name: st.tuples(st.just(name), _SETTINGS[name], st.integers(2, 60), st.integers(0, 20))
)


def _largest_difference(name, kwargs, num_steps, warmup, fault=0):
    """Between our rates and those of transformers; `fault` changes our warm-up."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # num_stable_steps and the number of steps say the same twice
        scheduler = transformers.get_scheduler(
            name, optimizer, warmup, num_steps, scheduler_specific_kwargs=dict(kwargs)
        )
    differences = []
    for step in range(num_steps):
        rate = scheduled_rate(name, step, num_steps, 1e-2, warmup + fault, kwargs)
        differences.append(abs(rate - scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return max(differences)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(run=_RUNS)
def test_rates_equal_those_of_transformers(run):
    """Every scheduler, every step, with any settings, warm-up and length."""
    name, kwargs, num_steps, warmup = run
    check_scheduler(name, 1e-2, kwargs)
    assert _largest_difference(name, kwargs, num_steps, min(warmup, num_steps - 1)) < 1e-15


@pytest.mark.slow
def test_another_warm_up_is_noticed():
    """A planted fault: a warm-up that is one step too long."""
    assert (
        _largest_difference("cosine", {}, 20, 5) < 1e-15 < 1e-4 < _largest_difference("cosine", {}, 20, 5, 1)
    )


def _rates(text, tmp_path, options=(), num_steps=10):
    path = tmp_path / "train.toml"
    path.write_text(text)
    section = load_config(path, options).optimizer
    return [section.rate(step, num_steps) for step in range(num_steps)]


def test_a_scheduler_of_transformers_has_its_values(tmp_path):
    """The first step of a warm-up has rate 0, and without one it has the highest rate; no floor."""
    linear = "[optimizer]\nlr = 1.0\nlr_scheduler_type = 'linear'\n"
    assert _rates(linear, tmp_path) == pytest.approx([1 - step / 10 for step in range(10)])
    warm = _rates(linear + "warmup_ratio = 0.15\n", tmp_path)
    assert warm[:3] == [0.0, 0.5, 1.0] and warm[-1] == 1 / 8
    floor = linear.replace("linear", "cosine_with_min_lr") + "lr_scheduler_kwargs = { min_lr_rate = 0.5 }\n"
    assert _rates(floor, tmp_path)[5] == pytest.approx(0.75)


def test_warm_up_as_a_share_is_rounded_up(tmp_path):
    """`warmup_ratio` is the same as the steps that it stands for, rounded up."""
    shared = "[optimizer]\nlr = 1.0\n"
    for ratio, steps in ((0.0, 0), (0.11, 2), (0.2, 2), (1.0, 10)):
        expected = _rates(f"{shared}warmup_steps = {steps}\n", tmp_path)
        assert _rates(f"{shared}warmup_ratio = {ratio}\n", tmp_path) == expected
    assert _rates(f"{shared}warmup_steps = 3\n", tmp_path, ["optimizer.warmup_ratio=0.2"]) == _rates(
        f"{shared}warmup_steps = 2\n", tmp_path
    )


def test_epochs_become_steps(tmp_path):
    """Steps cover the windows, rounded up; the command line may replace epochs by steps and the reverse."""
    config = TrainConfig.model_validate({"train": {"epochs": 1.5, "batch": 8}})
    for windows in (1, 8, 21, 1000):
        steps = with_steps_of_epochs(config, windows).train.steps
        assert steps == max(1, math.ceil(1.5 * windows / 8))
    path = tmp_path / "train.toml"
    path.write_text("[train]\nepochs = 2\n")
    assert load_config(path, ["train.steps=7"]).train.steps == 7
    path.write_text("[train]\nsteps = 7\n")
    assert load_config(path, ["train.epochs=2"]).train.epochs == 2


def test_new_keys_leave_the_settings_of_old_checkpoints(tmp_path):
    """A configuration without them must match exactly what earlier versions recorded."""
    settings = TrainConfig().what_must_match()
    assert {*settings["train"]} == {"steps", "batch", "batch_splits", "dtype", "on_nonfinite", "seed"}
    assert {"lr", "warmup_steps", "min_lr_ratio"} < {*settings["optimizer"]}
    assert not {"warmup_ratio", "lr_scheduler_type", "lr_scheduler_kwargs"} & {*settings["optimizer"]}
    watched = {"evaluate_every": 2, "early_stopping_patience": 1, "load_best_model_at_end": True}
    assert TrainConfig.model_validate({"train": watched}).what_must_match() == settings
