"""Converts ASGI messages to bodies and back: reads JSON, sends JSON or a stream of events, and
turns errors into bodies.

Bodies that are too large, arrive too slowly, are nested too deep or are not JSON are rejected
before any field is read. When a client disconnects, the work for it is cancelled, including its
requests in the engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.types import Message, Receive, Scope, Send

from tilewise.core import TilewiseError, get_logger
from tilewise.core.validation import cut, shown
from tilewise.server.errors import ApiError, of_exception, validation_error
from tilewise.server.requests.bodies import BodyModel
from tilewise.server.requests.params import MOST_DEPTH
from tilewise.server.service import Caller, Service

__all__ = ["Endpoint", "Page", "parse_body", "read_json", "send_error", "send_json"]

Body = TypeVar("Body", bound=BodyModel)
_MOST_WARNED = 100
_REPLACED = dict.fromkeys(
    (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),  # older versions of vLLM
        *("guided_decoding_backend", "guided_whitespace_pattern"),
        *("grammar", "json_schema"),  # llama.cpp
        *("regex", "ebnf"),  # SGLang
    ),
    "structured_outputs",
) | {"functions": "tools", "function_call": "tool_choice"}
"""Fields of older versions and of other servers that constrain the answer, and the field to use. Ignoring one would
answer without the constraint."""
_MOST_FIELDS, _MOST_VALUES, _MOST_LISTS = 1 << 10, 1 << 20, 1 << 18


class Endpoint:
    """Answers a POST with a JSON body.

    Args:
        service: state of the server.
        model: model of the body.
        answer: makes the whole answer.
        stream: makes the chunks of a stream; None if the path has no streams.
        ends_with_done: whether `[DONE]` follows the last chunk.
    """

    def __init__(
        self,
        service: Service,
        model: type[Body],
        answer: Callable[[Service, Body, Caller], Awaitable[dict[str, Any]]],
        stream: Callable[[Service, Body, Caller], AsyncIterator[dict[str, Any]]] | None = None,
        ends_with_done: bool = True,
    ) -> None:
        self._service, self._model, self._answer, self._stream = service, model, answer, stream
        self._ends_with_done = ends_with_done
        self._warned: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        try:
            body = self._parse(await read_json(self._service, scope, receive))
        except Exception as error:
            await send_error(send, error)
            return
        caller = Caller(scope["state"].get("salt", ""), scope["state"].get("request_id", ""))
        if getattr(body, "stream", None) and self._stream is not None:
            work = self._events(send, body.model_fields_set, self._stream(self._service, body, caller))
        else:
            work = self._whole(send, body.model_fields_set, self._answer(self._service, body, caller))
        await _until_disconnect(receive, work)

    def _parse(self, content: Any) -> Any:
        try:
            body = self._model.model_validate(content)
        except ValidationError as error:
            raise validation_error(error) from None
        for name in body.unknown:
            if name in _REPLACED and getattr(body, name) is not None:
                text = f"[server.request] {name} is not supported; got a value; use {_REPLACED[name]} instead"
                raise ApiError(400, text, name)
            if name not in self._warned and len(self._warned) < _MOST_WARNED:  # warn once per field
                self._warned.add(name)
                get_logger("server").warning("an unknown field was ignored: %s", shown(name, 40))
        return body

    async def _whole(self, send: Send, fields: Collection[str], answer: Awaitable[dict[str, Any]]) -> None:
        try:
            content = await answer
        except Exception as error:
            await send_error(send, error, fields)
        else:
            await send_json(send, 200, content)

    async def _events(
        self, send: Send, fields: Collection[str], chunks: AsyncIterator[dict[str, Any]]
    ) -> None:
        has_begun = False
        try:
            async with aclosing(chunks) as events:  # type: ignore[type-var]
                async for chunk in events:
                    if not has_begun:
                        has_begun = True
                        await send(_START)
                    await send(_event(chunk))
        except Exception as error:
            if not has_begun:
                await send_error(send, error, fields)
                return
            await send(_event(_client_error(error, fields).body))
        if not has_begun:
            await send(_START)
        done = b"data: [DONE]\n\n" if self._ends_with_done else b""
        await send({"type": "http.response.body", "body": done, "more_body": False})


class Page:
    """Answers a GET.

    Args:
        answer: returns status, content type and content for the path's parameters.
    """

    def __init__(self, answer: Callable[[Mapping[str, str]], Awaitable[tuple[int, str, bytes]]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        try:
            status, kind, content = await self._answer(scope.get("path_params", {}))
        except Exception as error:
            await send_error(send, error)
            return
        await _send(send, status, kind, content)


_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


def _event(chunk: dict[str, Any]) -> Message:
    """A chunk as a server-sent event, with an `event:` line if the chunk has a type."""
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    text = f"{name}data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


async def send_json(send: Send, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
    """Send a whole answer."""
    await _send(
        send, status, "application/json", json.dumps(content, separators=(",", ":")).encode(), headers
    )


async def send_error(send: Send, error: BaseException, fields: Collection[str] = ()) -> None:
    """Send an error as a body. If it is a defect of Tilewise, also log it.

    JSON has a space after colons, as OpenAI's servers write it, because some clients search the text for
    `"code": "context_length_exceeded"`.

    Args:
        send: sends ASGI messages.
        error: the error.
        fields: names of the request's fields, one of which may become `param`.
    """
    answer = _client_error(error, fields)
    await _send(send, answer.status, "application/json", json.dumps(answer.body).encode(), answer.headers)


def _client_error(error: BaseException, fields: Collection[str] = ()) -> ApiError:
    if not isinstance(error, (ApiError, TilewiseError)):
        get_logger("server").error("a request has failed", exc_info=error)
    return of_exception(error, fields)


async def _send(
    send: Send, status: int, kind: str, content: bytes, headers: Mapping[str, str] | None = None
) -> None:
    all_headers = {"content-type": kind, "content-length": str(len(content)), **(headers or {})}
    rows = [(name.lower().encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": rows})
    await send({"type": "http.response.body", "body": content, "more_body": False})


async def _until_disconnect(receive: Receive, work: Any) -> None:
    """Await some work, and cancel it when the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_json(service: Service, scope: Scope, receive: Receive) -> Any:
    """Read and parse a request's body.

    Raises:
        ApiError: the body arrives too slowly (408), is too large (413), is not JSON by its content
            type (415), or is invalid (400).
    """
    headers = {
        name: value for name, value in scope["headers"] if name in (b"content-type", b"content-length")
    }
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        text = "[server] a body must be application/json; got another content type; set Content-Type"
        raise ApiError(415, text, headers=_CLOSE)
    most = service.settings.max_request_bytes
    size = headers.get(b"content-length", b"0")
    if size.isdigit() and (len(size) > 15 or int(size) > most):
        raise _too_large(most)
    until = time.monotonic() + service.settings.body_timeout_s
    return parse_body(await _read(receive, most, until))


def parse_body(content: bytes) -> dict[str, Any]:
    """Parse a body, which must be a JSON object.

    Raises:
        ApiError: the body is not a JSON object, or is nested too deep (400).
    """
    # each takes about a hundred times its bytes in memory
    if content.count(b"[") + content.count(b"{") > _MOST_LISTS:
        text = f"[server.request] a body must have at most {_MOST_LISTS:,} lists and objects; got more; shorten it"
        raise ApiError(400, text)
    try:
        body = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        text = f"[server.request] a body must be JSON; got an error: {cut(str(error), 200)}; correct it"
        raise ApiError(400, text) from None
    if not isinstance(body, dict):
        raise ApiError(400, "[server.request] a body must be an object; got another value; correct it")
    _check_size(body)
    return body


_CLOSE = {"connection": "close"}  # the rest of the body is not read


def _too_large(most: int) -> ApiError:
    text = f"[server] a body must have at most {most:,} bytes; got more; shorten it"
    return ApiError(413, text, headers=_CLOSE)


async def _read(receive: Receive, most: int, until: float) -> bytes:
    content = bytearray()
    while True:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
        except asyncio.TimeoutError:
            text = "[server] a body must arrive before the deadline; got part of it; send it faster"
            raise ApiError(408, text, headers=_CLOSE) from None
        if message["type"] == "http.disconnect":
            raise ApiError(400, "[server] a body must be complete; got part of it; send it again")
        content += message.get("body", b"")
        if len(content) > most:
            raise _too_large(most)
        if not message.get("more_body", False):
            return bytes(content)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _check_size(body: dict[str, Any]) -> None:
    """Reject bodies that are nested too deep, or have so many values that checking them would delay other clients.

    Raises:
        ApiError: 400.
    """
    layer: list[Any] = [body]
    count = 0
    for _ in range(MOST_DEPTH):
        count += sum(map(len, layer))
        if count > _MOST_VALUES or len(body) > _MOST_FIELDS:
            text = f"a body must have at most {_MOST_FIELDS:,} fields and {_MOST_VALUES:,} values; got more; shorten it"
            raise ApiError(400, f"[server.request] {text}")
        layer = [
            inner
            for value in layer
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
        if not layer:
            return
    text = f"[server.request] a body must be nested at most {MOST_DEPTH} levels deep; got more; flatten it"
    raise ApiError(400, text)
