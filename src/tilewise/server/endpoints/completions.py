"""`/v1/completions`: prompts, of text or of ids, continued whole or as they are written; with `echo`, scored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tilewise.generate import Detokenizer, TextOffsets
from tilewise.serve import Delta, SamplingParams
from tilewise.serve.logprobs import TokenLogprobs
from tilewise.server.endpoints.answers import (
    ChunkBuffer,
    completion_choice,
    completion_figures,
    new_id,
    prompt_figures,
    usage_of,
)
from tilewise.server.errors import ApiError
from tilewise.server.requests.bodies import MOST_PROMPTS, CompletionBody
from tilewise.server.requests.model_files import ModelFiles
from tilewise.server.requests.params import sampling_params
from tilewise.server.service import Caller, Service

__all__ = ["Asking", "answer_completion", "prompts_of", "stream_completion", "whole_completion"]


@dataclass
class _Prompt:
    """A prompt and its texts.

    Attributes:
        ids: of it.
        text: of it, where the answer repeats it.
        offsets: characters of its text before each token, where the answer has them.
        texts: that follow it.
        num_cached: tokens that were found in the cache.
        figures: log probabilities of its tokens, where they were requested.
    """

    ids: list[int]
    text: str
    offsets: list[int]
    texts: list[ChunkBuffer]
    num_cached: int = 0
    figures: list[TokenLogprobs | None] | None = None


@dataclass
class Asking:
    """A request, ready for the engine.

    Attributes:
        files: of the model.
        body: of the request.
        model: the model name in the answer.
        params: of the texts.
        prompts: to continue.
    """

    files: ModelFiles
    body: CompletionBody
    model: str
    params: SamplingParams
    prompts: list[_Prompt] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        """Whether the answer has new tokens; `max_tokens: 0` asks for log probabilities of the prompt alone."""
        return self.body.max_tokens != 0

    def add_prompt(self, given: str | list[int], ids: list[int]) -> None:
        """One more prompt, as it was given and as ids."""
        is_whole = isinstance(given, str) and self.body.truncate_prompt_tokens is None
        text = str(given) if is_whole else self.files.decode(ids) if self.body.echo else ""
        offsets = []
        if self.body.echo and self.body.logprobs is not None:
            # a prompt that came as text does not show the special tokens that the tokenizer adds
            detokenizer = Detokenizer(self.files.tokenizer, [], skip_special_tokens=is_whole)
            reading = TextOffsets(detokenizer, self.files.token_bytes)
            offsets = [min(reading.add(id_)[1], len(text)) for id_ in ids]
        self.prompts.append(_Prompt(ids, text, offsets, [ChunkBuffer() for _ in range(self.params.n)]))

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        written = sum(text.num_tokens for prompt in self.prompts for text in prompt.texts)
        read = sum(len(prompt.ids) for prompt in self.prompts)
        cached = sum(prompt.num_cached for prompt in self.prompts)
        return usage_of(read, written if self.writes else 0, cached)

    def note(self, delta: Delta) -> ChunkBuffer:
        """A delta came; the text that it belongs to."""
        prompt = self.prompts[delta.sequence]
        text = prompt.texts[delta.choice]
        if delta.prompt_logprobs is not None:
            prompt.figures = delta.prompt_logprobs
        if delta.choice == 0 and not text.num_tokens:
            prompt.num_cached = delta.num_cached_tokens
        text.add(delta)
        return text

    def shown_text(
        self, prompt: _Prompt, text: ChunkBuffer, is_first: bool
    ) -> tuple[str, dict[str, Any] | None, list[int]]:
        """What has come of a text, its prompt before it where that is wanted."""
        shown, tokens, figures, offsets = text.take()
        if not self.writes:
            shown, tokens, figures, offsets = "", [], [], []
        echoes = bool(self.body.echo) and is_first
        whole = (prompt.text if echoes else "") + shown
        if self.body.logprobs is None:
            return whole, None, tokens
        rows: list[TokenLogprobs | None] = [*figures]
        ids = tokens
        if self.body.echo:
            offsets = [len(prompt.text) + offset for offset in offsets]
        if echoes:
            rows = [*(prompt.figures or [None] * len(prompt.ids)), *figures]
            ids, offsets = [*prompt.ids, *tokens], [*prompt.offsets, *offsets]
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return whole, completion_figures(ids, rows, offsets, self.files.token_bytes, as_ids), tokens


def prompts_of(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a body."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(one, int) for one in given):
        return [[one for one in given if isinstance(one, int)]]
    return [one for one in given if not isinstance(one, int)]


async def _begin(service: Service, body: CompletionBody) -> Asking:
    service.check_ready()
    service.check_writes()
    name = service.check_model(body.model)
    params = service.check_params(sampling_params(body, service.files.defaults))
    asking = Asking(service.files, body, name, params)
    given = prompts_of(body.prompt)
    if len(given) * params.n > MOST_PROMPTS:
        text = f"[server.request] prompts times n must be at most {MOST_PROMPTS}; got {len(given)} times {params.n}"
        raise ApiError(400, f"{text}; ask for less", "n")
    for one in given:
        truncate = body.truncate_prompt_tokens
        if isinstance(one, str):
            ids = await service.encode(one, body.add_special_tokens, truncate)
        else:
            ids = one
        if not ids:
            text = "[server.request] a prompt must have a token; got none; write something"
            raise ApiError(400, text, "prompt")
        ids = service.fit(ids, truncate, "prompt", params)
        await service.run_in_thread(asking.add_prompt, one, ids)
    return asking


def _reason(asking: Asking, text: ChunkBuffer) -> str | None:
    return text.finish_reason if asking.writes else "length"


async def answer_completion(service: Service, body: CompletionBody, caller: Caller) -> dict[str, Any]:
    """The whole answer.

    Raises:
        ApiError, ConfigError: there is none.
    """
    asking = await _begin(service, body)
    with service.admit(len(asking.prompts) * asking.params.n):
        ids = [prompt.ids for prompt in asking.prompts]
        deltas = service.ask(ids, asking.params, caller, body.cache_salt, body.priority)
        async with aclosing(deltas) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for delta in batch:
                    asking.note(delta)
    return whole_completion(asking)


def whole_completion(asking: Asking) -> dict[str, Any]:
    """The body of an answer, when all of it has come."""
    body = asking.body
    choices: list[dict[str, Any]] = []
    for prompt in asking.prompts:
        for text in prompt.texts:
            shown, figures, tokens = asking.shown_text(prompt, text, is_first=True)
            choice = completion_choice(
                len(choices),
                shown,
                figures,
                _reason(asking, text),
                text.stop_reason if asking.writes else None,
            )
            if body.return_token_ids:
                choice |= {"token_ids": tokens, "prompt_token_ids": prompt.ids}
            if body.prompt_logprobs is not None and prompt.figures is not None:
                choice["prompt_logprobs"] = prompt_figures(prompt.figures)
            choices.append(choice)
    return {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": asking.model,
        "choices": choices,
        "usage": asking.usage(),
    }


async def stream_completion(
    service: Service, body: CompletionBody, caller: Caller
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of an answer.

    Raises:
        ApiError, ConfigError: there is none, or no more of it.
    """
    asking = await _begin(service, body)
    options = body.stream_options
    usage: dict[str, Any] = {"usage": None} if options is not None and options.include_usage else {}
    is_counting = bool(usage) and options is not None and bool(options.continuous_usage_stats)
    head = {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": asking.model,
    }
    begun: set[tuple[int, int]] = set()
    with service.admit(len(asking.prompts) * asking.params.n):
        ids = [prompt.ids for prompt in asking.prompts]
        deltas = service.ask(ids, asking.params, caller, body.cache_salt, body.priority)
        async with aclosing(deltas) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for delta in batch:
                    asking.note(delta)
                for place in dict.fromkeys((delta.sequence, delta.choice) for delta in batch):
                    prompt = asking.prompts[place[0]]
                    text = prompt.texts[place[1]]
                    if not text.is_due(service.settings.stream_interval):
                        continue
                    is_first = place not in begun
                    shown, figures, tokens = asking.shown_text(prompt, text, is_first)
                    begun.add(place)
                    is_over = text.finish_reason is not None
                    choice = completion_choice(
                        place[0] * asking.params.n + place[1],
                        shown,
                        figures,
                        _reason(asking, text) if is_over else None,
                        text.stop_reason if is_over and asking.writes else None,
                    )
                    if body.return_token_ids:
                        choice |= {
                            "token_ids": tokens,
                            **({"prompt_token_ids": prompt.ids} if is_first else {}),
                        }
                    yield {
                        **head,
                        "choices": [choice],
                        **({"usage": asking.usage()} if is_counting else usage),
                    }
    if usage:
        yield {**head, "choices": [], "usage": asking.usage()}
