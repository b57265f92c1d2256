"""Child processes of this Python: their JSON messages, children that work together with their
parent, and children that may be killed at any time.

A message is a frame: JSON after its length. It is not a pickle, because parts of it may come from
clients. The side that reads a message checks it.

`Spawned` runs a module's `main` and exchanges messages with it through a socket. The engine of a
server and the workers of a group are such children. `DisposableProcess` processes untrusted input,
for example renders a chat template. It has no environment variables, and is killed if it does not
answer by a deadline. Children are started by the name of a file, so they do not run the parent's
main module.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Lock, Timer
from typing import Any

from tilewise.processes import child

__all__ = ["HEAD", "MOST_BYTES", "DisposableProcess", "DisposableProcesses", "Spawned", "pack", "unpack"]

HEAD = struct.Struct(">I")
MOST_BYTES = 1 << 28
"""The largest frame. A longer one is a defect of the other side."""
_END_S = 5.0
_MAX_IDLE = 2


def pack(message: Any) -> bytes:
    """A message as it is sent: its length, then JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEAD.pack(len(body)) + body


def unpack(body: bytes | bytearray) -> Any:
    """The message in a frame's body.

    Raises:
        ValueError: the body is not JSON.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


class Spawned:
    """A child process that runs one module's `main`. The child must end when its socket closes, so
    that a parent that is killed leaves no child behind. It also ends when this object is dropped.

    Args:
        module: the module whose `main` the child calls, with the number of its socket.
        apart: whether the child is in its own session, which Ctrl-C in a terminal does not reach.
        shares_stdout: whether the child writes to this process's standard output. Otherwise its
            output is dropped.

    Attributes:
        process: the child.
        link: the socket to the child, which ends when the socket closes.
    """

    def __init__(self, module: str, *, apart: bool = False, shares_stdout: bool = True) -> None:
        self.link, theirs = socket.socketpair()
        places = [place for place in sys.path if isinstance(place, str)]
        command = [sys.executable, "-I", child.__file__, str(theirs.fileno()), json.dumps(places), module]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=None if shares_stdout else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=apart,
            )
        weakref.finalize(self, _kill, self.process, self.link)

    def end(self, patience_s: float = _END_S) -> None:
        """Close the socket and wait for the child to end; kill it after `patience_s` seconds."""
        self.link.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            _kill(self.process, self.link)

    def ending(self) -> str:
        """How the process has ended, in words."""
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "it has closed its socket"
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def _kill(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    if process.poll() is None:
        process.kill()
        process.wait()


class DisposableProcess:
    """A child process that may be killed at any time, with the processes that it has started. Not thread-safe.

    Args:
        arguments: arguments of Python: a file that reads frames from standard input and answers
            each on standard output, then the arguments of this file.

    Attributes:
        process: the child.
        is_late: whether the child was killed because it missed a deadline.
    """

    def __init__(self, *arguments: str) -> None:
        self.is_late = False
        self.process = subprocess.Popen(
            [sys.executable, "-I", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,  # Ctrl-C reaches only the parent; killpg reaches the child's own children
        )

    @property
    def is_alive(self) -> bool:
        """Whether the child can answer."""
        return not self.is_late and self.process.poll() is None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message that has no answer."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the child is dead; `ask` reports it
            self.process.stdin.write(pack(message))
            self.process.stdin.flush()

    def ask(self, message: Mapping[str, Any], deadline_s: float, max_bytes: int) -> bytes | None:
        """Send a message.

        Args:
            message: plain values.
            deadline_s: seconds after which the child is killed.
            max_bytes: maximum size of the answer.

        Returns:
            The body of the answer. It is empty if the answer is too long, and None if the child has
            ended without an answer.
        """
        timer = Timer(deadline_s, self._stop)
        timer.start()
        try:
            self.send(message)
            return self._receive(max_bytes)
        finally:
            timer.cancel()

    def end(self) -> None:
        """Kill the child."""
        self._kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # the pipe has unread data
                    pipe.close()
        self.process.wait()

    def _receive(self, max_bytes: int) -> bytes | None:
        assert self.process.stdout is not None
        head = self.process.stdout.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        (size,) = HEAD.unpack(head)
        if size > max_bytes:
            return b""
        body = self.process.stdout.read(size)
        return body if len(body) == size else None

    def _stop(self) -> None:
        self.is_late = True
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


class DisposableProcesses:
    """Keeps up to two idle child processes for reuse. Thread-safe. The children end with this
    object, or with this process.
    """

    def __init__(self) -> None:
        self._idle: list[DisposableProcess] = []
        self._lock = Lock()
        weakref.finalize(self, _end_all, self._idle)

    def start(self) -> None:
        """Start a process that waits for its first message."""
        process = self._new_process()
        with self._lock:
            self._idle.append(process)

    @contextmanager
    def _borrowed(self) -> Iterator[DisposableProcess]:
        """A process that no other thread uses. It is kept if it is alive afterwards."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or not process.is_alive:
            process = self._new_process()
        try:
            yield process
        finally:
            with self._lock:
                is_reusable = process.is_alive and len(self._idle) < _MAX_IDLE
                if is_reusable:
                    self._idle.append(process)
            if not is_reusable:
                process.end()

    def _new_process(self) -> DisposableProcess:
        raise NotImplementedError


def _end_all(processes: list[DisposableProcess]) -> None:
    for process in processes:
        process.end()
