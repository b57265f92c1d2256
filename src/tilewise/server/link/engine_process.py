"""What runs in a server's engine process: the model, a thread that takes messages, one that sends what comes.

Owns the engine. The parent is trusted to have checked what clients send, and is checked all the same: the engine's own
border refuses what is no request. Ends at once when the parent's end of the socket closes, whatever it is doing.

Threads: the engine's own reports deltas by `Outbox.put`, which waits only where the parent has stopped reading; the
reader takes frames; preparing a request is done by two worker threads, one with a grammar by two others, since
that may take a while.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from tilewise import models
from tilewise.core import PeerLost, TilewiseError, configure_logging, get_logger
from tilewise.core.frames import HEAD, MOST_BYTES, pack, unpack
from tilewise.distributed import ProcessGroup
from tilewise.encode import Encoder
from tilewise.serve import Delta, Engine, SamplingParams, StructuredOutputsParams
from tilewise.serve.model import encoder_settings
from tilewise.server.link.rows import row_of

__all__ = ["EngineProcess", "Outbox", "main"]

_MOST_WAITING = 1 << 14  # messages that the parent has not taken; then the engine waits
_MOST_FIGURES = 1 << 15  # of a frame that another message may still be added to
_PREPARERS = 2


class Outbox:
    """Messages on their way to the parent. Any thread puts, one sends.

    Args:
        send: one frame's bytes; raises OSError where there is no one to read them.
        most: messages that may wait.
    """

    def __init__(self, send: Callable[[bytes], object], most: int = _MOST_WAITING) -> None:
        self._send, self._most = send, most
        self._waiting: deque[list[Any]] = deque()
        self._changed = threading.Condition()

    def put(self, *message: Any) -> None:
        """One message. Waits while too many are on their way, which makes the engine wait for its readers."""
        with self._changed:
            while len(self._waiting) >= self._most:
                self._changed.wait()
            self._waiting.append(list(message))
            self._changed.notify_all()

    def run(self) -> None:
        """Send until the parent is gone: all that waits is one frame, or several where it is large.

        Raises:
            OSError: it is.
        """
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                messages = list(self._waiting)
                self._waiting.clear()
                self._changed.notify_all()
            for frame in _frames(messages):
                self._send(frame)


def _frames(messages: Sequence[list[Any]]) -> Iterator[bytes]:
    """Messages in as few frames as their figures allow."""
    waiting: list[list[Any]] = []
    num_figures = 0
    for message in messages:
        waiting.append([row_of(value) if isinstance(value, Delta) else value for value in message])
        num_figures += sum(_num_figures(value) for value in message if isinstance(value, Delta))
        if num_figures > _MOST_FIGURES:
            yield pack(waiting)
            waiting, num_figures = [], 0
    if waiting:
        yield pack(waiting)


def _num_figures(delta: Delta) -> int:
    """Numbers that make a delta long."""
    prompt = sum(map(len, filter(None, delta.prompt_logprobs or ())))
    return prompt + len(delta.logprobs or ()) + (0 if delta.vector is None else len(delta.vector))


class EngineProcess:
    """Answers messages with an engine, or with an encoder.

    Args:
        outbox: for answers.
        model: the engine that writes or makes vectors.
    """

    def __init__(self, outbox: Outbox, model: Engine | Encoder) -> None:
        self._outbox, self._model = outbox, model
        self._names: dict[int, list[str]] = {}  # of the requests of each ask, until the parent ends it
        self._lock = threading.Lock()
        self._preparers = ThreadPoolExecutor(_PREPARERS, "tilewise-prepare")
        self._compilers = ThreadPoolExecutor(_PREPARERS, "tilewise-compile")

    def obey(self, message: dict[str, Any]) -> None:
        """One message of the parent; answers come through the outbox."""
        kind, number = message["op"], message["id"]
        if kind == "stats":
            stats = asdict(self._model.stats()) if isinstance(self._model, Engine) else {}
            self._outbox.put("stats", number, stats)
        elif kind == "end":
            with self._lock:
                names = self._names.pop(number, [])
            if isinstance(self._model, Engine):
                for name in names:
                    self._model.abort(name)
        else:
            with self._lock:
                self._names[number] = []
            is_structured = "structured_outputs" in (message["params"] or {})  # which may take seconds
            workers = self._compilers if is_structured else self._preparers
            workers.submit(self._ask, kind, number, message)

    def _ask(self, kind: str, number: int, message: dict[str, Any]) -> None:
        try:
            if isinstance(self._model, Encoder):
                self._encode(self._model, number, message["prompts"])
            else:
                self._begin(self._model, kind, number, message)
        except Exception as error:
            self._tell(number, error)

    def _encode(self, encoder: Encoder, number: int, prompts: list[list[int]]) -> None:
        for index, vector in enumerate(encoder.encode(prompts)):
            self._tell(number, Delta(index, 0, None, "", "stop", vector=vector))

    def _begin(self, engine: Engine, kind: str, number: int, message: dict[str, Any]) -> None:
        prompts = [{"prompt_token_ids": ids, "cache_salt": message["salt"]} for ids in message["prompts"]]
        if kind == "vectors":
            requests = engine.pooling_requests(prompts)
        else:
            given = dict(message["params"])
            if given.get("structured_outputs") is not None:
                given["structured_outputs"] = StructuredOutputsParams.of(given["structured_outputs"])
            if given.get("logit_bias") is not None:  # keys of JSON are texts
                given["logit_bias"] = {int(key): value for key, value in given["logit_bias"].items()}
            requests = engine.requests(prompts, SamplingParams(**given), message["priority"])
        with self._lock:
            if number in self._names:  # not ended before it began
                self._names[number] = [request.request_id for request in requests]
                engine.submit(requests, partial(self._tell, number))

    def _tell(self, number: int, event: Delta | BaseException) -> None:
        """On the engine's thread, mostly."""
        if isinstance(event, Delta):
            self._outbox.put("delta", number, event)
            return
        if isinstance(event, PeerLost):  # nothing more can be computed; the parent notices the end
            get_logger("server").error("%s", event)
            os._exit(1)
        if not isinstance(event, TilewiseError):
            get_logger("server").error("a request has failed: %r", event)
        self._outbox.put("error", number, type(event).__name__, str(event))


def main(descriptor: int) -> None:
    """The engine's process, from its first message (model and settings) to the parent's end.

    Args:
        descriptor: of the socket.
    """
    configure_logging()
    link = socket.socket(fileno=descriptor)
    outbox = Outbox(link.sendall)
    try:
        given = _read(link)
    except (EOFError, ConnectionError):  # the parent had nothing to serve
        return
    for package in (
        "models",
        "checkpoint",
    ):  # the HTTP process reads the same files and logs the same warnings
        get_logger(package).addFilter(lambda record: given["model"] not in record.getMessage())
    threading.Thread(target=_send_all, args=(outbox,), daemon=True).start()
    ready: deque[EngineProcess] = deque()
    threading.Thread(target=_obey_all, args=(link, ready), daemon=True).start()
    try:
        if given["processes"] > 1:
            ProcessGroup(given["processes"])  # until this process ends
        model = _load(given["model"], given["settings"], outbox)
    except Exception as error:
        outbox.put("failed", type(error).__name__, str(error))
    else:
        ready.append(EngineProcess(outbox, model))
        outbox.put("ready", _facts(model))
    threading.Event().wait()  # the reader ends the process


def _load(model: str, settings: dict[str, Any], outbox: Outbox) -> Engine | Encoder:
    if models.is_encoder(models.open(model, ignore=settings.get("ignore_config_fields", ()))):
        return Encoder(model, **encoder_settings("serve", settings))
    return Engine(model, on_progress=lambda done, total: outbox.put("progress", done, total), **settings)


def _facts(model: Engine | Encoder) -> dict[str, Any]:
    """What the parent needs to know of a loaded model."""
    if isinstance(model, Encoder):
        return {"max_context": model.max_context, "max_num_seqs": 1, "num_blocks": 0, "dtype": ""}
    served = model.model
    return {
        "max_context": served.limits.max_context,
        "max_num_seqs": served.limits.max_num_seqs,
        "num_blocks": served.limits.num_blocks,
        "dtype": served.dtype,
    }


def _send_all(outbox: Outbox) -> None:
    try:
        outbox.run()
    finally:
        os._exit(1)  # the parent is gone, or a defect would leave it waiting


def _obey_all(link: socket.socket, ready: deque[EngineProcess]) -> None:
    """The reader: until the parent is gone, which is the end, within a step and within loading as well."""
    try:
        while True:
            message = _read(link)
            ready[0].obey(message)  # the parent asks nothing before it has heard that the model is loaded
    except (EOFError, ConnectionError):  # the parent has ended, perhaps with messages of ours unread
        os._exit(0)
    except BaseException as error:
        get_logger("server").error("a message must be one of the server's; got %r", error)
        os._exit(1)


def _read(link: socket.socket) -> Any:
    (size,) = HEAD.unpack(_exactly(link, HEAD.size))
    if size > MOST_BYTES:
        raise ValueError(f"a frame of {size:,} bytes")
    return unpack(_exactly(link, size))


def _exactly(link: socket.socket, size: int) -> bytearray:
    found = bytearray()
    while len(found) < size:
        chunk = link.recv(min(size - len(found), 1 << 20))
        if not chunk:
            raise EOFError
        found += chunk
    return found
