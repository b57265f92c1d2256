"""How many prompt tokens are nearly free while texts are decoded, from measured steps."""

import pytest

from tilewise.serve.prefill_budget import USUAL_FREE_TOKENS, PrefillBudget

STEP_MS, TOKEN_MS = 50.0, 5.0


def step_s(num_tokens, step_ms=STEP_MS, token_ms=TOKEN_MS):
    """Reading the weights, or computing, whichever is longer."""
    return max(step_ms, num_tokens * token_ms) * 1e-3


def play(budget, sizes, **times):
    for size, is_decode in sizes:
        budget.note(size, is_decode, step_s(size, **times))
    return budget.free_tokens


def test_no_budget_before_both_kinds_of_steps():
    """One kind alone gives no estimate."""
    assert PrefillBudget().free_tokens == USUAL_FREE_TOKENS
    assert play(PrefillBudget(), [(1, True)] * 9) == USUAL_FREE_TOKENS
    assert play(PrefillBudget(), [(256, False)] * 9) == USUAL_FREE_TOKENS


@pytest.mark.parametrize("token_ms,least,most", [(5.0, 9, 10), (0.5, 99, 100), (25.0, 2, 4), (1000.0, 1, 4)])
def test_budget_follows_the_ratio_of_compute_to_memory(token_ms, least, most):
    """On machines of any ratio of compute to memory; never zero."""
    sizes = play(PrefillBudget(), [(256, False), (1, True), (4, True)], token_ms=token_ms)
    assert least <= sizes <= most


def test_one_slow_step_changes_little():
    """Another program used the processor for a while."""
    budget = PrefillBudget()
    usual = play(budget, [(256, False), (1, True)] * 5)
    for _ in range(3):
        budget.note(1, True, 10 * step_s(1))
        budget.note(256, False, 10 * step_s(256))
    assert budget.free_tokens == usual


def test_compute_bound_steps_give_no_weight_time():
    """Large batches are limited by compute, so they do not measure reading of the weights."""
    budget = PrefillBudget()
    usual = play(budget, [(256, False), (1, True)] * 5)
    assert play(budget, [(48, True)] * 20) == usual


def test_budget_adapts():
    """Another program permanently takes half of the memory's bandwidth."""
    budget = PrefillBudget()
    before = play(budget, [(256, False), (1, True)] * 9)
    assert play(budget, [(1, True)] * 9, step_ms=2 * STEP_MS) > before


def test_zero_durations_divide_nothing():
    """A clock that does not advance."""
    budget = PrefillBudget()
    budget.note(256, False, 0.0)
    budget.note(1, True, 0.0)
    assert budget.free_tokens >= 1
