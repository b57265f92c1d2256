"""Reference in NumPy, slow and by sorting, for the native logits processors and sampling."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.generate import History, Sampling

Array = NDArray[Any]


def apply_processors(
    logits: Array,
    sampling: Sampling,
    history: History,
    end_ids: Collection[int] = (),
    allowed: Array | None = None,
) -> Array:
    """Logits after penalties, in fp64; those of forbidden tokens are minus infinity."""
    scores = logits.astype(np.float64)
    ids = np.array(history.ids, np.int64)
    if sampling.repetition_penalty != 1:
        seen = _below(np.unique(ids), scores.size)
        values, largest = scores[seen], np.finfo(np.float64).max  # minus infinity is for forbidden tokens
        with np.errstate(over="ignore"):
            penalized = np.where(
                values < 0, values * sampling.repetition_penalty, values / sampling.repetition_penalty
            )
        scores[seen] = np.clip(penalized, -largest, largest)
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        written, counts = np.unique(_below(ids[history.num_prompt :], scores.size), return_counts=True)
        scores[written] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    for id_, bias in sampling.logit_bias:
        scores[id_] += bias
    if sampling.allowed_token_ids:
        scores[np.isin(np.arange(scores.size), sampling.allowed_token_ids, invert=True)] = -np.inf
    size = sampling.no_repeat_ngram_size
    for place in range(size - 1, len(ids)) if 0 < size <= len(ids) else ():
        if ids[place] < scores.size and (ids[place + 1 - size : place] == ids[len(ids) + 1 - size :]).all():
            scores[ids[place]] = -np.inf
    for *before, last in sampling.bad_words_ids:
        is_end = not before and last in end_ids
        if not is_end and history.ids[len(ids) - len(before) :] == before:
            scores[last] = -np.inf
    if history.num_new < sampling.min_tokens:
        scores[_below(np.array([*end_ids], np.int64), scores.size)] = -np.inf
    if allowed is not None:
        scores[np.pad(allowed, (0, max(0, scores.size - len(allowed))))[: scores.size] == 0] = -np.inf
    return scores


def _below(ids: Array, size: int) -> Array:
    return ids[ids < size]


def sample(scores: Array, sampling: Sampling, position: int, choice: int) -> tuple[int, float]:
    """The token, and the distance of its random number from the nearest border, as a share of the whole."""
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
    """The tokens that may be sampled, likeliest first, and weights in proportion to their probabilities.

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
    """Indices of the likeliest, in order, until their probabilities reach the sum."""
    mass = top_p * np.exp(scaled).sum()
    order = np.argsort(-scaled, kind="stable")
    if top_p == 1:
        return order
    return order[: int(np.searchsorted(np.cumsum(np.exp(scaled[order])), mass)) + 1]


def _is_typical(scaled: Array, weights: Array, mass: float) -> Array:
    """Which tokens' surprise is nearest to the entropy, until they reach the mass (Meister et al. 2022)."""
    total = weights.sum()
    probability, log = weights / total, scaled - np.log(total)
    with np.errstate(invalid="ignore"):  # nothing times infinity, for what is too unlikely for a double
        entropy = -np.nansum(probability * log)
    distance = np.abs(-log - entropy)
    order = np.argsort(distance, kind="stable")
    count = int((np.cumsum(probability[order]) < mass).sum())
    is_kept: Array = distance <= distance[order[min(count, len(order) - 1)]]
    return is_kept
