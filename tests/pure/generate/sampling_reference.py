"""Drawing a token in NumPy, slowly and by sorting: what the native code is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.generate import Sampling

Array = NDArray[Any]


def draw(scores: Array, sampling: Sampling, position: int, choice: int) -> tuple[int, float]:
    """The token, and how far the number that points at it is from the nearest border, as a share of the whole."""
    if sampling.temperature == 0:
        return int(np.argmax(scores)), 1.0
    ids, weights = candidates(scores, sampling)
    order = np.argsort(ids)
    ids, borders = ids[order], np.cumsum(weights[order])
    key = np.array([sampling.seed, position], np.uint64)
    counter = np.array([0, 0, 0, choice], np.uint64)
    share = np.random.Generator(np.random.Philox(key=key, counter=counter)).random()
    place = min(int(np.searchsorted(borders, share * borders[-1], side="right")), len(ids) - 1)
    return int(ids[place]), float(np.abs(borders / borders[-1] - share).min())


def candidates(scores: Array, sampling: Sampling) -> tuple[Array, Array]:
    """The tokens among which is drawn, likeliest first, and weights in proportion to their probabilities.

    Filters apply one after the other as in transformers: top-k, top-p, min-p, typical-p.
    """
    ids = np.flatnonzero(scores > -np.inf)
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest alone
        scaled = (scores[ids] - scores.max()) / sampling.temperature
    if 0 < sampling.top_k < len(ids):
        least = np.partition(scaled, len(ids) - sampling.top_k)[len(ids) - sampling.top_k]
        ids, scaled = ids[scaled >= least], scaled[scaled >= least]
    order = _nucleus(scaled, sampling.top_p)
    ids, scaled = ids[order], scaled[order]
    weights = np.exp(scaled)
    if sampling.min_p > 0:
        keep = max(1, int((weights >= sampling.min_p * weights[0]).sum()))
        ids, scaled, weights = ids[:keep], scaled[:keep], weights[:keep]
    if sampling.typical_p < 1:
        is_kept = _is_typical(scaled, weights, sampling.typical_p)
        ids, weights = ids[is_kept], weights[is_kept]
    return ids, weights


def _nucleus(scaled: Array, top_p: float) -> Array:
    """Places of the likeliest, in order, until they have the probability together."""
    mass = top_p * np.exp(scaled).sum()
    order = np.argsort(-scaled, kind="stable")
    if top_p == 1:
        return order
    return order[: int(np.searchsorted(np.cumsum(np.exp(scaled[order])), mass)) + 1]


def _is_typical(scaled: Array, weights: Array, mass: float) -> Array:
    """Which tokens' surprise is nearest to the entropy, until they have the mass (Meister et al. 2022)."""
    total = weights.sum()
    probability, log = weights / total, scaled - np.log(total)
    with np.errstate(invalid="ignore"):  # nothing times infinity, for what is too unlikely for a double
        entropy = -np.nansum(probability * log)
    distance = np.abs(-log - entropy)
    order = np.argsort(distance, kind="stable")
    count = int((np.cumsum(probability[order]) < mass).sum())
    is_kept: Array = distance <= distance[order[min(count, len(order) - 1)]]
    return is_kept
