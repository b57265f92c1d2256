"""The number of steps of a run with a time limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilewise.train import TimeBudget


def length_after(times, seconds, at_least=0):
    """The number of steps after all these steps, and how often it was announced."""
    budget, now, length, num_announced = TimeBudget(seconds, at_least), 0.0, None, 0
    for time in times:
        now += time
        if (steps := budget.step_done(now)) is not None:
            length, num_announced = steps, num_announced + 1
    return length, num_announced


def test_steady_machine_fills_its_time():
    """A tenth of a second a step: 1,800 steps in three minutes, announced once during the first tenth."""
    length, num_announced = length_after([0.5] + [0.1] * 600, 180.0)
    assert (
        1790 <= length <= 1800
        and num_announced <= 180
        and length_after([0.5] + [0.1] * 300, 180.0)[0] == length
    )


def test_half_the_speed_does_half_the_steps():
    """The length follows the measured speed."""
    assert abs(length_after([1.0] + [0.2] * 300, 180.0)[0] - 895) < 10


def test_slow_machine_exceeds_the_time_for_enough_steps():
    """A fast machine does more than enough in the time; a slow one continues until it is enough."""
    assert length_after([0.4] * 100, 180.0, at_least=1000)[0] == 1000
    assert length_after([0.1] * 300, 180.0, at_least=1000)[0] > 1700


def test_initial_slow_steps_are_corrected():
    """Eight slow steps at the beginning, which once fixed the demo's length: later ones correct it."""
    length, _ = length_after([0.3] * 8 + [0.1] * 400, 180.0)
    assert length > 1700


def test_slow_first_tenth_counts():
    """The twin: steps that are slow all the time are the machine's speed."""
    assert length_after([0.3] * 60, 180.0)[0] < 700


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60), st.floats(0.0, 1e5))
def test_length_is_never_below_the_steps_done(times, seconds):
    """For any clock, the length is at least the steps done."""
    budget, now = TimeBudget(seconds), 0.0
    for done, time in enumerate(times, 1):
        now += time
        length = budget.step_done(now)
        assert length is None or length >= done
