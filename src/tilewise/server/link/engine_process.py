"""The engine's process of a server. It runs the model, reads messages of the HTTP process (its
parent), and sends answers.

The process owns the engine. The parent has checked what clients send, and the engine checks
requests again. The process exits at once when the parent's end of the socket closes, whatever it is
doing.

Its threads are these. The engine's thread reports deltas by `Outbox.put`, which waits only if the
parent has stopped reading. One thread reads frames, and one sends answers. Two worker threads
prepare requests without a grammar. Two other worker threads prepare requests with a grammar,
because this may take a while.
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
from tilewise.distributed import ProcessGroup
from tilewise.encode import Encoder
from tilewise.processes.children import HEAD, MOST_BYTES, pack, unpack
from tilewise.serve import Delta, Engine, SamplingParams, StructuredOutputsParams
from tilewise.serve.model import ENCODER_SETTINGS, encoder_settings
from tilewise.server.link.rows import row_of
from tilewise.settings import EngineSettings, settings_of

__all__ = ["EngineProcess", "Outbox", "main"]

_MAX_WAITING = 1 << 14  # messages that the parent has not read; then the engine waits
_MAX_VALUES = 1 << 15  # log probabilities of a frame to which more messages may be added
_PREPARERS = 2


class Outbox:
    """Queue of messages to the parent. Any thread may call `put`; one thread calls `run`.

    Args:
        send: sends the bytes of a frame; raises OSError if the parent is gone.
        most: number of messages that may wait.
    """

    def __init__(self, send: Callable[[bytes], object], most: int = _MAX_WAITING) -> None:
        self._send, self._most = send, most
        self._waiting: deque[list[Any]] = deque()
        self._changed = threading.Condition()

    def put(self, *message: Any) -> None:
        """Queue a message. Blocks while too many messages wait, so that the engine waits for the
        parent.
        """
        with self._changed:
            while len(self._waiting) >= self._most:
                self._changed.wait()
            self._waiting.append(list(message))
            self._changed.notify_all()

    def run(self) -> None:
        """Send messages until the parent is gone. All waiting messages are sent as one frame, or as
        several if they are large.

        Raises:
            OSError: the parent is gone.
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
    """Pack messages into frames of limited size."""
    waiting: list[list[Any]] = []
    num_values = 0
    for message in messages:
        waiting.append([row_of(value) if isinstance(value, Delta) else value for value in message])
        num_values += sum(_num_values(value) for value in message if isinstance(value, Delta))
        if num_values > _MAX_VALUES:
            yield pack(waiting)
            waiting, num_values = [], 0
    if waiting:
        yield pack(waiting)


def _num_values(delta: Delta) -> int:
    """Number of values that decide the size of a delta."""
    prompt = sum(map(len, filter(None, delta.prompt_logprobs or ())))
    return prompt + len(delta.logprobs or ()) + (0 if delta.vector is None else len(delta.vector))


class EngineProcess:
    """Executes messages of the parent with an engine or an encoder.

    Args:
        outbox: queue for answers.
        model: the engine or encoder.
    """

    def __init__(self, outbox: Outbox, model: Engine | Encoder) -> None:
        self._outbox, self._model = outbox, model
        self._names: dict[
            int, list[str]
        ] = {}  # names of the engine's requests, by number of the parent's request
        self._lock = threading.Lock()
        self._preparers = ThreadPoolExecutor(_PREPARERS, "tilewise-prepare")
        self._compilers = ThreadPoolExecutor(_PREPARERS, "tilewise-compile")

    def execute(self, message: dict[str, Any]) -> None:
        """Execute a message. Answers go to the outbox."""
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
            is_structured = "structured_outputs" in (message["params"] or {})  # compiling may take seconds
            workers = self._compilers if is_structured else self._preparers
            workers.submit(self._ask, kind, number, message)

    def _ask(self, kind: str, number: int, message: dict[str, Any]) -> None:
        try:
            if isinstance(self._model, Encoder):
                self._encode(self._model, number, message["prompts"])
            else:
                self._begin(self._model, kind, number, message)
        except Exception as error:
            self._report(number, error)

    def _encode(self, encoder: Encoder, number: int, prompts: list[list[int]]) -> None:
        for index, vector in enumerate(encoder.encode(prompts)):
            self._report(number, Delta(index, 0, None, "", "stop", vector=vector))

    def _begin(self, engine: Engine, kind: str, number: int, message: dict[str, Any]) -> None:
        shared = {"cache_salt": message["salt"], "lora": message["lora"]}
        prompts = [{"prompt_token_ids": ids, **shared} for ids in message["prompts"]]
        if kind == "vectors":
            requests = engine.pooling_requests(prompts)
        else:
            params = dict(message["params"])
            if params.get("structured_outputs") is not None:
                params["structured_outputs"] = StructuredOutputsParams.of(params["structured_outputs"])
            if params.get("logit_bias") is not None:  # keys of JSON objects are strings
                params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
            requests = engine.requests(prompts, SamplingParams(**params), message["priority"])
        with self._lock:
            if number in self._names:  # it was not aborted before it began
                self._names[number] = [request.request_id for request in requests]
                engine.submit(requests, partial(self._report, number))

    def _report(self, number: int, event: Delta | BaseException) -> None:
        """Report an event to the parent, usually on the engine's thread."""
        if isinstance(event, Delta):
            self._outbox.put("delta", number, event)
            return
        if isinstance(event, PeerLost):  # nothing more can be computed; the parent detects the end
            get_logger("server").error("%s", event)
            os._exit(1)
        if not isinstance(event, TilewiseError):
            get_logger("server").error("a request has failed: %r", event)
        self._outbox.put("error", number, type(event).__name__, str(event))


def main(descriptor: int) -> None:
    """Run the engine's process. The first message has the model and its settings. The process ends
    with its parent.

    Args:
        descriptor: descriptor of the socket.
    """
    configure_logging()
    link = socket.socket(fileno=descriptor)
    outbox = Outbox(link.sendall)
    try:
        request = _read(link)
    except (EOFError, ConnectionError):  # the parent ended before it sent a model
        return
    for package in (
        "models",
        "checkpoint",
    ):  # the HTTP process reads the same files and logs the same warnings
        get_logger(package).addFilter(lambda record: request["model"] not in record.getMessage())
    threading.Thread(target=_send_all, args=(outbox,), daemon=True).start()
    ready: deque[EngineProcess] = deque()
    threading.Thread(target=_execute_all, args=(link, ready), daemon=True).start()
    try:
        if request["processes"] > 1:
            ProcessGroup(request["processes"])  # until this process ends
        model = _load(request["model"], request["settings"], outbox)
    except Exception as error:
        outbox.put("failed", type(error).__name__, str(error))
    else:
        ready.append(EngineProcess(outbox, model))
        outbox.put("ready", _facts(model))
    threading.Event().wait()  # the reader ends the process


def _load(model: str, settings: dict[str, Any], outbox: Outbox) -> Engine | Encoder:
    if models.is_encoder(models.open(model, ignore=settings.get("ignore_config_fields", ()))):
        changed = {  # encoders accept further options that have their default values
            name: value
            for name, value in settings.items()
            if name in ENCODER_SETTINGS or value != settings_of(EngineSettings)[name].default
        }
        return Encoder(model, **encoder_settings("serve", changed))
    return Engine(model, on_progress=lambda done, total: outbox.put("progress", done, total), **settings)


def _facts(model: Engine | Encoder) -> dict[str, Any]:
    """The facts of a loaded model that the parent needs."""
    if isinstance(model, Encoder):
        return {"max_context": model.max_context, "max_num_seqs": 1, "num_blocks": 0, "dtype": ""}
    served = model.model
    return {
        "max_context": served.limits.max_context,
        "max_num_seqs": served.limits.max_num_seqs,
        "num_blocks": served.limits.num_blocks,
        "dtype": served.dtype,
        "adapters": [*served.adapters],
    }


def _send_all(outbox: Outbox) -> None:
    try:
        outbox.run()
    finally:
        os._exit(1)  # the parent is gone, or would wait forever after a defect


def _execute_all(link: socket.socket, ready: deque[EngineProcess]) -> None:
    """Execute messages until the parent is gone, then exit, even during a step or while loading."""
    try:
        while True:
            message = _read(link)
            ready[0].execute(message)  # the parent sends requests only after `ready`
    except (EOFError, ConnectionError):  # the parent has exited, perhaps with unread messages
        os._exit(0)
    except BaseException as error:
        get_logger("server").error("a message of the server must be valid; got %r", error)
        os._exit(1)


def _read(link: socket.socket) -> Any:
    (size,) = HEAD.unpack(_exactly(link, HEAD.size))
    if size > MOST_BYTES:
        raise ValueError(f"a frame of {size:,} bytes")
    return unpack(_exactly(link, size))


def _exactly(link: socket.socket, size: int) -> bytearray:
    content = bytearray()
    while len(content) < size:
        chunk = link.recv(min(size - len(content), 1 << 20))
        if not chunk:
            raise EOFError
        content += chunk
    return content
