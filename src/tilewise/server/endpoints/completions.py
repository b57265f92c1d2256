"""`/v1/completions`: continues prompts of text or token ids. The answer is whole or a stream. With
`echo`, the answer also repeats the prompt, and can have the log probabilities of its tokens.
"""

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
    completion_logprobs,
    new_id,
    prompt_logprobs_of,
    usage_of,
)
from tilewise.server.errors import ApiError
from tilewise.server.requests.bodies import MOST_PROMPTS, CompletionBody
from tilewise.server.requests.model_files import ModelFiles
from tilewise.server.requests.params import sampling_params
from tilewise.server.service import Caller, Service

__all__ = ["CompletionRun", "answer_completion", "prompts_of", "stream_completion", "whole_completion"]


@dataclass
class _Prompt:
    """A prompt and its texts.

    Attributes:
        ids: token ids of the prompt.
        text: text of the prompt, if the answer repeats it.
        offsets: number of characters of this text before each token, if the answer has log
            probabilities.
        texts: the texts that continue the prompt.
        num_cached: tokens that were found in the prefix cache.
        logprobs: log probabilities of the prompt's tokens, if requested.
    """

    ids: list[int]
    text: str
    offsets: list[int]
    texts: list[ChunkBuffer]
    num_cached: int = 0
    logprobs: list[TokenLogprobs | None] | None = None


@dataclass
class CompletionRun:
    """A request, ready for the engine.

    Attributes:
        files: files of the model.
        body: body of the request.
        model: the model name in the answer.
        params: settings of the texts.
        prompts: prompts to continue.
    """

    files: ModelFiles
    body: CompletionBody
    model: str
    params: SamplingParams
    prompts: list[_Prompt] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        """Whether the answer has new tokens. With `max_tokens: 0`, a request asks only for log
        probabilities of the prompt.
        """
        return self.body.max_tokens != 0

    def add_prompt(self, prompt_or_ids: str | list[int], ids: list[int]) -> None:
        """Add a prompt, as the request has it and as token ids."""
        is_whole = isinstance(prompt_or_ids, str) and self.body.truncate_prompt_tokens is None
        text = str(prompt_or_ids) if is_whole else self.files.decode(ids) if self.body.echo else ""
        offsets = []
        if self.body.echo and self.body.logprobs is not None:
            num_added = self.files.num_added_tokens(text, ids) if is_whole else 0
            detokenizer = Detokenizer(self.files.tokenizer, [], skip_special_tokens=False)
            reading = TextOffsets(detokenizer, self.files.token_bytes)
            offsets = [0] * num_added + [min(reading.add(id_)[1], len(text)) for id_ in ids[num_added:]]
        self.prompts.append(_Prompt(ids, text, offsets, [ChunkBuffer() for _ in range(self.params.n)]))

    def usage(self) -> dict[str, Any]:
        """The usage so far."""
        written = sum(text.num_tokens for prompt in self.prompts for text in prompt.texts)
        read = sum(len(prompt.ids) for prompt in self.prompts)
        cached = sum(prompt.num_cached for prompt in self.prompts)
        return usage_of(read, written if self.writes else 0, cached)

    def add(self, delta: Delta) -> ChunkBuffer:
        """Add a delta. Returns the buffer of the text that it belongs to."""
        prompt = self.prompts[delta.sequence]
        text = prompt.texts[delta.choice]
        if delta.prompt_logprobs is not None:
            prompt.logprobs = delta.prompt_logprobs
        if delta.choice == 0 and not text.num_tokens:
            prompt.num_cached = delta.num_cached_tokens
        text.add(delta)
        return text

    def shown_text(
        self, prompt: _Prompt, text: ChunkBuffer, is_first: bool
    ) -> tuple[str, dict[str, Any] | None, list[int]]:
        """The new text, log probabilities and tokens of a chunk. With `echo`, the first chunk
        begins with those of the prompt.
        """
        shown, tokens, logprobs, offsets = text.take()
        if not self.writes:
            shown, tokens, logprobs, offsets = "", [], [], []
        echoes = bool(self.body.echo) and is_first
        new_text = (prompt.text if echoes else "") + shown
        if self.body.logprobs is None:
            return new_text, None, tokens
        rows: list[TokenLogprobs | None] = [*logprobs]
        ids = tokens
        if self.body.echo:
            offsets = [len(prompt.text) + offset for offset in offsets]
        if echoes:
            rows = [*(prompt.logprobs or [None] * len(prompt.ids)), *logprobs]
            ids, offsets = [*prompt.ids, *tokens], [*prompt.offsets, *offsets]
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return new_text, completion_logprobs(ids, rows, offsets, self.files.token_bytes, as_ids), tokens


def prompts_of(prompt_or_ids: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a body, as a list."""
    if isinstance(prompt_or_ids, str):
        return [prompt_or_ids]
    if all(isinstance(one, int) for one in prompt_or_ids):
        return [[one for one in prompt_or_ids if isinstance(one, int)]]
    return [one for one in prompt_or_ids if not isinstance(one, int)]


async def _open_run(service: Service, body: CompletionBody) -> CompletionRun:
    service.check_ready()
    service.check_writes()
    name = service.check_model(body.model)
    params = service.check_params(sampling_params(body, service.files.defaults))
    run = CompletionRun(service.files, body, name, params)
    prompts = prompts_of(body.prompt)
    if len(prompts) * params.n > MOST_PROMPTS:
        text = f"[server.request] prompts times n must be at most {MOST_PROMPTS}; got {len(prompts)} times {params.n}"
        raise ApiError(400, f"{text}; lower n or send fewer prompts", "n")
    for one in prompts:
        truncate = body.truncate_prompt_tokens
        if isinstance(one, str):
            ids = await service.encode(one, body.add_special_tokens, truncate)
        else:
            ids = one
        if not ids:
            text = "[server.request] a prompt must have at least one token; got none; send text"
            raise ApiError(400, text, "prompt")
        ids = service.fit(ids, truncate, "prompt", params.max_tokens if run.writes else 0)
        await service.run_in_thread(run.add_prompt, one, ids)
    return run


def _reason(run: CompletionRun, text: ChunkBuffer) -> str | None:
    return text.finish_reason if run.writes else "length"


async def answer_completion(service: Service, body: CompletionBody, caller: Caller) -> dict[str, Any]:
    """The whole answer.

    Raises:
        ApiError, ConfigError: the request is invalid or failed.
    """
    run = await _open_run(service, body)
    with service.admit(len(run.prompts) * run.params.n):
        ids = [prompt.ids for prompt in run.prompts]
        deltas = service.ask(ids, run.params, caller, body.cache_salt, body.priority, model=run.model)
        async with aclosing(deltas) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for delta in batch:
                    run.add(delta)
    return whole_completion(run)


def whole_completion(run: CompletionRun) -> dict[str, Any]:
    """The body of an answer, after all deltas."""
    body = run.body
    choices: list[dict[str, Any]] = []
    for prompt in run.prompts:
        for text in prompt.texts:
            shown, logprobs, tokens = run.shown_text(prompt, text, is_first=True)
            choice = completion_choice(
                len(choices),
                shown,
                logprobs,
                _reason(run, text),
                text.stop_reason if run.writes else None,
            )
            if body.return_token_ids:
                choice |= {"token_ids": tokens, "prompt_token_ids": prompt.ids}
            if body.prompt_logprobs is not None and prompt.logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs_of(prompt.logprobs)
            choices.append(choice)
    return {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": run.model,
        "choices": choices,
        "usage": run.usage(),
    }


async def stream_completion(
    service: Service, body: CompletionBody, caller: Caller
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of an answer.

    Raises:
        ApiError, ConfigError: the request is invalid or failed, perhaps after some chunks.
    """
    run = await _open_run(service, body)
    options = body.stream_options
    usage: dict[str, Any] = {"usage": None} if options is not None and options.include_usage else {}
    is_counting = bool(usage) and options is not None and bool(options.continuous_usage_stats)
    head = {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": run.model,
    }
    begun: set[tuple[int, int]] = set()
    with service.admit(len(run.prompts) * run.params.n):
        ids = [prompt.ids for prompt in run.prompts]
        deltas = service.ask(ids, run.params, caller, body.cache_salt, body.priority, model=run.model)
        async with aclosing(deltas) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for delta in batch:
                    run.add(delta)
                for place in dict.fromkeys((delta.sequence, delta.choice) for delta in batch):
                    prompt = run.prompts[place[0]]
                    text = prompt.texts[place[1]]
                    if not text.is_due(service.settings.stream_interval):
                        continue
                    is_first = place not in begun
                    shown, logprobs, tokens = run.shown_text(prompt, text, is_first)
                    begun.add(place)
                    is_over = text.finish_reason is not None
                    choice = completion_choice(
                        place[0] * run.params.n + place[1],
                        shown,
                        logprobs,
                        _reason(run, text) if is_over else None,
                        text.stop_reason if is_over and run.writes else None,
                    )
                    if body.return_token_ids:
                        choice |= {
                            "token_ids": tokens,
                            **({"prompt_token_ids": prompt.ids} if is_first else {}),
                        }
                    yield {
                        **head,
                        "choices": [choice],
                        **({"usage": run.usage()} if is_counting else usage),
                    }
    if usage:
        yield {**head, "choices": [], "usage": run.usage()}
