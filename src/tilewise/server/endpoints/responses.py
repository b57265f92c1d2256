"""`/v1/responses` without stored state: answers with text and function calls, whole or as a stream
of events.

A request contains its whole conversation. It is converted to a request of `/v1/chat/completions`,
and the answer is converted back. Fields that need stored requests, and tools that the server would
have to run itself, are rejected.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError

from tilewise.core import Validator
from tilewise.core.validation import shown
from tilewise.server.endpoints.answers import call_id, chat_logprobs
from tilewise.server.endpoints.chat import ChatRun, begin, take
from tilewise.server.errors import ApiError, of_exception, validation_error
from tilewise.server.requests.bodies import ChatBody, ResponseBody
from tilewise.server.requests.conversation import text_of
from tilewise.server.requests.reading import Part
from tilewise.server.service import Caller, Service
from tilewise.settings import SamplingSettings, settings_of

__all__ = ["answer_response", "chat_body", "stream_response"]

_SAME = (
    *("model", "cache_salt", "priority"),
    *(name for name, one in settings_of(SamplingSettings).items() if one.in_response_body),
)
_LOGPROBS = "message.output_text.logprobs"
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_validate = Validator("server")


def chat_body(body: ResponseBody) -> ChatBody:
    """Convert a body to one of the chat endpoint.

    Raises:
        ApiError, ConfigError: the request needs an unsupported feature.
    """
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            text = f"[server.request] nothing is stored between requests; got {name}; send the whole conversation"
            raise ApiError(400, text, name)
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for number, item in enumerate(items):
        _add(messages, item, f"input.{number}")
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields |= {"messages": messages, "tools": [_tool(tool) for tool in body.tools or ()] or None}
    fields |= {"max_completion_tokens": body.max_output_tokens, "tool_choice": _choice(body.tool_choice)}
    fields |= {
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    if _LOGPROBS in (body.include or ()) or body.top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    try:
        chat: ChatBody = ChatBody.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        raise validation_error(error) from None
    return chat


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    """Add an item of the input to the messages, as a message or as a part of the last message.
    Errors name the item's place in the body.
    """
    kind = item.get("type", "message")
    if kind == "message":
        content = _content(item.get("content"), f"{place}.content")
        messages.append({"role": item.get("role"), "content": text_of(content, f"{place}.content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = text_of(_content(item.get("output"), f"{place}.output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        parts = _content(item.get("content") or [], f"{place}.content")
        if isinstance(parts, list):
            parts = text_of([{**part, "type": "text"} for part in parts], f"{place}.content")
        thought = parts
        if thought:
            messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
    else:
        rule = "items of input must be messages, reasoning, function_call or function_call_output"
        _validate.invalid("request", rule, f"one of type {shown(kind, 40)} at {place}", "remove others")


def _content(value: Any, place: str) -> Any:
    if value is None or isinstance(value, str):
        return value
    parts = _validate.sequence("request", place, value, "parts")
    return [
        _validate.mapping("request", f"{place}.{number}", part, "fields") for number, part in enumerate(parts)
    ]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        rule = "tools must be functions, which the client runs"
        _validate.invalid("request", rule, f"one of type {shown(tool.get('type'), 40)}", "remove others")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}


def _choice(value: Any) -> Any:
    return (
        {"type": "function", "function": {"name": value.get("name")}} if isinstance(value, Mapping) else value
    )


def _format(value: Mapping[str, Any]) -> dict[str, Any]:
    """`text.format` in the form of `response_format`."""
    if value.get("type") != "json_schema":
        return dict(value)
    inner = {name: value for name, value in value.items() if name != "type"}
    return {"type": "json_schema", "json_schema": inner}


class _Output:
    """The items of an answer, and the events that report them.

    Args:
        body: body of the request.
        run: the chat request that answers it.
    """

    def __init__(self, body: ResponseBody, run: ChatRun) -> None:
        self.run, self.body = run, body
        self._id, self._created = f"resp_{secrets.token_hex(24)}", int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._number = -1
        self._logprobs: list[dict[str, Any]] = []
        self._fresh: list[dict[str, Any]] = []

    @property
    def has_begun(self) -> bool:
        """Whether an event has been sent."""
        return self._number >= 0

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Make an event with the next sequence number."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def logprobs(self, tokens: list[int], rows: list[Any]) -> None:
        """Take log probabilities of new tokens. If the tokens belong to a message, they are sent
        with its next delta.
        """
        if rows:
            top = self.run.params.logprobs or 0
            self._fresh += chat_logprobs(tokens, rows, top, self.run.token_bytes)["content"]

    def whole(self, status: str) -> dict[str, Any]:
        """The response object in its current state."""
        body, choice = self.body, self.run.choices[0]
        is_cut = choice.text.finish_reason == "length"
        shown_status = "incomplete" if status == "completed" and is_cut else status
        usage = None
        if status == "completed":
            usage = {
                "input_tokens": len(self.run.ids),
                "input_tokens_details": {"cached_tokens": self.run.num_cached},
                "output_tokens": self.run.num_written,
                "output_tokens_details": {"reasoning_tokens": self.run.num_thought},
                "total_tokens": len(self.run.ids) + self.run.num_written,
            }
        text = body.text.model_dump(exclude_none=True) if body.text is not None else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": shown_status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if shown_status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.run.model,
            "output": [item for item in self._items if status == "completed"],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            "store": False,
            "temperature": self.run.params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": self.run.params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
            **self.run.warned(),
        }

    def add(self, part: Part) -> list[dict[str, Any]]:
        """The events of a new part."""
        kinds = {"content": "message", "reasoning": "reasoning", "call": "function_call"}
        kind = kinds.get(part.kind, "function_call")
        events: list[dict[str, Any]] = []
        if part.kind == "call" or self._open is None or self._open["type"] != kind:
            if part.kind == "content" and not part.text.strip() and self._items:
                return []  # whitespace between two calls
            events += self.close() + self._begin(kind, part)
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items) - 1}
        logprobs, self._fresh = self._fresh, []
        if kind == "function_call":
            self._open["arguments"] += part.text
            if part.text:
                events.append(self.event("response.function_call_arguments.delta", **place, delta=part.text))
        else:
            self._open["content"][0]["text"] += part.text
            name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
            more: dict[str, Any] = {}
            if kind == "message":
                more["logprobs"] = logprobs
                self._logprobs += logprobs
            events.append(self.event(name, **place, content_index=0, delta=part.text, **more))
        return events

    def _begin(self, kind: str, part: Part) -> list[dict[str, Any]]:
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(24)}", "type": kind}
        item["status"] = "in_progress"
        if kind == "function_call":
            id_ = call_id(part, self.run.output_format.has_short_ids)
            item |= {"call_id": id_, "name": part.name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._open = item
        index = len(self._items) - 1
        events = [self.event("response.output_item.added", output_index=index, item=_copy(item))]
        if kind != "function_call":
            item["content"] = [_content_part(kind)]
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events.append(self.event("response.content_part.added", **place, part=_content_part(kind)))
        return events

    def close(self) -> list[dict[str, Any]]:
        """The events that end the open item."""
        item, self._open = self._open, None
        if item is None:
            return []
        is_last_cut = self.run.choices[0].text.finish_reason == "length"
        item["status"] = "incomplete" if is_last_cut else "completed"
        index = len(self._items) - 1
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        events: list[dict[str, Any]] = []
        if item["type"] == "function_call":
            fields = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self.event("response.function_call_arguments.done", **place, **fields))
        else:
            part = item["content"][0]
            place["content_index"] = 0
            if item["type"] == "message":
                part["logprobs"] = [*self._logprobs, *self._fresh]
                self._logprobs, self._fresh = [], []
                more = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append(self.event("response.output_text.done", **place, **more))
            else:
                events.append(self.event("response.reasoning_text.done", **place, text=part["text"]))
            events.append(self.event("response.content_part.done", **place, part=dict(part)))
        events.append(self.event("response.output_item.done", output_index=index, item=_copy(item)))
        return events


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _content_part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, **({"content": [dict(part) for part in item["content"]]} if "content" in item else {})}


async def stream_response(
    service: Service, body: ResponseBody, caller: Caller
) -> AsyncIterator[dict[str, Any]]:
    """The events of an answer, from `response.created` to `response.completed`.

    Raises:
        ApiError, ConfigError: the request is invalid or failed. After the first event, nothing is
            raised: an event reports the failure.
    """
    output = await _begin(service, body)
    async with aclosing(_events(service, output, caller)) as events:  # type: ignore[type-var]
        try:
            async for event in events:
                yield event
        except Exception as error:
            if not output.has_begun:
                raise
            api_error = of_exception(error)
            code = _CODES.get(api_error.status, "server_error")
            response = {**output.whole("failed"), "error": {"code": code, "message": api_error.message}}
            yield output.event("response.failed", response=response)


async def answer_response(service: Service, body: ResponseBody, caller: Caller) -> dict[str, Any]:
    """The whole answer.

    Raises:
        ApiError, ConfigError: the request is invalid or failed.
    """
    output = await _begin(service, body)
    async with aclosing(_events(service, output, caller)) as events:  # type: ignore[type-var]
        async for _ in events:
            pass
    return output.whole("completed")


async def _begin(service: Service, body: ResponseBody) -> _Output:
    chat = chat_body(body)
    return _Output(body, await begin(service, chat))


async def _events(service: Service, output: _Output, caller: Caller) -> AsyncIterator[dict[str, Any]]:
    """Yield events until the answer is complete."""
    body, run = output.body, output.run
    (choice,) = run.choices
    with service.admit(1):
        deltas = service.ask([run.ids], run.params, caller, body.cache_salt, body.priority, model=run.model)
        async with aclosing(deltas) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for delta in batch:
                    take(run, delta)
                if not output.has_begun:
                    for kind in ("created", "in_progress"):
                        yield output.event(f"response.{kind}", response=output.whole("in_progress"))
                if not choice.text.is_due(service.settings.stream_interval):
                    continue
                _, tokens, logprobs, _ = choice.text.take()
                output.logprobs(tokens, logprobs)
                for part in choice.take_parts():
                    for event in output.add(part):
                        yield event
    for event in output.close():
        yield event
    response = output.whole("completed")
    yield output.event(f"response.{response['status']}", response=response)
