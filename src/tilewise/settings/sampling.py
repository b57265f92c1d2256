"""Settings of sampling, each declared once: how a token is chosen and when a text ends.

`SamplingSettings` has vLLM's names and defaults and the values that users may write.
`tilewise.serve.SamplingParams` extends it with the fields that only a request has. `Sampling` is its resolved form,
which the engine computes with: every value is there, and lists are tuples.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.core import Validator
from tilewise.core.validation import shown
from tilewise.settings.declaration import check_settings, documented, narrowed, setting

__all__ = ["OutputOptions", "Sampling", "SamplingSettings"]

_MAX = 1 << 53
_MAX_CHOICES = 1 << 20
_MAX_LOGPROBS = 1 << 20
_MAX_ID = (1 << 32) - 1
_MAX_BIAS = 1e6
_SMALLEST_SHARE = sys.float_info.min  # the top_p that leaves only the most likely token
_LENGTH, _SAMPLING, _PENALTIES = "Length", "Sampling", "Penalties and forbidden text"
_validate = Validator("generate")


@documented
@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are chosen and when a text ends, with vLLM's names and defaults.

    Args:
    """

    n: int = setting(
        1,
        "Number of texts for a prompt. Text i does not depend on n.",
        low=1,
        high=_MAX_CHOICES,
        options=("--n",),
        panel=_SAMPLING,
        in_body=True,
        in_file="combined",
    )
    presence_penalty: float = setting(
        0.0,
        "Subtracted from the logits of tokens that the text already contains (vLLM).",
        low=-2.0,
        high=2.0,
        panel=_PENALTIES,
        in_body=True,
        in_file="always",
    )
    frequency_penalty: float = setting(
        0.0,
        "Subtracted from the logit of a token once for every time that the text contains it (vLLM).",
        low=-2.0,
        high=2.0,
        panel=_PENALTIES,
        in_body=True,
        in_file="always",
    )
    repetition_penalty: float = setting(
        1.0,
        "Above 1, makes tokens of the prompt and the text less likely: their logits are divided by it, or multiplied "
        "if they are negative (transformers).",
        low=0.0,
        high=float("inf"),
        is_low_excluded=True,
        panel=_PENALTIES,
        in_body=True,
        in_response_body=True,
        in_file="always",
        is_server_default=True,
    )
    temperature: float = setting(
        1.0,
        "0 takes the most likely token each time; higher values make less likely tokens more frequent.",
        low=0.0,
        high=float("inf"),
        panel=_SAMPLING,
        in_body=True,
        in_response_body=True,
        is_server_default=True,
        in_file="combined",
    )
    top_p: float = setting(
        1.0,
        "Sample from the most likely tokens that together have this probability; 0 leaves only the most likely.",
        low=0.0,
        high=1.0,
        panel=_SAMPLING,
        in_body=True,
        in_response_body=True,
        in_file="sampling",
        is_server_default=True,
    )
    top_k: int = setting(
        0,
        "Sample from the k most likely tokens; 0 or -1 samples from all.",
        low=-1,
        high=_MAX,
        panel=_SAMPLING,
        in_body=True,
        in_response_body=True,
        in_file="sampling",
        is_server_default=True,
    )
    min_p: float = setting(
        0.0,
        "Sample from tokens whose probability is at least this share of the most likely token's.",
        low=0.0,
        high=1.0,
        panel=_SAMPLING,
        in_body=True,
        in_response_body=True,
        in_file="sampling",
        is_server_default=True,
    )
    typical_p: float = setting(
        1.0,
        "Sample from the smallest set of tokens with this total probability, taking first those whose surprise is "
        "closest to the expected surprise (the entropy).",
        low=0.0,
        high=1.0,
        is_low_excluded=True,
        panel=_SAMPLING,
        in_body=True,
        in_file="sampling",
    )
    no_repeat_ngram_size: int = setting(
        0,
        "No sequence of this many tokens occurs twice, prompt included; 0 allows repetition.",
        low=0,
        high=_MAX,
        panel=_PENALTIES,
        in_body=True,
        in_file="always",
    )
    seed: int | None = setting(
        None,
        "Seed of the random numbers, a 64-bit integer: equal seeds give equal text; -1 is a random seed.",
        low=-(2**63),
        high=2**63 - 1,
        panel=_SAMPLING,
        default_text="random",
        in_body=True,
        in_response_body=True,
    )
    stop: str | Sequence[str] | None = setting(
        None,
        "The text ends before the first of these strings.",
        panel=_LENGTH,
        metavar="TEXT",
        in_body=True,
        in_file="combined",
    )
    stop_token_ids: Sequence[int] | None = setting(
        None,
        "Token ids that end the text in addition to the model's end tokens.",
        on_command_line=False,
        in_body=True,
    )
    bad_words: Sequence[str] | None = setting(
        None,
        "Texts that are not generated. Each is forbidden as two token sequences, with and without a space before it.",
        panel=_PENALTIES,
        metavar="TEXT",
        in_body=True,
    )
    bad_words_ids: Sequence[Sequence[int]] | None = setting(
        None, "Sequences of token ids that are not generated.", on_command_line=False, in_file="always"
    )
    include_stop_str_in_output: bool = setting(
        False,
        "The text ends after the stop string instead of before it.",
        options=("--include-stop",),
        panel=_LENGTH,
        in_body=True,
    )
    ignore_eos: bool = setting(
        False,
        "Continue after the model's end tokens.",
        options=("--ignore-eos",),
        panel=_LENGTH,
        in_body=True,
    )
    max_tokens: int | None = setting(
        16,
        "Maximum number of new tokens; None or -1: as many as fit the context.",
        low=-1,
        high=_MAX,
        panel=_LENGTH,
        in_file="combined",
    )
    min_tokens: int = setting(
        0,
        "No end token and no stop string ends the text before this many new tokens.",
        low=0,
        high=_MAX,
        panel=_LENGTH,
        in_body=True,
        in_file="combined",
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = setting(
        None,
        "Numbers to add to the logits of tokens, by token id, after the penalties.",
        on_command_line=False,
        in_body=True,
    )
    allowed_token_ids: Sequence[int] | None = setting(
        None, "The only token ids that may be chosen; None allows all.", on_command_line=False, in_body=True
    )

    def __post_init__(self) -> None:
        check_settings(self, type(self), _validate, "sampling")
        object.__setattr__(self, "top_k", max(0, self.top_k))


@documented
@dataclass(frozen=True)
class OutputOptions:
    """The reports about a text in addition to its tokens.

    Args:
    """

    logprobs: int | None = setting(
        None,
        "Report the log probabilities of this many most likely tokens at each position, and of the chosen one; -1: of "
        "all tokens.",
        low=-1,
        high=_MAX_LOGPROBS,
        on_command_line=False,
    )
    prompt_logprobs: int | None = setting(
        None, "The same for the prompt's tokens.", low=-1, high=_MAX_LOGPROBS, on_command_line=False
    )
    detokenize: bool = setting(
        True, "Whether outputs have text; False: only token ids.", on_command_line=False
    )
    skip_special_tokens: bool = setting(
        True, "Leave special tokens out of the text.", on_command_line=False, in_body=True
    )


@documented
@dataclass(frozen=True)
class Sampling(SamplingSettings):
    """`SamplingSettings` with every value decided, as the engine takes them.

    Args:

    Raises:
        ConfigError: a value outside its range, or two that contradict each other.
    """

    max_tokens: int = narrowed(128, help="Maximum number of new tokens.", low=1)
    temperature: float = narrowed(0.0)
    top_k: int = narrowed(0, low=0)
    seed: int = narrowed(0, default_text="")
    stop: tuple[str, ...] = narrowed(())
    stop_token_ids: tuple[int, ...] = narrowed(())
    bad_words: tuple[str, ...] = narrowed(())
    bad_words_ids: tuple[tuple[int, ...], ...] = narrowed(())
    logit_bias: tuple[tuple[int, float], ...] = narrowed(())
    allowed_token_ids: tuple[int, ...] = narrowed(())

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer("sampling", "seed", self.seed, 0, 2**63 - 1)
        for name in ("bad_words", "stop"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "bad_words_ids", _id_sequences(self.bad_words_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("allowed_token_ids", "stop_token_ids"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if self.min_tokens > self.max_tokens:
            got = f"{self.min_tokens} and {self.max_tokens}"
            _validate.invalid(
                "sampling", "min_tokens must not be above max_tokens", got, "correct one of them"
            )
        if self.n > 1 and self.temperature == 0:
            got, advice = f"{self.n} with temperature 0", "choose a temperature above 0"
            _validate.invalid("sampling", "n must be 1 if all texts would be equal", got, advice)

    @property
    def sampler_settings(self) -> tuple[float, int, float, float, float]:
        """Numbers that native code samples by: temperature, top-k, top-p, min-p, typical-p."""
        return self.temperature, self.top_k, max(self.top_p, _SMALLEST_SHARE), self.min_p, self.typical_p

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen from other logits than the model's."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.no_repeat_ngram_size > 0
            or self.min_tokens > 0
            or bool(self.logit_bias or self.allowed_token_ids or self.bad_words_ids)
        )


def _texts(name: str, values: Any) -> tuple[str, ...]:
    """Texts, none of them empty."""
    texts = tuple(_validate.sequence("sampling", name, values, "texts"))
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            rule = f"{name}.{index} must not be empty"
            _validate.invalid("sampling", rule, shown(text), "correct it")
    return texts


def _ids(name: str, values: Any) -> tuple[int, ...]:
    """Token ids in ascending order, without duplicates."""
    ids = _validate.sequence("sampling", name, values, "ids", in_any_order=True)
    return tuple(sorted({_validate.integer("sampling", f"an id of {name}", id_, 0, _MAX_ID) for id_ in ids}))


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and the number added to its logit, from pairs or a dictionary."""
    pairs = _validate.sequence(
        "sampling", "logit_bias", values.items() if isinstance(values, Mapping) else values, "pairs"
    )
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            rule = "logit_bias must have pairs of an id and a number"
            _validate.invalid("sampling", rule, shown(pair), "pass a dictionary")
        id_ = _validate.integer("sampling", "an id of logit_bias", pair[0], 0, _MAX_ID)
        biases[id_] = _validate.number("sampling", "a value of logit_bias", pair[1], -_MAX_BIAS, _MAX_BIAS)
    return tuple(sorted(biases.items()))


def _id_sequences(values: Any) -> tuple[tuple[int, ...], ...]:
    words = []
    for ids in _validate.sequence("sampling", "bad_words_ids", values, "sequences of ids"):
        word = tuple(_validate.sequence("sampling", "a sequence of bad_words_ids", ids, "ids"))
        if not word:
            rule = "sequences of bad_words_ids must not be empty"
            _validate.invalid("sampling", rule, shown(values), "remove the empty one")
        words.append(
            tuple(_validate.integer("sampling", "an id of bad_words_ids", id_, 0, _MAX_ID) for id_ in word)
        )
    return tuple(words)
