"""How a token is chosen from a row of logits.

Names and meaning are those of transformers; presence and frequency penalties, stop strings and `ignore_eos` are vLLM's.
A sampled token depends only on the logits, the seed, the position and the index of the text (Philox keyed by them), not
on the batch, the request's place in it or the devices: see native/kernels/sampling. Of equal logits the lower id wins.
Rejects logits that are not finite, and settings that leave no token to choose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core import DTYPES, ConfigError, NotFinite, TilewiseError, Validator, is_float, shown
from tilewise.generate.history import History
from tilewise.kernels.sampling import NOT_FINITE, LogitsProcessors, Rules, sample_tokens
from tilewise.settings import Sampling

__all__ = ["Batch", "Sampler", "choose_token"]

_validate = Validator("generate")
_MAX_CHOICES = 1 << 20
_MAX_ID = (1 << 32) - 1
Array = NDArray[Any]


class Sampler:
    """How the tokens of one text are chosen. The caller has checked the arguments.

    Args:
        sampling: the settings.
        history: the tokens so far; the random number depends on their count, penalties on their ids.
        end_ids: tokens that end the text.
        choice: index among the texts of one prompt.

    Attributes:
        sampling: the settings.
        history: the tokens so far.
        rules: penalties and bans that change logits; None where tokens are chosen from the model's own logits.
        settings: temperature, top-k, top-p, min-p and typical-p, as bytes for native code.
        key: seed, position 0 and choice, as bytes.
    """

    __slots__ = ("history", "key", "rules", "sampling", "settings")

    def __init__(
        self, sampling: Sampling, history: History, end_ids: Collection[int] = (), choice: int = 0
    ) -> None:
        self.sampling, self.history = sampling, history
        self.rules = _rules_of(sampling, end_ids) if sampling.changes_logits else None
        self.settings = np.array(sampling.sampler_settings, np.float64).tobytes()
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


def choose_token(
    logits: Array, sampling: Sampling, history: History, end_ids: Collection[int] = (), choice: int = 0
) -> int:
    """The next token of a sequence.

    Args:
        logits: `[vocab]`, any floating type.
        sampling: the settings.
        history: the tokens so far; the random number depends on their count, penalties on their ids.
        end_ids: tokens that end a text.
        choice: index among the texts of one prompt.

    Raises:
        ConfigError: the logits are not one row of numbers, or no token is left to choose.
        NotFinite: a logit is NaN or infinite.
    """
    choice = _validate.integer("sampling", "a choice", choice, 0, _MAX_CHOICES)
    if (
        not isinstance(logits, np.ndarray)
        or logits.ndim != 1
        or not logits.size
        or not is_float(logits.dtype)
    ):
        _validate.invalid("sampling", "logits are one row of numbers", shown(logits), "pass a row of them")
    _validate.without_mask("sampling", "logits", logits)
    ids = _validate.sequence("sampling", "end_ids", end_ids, "ids", in_any_order=True)
    ends = [_validate.integer("sampling", "an id of end_ids", id_, 0, _MAX_ID) for id_ in ids]
    batch = Batch([Sampler(sampling, history, ends, choice)])
    (token,) = batch.sample(logits[None], np.zeros(1, np.int64))
    if token < 0:
        raise batch.error(0, logits)
    return token


class Batch:
    """Next tokens of several sequences. It is made before their logits are computed.

    Args:
        samplers: how the token of each sequence is chosen.
        lengths: number of tokens that each sequence has when its token is sampled; None: the current number.
        masks: grammar masks, one per sequence: uint8 by token, 0 for forbidden tokens; None allows all.
    """

    def __init__(
        self,
        samplers: Sequence[Sampler],
        lengths: Sequence[int] | None = None,
        masks: Sequence[Array | None] = (),
    ) -> None:
        self._samplers = samplers
        self._masks = masks
        self._invalid: set[int] = set()
        self._has_processors = bool(masks) or any(one.rules is not None for one in samplers)
        self._settings = np.frombuffer(b"".join([one.settings for one in samplers]), np.float64)
        self._settings = self._settings.reshape(-1, 5)
        self._keys = np.frombuffer(bytearray().join([one.key for one in samplers]), np.uint64).reshape(-1, 3)
        self._keys[:, 1] = [len(one.history.ids) for one in samplers] if lengths is None else lengths

    def sample(self, logits: Array, rows: NDArray[np.int64], threads: int = 1) -> list[int]:
        """A token for each sequence; below 0 where it has none. Sequences do not affect one another.

        Args:
            logits: `[R, vocab]`, any floating type.
            rows: the row of each sequence.
            threads: number of threads that share the rows.
        """
        if logits.dtype == DTYPES["bf16"].numpy:
            logits = logits.view(np.uint16)
        elif logits.dtype != np.float32 and logits.dtype != np.float64:
            logits = logits.astype(np.float32)
        processors = self._logits_processors(logits.shape[1]) if self._has_processors else ()
        if not logits.flags.c_contiguous:
            logits = np.ascontiguousarray(logits)
        tokens = sample_tokens(logits, rows, self._settings, self._keys, threads, processors)
        for place in self._invalid:
            tokens[place] = NOT_FINITE
        return tokens

    def error(self, place: int, logits_V: Array) -> TilewiseError:
        """Why a sequence has no token.

        Args:
            place: index of the sequence.
            logits_V: its logits.
        """
        if place in self._invalid:
            return _unknown_id(self._samplers[place].sampling, len(logits_V))
        return _no_token(logits_V, len(self._samplers[place].history))

    def _logits_processors(self, size: int) -> list[LogitsProcessors | None]:
        """The changes of each row's logits. Settings with a token beyond the vocabulary are recorded as invalid."""
        processors: list[LogitsProcessors | None] = []
        for place, (one, mask) in enumerate(zip(self._samplers, self._masks or [None] * len(self._samplers))):
            rules = one.rules
            if rules is not None and rules.largest_id >= size:
                rules = None
                self._invalid.add(place)
            text = None if rules is None else one.history.counted
            processors.append(None if rules is None and mask is None else (rules, text, mask))
        return processors


def _unknown_id(sampling: Sampling, size: int) -> ConfigError:
    """The error for settings that name a token beyond the vocabulary."""
    named = {
        "logit_bias": [id_ for id_, _ in sampling.logit_bias],
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words_ids": [id_ for word in sampling.bad_words_ids for id_ in word],
    }
    name, largest = max(((n, max(ids, default=-1)) for n, ids in named.items()), key=lambda pair: pair[1])
    return ConfigError(
        f"[generate.sampling] {name} must lie below the vocabulary's {size}; got {largest}; correct it"
    )


def _no_token(logits: Array, position: int) -> TilewiseError:
    wrong = np.flatnonzero(~np.isfinite(logits.astype(np.float64)))
    if len(wrong):
        return NotFinite(
            f"[generate.sampling] logits must be finite; got {logits[wrong[0]]} for token {wrong[0]} at position "
            f"{position}; the model overflows, or its weights are damaged: try f32"
        )
    return ConfigError(
        "[generate.sampling] at least one token must be allowed; got all forbidden by no_repeat_ngram_size, bad words, "
        f"allowed_token_ids, min_tokens or a grammar at position {position}; relax these settings"
    )
