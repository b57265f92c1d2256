"""A process of a `WorkerPool`: reads calls of functions from its standard input, and answers each.

Started by file, with nothing of its parent but what the first line of its input says: where modules are found. What
functions print goes to standard error; standard output is for answers.
"""

import gc
import json
import os
import pickle
import queue
import struct
import sys
import threading
from typing import IO, Any

__all__ = ["answer", "main", "read_frame", "write_frame"]

LENGTH = struct.Struct("<Q")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next message; None where the other side has ended."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: IO[bytes], body: bytes) -> None:
    """One message."""
    stream.write(LENGTH.pack(len(body)))
    stream.write(body)
    stream.flush()


def answer(body: bytes) -> bytes:
    """What calls of one function return, in a pickle; what one of them raises ends them. The collector of cycles waits
    until then: going through what is made took longer than making it."""
    gc.disable()
    try:
        return _answer(body)
    finally:
        gc.enable()


def _answer(body: bytes) -> bytes:
    done: tuple[int, Any] = (0, None)
    try:
        function, calls = pickle.loads(body)
        results: list[Any] = []
        for call in calls:
            done = (len(results), None)
            results.append(function(*call))
        return pickle.dumps((None, results), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        try:
            return pickle.dumps(((done[0], error), None), pickle.HIGHEST_PROTOCOL)
        except Exception:  # an error that holds what no pickle can
            plain = RuntimeError(f"{type(error).__name__}: {error}")
            return pickle.dumps(((done[0], plain), None), pickle.HIGHEST_PROTOCOL)


def main() -> None:
    """Answer until the parent closes the pipe or ends. A thread reads ahead, so that the parent can always write."""
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what functions print
    sys.path[:] = json.loads(calls.readline())
    bodies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        while (body := read_frame(calls)) is not None:
            bodies.put(body)
        bodies.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (body := bodies.get()) is not None:
        try:
            write_frame(answers, answer(body))
        except BrokenPipeError:
            break
    sys.stdout.flush()
    os._exit(0)  # the reader may still hold its stream


if __name__ == "__main__":
    main()
