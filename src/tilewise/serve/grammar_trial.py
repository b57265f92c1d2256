"""Child processes that compile grammars on trial, as the parent sees them.

A child is reused while it answers. A child that misses its deadline or dies is killed, and its grammar is refused.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import weakref
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from tilewise.serve import grammar_child

__all__ = ["GrammarTrials"]

_DEADLINE_S = 10.0
_MAX_IDLE = 2
_MAX_ANSWER = 1 << 16


class GrammarTrials:
    """Compiles grammars in child processes. Thread-safe. Its children end with it, or with this process.

    Args:
        tokenizer: content of tokenizer.json.
        end_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: str, end_ids: list[int]) -> None:
        self._tokenizer = {"tokenizer": tokenizer, "end_ids": end_ids}
        self._idle: list[_Process] = []
        self._lock = Lock()
        weakref.finalize(self, _end_all, self._idle)

    def problem(self, source: str) -> str:
        """The error of a grammar; empty if it is valid.

        Args:
            source: the grammar in llguidance's format.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or not process.is_alive:
            process = _Process(self._tokenizer)
        problem = process.ask(source)
        with self._lock:
            is_reusable = process.is_alive and len(self._idle) < _MAX_IDLE
            if is_reusable:
                self._idle.append(process)
        if not is_reusable:
            process.end()
        return problem


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.end()


class _Process:
    """One child process. Not thread-safe.

    Args:
        tokenizer: its first message, the tokenizer.
    """

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        import llguidance

        directory = Path(str(llguidance.__file__)).parents[1]
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, str(directory), grammar_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,  # Ctrl-C reaches only the parent
        )
        self._is_late = False
        self._send(tokenizer)

    @property
    def is_alive(self) -> bool:
        """Whether the child can answer."""
        return not self._is_late and self._child.poll() is None

    def ask(self, source: str) -> str:
        """The error of a grammar; empty if it is valid. A child that cannot answer is killed."""
        timer = Timer(_DEADLINE_S, self._stop)
        timer.start()
        try:
            self._send({"source": source})
            answer = self._receive()
        finally:
            timer.cancel()
        if answer is not None:
            return answer
        if self._is_late:
            return f"one that takes more than {_DEADLINE_S:g} s to compile"
        self.end()
        return "one that refers too deep, or takes too much memory"

    def end(self) -> None:
        """Kill the child."""
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # the pipe has unread data
                    pipe.close()
        self._child.wait()

    def _stop(self) -> None:
        self._is_late = True
        self._child.kill()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        body = json.dumps(message).encode()
        with contextlib.suppress(BrokenPipeError):  # the child is dead; _receive reports it
            self._child.stdin.write(grammar_child.HEAD.pack(len(body)) + body)
            self._child.stdin.flush()

    def _receive(self) -> str | None:
        """The answer; None if the child died."""
        assert self._child.stdout is not None
        head = self._child.stdout.read(grammar_child.HEAD.size)
        if len(head) < grammar_child.HEAD.size:
            return None
        (size,) = grammar_child.HEAD.unpack(head)
        body = self._child.stdout.read(min(size, _MAX_ANSWER))
        try:
            problem = json.loads(body)["problem"]
        except (ValueError, TypeError, KeyError):
            return None
        return problem if isinstance(problem, str) else None


_START = "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
"""Imports llguidance from the directory where this process found it, after the standard library."""
