"""A process of a `WorkerPool`: reads calls of functions from a pipe, and answers each through another.

Started by file, with nothing of its parent but the numbers of its pipes and what the first line says: the parent's
process, and where modules are found. What functions print goes to standard error. It ends with its parent, whatever it
is doing: when the pipe ends, or, where a copy of the parent still holds that, when it has another parent.
"""

import gc
import json
import os
import pickle
import queue
import select
import struct
import sys
import threading
import traceback
from typing import Any

__all__ = ["BEAT_S", "LENGTH", "answer", "main"]

LENGTH = struct.Struct("<Q")
"""Before each message, in both directions."""
BEAT_S = 1.0
"""How often either side asks whether the other one is still there, in seconds."""
_PIECE = 1 << 20


def answer(body: bytes) -> bytes | None:
    """What calls of one function return, in a pickle; what one of them raises ends them. None for a message without
    calls. The collector of cycles waits until then: going through what is made took longer than making it."""
    gc.disable()
    try:
        return _answer(body)
    finally:
        gc.enable()


def _answer(body: bytes) -> bytes | None:
    done: tuple[int, Any] = (0, None)
    try:
        numbers, message = pickle.loads(body)
        if numbers is None or numbers:  # of objects to keep no more, all or some
            from tilewise.core.kept import HERE  # it is here where there are such objects

            HERE.drop(numbers)
        if message is None:
            return None
        function, calls = pickle.loads(message)
        results: list[Any] = []
        for call in calls:
            done = (len(results), None)
            results.append(function(*call))
        return _dumps((None, results))
    except BaseException as error:
        try:
            return pickle.dumps(((done[0], error), None), pickle.HIGHEST_PROTOCOL)
        except Exception:  # an error that holds what no pickle can
            plain = RuntimeError(f"{type(error).__name__}: {error}")
            return pickle.dumps(((done[0], plain), None), pickle.HIGHEST_PROTOCOL)


def _dumps(content: object) -> bytes:
    """A pickle; what it holds of kept classes is kept, where there are any."""
    kept = sys.modules.get("tilewise.core.kept")
    return pickle.dumps(content, pickle.HIGHEST_PROTOCOL) if kept is None else kept.HERE.dumps(content)


class _Reader:
    """Messages from a pipe. The process ends where the parent has ended."""

    def __init__(self, pipe: int) -> None:
        self.parent, self._pipe, self._left = os.getppid(), pipe, bytearray()

    def until(self, size: int) -> bytes:
        """The next bytes."""
        while len(self._left) < size:
            while not select.select([self._pipe], [], [], BEAT_S)[0]:
                self.require_parent()
            if not (piece := os.read(self._pipe, _PIECE)):
                os._exit(0)
            self._left += piece
        found = bytes(self._left[:size])
        del self._left[:size]
        return found

    def require_parent(self) -> None:
        if os.getppid() != self.parent:
            os._exit(0)

    def message(self) -> bytes:
        """The next message."""
        return self.until(LENGTH.unpack(self.until(LENGTH.size))[0])


def main(calls: int, answers: int) -> None:
    """Answer until the parent ends. A thread reads ahead, so that the parent can always write."""
    for pipe in (calls, answers):
        os.set_inheritable(pipe, False)  # a process that a function starts may live longer than this one
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    reader = _Reader(calls)
    reader.parent, sys.path[:] = json.loads(reader.message())
    reader.require_parent()
    bodies: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        while True:
            bodies.put(reader.message())

    threading.Thread(target=read, daemon=True).start()
    while True:
        if (found := answer(bodies.get())) is not None:
            left = memoryview(LENGTH.pack(len(found)) + found)
            while left:
                left = left[os.write(answers, left) :]


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except BrokenPipeError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # the reader may be in the middle of a read
