"""From logits to a text's next piece: the token is drawn, its text decoded, its end recognised.

All that a text's pieces depend on lies here and in its sequence: logits of its own row, its tokens, its settings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core import NotFinite
from tilewise.generate import Detokenizer, Pick
from tilewise.generate.stopping import StopFinder
from tilewise.serve.logprobs import TokenLogprobs, token_logprobs
from tilewise.serve.outputs import Piece
from tilewise.serve.sequence import Sequence

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Text"]


class Text:
    """The text of one sequence.

    Args:
        sequence: whose tokens it has.
        tokenizer: of the model.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        request = sequence.request
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._detokenizer = None
        if request.asked.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, list(request.ids), skip_special_tokens=request.asked.skip_special_tokens
            )
        self._stops = StopFinder(request.sampling.stop, request.sampling.include_stop)
        self._ends = request.all_end_ids
        self._grammar = None if request.grammar is None else request.grammar.copy()
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]

    def read_prompt(self, first: int, rows: NDArray[Any]) -> None:
        """Logits of positions of the prompt from `first` on came; those that are known are passed over."""
        sequence, asked = self._sequence, self._sequence.request.asked
        if sequence.choice != 0 or asked.prompt_logprobs is None:
            return
        ids = sequence.request.ids
        for position, logits_V in enumerate(rows, first):
            if position == sequence.num_prompt_rows < len(ids) - 1:
                found = token_logprobs(logits_V, ids[position + 1], asked.prompt_logprobs)
                self._prompt_logprobs.append(self._decoded(found))
                sequence.num_prompt_rows += 1

    def pick(self, logits_V: NDArray[Any]) -> Pick:
        """How the next token is to be chosen.

        Raises:
            ConfigError: a grammar is more than its limits allow.
        """
        sequence = self._sequence
        allowed = None if self._grammar is None else self._grammar.allowed(len(logits_V))
        return Pick(
            logits_V, sequence.request.sampling, sequence.history, self._ends, sequence.choice, allowed
        )

    def extend(self, logits_V: NDArray[Any], token: int) -> Piece:
        """The next token was chosen.

        Raises:
            ConfigError: a grammar is more than its limits allow.
        """
        history, request = self._sequence.history, self._sequence.request
        sampling, asked = request.sampling, request.asked
        figures = None
        if asked.logprobs is not None:
            figures = self._decoded(token_logprobs(logits_V, token, asked.logprobs))
        is_first = history.num_new == 0
        reason: str | None = None
        stop: str | int | None = None
        if token in self._ends:
            text, reason = self._finish(), "stop"
            if token in sampling.stop_token_ids:
                stop = token
        else:
            history.append(token)
            text = self._detokenizer.add(token) if self._detokenizer is not None else ""
            if self._grammar is not None:
                self._grammar.take(token)
                reason = "stop" if self._grammar.is_complete else None
            if history.num_new >= sampling.max_tokens or len(history) >= request.max_model_len:
                reason = reason or "length"
            if reason is not None:
                text += self._finish()
        if history.num_new >= sampling.min_tokens:
            text, is_stopped = self._stops.add(text)
            if is_stopped:
                reason, stop = "stop", self._stops.found
            text += "" if reason is None else self._stops.finish()
        wants_prompt = is_first and self._sequence.choice == 0 and asked.prompt_logprobs is not None
        return Piece(
            self._sequence.request.index,
            self._sequence.choice,
            token,
            text,
            reason,
            stop,
            figures,
            self._prompt_logprobs if wants_prompt else None,
            self._sequence.num_cached or 0,
        )

    def pool(self, hidden_D: NDArray[Any]) -> Piece:
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
        request = self._sequence.request
        return Piece(
            request.index,
            0,
            None,
            "",
            "stop",
            num_cached_tokens=self._sequence.num_cached or 0,
            vector=vector,
        )

    def abort(self) -> Piece:
        """The text ends here because its caller wants no more of it."""
        return Piece(self._sequence.request.index, self._sequence.choice, None, self._stops.finish(), "abort")

    def _finish(self) -> str:
        return self._detokenizer.finish() if self._detokenizer is not None else ""

    def _decoded(self, found: TokenLogprobs) -> TokenLogprobs:
        if self._detokenizer is None:
            return found
        decode = self._tokenizer.decode
        return {
            token: replace(figure, decoded_token=decode([token], skip_special_tokens=False))
            for token, figure in found.items()
        }
