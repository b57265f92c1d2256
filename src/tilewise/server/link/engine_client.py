"""The HTTP process's side of the link to the engine's process.

The `EngineClient` owns the socket. Everything runs on the event loop's thread. A request is a
`Stream` of deltas (new pieces of its texts). Closing a stream ends the request in the engine, so
that a client that disconnects frees its blocks of the KV cache. If the engine's process ends
unexpectedly, every stream ends with an error and `dead` is set.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tilewise.core import get_logger
from tilewise.processes.children import HEAD, MOST_BYTES, Spawned, pack, unpack
from tilewise.serve import Delta, EngineStats, SamplingParams
from tilewise.server.errors import ApiError, engine_error
from tilewise.server.link.rows import delta_of

__all__ = ["EngineClient", "Stream"]


class Stream:
    """Deltas of a request, as they arrive. Use with `with`.

    Args:
        client: link to the engine.
        number: number of the request.
        num_texts: number of its texts.
    """

    def __init__(self, client: EngineClient, number: int, num_texts: int) -> None:
        self._client, self._number, self._left = client, number, num_texts
        self._waiting: list[Delta] = []
        self._error: ApiError | None = None
        self._news = asyncio.Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """End the request if it has not ended."""
        self._client.end(self._number)

    def add(self, event: Delta | ApiError) -> None:
        """Add a delta or an error."""
        if isinstance(event, ApiError):
            self._error = self._error or event
        else:
            self._waiting.append(event)
        self._news.set()

    async def next(self) -> list[Delta]:
        """Wait for deltas, and return all deltas since the last call. Returns an empty list when
        all texts have ended.

        Raises:
            ApiError: the request has failed.
        """
        while not self._waiting and self._left:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        deltas, self._waiting = self._waiting, []
        self._left -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas


class EngineClient:
    """Link to the engine's process.

    Args:
        spawned: the process.
    """

    def __init__(self, spawned: Spawned) -> None:
        self._spawned = spawned
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._stats: dict[int, asyncio.Future[EngineStats | None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self.facts: dict[str, Any] = {}
        self.ready = asyncio.Event()
        self.dead = asyncio.Event()
        self.cause: ApiError | None = None
        """Why the engine is dead, as clients receive it."""
        self.failure: tuple[str, str] | None = None
        """Class and text of the error of loading."""

    async def start(self) -> None:
        """Start reading from the process. `ready` is set when the model is loaded."""
        reader, self._writer = await asyncio.open_connection(sock=self._spawned.link, limit=1 << 20)
        self._task = asyncio.create_task(self._read(reader))

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None,
        salt: str = "",
        priority: int = 0,
        lora: str = "",
    ) -> Stream:
        """Continue prompts, or compute their vectors.

        Args:
            prompts: token ids of each prompt.
            params: settings of the texts; None to compute vectors.
            salt: blocks of the KV cache are shared only between requests with equal salt.
            priority: requests with a lower number run first.
            lora: the name of an adapter; empty for the model alone.

        Raises:
            ApiError: the engine is dead.
        """
        if self.cause is not None:
            raise self.cause
        number = next(self._numbers)
        num_texts = len(prompts) * (1 if params is None else params.n)
        stream = self._streams[number] = Stream(self, number, num_texts)
        message = {
            "op": "vectors" if params is None else "ask",
            "id": number,
            "prompts": [list(ids) for ids in prompts],
            "params": None if params is None else _plain(params),
            "salt": salt,
            "lora": lora,
            "priority": priority,
        }
        self._send(message)
        return stream

    def end(self, number: int) -> None:
        """End a request."""
        if self._streams.pop(number, None) is not None:
            self._send({"op": "end", "id": number})

    async def stats(self) -> EngineStats | None:
        """The load of the engine; None for an encoder.

        Raises:
            ApiError: the engine is dead.
        """
        if self.cause is not None:
            raise self.cause
        number = next(self._numbers)
        self._stats[number] = asyncio.get_running_loop().create_future()
        self._send({"op": "stats", "id": number})
        return await self._stats[number]

    def fail_all(self, error: ApiError) -> None:
        """End every stream with an error."""
        for stream in self._streams.values():
            stream.add(error)

    async def close(self) -> None:
        """End the process."""
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self._spawned.end)
        if self._task is not None:
            self._task.cancel()

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self.dead.is_set():
            self._writer.write(pack(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read messages until the process ends."""
        try:
            while True:
                (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                if size > MOST_BYTES:
                    raise ValueError(f"a frame of {size:,} bytes")
                for kind, *values in unpack(await reader.readexactly(size)):
                    self._take(kind, values)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            get_logger("server").error("a message of the engine must be valid; got %r", error)
        self._die()

    def _take(self, kind: str, values: list[Any]) -> None:
        number = values[0]
        if kind == "delta" and number in self._streams:
            self._streams[number].add(delta_of(values[1]))
        elif kind == "error" and number in self._streams:
            self._streams[number].add(engine_error(values[1], values[2]))
        elif kind == "stats":
            waiting = self._stats.pop(number, None)
            if waiting is not None and not waiting.done():
                names = {field.name for field in fields(EngineStats)}
                waiting.set_result(EngineStats(**values[1]) if names == {*values[1]} else None)
        elif kind == "ready":
            self.facts = values[0]
            self.ready.set()
        elif kind == "failed":
            self.failure = (str(values[0]), str(values[1]))
            self.cause = ApiError(503, self.failure[1] or self.failure[0])
            self._die()

    def _die(self) -> None:
        if self.cause is None:
            self.cause = ApiError(
                503, "[server.engine] the engine's process must be alive; it has ended; restart the server"
            )
        self.dead.set()
        self.fail_all(self.cause)
        for waiting in self._stats.values():
            if not waiting.done():
                waiting.set_exception(self.cause)
        self._stats.clear()


def _plain(params: SamplingParams) -> dict[str, Any]:
    """Settings as JSON values, without defaults."""
    values: dict[str, Any] = {}
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        if value == field.default or field.name in ("output_kind", "structured_outputs"):
            continue
        values[field.name] = value
    if params.structured_outputs is not None:
        structure = params.structured_outputs
        values["structured_outputs"] = {
            field.name: getattr(structure, field.name)
            for field in fields(structure)
            if getattr(structure, field.name) != field.default
        }
    return values
