"""Assembles the outputs that a caller of one request gets from the deltas of its texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewise.serve.outputs import CompletionOutput, Delta, RequestOutput, RequestOutputKind
from tilewise.serve.request import Request

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """The growing output of one request.

    Args:
        request: the request.
        prompt: the prompt as the caller gave it. If it is a text, it becomes part of the output.
        kind: what each output contains.
    """

    def __init__(self, request: Request, prompt: object, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._num_open = request.sampling.n
        choices = [CompletionOutput(choice) for choice in range(request.sampling.n)]
        content = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        text = content if isinstance(content, str) else None
        self._whole = RequestOutput(request.request_id, text, list(request.ids), choices)

    @property
    def is_finished(self) -> bool:
        """Whether all texts of the request have ended."""
        return self._whole.finished

    def add(self, delta: Delta) -> RequestOutput | None:
        """Add a delta. Returns the output to yield, or None if this delta needs none."""
        output, choice = self._whole, self._whole.outputs[delta.choice]
        choice.extend(delta)
        self._num_open -= choice.finished()
        output.finished = self._num_open == 0
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = delta.prompt_logprobs
        if delta.choice == 0 and len(choice.token_ids) == 1:
            output.num_cached_tokens = delta.num_cached_tokens
        if self._kind is RequestOutputKind.DELTA:
            new = CompletionOutput(delta.choice)
            new.extend(delta)
            return replace(output, outputs=[new], prompt_logprobs=delta.prompt_logprobs)
        if self._kind is RequestOutputKind.FINAL_ONLY and not output.finished:
            return None
        return self._snapshot()

    def _snapshot(self) -> RequestOutput:
        """A copy that later deltas do not change."""
        outputs = [
            replace(
                each,
                token_ids=list(each.token_ids),
                logprobs=None if each.logprobs is None else list(each.logprobs),
            )
            for each in self._whole.outputs
        ]
        return replace(self._whole, outputs=outputs)
