"""Few cases that cover every pair of values of some settings: shared by tests over many settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Case = tuple[object, ...]


def pairwise_cases(
    choices: Mapping[str, Sequence[object]], is_allowed: Callable[[Case], bool], drawn: int = 1200
) -> list[Case]:
    """Of so many random allowed cases those that add most new pairs, until none is missing."""
    dice = random.Random(0)
    cases = {tuple(dice.choice(values) for values in choices.values()): None for _ in range(drawn)}
    pairs_of = {case: set(combinations(enumerate(case), 2)) for case in cases if is_allowed(case)}
    missing = set().union(*pairs_of.values())
    chosen = []
    while missing:
        best = max(pairs_of, key=lambda case: len(pairs_of[case] & missing))
        chosen.append(best)
        missing -= pairs_of[best]
    return chosen
