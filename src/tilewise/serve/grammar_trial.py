"""Processes that try grammars out, as the process that started them has them: asked, watched, ended.

One is kept while it answers. One that is late or dies is killed, and its grammar is one that is not followed.
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
_MOST_KEPT = 2
_MOST_ANSWER = 1 << 16


class GrammarTrials:
    """Tries grammars out, for any thread. Its processes end when it is dropped, or when this process does.

    Args:
        tokenizer: text of tokenizer.json.
        end_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: str, end_ids: list[int]) -> None:
        self._given = {"tokenizer": tokenizer, "end_ids": end_ids}
        self._idle: list[_Process] = []
        self._lock = Lock()
        weakref.finalize(self, _end_all, self._idle)

    def problem(self, source: str) -> str:
        """What is wrong with a grammar; empty where nothing is.

        Args:
            source: as llguidance reads it.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or not process.is_alive:
            process = _Process(self._given)
        problem = process.ask(source)
        with self._lock:
            is_kept = process.is_alive and len(self._idle) < _MOST_KEPT
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            process.end()
        return problem


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.end()


class _Process:
    """One process. One thread at a time.

    Args:
        given: its first message.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        import llguidance

        place = Path(str(llguidance.__file__)).parents[1]
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, str(place), grammar_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self._is_late = False
        self._send(given)

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return not self._is_late and self._child.poll() is None

    def ask(self, source: str) -> str:
        """What is wrong with a grammar; a process that cannot say ends."""
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
        """Kill it."""
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it has not read
                    pipe.close()
        self._child.wait()

    def _stop(self) -> None:
        self._is_late = True
        self._child.kill()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        body = json.dumps(message).encode()
        with contextlib.suppress(BrokenPipeError):  # it is dead, which reading finds
            self._child.stdin.write(grammar_child.HEAD.pack(len(body)) + body)
            self._child.stdin.flush()

    def _receive(self) -> str | None:
        """The answer; None where it dies before."""
        assert self._child.stdout is not None
        head = self._child.stdout.read(grammar_child.HEAD.size)
        if len(head) < grammar_child.HEAD.size:
            return None
        (size,) = grammar_child.HEAD.unpack(head)
        body = self._child.stdout.read(min(size, _MOST_ANSWER))
        try:
            problem = json.loads(body)["problem"]
        except (ValueError, TypeError, KeyError):
            return None
        return problem if isinstance(problem, str) else None


_START = "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
"""llguidance is found where this process has found it, behind the standard library."""
