"""How a request wants its texts, with vLLM's names and defaults. Checked when made, before any engine sees it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilewise.core import Border
from tilewise.core.border import shown
from tilewise.generate import Sampling
from tilewise.serve.outputs import RequestOutputKind
from tilewise.serve.request import Asked
from tilewise.serve.structured import StructuredOutputsParams

__all__ = ["SamplingParams"]

_MOST = 1 << 53
_MOST_LOGPROBS = 1 << 20
_NUM_SEEDS = 2**63  # of draws; a negative seed is one of the larger ones
_border = Border("serve")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, when to stop, what to tell.

    A text depends on the prompt, these settings, the seed and its index only: not on what else is asked of the engine.

    Args:
        n: texts for a prompt. What text i says does not depend on n.
        presence_penalty: taken from the logits of tokens that were written.
        frequency_penalty: the same, for every time that they were.
        repetition_penalty: logits of tokens of prompt and text are divided by it, or multiplied where negative.
        temperature: 0 takes the likeliest token.
        top_p: draw among the likeliest tokens that together have this probability; 0 leaves the likeliest alone.
        top_k: draw among the k likeliest only; 0 or -1 for all.
        min_p: draw among those at least this share as likely as the likeliest.
        typical_p: draw among those whose surprise is nearest to the expected one, of this probability together.
        no_repeat_ngram_size: no so many tokens in a row twice, prompt included; 0 for no such rule.
        seed: of the draws, a 64-bit integer; None or -1: a random one for each request.
        stop: a text, or several: the text ends before the first of these that it comes to hold.
        stop_token_ids: tokens that end the text besides the model's own.
        bad_words: texts that are not written.
        bad_words_ids: the same as token ids.
        include_stop_str_in_output: the text ends behind a stop string.
        ignore_eos: write on after the model's end tokens.
        max_tokens: at most so many new tokens; None or -1: as many as the context has room for.
        min_tokens: before so many new tokens nothing ends the text but its length, or a grammar that is complete.
        logprobs: tell of so many likeliest tokens at each place besides the one that came; -1 for all.
        prompt_logprobs: the same for the prompt's tokens.
        detokenize: whether there is text; False: tokens only.
        skip_special_tokens: leave special tokens out of the text.
        logit_bias: added to the logits of tokens, by id.
        allowed_token_ids: only these may come; None for all.
        output_kind: what each output of a stream holds.
        structured_outputs: a schema, an expression or a grammar that the text follows.

    Raises:
        ConfigError: a value outside its range, or two that contradict each other.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    no_repeat_ngram_size: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        top_k = _border.integer("sampling_params", "top_k", self.top_k, -1, _MOST)
        object.__setattr__(self, "top_k", max(0, top_k))
        self._set_integer("seed", -(2**63), 2**63 - 1)
        self._set_integer("max_tokens", -1, _MOST)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _border.integer("sampling_params", name, value, -1, _MOST_LOGPROBS)
        for name in ("detokenize", "skip_special_tokens"):
            _border.truth("sampling_params", name, getattr(self, name))
        _border.instance(
            "sampling_params", "output_kind", self.output_kind, RequestOutputKind, "pass one of its values"
        )
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            rule = "logit_bias must be a dictionary from ids to numbers"
            _border.refuse("sampling_params", rule, shown(self.logit_bias), "pass a dict")
        if self.allowed_token_ids is not None and len(self._sequence("allowed_token_ids")) == 0:
            rule = "allowed_token_ids must leave a token to choose"
            _border.refuse("sampling_params", rule, "none", "pass None for all")
        if not self.detokenize and self.stop:
            rule, advice = "stop strings need text", "pass detokenize=True"
            _border.refuse("sampling_params", rule, "detokenize=False", advice)
        if self.structured_outputs is not None:
            advice = "pass StructuredOutputsParams(...)"
            kind = StructuredOutputsParams
            _border.instance("sampling_params", "structured_outputs", self.structured_outputs, kind, advice)
            if self.ignore_eos:
                rule, advice = "structured_outputs end where their grammar ends", "leave ignore_eos out"
                _border.refuse("sampling_params", rule, "ignore_eos=True", advice)
        self.sampling(1)

    def _set_integer(self, name: str, low: int, high: int) -> None:
        """Check a setting for which -1 and None mean the same."""
        value = getattr(self, name)
        if value is not None:
            value = _border.integer("sampling_params", name, value, low, high)
            object.__setattr__(self, name, None if value == -1 else value)

    @classmethod
    def of(
        cls, sampling: Sampling, *, structured_outputs: StructuredOutputsParams | None = None
    ) -> SamplingParams:
        """The same settings, as a command line and a model's files decided them.

        Args:
            sampling: these settings.
            structured_outputs: what the text follows besides.

        Raises:
            ConfigError: the two contradict each other.
        """
        given = asdict(sampling)
        is_included, biases = given.pop("include_stop"), dict(given.pop("logit_bias"))
        allowed = given.pop("allowed_token_ids") or None
        return cls(
            **given,
            include_stop_str_in_output=is_included,
            logit_bias=biases,
            allowed_token_ids=allowed,
            structured_outputs=structured_outputs,
        )

    def sampling(self, room: int) -> Sampling:
        """The settings that the choice of tokens takes; a seed is drawn here where none is given.

        Args:
            room: positions that the context has left, for `max_tokens` None.

        Raises:
            ConfigError: a value outside its range.
        """
        most = max(room, self.min_tokens, 1) if self.max_tokens is None else self.max_tokens
        return Sampling(
            max_tokens=most,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            bad_words=self._sequence("bad_words"),
            bad_words_ids=self._sequence("bad_words_ids"),
            logit_bias=() if self.logit_bias is None else tuple(self.logit_bias.items()),
            allowed_token_ids=self._sequence("allowed_token_ids"),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self._sequence("stop_token_ids"),
            stop=(self.stop,) if isinstance(self.stop, str) else self._sequence("stop"),
            include_stop=self.include_stop_str_in_output,
            n=self.n,
            seed=secrets.randbits(63) if self.seed is None else self.seed % _NUM_SEEDS,
        )

    def asked(self) -> Asked:
        """What is told about the texts."""
        return Asked(self.logprobs, self.prompt_logprobs, self.detokenize, self.skip_special_tokens)

    def _sequence(self, name: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        return () if value is None else tuple(_border.sequence("sampling_params", name, value, "values"))
