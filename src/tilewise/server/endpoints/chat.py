"""`/v1/chat/completions`: answers a conversation, whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from tilewise.core import Validator
from tilewise.core.validation import shown
from tilewise.generate import TokenBytes
from tilewise.serve import Delta, SamplingParams, StructuredOutputsParams
from tilewise.server.endpoints.answers import (
    ChunkBuffer,
    call_id,
    chat_choice,
    chat_logprobs,
    message_of,
    new_id,
    prompt_logprobs_of,
    usage_of,
)
from tilewise.server.requests.bodies import ChatBody, ToolChoice, ToolModel
from tilewise.server.requests.conversation import Conversation, Rendered
from tilewise.server.requests.model_files import ModelFiles
from tilewise.server.requests.params import sampling_params
from tilewise.server.requests.reading import OutputFormat, Part, Reader, merged
from tilewise.server.requests.tool_parsers import FORMATS
from tilewise.server.service import Caller, Service

__all__ = ["ChatRun", "answer_chat", "begin", "open_run", "plan", "stream_chat", "take", "whole_chat"]

_validate = Validator("server")


@dataclass
class Choice:
    """One answer to a conversation.

    Attributes:
        reader: splits the text into content, reasoning and calls.
        text: buffer of the next chunk.
        parts: parts that have not been sent.
        num_calls: number of tool calls that have been sent.
        num_thought: number of reasoning tokens, including the tags around them.
        has_begun: whether the answer's first chunk was sent.
    """

    reader: Reader
    text: ChunkBuffer = field(default_factory=ChunkBuffer)
    parts: list[Part] = field(default_factory=list)
    num_calls: int = 0
    num_thought: int = 0
    has_begun: bool = False

    def take_parts(self) -> list[Part]:
        """The parts to send now. If the text has ended, all remaining parts."""
        is_over = self.text.finish_reason is not None
        parts, self.parts = [*self.parts, *(self.reader.finish() if is_over else [])], []
        return merged(parts)


@dataclass
class ChatRun:
    """A request for answers, ready for the engine.

    Attributes:
        model: the model name in the answer.
        ids: token ids of the prompt.
        params: settings of the texts.
        output_format: how the texts are read.
        choices: the answers.
        token_bytes: bytes of the tokenizer's tokens.
        warnings: warnings for the client, one sentence each.
        num_cached: tokens of the prompt that were found in the prefix cache.
        prompt_logprobs: log probabilities of the prompt, if requested.
    """

    model: str
    ids: list[int]
    params: SamplingParams
    output_format: OutputFormat
    choices: list[Choice]
    token_bytes: TokenBytes
    warnings: tuple[str, ...] = ()
    num_cached: int = 0
    prompt_logprobs: list[Any] | None = None

    @property
    def num_written(self) -> int:
        """Number of tokens of all answers so far."""
        return sum(choice.text.num_tokens for choice in self.choices)

    @property
    def num_thought(self) -> int:
        """Number of reasoning tokens so far."""
        return sum(choice.num_thought for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """The usage so far."""
        return usage_of(len(self.ids), self.num_written, self.num_cached, self.num_thought)

    def warned(self) -> dict[str, Any]:
        """The field `warnings` of an answer; empty if there are no warnings."""
        return {"warnings": list(self.warnings)} if self.warnings else {}

    def finish_reason(self, choice: Choice) -> str | None:
        """Why an answer has ended, as OpenAI names it."""
        reason = choice.text.finish_reason
        is_call = choice.num_calls > 0 and self.output_format.function is None and reason == "stop"
        return "tool_calls" if is_call else reason


def plan(files: ModelFiles, body: ChatBody) -> tuple[Conversation, SamplingParams, OutputFormat]:
    """The conversation of a body, the settings of its answers, and how these are read.

    Args:
        files: files of the model.
        body: the validated body.

    Raises:
        ConfigError: the body cannot be answered.
    """
    conversation = Conversation.of(body)
    structure, output_format = _calls(files, body)
    output_format = replace(output_format, has_short_ids=files.has_short_ids)
    return conversation, sampling_params(body, files.defaults, structure), output_format


def open_run(
    token_bytes: TokenBytes,
    name: str,
    rendered: Rendered,
    ids: list[int],
    params: SamplingParams,
    output_format: OutputFormat,
) -> ChatRun:
    """Make the run of a rendered conversation.

    Args:
        token_bytes: bytes of the tokenizer's tokens.
        name: name of the model.
        rendered: the prompt that the template made.
        ids: token ids of the prompt, perhaps truncated.
        params: settings of the texts.
        output_format: how the texts are read.
    """
    if output_format.thinks:
        is_free = params.structured_outputs is None
        inside = rendered.text.rstrip().endswith("<think>")
        output_format = replace(output_format, thinks=is_free, is_thinking=inside and is_free)
    choices = [Choice(Reader(output_format)) for _ in range(params.n)]
    return ChatRun(name, ids, params, output_format, choices, token_bytes, rendered.warnings)


async def begin(service: Service, body: ChatBody) -> ChatRun:
    """Render the conversation of a body and make its run.

    Raises:
        ApiError, ConfigError: the body cannot be answered.
    """
    service.check_ready()
    service.check_writes()
    name = service.check_model(body.model)
    conversation, params, output_format = plan(service.files, body)
    service.check_params(params, "top_logprobs")
    rendered = await service.render(conversation)
    ids = service.fit(rendered.ids, body.truncate_prompt_tokens, "messages", params.max_tokens)
    return open_run(service.files.token_bytes, name, rendered, ids, params, output_format)


def _calls(files: ModelFiles, body: ChatBody) -> tuple[StructuredOutputsParams | None, OutputFormat]:
    """The grammar for tool calls that the model must write (None if it need not), and how texts are
    read.
    """
    tools, choice = body.tools or [], body.tool_choice
    thinks = files.thinks and body.include_reasoning is not False
    if isinstance(choice, ToolChoice):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            rule, got = "tool_choice must name one of tools", shown(choice.function.name)
            _validate.invalid("request", rule, got, "correct it")
        schema = named[0].function.parameters or {"type": "object"}
        return _calls_of(schema), OutputFormat(function=choice.function.name)
    if choice == "required":
        if not tools:
            _validate.invalid("request", "tool_choice required needs tools", "none", "add some")
        schema = _list_of_calls(tools, body.parallel_tool_calls is not False)
        return _calls_of(schema), OutputFormat(calls=True)
    if not tools or choice == "none":
        return None, OutputFormat(thinks=thinks)
    form = files.tools
    if form is not None and FORMATS[form].shows_special and body.skip_special_tokens is None:
        body.skip_special_tokens = False
    return None, OutputFormat(form, thinks, is_single=body.parallel_tool_calls is False)


def _calls_of(schema: dict[str, Any]) -> StructuredOutputsParams:
    """A grammar of calls as JSON, with at most one space between parts, so that no tokens are spent on whitespace."""
    return StructuredOutputsParams(json=schema, whitespace_pattern="[ ]?")


def _list_of_calls(tools: Sequence[ToolModel], are_many: bool) -> dict[str, Any]:
    """A JSON schema of a list of calls."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool.function.name]},
                "parameters": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if are_many else {**schema, "maxItems": 1}


async def answer_chat(service: Service, body: ChatBody, caller: Caller) -> dict[str, Any]:
    """The whole answer.

    Raises:
        ApiError, ConfigError: the request is invalid or failed.
    """
    run = await begin(service, body)
    with service.admit(run.params.n):
        deltas = service.ask([run.ids], run.params, caller, body.cache_salt, body.priority, model=run.model)
        async with aclosing(deltas) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for delta in batch:
                    take(run, delta)
    return whole_chat(run, body)


def take(run: ChatRun, delta: Delta) -> None:
    """Add a delta of an answer."""
    _record_prompt(run, delta)
    choice = run.choices[delta.choice]
    choice.text.add(delta)
    was_thinking = choice.reader.is_thinking
    choice.parts += choice.reader.add(delta.text)
    if delta.token is not None and (was_thinking or choice.reader.is_thinking):
        choice.num_thought += 1


def whole_chat(run: ChatRun, body: ChatBody) -> dict[str, Any]:
    """The body of an answer, after all deltas."""
    choices = []
    for index, choice in enumerate(run.choices):
        parts = choice.take_parts()
        choice.num_calls = sum(part.kind == "call" for part in parts)
        logprobs = None
        if choice.text.logprobs:
            logprobs = _logprobs(body, run, choice.text.tokens, choice.text.logprobs)
        reason, stop = run.finish_reason(choice), choice.text.stop_reason
        message = message_of(parts, run.output_format.has_short_ids)
        answer = chat_choice(index, message, logprobs, reason, stop)
        choices.append({**answer, "token_ids": choice.text.tokens} if body.return_token_ids else answer)
    answer = {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": run.model,
        "choices": choices,
        "usage": run.usage(),
        "system_fingerprint": None,
    }
    if run.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs_of(run.prompt_logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = run.ids
    return answer | run.warned()


async def stream_chat(service: Service, body: ChatBody, caller: Caller) -> AsyncIterator[dict[str, Any]]:
    """The chunks of an answer.

    Raises:
        ApiError, ConfigError: the request is invalid or failed, perhaps after some chunks.
    """
    run = await begin(service, body)
    options = body.stream_options
    usage: dict[str, Any] = {"usage": None} if options is not None and options.include_usage else {}
    is_counting = bool(usage) and options is not None and bool(options.continuous_usage_stats)
    head = {
        "id": new_id("chatcmpl"),
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": run.model,
        "system_fingerprint": None,
    }
    once: dict[str, Any] = run.warned()  # fields of the first chunk only
    if body.return_token_ids:
        once["prompt_token_ids"] = run.ids
    with service.admit(run.params.n):
        deltas = service.ask([run.ids], run.params, caller, body.cache_salt, body.priority, model=run.model)
        async with aclosing(deltas) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for delta in batch:
                    take(run, delta)
                for index in dict.fromkeys(delta.choice for delta in batch):
                    choice = run.choices[index]
                    if not choice.text.is_due(service.settings.stream_interval):
                        continue
                    for chunks in _deltas(body, run, index, choice):
                        counted = {"usage": run.usage()} if is_counting else usage
                        yield {**head, "choices": [chunks], **counted, **once}
                        once = {}
    if usage:
        yield {**head, "choices": [], "usage": run.usage()}


def _record_prompt(run: ChatRun, delta: Delta) -> None:
    """Record what a delta reports about the prompt."""
    if delta.prompt_logprobs is not None:
        run.prompt_logprobs = delta.prompt_logprobs
    if delta.choice == 0 and not run.choices[0].text.num_tokens:
        run.num_cached = delta.num_cached_tokens


def _logprobs(body: ChatBody, run: ChatRun, tokens: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
    as_ids = bool(body.return_tokens_as_token_ids)
    return chat_logprobs(tokens, logprobs, run.params.logprobs or 0, run.token_bytes, as_ids)


def _deltas(body: ChatBody, run: ChatRun, index: int, choice: Choice) -> list[dict[str, Any]]:
    """The choices of the next chunks of one answer."""
    deltas: list[dict[str, Any]] = []
    if not choice.has_begun:
        choice.has_begun = True
        deltas.append({"role": "assistant", "content": ""})
    _, tokens, logprobs, _ = choice.text.take()
    is_over = choice.text.finish_reason is not None
    deltas += [_delta(run, choice, part) for part in choice.take_parts()]
    chunks = [_chunk(index, delta) for delta in deltas]
    if logprobs:
        if len(chunks) < 2 and "role" in (chunks[-1]["delta"] if chunks else {"role": ""}):
            chunks.append(_chunk(index, {"content": ""}))
        chunks[-1]["logprobs"] = _logprobs(body, run, tokens, logprobs)
    if body.return_token_ids and tokens:
        if not chunks:
            chunks.append(_chunk(index, {}))
        chunks[-1]["token_ids"] = tokens
    if is_over:
        last = _chunk(index, {})
        last["finish_reason"], last["stop_reason"] = run.finish_reason(choice), choice.text.stop_reason
        chunks.append(last)
    return chunks


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(run: ChatRun, choice: Choice, part: Part) -> dict[str, Any]:
    if part.kind == "content":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}
    function = {"arguments": part.text}
    if part.kind == "arguments":
        return {"tool_calls": [{"index": choice.num_calls - 1, "function": function}]}
    choice.num_calls += 1
    id_ = call_id(part, run.output_format.has_short_ids)
    call = {"index": choice.num_calls - 1, "id": id_, "type": "function"}
    return {"tool_calls": [{**call, "function": {"name": part.name, **function}}]}
