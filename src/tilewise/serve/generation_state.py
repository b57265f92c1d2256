"""From logits to a text's next delta: sampling, grammar, detokenizing, stop conditions.

A delta is what one step adds to a text. The deltas of a text depend only on this state and on the
text's sequence: on logits of its own row, its tokens and its settings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core import NotFinite
from tilewise.generate import Detokenizer, Sampler, TextOffsets, TokenBytes
from tilewise.generate.detokenizer import StopFinder
from tilewise.serve.logprobs import TokenLogprobs, token_logprobs
from tilewise.serve.outputs import Delta
from tilewise.serve.sequence import Sequence

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["GenerationState"]


class GenerationState:
    """State of generating one text: how it is sampled, its grammar, its detokenizer, when it ends.

    Args:
        sequence: the tokens.
        tokenizer: tokenizer of the model.
        token_bytes: bytes of its tokens, shared by all texts.

    Attributes:
        sequence: the tokens.
        request: the request that the text belongs to.
        ends_by_text: whether stop strings, and not tokens alone, may end the text.
        sampler: how its tokens are sampled.
        end_ids: tokens that end the text.
        longest: largest number of tokens of prompt and text.
        is_plain: whether a step only adds a token, until one of `end_ids` or `longest` ends the text.
        is_structured: whether the text follows a grammar.
        reports_logprobs: whether log probabilities of its tokens are reported, which needs logits.
        begun_s: when the text was first part of a step, in seconds of `time.monotonic`.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
        request = sequence.request
        self.sequence, self.request = sequence, request
        self.ends_by_text = bool(request.sampling.stop)
        self.is_structured = request.grammar is not None
        self.reports_logprobs = request.output_options.logprobs is not None
        self._token_bytes = token_bytes
        self._detokenizer = None
        if request.output_options.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, list(request.ids), skip_special_tokens=request.output_options.skip_special_tokens
            )
        self._offsets = None
        if self._detokenizer is not None and self.reports_logprobs:
            self._offsets = TextOffsets(self._detokenizer, token_bytes)
        self._stops = StopFinder(request.sampling.stop, request.sampling.include_stop_str_in_output)
        self.end_ids = request.all_end_ids
        self.sampler = Sampler(request.sampling, sequence.history, self.end_ids, sequence.choice)
        self.longest = min(sequence.history.num_prompt + request.sampling.max_tokens, request.max_model_len)
        self._grammar = None if request.grammar is None else request.grammar.copy()
        self.is_plain = not (self.ends_by_text or self.is_structured or request.is_pooled)
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._is_first = True
        self.begun_s: float | None = None

    @property
    def wants_prompt(self) -> bool:
        """Whether log probabilities of the prompt's tokens are reported with this text."""
        return self.sequence.choice == 0 and self.request.output_options.prompt_logprobs is not None

    def read_prompt(self, first: int, rows: NDArray[Any]) -> None:
        """Take logits of the prompt's positions from `first` on. Positions that were read before
        are skipped.
        """
        sequence, ids = self.sequence, self.request.ids
        for position, logits_V in enumerate(rows, first):
            if position == sequence.num_prompt_rows < len(ids) - 1:
                count = self.request.output_options.prompt_logprobs or 0
                self._prompt_logprobs.append(
                    self._decoded(token_logprobs(logits_V, ids[position + 1], count))
                )
                sequence.num_prompt_rows += 1

    def mask(self) -> NDArray[np.uint8] | None:
        """Which tokens the grammar allows next; None without a grammar.

        Raises:
            ConfigError: the grammar exceeds its limits.
        """
        return None if self._grammar is None else self._grammar.allowed()

    def take(self, token: int) -> str | None:
        """Append a sampled token. Returns the reason if the token ends the text, otherwise None.
        (Stop strings are checked in `delta`.)

        Raises:
            ConfigError: the grammar exceeds its limits.
        """
        if token in self.end_ids:
            return "stop"
        history = self.sequence.history
        history.push(token)
        if self._grammar is not None:
            self._grammar.take(token)
            if self._grammar.is_complete:
                return "stop"
        return "length" if len(history.ids) >= self.longest else None

    def delta(self, token: int, reason: str | None, num_new: int, logits_V: NDArray[Any] | None) -> Delta:
        """The delta of a token that `take` appended. Call once per token, in order; later tokens do not matter.

        Args:
            token: the sampled token.
            reason: why the token ends the text, as `take` returned; None if it does not.
            num_new: number of new tokens, including this one.
            logits_V: logits from which the token was sampled, if log probabilities are reported.

        Raises:
            ConfigError: the tokenizer cannot decode the token.
        """
        request, options = self.request, self.request.output_options
        logprobs = None
        if options.logprobs is not None:
            assert logits_V is not None
            logprobs = self._decoded(token_logprobs(logits_V, token, options.logprobs))
        stop: str | int | None = None
        text, text_offset = "", 0
        if token in self.end_ids:
            if token in request.sampling.stop_token_ids:
                stop = token
            text_offset = 0 if self._offsets is None else self._offsets.end
        elif self._offsets is not None:
            text, text_offset = self._offsets.add(token)
        elif self._detokenizer is not None:
            text = self._detokenizer.add(token)
        if reason is not None:
            text += self._finish()
        if num_new >= request.sampling.min_tokens:
            text, is_stopped = self._stops.add(text)
            if is_stopped:
                reason, stop = "stop", self._stops.stop_string
            text += "" if reason is None else self._stops.finish()
        is_first, self._is_first = self._is_first, False
        return Delta(
            request.index,
            self.sequence.choice,
            token,
            text,
            reason,
            stop,
            logprobs,
            self._prompt_logprobs if is_first and self.wants_prompt else None,
            self.sequence.num_cached or 0,
            text_offset=text_offset,
            begun_s=self.begun_s if is_first else None,
        )

    def pool(self, hidden_D: NDArray[Any]) -> Delta:
        """The prompt's vector as a delta that ends the sequence.

        Raises:
            NotFinite: a number of the vector is not finite.
        """
        vector = np.array(hidden_D, np.float32)
        if not np.isfinite(vector).all():
            raise NotFinite(
                "[serve.encode] embeddings must be finite; got NaN or infinity; the weights are damaged, or too "
                "large for the dtype: encode in f32"
            )
        request = self.sequence.request
        return Delta(
            request.index,
            0,
            None,
            "",
            "stop",
            num_cached_tokens=self.sequence.num_cached or 0,
            vector=vector,
            begun_s=self.begun_s,
        )

    def abort(self) -> Delta:
        """The last delta of a text that its caller aborted."""
        return Delta(self.sequence.request.index, self.sequence.choice, None, self._stops.finish(), "abort")

    def _finish(self) -> str:
        return self._detokenizer.finish() if self._detokenizer is not None else ""

    def _decoded(self, logprobs: TokenLogprobs) -> TokenLogprobs:
        if self._detokenizer is None:
            return logprobs
        text = self._token_bytes.text
        return {token: replace(figure, decoded_token=text(token)) for token, figure in logprobs.items()}
