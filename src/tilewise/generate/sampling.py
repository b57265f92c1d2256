"""How a token is chosen: the settings, and the choice from one row of logits.

Names and meaning are those of transformers; presence and frequency penalties, stop strings and `ignore_eos` those of
vLLM. A draw depends on the logits, the seed, the position and the index of the choice only (Philox keyed by them),
never on the batch, a request's place in it, or the devices: native/kernels/sampling. Ties go to the lower id. Refuses
logits that are no finite
numbers, and settings that leave no token to choose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core import DTYPES, Border, ConfigError, NotFinite, TilewiseError, is_float, shown
from tilewise.generate.history import History
from tilewise.kernels.sampling import NOT_FINITE, Adjustment, Rules, draw_tokens
from tilewise.settings import Sampling

__all__ = ["Batch", "Pick", "pick_token"]

_border = Border("generate")
_MOST_CHOICES = 1 << 20
_LARGEST_ID = (1 << 32) - 1
Array = NDArray[Any]


class Pick:
    """How the tokens of a text are chosen. What stands in it was checked by its maker.

    Args:
        sampling: the settings.
        history: the tokens so far; the draw depends on their number, penalties on what they are.
        end_ids: tokens that end the text.
        choice: index among the texts of one prompt.

    Attributes:
        sampling: the settings.
        history: the tokens so far.
        rules: what the settings ask of logits; None where tokens are chosen from the model's own.
        settings: what native code draws by, as bytes.
        key: seed, no position, choice, as bytes.
    """

    __slots__ = ("history", "key", "rules", "sampling", "settings")

    def __init__(
        self, sampling: Sampling, history: History, end_ids: Collection[int] = (), choice: int = 0
    ) -> None:
        self.sampling, self.history = sampling, history
        self.rules = _rules_of(sampling, end_ids) if sampling.changes_logits else None
        self.settings = np.array(sampling.draw_settings, np.float64).tobytes()
        self.key = np.array((sampling.seed, 0, choice), np.uint64).tobytes()


def _rules_of(sampling: Sampling, end_ids: Collection[int]) -> Rules:
    return Rules(
        repetition=float(sampling.repetition_penalty),
        presence=float(sampling.presence_penalty),
        frequency=float(sampling.frequency_penalty),
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        min_tokens=sampling.min_tokens,
        bias=[(id_, float(bias)) for id_, bias in sampling.logit_bias],
        allowed=sampling.allowed_token_ids,
        bad_words=sampling.bad_words_ids,
        ends=sorted(end_ids),
    )


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
    _border.without_mask("sampling", "logits", logits)
    given = _border.sequence("sampling", "end_ids", end_ids, "ids", in_any_order=True)
    ends = [_border.integer("sampling", "an id of end_ids", id_, 0, _LARGEST_ID) for id_ in given]
    batch = Batch([Pick(sampling, history, ends, choice)])
    (found,) = batch.draw(logits[None], np.zeros(1, np.int64))
    if found < 0:
        raise batch.error(0, logits)
    return found


class Batch:
    """The next tokens of several sequences, put together before their logits are there.

    Args:
        picks: how each is chosen.
        lengths: tokens that each will have then; None: those that it has.
        masks: of each, where there are any: bytes by token, 0 for those that may not come; None for all.
    """

    def __init__(
        self,
        picks: Sequence[Pick],
        lengths: Sequence[int] | None = None,
        masks: Sequence[Array | None] = (),
    ) -> None:
        self._picks = picks
        self._masks = masks
        self._wrong: set[int] = set()
        self._is_adjusted = bool(masks) or any(pick.rules is not None for pick in picks)
        self._settings = np.frombuffer(b"".join([p.settings for p in picks]), np.float64).reshape(-1, 5)
        self._keys = np.frombuffer(bytearray().join([p.key for p in picks]), np.uint64).reshape(-1, 3)
        self._keys[:, 1] = [len(pick.history.ids) for pick in picks] if lengths is None else lengths

    def draw(self, logits: Array, rows: NDArray[np.int64], threads: int = 1) -> list[int]:
        """A token for each, below 0 where it has none; one says nothing about another.

        Args:
            logits: `[R, vocab]`.
            rows: the row of each sequence.
            threads: that share the rows.
        """
        if logits.dtype == DTYPES["bf16"].numpy:
            logits = logits.view(np.uint16)
        elif logits.dtype != np.float32 and logits.dtype != np.float64:
            logits = logits.astype(np.float32)
        adjustments = self._adjustments(logits.shape[1]) if self._is_adjusted else ()
        if not logits.flags.c_contiguous:
            logits = np.ascontiguousarray(logits)
        found = draw_tokens(logits, rows, self._settings, self._keys, threads, adjustments)
        for place in self._wrong:
            found[place] = NOT_FINITE
        return found

    def error(self, place: int, logits_V: Array) -> TilewiseError:
        """Why a sequence has no token.

        Args:
            place: of the sequence.
            logits_V: that it was to be drawn from.
        """
        if place in self._wrong:
            return _unknown_id(self._picks[place].sampling, len(logits_V))
        return _why_none(logits_V, len(self._picks[place].history))

    def _adjustments(self, size: int) -> list[Adjustment | None]:
        """What is done to each row; settings that name a token beyond it are left out."""
        adjustments: list[Adjustment | None] = []
        for place, (pick, mask) in enumerate(zip(self._picks, self._masks or [None] * len(self._picks))):
            rules = pick.rules
            if rules is not None and rules.largest_id >= size:
                rules = None
                self._wrong.add(place)
            text = None if rules is None else pick.history.counted
            adjustments.append(None if rules is None and mask is None else (rules, text, mask))
        return adjustments


def _unknown_id(sampling: Sampling, size: int) -> ConfigError:
    """Settings name a token that the logits do not have."""
    named = {
        "logit_bias": [id_ for id_, _ in sampling.logit_bias],
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words_ids": [id_ for word in sampling.bad_words_ids for id_ in word],
    }
    name, largest = max(((n, max(ids, default=-1)) for n, ids in named.items()), key=lambda found: found[1])
    return ConfigError(
        f"[generate.sampling] {name} must lie below the vocabulary's {size}; got {largest}; correct it"
    )


def _why_none(logits: Array, position: int) -> TilewiseError:
    wrong = np.flatnonzero(~np.isfinite(logits.astype(np.float64)))
    if len(wrong):
        return NotFinite(
            f"[generate.sampling] logits must be finite; got {logits[wrong[0]]} for token {wrong[0]} at position "
            f"{position}; the model overflows, or its weights are damaged: try f32"
        )
    return ConfigError(
        "[generate.sampling] a token must be left to choose; got all forbidden by no_repeat_ngram_size, bad words, "
        f"allowed_token_ids, min_tokens or a grammar at position {position}; loosen them"
    )
