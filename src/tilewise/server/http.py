"""From ASGI messages to bodies and back: JSON in, JSON or a stream of events out, every error as a body.

Refuses bodies that are too large, too slow, too deep or no JSON, before any field of them is looked at. While an answer
is made, the client is listened to: when it leaves, the work is cancelled, and with it its requests in the engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.types import Message, Receive, Scope, Send

from tilewise.core import TilewiseError, get_logger
from tilewise.core.border import cut, shown
from tilewise.server.errors import ApiError, of_exception, validation_error
from tilewise.server.requests.bodies import BodyModel
from tilewise.server.requests.params import MOST_DEPTH
from tilewise.server.service import Caller, Service

__all__ = ["Endpoint", "Page", "parse_body", "read_json", "send_error", "send_json"]

Body = TypeVar("Body", bound=BodyModel)
_MOST_WARNED = 100
_MOST_FIELDS, _MOST_VALUES, _MOST_LISTS = 1 << 10, 1 << 20, 1 << 18


class Endpoint:
    """Takes a body of JSON.

    Args:
        service: the server's state.
        model: of the body.
        answer: makes the whole answer.
        stream: makes its chunks, where there is such a way.
        ends_with_done: `[DONE]` stands behind the last chunk.
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
        """One request."""
        try:
            body = self._parse(await read_json(self._service, scope, receive))
        except Exception as error:
            await send_error(send, error)
            return
        caller = Caller(scope["state"].get("salt", ""), scope["state"].get("request_id", ""))
        if getattr(body, "stream", None) and self._stream is not None:
            work = self._events(send, self._stream(self._service, body, caller))
        else:
            work = self._whole(send, self._answer(self._service, body, caller))
        await _while_listened(receive, work)

    def _parse(self, given: Any) -> Any:
        try:
            body = self._model.model_validate(given)
        except ValidationError as error:
            raise validation_error(error) from None
        for name in body.unknown:
            if name not in self._warned and len(self._warned) < _MOST_WARNED:  # each once
                self._warned.add(name)
                get_logger("server").warning("a field that is not known was passed over: %s", shown(name, 40))
        return body

    async def _whole(self, send: Send, answer: Awaitable[dict[str, Any]]) -> None:
        try:
            content = await answer
        except Exception as error:
            await send_error(send, error)
        else:
            await send_json(send, 200, content)

    async def _events(self, send: Send, chunks: AsyncIterator[dict[str, Any]]) -> None:
        has_begun = False
        try:
            async with aclosing(chunks) as found:  # type: ignore[type-var]
                async for chunk in found:
                    if not has_begun:
                        has_begun = True
                        await send(_START)
                    await send(_event(chunk))
        except Exception as error:
            if not has_begun:
                await send_error(send, error)
                return
            await send(_event(_client_error(error).body))
        if not has_begun:
            await send(_START)
        done = b"data: [DONE]\n\n" if self._ends_with_done else b""
        await send({"type": "http.response.body", "body": done, "more_body": False})


class Page:
    """Answers a GET.

    Args:
        answer: status, type and content, of the path's parameters.
    """

    def __init__(self, answer: Callable[[Mapping[str, str]], Awaitable[tuple[int, str, bytes]]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
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
    """A chunk as a line of a stream; a kind of event stands before it where the chunk has a type."""
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    text = f"{name}data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


async def send_json(send: Send, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
    """A whole answer."""
    await _send(
        send, status, "application/json", json.dumps(content, separators=(",", ":")).encode(), headers
    )


async def send_error(send: Send, error: BaseException) -> None:
    """An error as a body; one that is a defect is logged as well. It is written as OpenAI's servers write it, with a
    blank behind colons: some clients look for `"code": "context_length_exceeded"` in the text."""
    answer = _client_error(error)
    await _send(send, answer.status, "application/json", json.dumps(answer.body).encode(), answer.headers)


def _client_error(error: BaseException) -> ApiError:
    if not isinstance(error, (ApiError, TilewiseError)):
        get_logger("server").error("a request has failed", exc_info=error)
    return of_exception(error)


async def _send(
    send: Send, status: int, kind: str, content: bytes, headers: Mapping[str, str] | None = None
) -> None:
    all_headers = {"content-type": kind, "content-length": str(len(content)), **(headers or {})}
    rows = [(name.lower().encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": rows})
    await send({"type": "http.response.body", "body": content, "more_body": False})


async def _while_listened(receive: Receive, work: Any) -> None:
    """Do something until it is done, or until the client has left."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_json(service: Service, scope: Scope, receive: Receive) -> Any:
    """A request's body.

    Raises:
        ApiError: 408, 413, 415 or 400.
    """
    headers = {
        name: value for name, value in scope["headers"] if name in (b"content-type", b"content-length")
    }
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        text = "[server] a body must be application/json; got another content type; name that one"
        raise ApiError(415, text, headers=_CLOSE)
    most = service.settings.max_request_bytes
    size = headers.get(b"content-length", b"0")
    if size.isdigit() and (len(size) > 15 or int(size) > most):
        raise _too_large(most)
    until = time.monotonic() + service.settings.body_timeout_s
    return parse_body(await _read(receive, most, until))


def parse_body(content: bytes) -> dict[str, Any]:
    """The object that a body is.

    Raises:
        ApiError: 400, it is none, or nests too deep.
    """
    if content.count(b"[") + content.count(b"{") > _MOST_LISTS:  # which take a hundred times their bytes
        text = (
            f"[server.request] a body has at most {_MOST_LISTS:,} lists and objects; got more; ask for less"
        )
        raise ApiError(400, text)
    try:
        given = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        text = f"[server.request] a body must be JSON; got something else: {cut(str(error), 200)}; correct it"
        raise ApiError(400, text) from None
    if not isinstance(given, dict):
        raise ApiError(400, "[server.request] a body must be an object; got another value; correct it")
    _check_size(given)
    return given


_CLOSE = {"connection": "close"}  # what is left of the body is not read


def _too_large(most: int) -> ApiError:
    text = f"[server] a body has at most {most:,} bytes; got more; ask for less"
    return ApiError(413, text, headers=_CLOSE)


async def _read(receive: Receive, most: int, until: float) -> bytes:
    found = bytearray()
    while True:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
        except asyncio.TimeoutError:
            text = "[server] a body must come in time; got part of it; send it faster"
            raise ApiError(408, text, headers=_CLOSE) from None
        if message["type"] == "http.disconnect":
            raise ApiError(400, "[server] a body must be whole; got part of it; send it again")
        found += message.get("body", b"")
        if len(found) > most:
            raise _too_large(most)
        if not message.get("more_body", False):
            return bytes(found)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check_size(given: dict[str, Any]) -> None:
    """Refuse values that nest too deep, or so many that looking at each would hold up other clients.

    Raises:
        ApiError: 400.
    """
    layer: list[Any] = [given]
    count = 0
    for _ in range(MOST_DEPTH):
        count += sum(map(len, layer))
        if count > _MOST_VALUES or len(given) > _MOST_FIELDS:
            text = f"a body has at most {_MOST_FIELDS:,} fields and {_MOST_VALUES:,} values; got more; ask for less"
            raise ApiError(400, f"[server.request] {text}")
        layer = [
            inner
            for value in layer
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
        if not layer:
            return
    text = f"[server.request] a body nests at most {MOST_DEPTH} deep; got more; flatten it"
    raise ApiError(400, text)
