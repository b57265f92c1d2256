"""A client of a server. It uses HTTP/1.1 with one connection per request, and reads answers as they
arrive.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

from tilewise.core import ConfigError, Validator
from tilewise.core.validation import cut, shown

__all__ = ["BadAnswer", "Target", "require_answer"]

_validate = Validator("server.load")
_MOST_LINE = 1 << 24
_READ_BYTES = 1 << 16
_URL = re.compile(r"[!-~]+")  # characters allowed in a request line and headers
_NAME, _VALUE = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII), re.compile(r"[!-~](?:[ -~]*[!-~])?")


class BadAnswer(Exception):
    """A server answered with an error, or with something that is not an answer."""


@dataclass(frozen=True)
class Target:
    """The address of a server.

    Args:
        url: address of the server, `http://` or `https://`, optionally with a prefix of all paths.
            A `/v1` at its end, as clients of OpenAI's API write it, is removed.
        headers: headers of every request.

    Raises:
        ConfigError: the address is invalid.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_known = (
                _URL.fullmatch(self.url)
                and parts.scheme in ("http", "https")
                and (parts.hostname or "").encode("idna")  # raises for names that are invalid in DNS
                and (parts.port is None or parts.port > 0)
            )
        except ValueError:
            is_known = False
        if not is_known:
            _validate.invalid("target", "the address must be a URL", shown(self.url), "pass http://HOST:PORT")
        for name, value in self.headers.items():
            if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
                rule = "a header must have a name and a value of printable ASCII"
                _validate.invalid("target", rule, f"one called {shown(name)}", "correct it")

    async def look(self, path: str) -> Any:
        """The JSON that a GET request returns.

        Raises:
            BadAnswer: the answer is an error or not JSON.
            OSError: the server cannot be reached.
        """
        content = b"".join([part async for part in self._parts("GET", path, b"")])
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise BadAnswer(f"the answer of {path} is not JSON") from None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The events that a POST request returns as a stream, until `[DONE]` or the answer's end.

        Raises:
            BadAnswer: the answer is an error or not a stream.
            OSError: the server cannot be reached, or disconnects.
        """
        pending = b""
        async with aclosing(self._parts("POST", path, json.dumps(body).encode())) as parts:  # type: ignore[type-var]
            async for part in parts:
                *lines, pending = (pending + part).split(b"\n")
                if len(pending) > _MOST_LINE:
                    raise BadAnswer("an event is too long")
                for line in lines:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        yield _event(data)

    async def _parts(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        parts = urlsplit(self.url)
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        context = ssl.create_default_context() if is_tls else None
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
        try:
            connection = h11.Connection(h11.CLIENT)
            headers = {
                "host": parts.netloc.rpartition("@")[2],
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                **self.headers,
            }
            target = parts.path.rstrip("/").removesuffix("/v1") + path
            request = h11.Request(method=method, target=target, headers=list(headers.items()))
            chunks = (
                connection.send(request),
                connection.send(h11.Data(body)),
                connection.send(h11.EndOfMessage()),
            )
            writer.write(b"".join(chunk or b"" for chunk in chunks))
            await writer.drain()
            status, failed = 0, bytearray()
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(_READ_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data) and status == 200:
                    yield bytes(event.data)
                elif isinstance(event, h11.Data):
                    failed += event.data[: _READ_BYTES - len(failed)]
                elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    break
            if status != 200:
                raise BadAnswer(f"status {status}: {_reason(bytes(failed))}")
        except h11.RemoteProtocolError as error:
            raise BadAnswer(f"the answer is not HTTP: {error}") from None
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _event(data: bytes) -> Any:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise BadAnswer("an event is not JSON") from None
    if not isinstance(event, dict):
        raise BadAnswer("an event is not an object")
    if event.get("error"):
        raise BadAnswer(_reason(data))
    return event


def _reason(content: bytes) -> str:
    """The message of an error's body."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return cut(str(json.loads(content)["error"]["message"]), 300)
    return cut(content.decode("utf-8", "replace"), 300)


async def require_answer(target: Target, model: str | None) -> str:
    """Check that a server answers and has a model. Returns the model's name.

    Args:
        target: the server.
        model: the required name; None for the server's first model.

    Raises:
        ConfigError: the server cannot be reached, answers with an error, or does not have the model.
    """
    try:
        models = await target.look("/v1/models")
        names = [str(one["id"]) for one in models["data"]]
    except (OSError, BadAnswer, KeyError, TypeError) as error:
        raise ConfigError(
            f"[server.load] a server must answer at {target.url!r}; got {type(error).__name__}: {error}; start it, or "
            "correct --base-url"
        ) from None
    if model is None and names:
        return names[0]
    if model not in names:
        served = ", ".join(names) or "none"
        _validate.invalid("model", "the server must have the model", repr(model), f"choose from {served}")
    assert model is not None
    return model
