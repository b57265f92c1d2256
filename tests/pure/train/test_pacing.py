"""The length of a run that is given a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilewise.train import TimeBudget


def length_after(times, seconds, at_least=0):
    """The number of steps when all these steps have been done, and how often it was said."""
    budget, now, found, said = TimeBudget(seconds, at_least), 0.0, None, 0
    for time in times:
        now += time
        if (steps := budget.step_done(now)) is not None:
            found, said = steps, said + 1
    return found, said


def test_a_steady_machine_fills_its_time():
    """A tenth of a second a step: 1,800 steps in three minutes, said during the first tenth and never again."""
    found, said = length_after([0.5] + [0.1] * 600, 180.0)
    assert 1790 <= found <= 1800 and said <= 180 and length_after([0.5] + [0.1] * 300, 180.0)[0] == found


def test_a_machine_half_as_fast_does_half_the_steps():
    """The length follows the speed, not the hope."""
    assert abs(length_after([1.0] + [0.2] * 300, 180.0)[0] - 895) < 10


def test_a_slow_machine_takes_the_time_for_enough_steps():
    """What a fast machine does in the time is more than enough; a slow one goes on until it is enough."""
    assert length_after([0.4] * 100, 180.0, at_least=1000)[0] == 1000
    assert length_after([0.1] * 300, 180.0, at_least=1000)[0] > 1700


def test_a_burst_of_other_work_does_not_decide():
    """Eight slow steps at the beginning, by which the demo once fixed its length: the rest corrects it."""
    found, _ = length_after([0.3] * 8 + [0.1] * 400, 180.0)
    assert found > 1700


def test_work_for_the_whole_first_tenth_decides():
    """The comparison can fail: what is slow all the time is taken for the machine's speed."""
    assert length_after([0.3] * 60, 180.0)[0] < 700


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60), st.floats(0.0, 1e5))
def test_a_run_never_ends_before_what_it_has_done(times, seconds):
    """Whatever the clock says, the length is at least the steps done."""
    budget, now = TimeBudget(seconds), 0.0
    for done, time in enumerate(times, 1):
        now += time
        found = budget.step_done(now)
        assert found is None or found >= done
