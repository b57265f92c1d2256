"""`WorkerLink`: one process of a `WorkerPool`, as the process that started it has it: its pipes, and what it keeps.

Pipes are read and written without waiting for more than a second at a time: a process that another thread forks may
hold an end of them, so that they do not end when the worker does; then the worker itself is asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys

from tilewise.core import worker_child
from tilewise.core.kept import Far

__all__ = ["WorkerLink"]

_PIPE_BYTES = 1 << 20  # what Linux gives every user
_BEAT_MS = int(worker_child.BEAT_S * 1000)


class WorkerLink:
    """A process that answers calls. One thread at a time uses it.

    Attributes:
        far: what it keeps.
    """

    def __init__(self) -> None:
        self.far = Far()
        (theirs_in, self._calls), (self._answers, theirs_out) = os.pipe(), os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", worker_child.__file__, str(theirs_in), str(theirs_out)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what is printed before it says otherwise is no answer
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,  # Ctrl-C is for this process, which ends it
            )
        except BaseException:
            os.close(self._calls)
            os.close(self._answers)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        for pipe in (self._calls, self._answers):
            _widen(pipe)
            os.set_blocking(pipe, False)
        self._left = bytearray()
        paths = [path for path in sys.path if isinstance(path, str)]
        self.send(json.dumps([os.getpid(), paths]).encode())

    def send(self, body: bytes) -> bool:
        """One message; False where the process has ended."""
        left = memoryview(worker_child.LENGTH.pack(len(body)) + body)
        while left:
            try:
                left = left[os.write(self._calls, left) :]
            except BlockingIOError:
                if not self._wait(self._calls, select.POLLOUT):
                    return False
            except BrokenPipeError:
                return False
        return True

    def receive(self) -> bytes | None:
        """The next answer; None where the process has ended before it."""
        head = self._until(worker_child.LENGTH.size)
        return None if head is None else self._until(worker_child.LENGTH.unpack(head)[0])

    def _until(self, size: int) -> bytes | None:
        while len(self._left) < size:
            if not self._wait(self._answers, select.POLLIN):
                return None
            if not (piece := os.read(self._answers, _PIPE_BYTES)):
                return None
            self._left += piece
        found = bytes(self._left[:size])
        del self._left[:size]
        return found

    def _wait(self, pipe: int, event: int) -> bool:
        """Until a pipe can be used; False where the process has ended and the pipe has nothing of it."""
        poll, has_ended = select.poll(), False
        poll.register(pipe, event)
        while not poll.poll(0 if has_ended else _BEAT_MS):
            if has_ended:
                return False
            has_ended = self.process.poll() is not None
        return True

    def kill(self) -> None:
        """End the process; threads that use it find it ended."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Give the pipes back; no thread uses them any more."""
        os.close(self._calls)
        os.close(self._answers)

    def ending(self) -> str:
        """How the process has ended, in words."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it has closed its pipe"
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def _widen(pipe: int) -> None:
    """Let a pipe hold a whole batch, where the system can: a worker that writes an answer into a full one stands still
    until this process, busy with its own share, reads the next piece of it."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # more than a user may have
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
