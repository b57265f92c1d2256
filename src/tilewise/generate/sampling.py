"""How a token is chosen: the settings, and the choice from one row of logits.

Names and meaning are those of transformers; presence and frequency penalties, stop strings and `ignore_eos` those of
vLLM. A draw depends on the logits, the seed, the position and the index of the choice only (Philox keyed by them),
never on the batch, a request's place in it, or the devices: native/kernels/sampling. Ties go to the lower id. Refuses
logits that are no finite
numbers, and settings that leave no token to choose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.core import Border, ConfigError, NotFinite, TilewiseError, is_float, shown
from tilewise.generate.history import History
from tilewise.kernels.sampling import NOT_FINITE, NOTHING_LEFT, draw_tokens

__all__ = ["Pick", "Sampling", "adjust_logits", "pick_token", "pick_tokens"]

_border = Border("generate")
_MAX = 1 << 53
_MOST_CHOICES = 1 << 20
_LARGEST_ID = (1 << 32) - 1
_MOST_BIAS = 1e6
Array = NDArray[Any]


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and when to stop.

    Args:
        max_tokens: at most so many new tokens.
        temperature: 0 takes the likeliest token.
        top_k: draw among the k likeliest only; 0 for all.
        top_p: draw among the likeliest that together have this probability.
        min_p: draw among those at least this share as likely as the likeliest.
        typical_p: draw among those whose surprise is nearest to the expected one, of this probability together.
        repetition_penalty: logits of tokens of prompt and text are divided by it, or multiplied where negative.
        presence_penalty: taken from the logits of tokens that were written.
        frequency_penalty: the same, for every time that they were.
        no_repeat_ngram_size: no so many tokens in a row twice, prompt included; 0 for no such rule.
        bad_words: texts that are not written, as their tokens with and without a space before them.
        bad_words_ids: the same as token ids.
        logit_bias: added to the logits of tokens, by id, after penalties.
        allowed_token_ids: only these may come; empty for all.
        min_tokens: before so many new tokens, neither an end token nor a stop string ends the text.
        ignore_eos: write on after the model's end tokens.
        stop_token_ids: further tokens that end a text.
        stop: the text ends before the first of these strings that it comes to hold.
        include_stop: the text ends behind it.
        n: texts for a prompt. What text i says does not depend on n.
        seed: of the draws.

    Raises:
        ConfigError: a value outside its range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    n: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _border.integer("sampling", "max_tokens", self.max_tokens, 1, _MAX)
        for name, low, high in (
            ("temperature", 0.0, float("inf")),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("typical_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, float("inf")),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            _border.number("sampling", name, getattr(self, name), low, high)
        for name in ("top_p", "typical_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                advice = "pass 1.0 to switch it off"
                _border.refuse("sampling", f"{name} must be above 0", str(getattr(self, name)), advice)
        _border.integer("sampling", "top_k", self.top_k, 0, _MAX)
        _border.integer("sampling", "no_repeat_ngram_size", self.no_repeat_ngram_size, 0, _MAX)
        _border.integer("sampling", "min_tokens", self.min_tokens, 0, _MAX)
        _border.truth("sampling", "ignore_eos", self.ignore_eos)
        _border.truth("sampling", "include_stop", self.include_stop)
        _border.integer("sampling", "n", self.n, 1, _MOST_CHOICES)
        _border.integer("sampling", "seed", self.seed, 0, 2**63 - 1)
        for name in ("bad_words", "stop"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "bad_words_ids", _id_sequences(self.bad_words_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("allowed_token_ids", "stop_token_ids"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if self.min_tokens > self.max_tokens:
            got = f"{self.min_tokens} and {self.max_tokens}"
            _border.refuse("sampling", "min_tokens must not be above max_tokens", got, "correct one of them")
        if self.n > 1 and self.temperature == 0:
            got, advice = f"{self.n} with temperature 0", "choose a temperature above 0"
            _border.refuse(
                "sampling", "n must be 1 where every text would be the same, the likeliest", got, advice
            )

    def changes_logits(self, num_new: int) -> bool:
        """Whether tokens are chosen from other logits than the model's.

        Args:
            num_new: tokens written so far.
        """
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.no_repeat_ngram_size > 0
            or num_new < self.min_tokens
            or bool(self.logit_bias or self.allowed_token_ids or self.bad_words_ids)
        )


def _texts(name: str, values: Any) -> tuple[str, ...]:
    """Texts that are not empty."""
    texts = tuple(_border.sequence("sampling", name, values, "texts"))
    for text in texts:
        if not isinstance(text, str) or not text:
            _border.refuse("sampling", f"{name} must be texts that are not empty", shown(text), "correct it")
    return texts


def _ids(name: str, values: Any) -> tuple[int, ...]:
    """Ids, each once."""
    given = _border.sequence("sampling", name, values, "ids", in_any_order=True)
    return tuple(
        sorted({_border.integer("sampling", f"an id of {name}", id_, 0, _LARGEST_ID) for id_ in given})
    )


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of an id and what is added to its logit; a dictionary will do."""
    pairs = _border.sequence(
        "sampling", "logit_bias", values.items() if isinstance(values, Mapping) else values, "pairs"
    )
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            rule = "logit_bias must hold pairs of an id and a number"
            _border.refuse("sampling", rule, shown(pair), "pass a dictionary")
        id_ = _border.integer("sampling", "an id of logit_bias", pair[0], 0, _LARGEST_ID)
        found[id_] = _border.number("sampling", "a bias", pair[1], -_MOST_BIAS, _MOST_BIAS)
    return tuple(sorted(found.items()))


def _id_sequences(values: Any) -> tuple[tuple[int, ...], ...]:
    found = []
    for ids in _border.sequence("sampling", "bad_words_ids", values, "sequences of ids"):
        word = tuple(_border.sequence("sampling", "a sequence of bad_words_ids", ids, "ids"))
        if not word:
            rule = "sequences of bad_words_ids must hold an id"
            _border.refuse("sampling", rule, shown(values), "remove the empty one")
        found.append(
            tuple(_border.integer("sampling", "an id of bad_words_ids", id_, 0, _LARGEST_ID) for id_ in word)
        )
    return tuple(found)


class Pick(NamedTuple):
    """A row of logits that a token is to be chosen from. What stands in it was checked by its maker.

    Attributes:
        logits: `[vocab]`.
        sampling: how to choose.
        history: the tokens before it; the draw depends on their number, penalties on what they are.
        end_ids: tokens that end a text.
        choice: index among the texts of one prompt.
        allowed: `[vocab]` of truths, those that a grammar lets come; None for all.
    """

    logits: Array
    sampling: Sampling
    history: History
    end_ids: Collection[int] = ()
    choice: int = 0
    allowed: Array | None = None


def pick_token(
    logits: Array, sampling: Sampling, history: History, end_ids: Collection[int] = (), choice: int = 0
) -> int:
    """The next token of a sequence.

    Args:
        logits: `[vocab]`.
        sampling: how to choose.
        history: the tokens before it; the draw depends on their number, penalties on what they are.
        end_ids: tokens that end a text.
        choice: index among the texts of one prompt.

    Raises:
        ConfigError: the logits are no row of numbers, or no token is left to choose.
        NotFinite: a logit is NaN or infinite.
    """
    _border.instance("sampling", "sampling", sampling, Sampling, "pass Sampling(...)")
    _border.instance("sampling", "history", history, History, "pass History(ids)")
    choice = _border.integer("sampling", "a choice", choice, 0, _MOST_CHOICES)
    if (
        not isinstance(logits, np.ndarray)
        or logits.ndim != 1
        or not logits.size
        or not is_float(logits.dtype)
    ):
        _border.refuse("sampling", "logits are one row of numbers", shown(logits), "pass a row of them")
    given = _border.sequence("sampling", "end_ids", end_ids, "ids", in_any_order=True)
    ends = [_border.integer("sampling", "an id of end_ids", id_, 0, _LARGEST_ID) for id_ in given]
    (found,) = pick_tokens([Pick(logits, sampling, history, ends, choice)])
    if isinstance(found, TilewiseError):
        raise found
    return found


def pick_tokens(picks: Sequence[Pick], threads: int = 1) -> list[int | TilewiseError]:
    """The next token of each of several sequences, or why it has none; one says nothing about another.

    Args:
        picks: a row for each.
        threads: that share the rows.
    """
    found: list[int | TilewiseError] = [0] * len(picks)
    rows: list[Array] = []
    places: list[int] = []
    for place, pick in enumerate(picks):
        try:
            rows.append(_row(pick))
            places.append(place)
        except TilewiseError as error:
            found[place] = error
    if not rows:
        return found
    used = [picks[place] for place in places]
    ways = [pick.sampling for pick in used]
    settings = np.array([(w.temperature, w.top_k, w.top_p, w.min_p, w.typical_p) for w in ways], np.float64)
    keys = np.array([(p.sampling.seed, len(p.history), p.choice) for p in used], np.uint64)
    for place, pick, token in zip(places, used, draw_tokens(rows, settings, keys, threads)):
        if token == NOT_FINITE:
            found[place] = _not_finite(pick)
        elif token == NOTHING_LEFT:
            found[place] = ConfigError(
                "[generate.sampling] a token must be left to choose; got all forbidden by no_repeat_ngram_size, bad "
                f"words, allowed_token_ids, min_tokens or a grammar at position {len(pick.history)}; loosen them"
            )
        else:
            found[place] = token
    return found


def _row(pick: Pick) -> Array:
    """Logits as they are, or in fp64 after penalties."""
    logits, sampling, history = pick.logits, pick.sampling, pick.history
    if pick.allowed is None and not sampling.changes_logits(history.num_new):
        if logits.dtype == np.float64 and np.isinf(logits).any():
            raise _not_finite(pick)  # minus infinity would say that a token is forbidden
        return np.ascontiguousarray(logits, np.float64 if logits.dtype == np.float64 else np.float32)
    if not np.isfinite(logits).all():
        raise _not_finite(pick)
    scores = adjust_logits(logits, sampling, history, list(pick.end_ids))
    if pick.allowed is not None:
        scores[~pick.allowed] = -np.inf
    return scores


def _not_finite(pick: Pick) -> NotFinite:
    at = int(np.flatnonzero(~np.isfinite(pick.logits))[0])
    return NotFinite(
        f"[generate.sampling] logits must be finite; got {pick.logits[at]} for token {at} at position "
        f"{len(pick.history)}; the model overflows, or its weights are damaged: try f32"
    )


def adjust_logits(logits: Array, sampling: Sampling, history: History, end_ids: Sequence[int]) -> Array:
    """Logits after penalties, in fp64; those of tokens that may not come are minus infinity.

    Raises:
        ConfigError: a setting names a token outside the vocabulary.
    """
    scores = logits.astype(np.float64)
    if sampling.repetition_penalty != 1:
        seen = _below(history.seen(), scores.size)
        found = scores[seen]
        penalty = sampling.repetition_penalty
        largest = np.finfo(np.float64).max  # minus infinity is for what may not come
        with np.errstate(over="ignore"):
            punished = np.where(found < 0, found * penalty, found / penalty)
        scores[seen] = np.clip(punished, -largest, largest)
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        ids, counts = history.written()
        inside = ids < scores.size
        ids, counts = ids[inside], counts[inside]
        scores[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    for id_, bias in sampling.logit_bias:
        scores[_inside("logit_bias", id_, scores.size)] += bias
    if sampling.allowed_token_ids:
        allowed = [_inside("allowed_token_ids", id_, scores.size) for id_ in sampling.allowed_token_ids]
        kept = scores[allowed]
        scores[:] = -np.inf
        scores[allowed] = kept
    if 0 < sampling.no_repeat_ngram_size <= len(history):
        scores[_below(history.after_last(sampling.no_repeat_ngram_size - 1), scores.size)] = -np.inf
    for word in sampling.bad_words_ids:
        _inside("bad_words_ids", max(word), scores.size)
        is_end = len(word) == 1 and word[0] in end_ids
        if not is_end and history.ends_with(word[:-1]):
            scores[word[-1]] = -np.inf
    if history.num_new < sampling.min_tokens:
        scores[_below(np.array([*end_ids], np.int64), scores.size)] = -np.inf
    return scores


def _inside(name: str, id_: int, size: int) -> int:
    """An id that the vocabulary has."""
    if id_ >= size:
        _border.refuse("sampling", f"{name} must lie below the vocabulary's {size}", str(id_), "correct it")
    return id_


def _below(ids: Array, size: int) -> Array:
    return ids[ids < size]
