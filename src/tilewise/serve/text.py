"""From logits to a text's next delta: the token is drawn, its text decoded, its end recognised.

All that a text's deltas depend on lies here and in its sequence: logits of its own row, its tokens, its settings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core import NotFinite
from tilewise.generate import Detokenizer, Pick, TextOffsets, TokenBytes
from tilewise.generate.stopping import StopFinder
from tilewise.serve.logprobs import TokenLogprobs, token_logprobs
from tilewise.serve.outputs import Delta
from tilewise.serve.sequence import Sequence

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Text"]


class Text:
    """The text of one sequence.

    Args:
        sequence: whose tokens it has.
        tokenizer: of the model.
        token_bytes: of its tokens, shared by all texts.

    Attributes:
        sequence: the same.
        request: what it is written for.
        ends_by_text: whether what it says, and not its tokens alone, may end it.
        choose: how its tokens are chosen.
        end_ids: tokens that end it.
        longest: positions of prompt and text that it ends with at the latest.
        is_plain: whether a step changes no more of it than its tokens, until one of `end_ids`.
        is_structured: whether a grammar says what may come.
        tells_figures: whether logits are needed to tell of a token.
        begun_s: when it was first part of a step, of `time.monotonic`.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
        request = sequence.request
        self.sequence, self.request = sequence, request
        self.ends_by_text = bool(request.sampling.stop)
        self.is_structured = request.grammar is not None
        self.tells_figures = request.output_options.logprobs is not None
        self._token_bytes = token_bytes
        self._detokenizer = None
        if request.output_options.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, list(request.ids), skip_special_tokens=request.output_options.skip_special_tokens
            )
        self._offsets = None
        if self._detokenizer is not None and self.tells_figures:
            self._offsets = TextOffsets(self._detokenizer, token_bytes)
        self._stops = StopFinder(request.sampling.stop, request.sampling.include_stop_str_in_output)
        self.end_ids = request.all_end_ids
        self.choose = Pick(request.sampling, sequence.history, self.end_ids, sequence.choice)
        self.longest = min(sequence.history.num_prompt + request.sampling.max_tokens, request.max_model_len)
        self._grammar = None if request.grammar is None else request.grammar.copy()
        self.is_plain = not (self.ends_by_text or self.is_structured or request.is_pooled)
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._is_first = True
        self.begun_s: float | None = None

    @property
    def wants_prompt(self) -> bool:
        """Whether figures of the prompt's tokens are told with this text."""
        return self.sequence.choice == 0 and self.request.output_options.prompt_logprobs is not None

    def read_prompt(self, first: int, rows: NDArray[Any]) -> None:
        """Logits of positions of the prompt from `first` on came; those that are known are passed over."""
        sequence, ids = self.sequence, self.request.ids
        for position, logits_V in enumerate(rows, first):
            if position == sequence.num_prompt_rows < len(ids) - 1:
                found = token_logprobs(
                    logits_V, ids[position + 1], self.request.output_options.prompt_logprobs or 0
                )
                self._prompt_logprobs.append(self._decoded(found))
                sequence.num_prompt_rows += 1

    def mask(self) -> NDArray[np.uint8] | None:
        """Which tokens may come next, where a grammar says.

        Raises:
            ConfigError: it is more than its limits allow.
        """
        return None if self._grammar is None else self._grammar.allowed()

    def take(self, token: int) -> str | None:
        """The next token was chosen; why it ends the text, as far as tokens say.

        Raises:
            ConfigError: a grammar is more than its limits allow.
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
        """What a token that was taken adds; each once, in order. Depends on nothing that comes later.

        Args:
            token: that was chosen.
            reason: why it ends the text, as `take` said.
            num_new: tokens written with it.
            logits_V: that it was chosen from, where figures are told.

        Raises:
            ConfigError: the tokenizer makes no text of it.
        """
        request, options = self.request, self.request.output_options
        figures = None
        if options.logprobs is not None:
            assert logits_V is not None
            figures = self._decoded(token_logprobs(logits_V, token, options.logprobs))
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
                reason, stop = "stop", self._stops.found
            text += "" if reason is None else self._stops.finish()
        is_first, self._is_first = self._is_first, False
        return Delta(
            request.index,
            self.sequence.choice,
            token,
            text,
            reason,
            stop,
            figures,
            self._prompt_logprobs if is_first and self.wants_prompt else None,
            self.sequence.num_cached or 0,
            text_offset=text_offset,
            begun_s=self.begun_s if is_first else None,
        )

    def pool(self, hidden_D: NDArray[Any]) -> Delta:
        """The prompt's vector, which ends its sequence.

        Raises:
            NotFinite: it holds what is no finite number.
        """
        vector = np.array(hidden_D, np.float32)
        if not np.isfinite(vector).all():
            raise NotFinite(
                "[serve.encode] vectors must be finite; got others; the weights are spoilt, or too large for the "
                "element type: encode in f32"
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
        """The text ends here because its caller wants no more of it."""
        return Delta(self.sequence.request.index, self.sequence.choice, None, self._stops.finish(), "abort")

    def _finish(self) -> str:
        return self._detokenizer.finish() if self._detokenizer is not None else ""

    def _decoded(self, found: TokenLogprobs) -> TokenLogprobs:
        if self._detokenizer is None:
            return found
        text = self._token_bytes.text
        return {token: replace(figure, decoded_token=text(token)) for token, figure in found.items()}
