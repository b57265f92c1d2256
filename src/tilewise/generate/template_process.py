"""Child processes that render chat templates, as the parent sees them.

A process is reused while it answers correctly, so that a template costs a fork and not a start of Python. Each answer
has the random name of its request, so that output that an earlier template left behind is not mistaken for it. A
process that misses its deadline, dies or sends anything else is killed with its children.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from tilewise.generate import template_child

__all__ = ["TemplateProcesses"]

_DEADLINE_S = 10.0
_MEMORY_BYTES = 1 << 30
_MOST_BYTES = template_child.MOST_OUTPUT * 12 + 4096  # of JSON: an escaped character takes twelve at most
_MOST_KEPT = 2
_DIES = {"problem": "it ends the process that renders it, or takes too much memory"}
_STRAYS = {"problem": "it makes the process that renders it say something else"}


class TemplateProcesses:
    """Renders templates in child processes. Thread-safe. The processes end with it, or with this process."""

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._lock = Lock()
        weakref.finalize(self, _end_all, self._idle)

    def start(self) -> None:
        """Start a process that waits for a template."""
        process = _Process()
        with self._lock:
            self._idle.append(process)

    def render(self, template: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Render a template; returns its text as `text`, or the error as `problem`.

        Args:
            template: its source.
            variables: plain values by name.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process if process is not None and process.is_alive else _Process()
        result, is_well = process.render(template, variables)
        with self._lock:
            is_kept = is_well and len(self._idle) < _MOST_KEPT
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            process.end()
        return result


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.end()


class _Process:
    """One process. One thread at a time."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", template_child.__file__, *_places_of_jinja()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the parent; it and its forks are ended together
        )

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._child.poll() is None

    def render(self, template: str, variables: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """What it says of a template, and whether it can be asked again."""
        name = secrets.token_hex(16)
        limits = {"memory_bytes": _MEMORY_BYTES, "cpu_s": int(_DEADLINE_S) + 1}
        given = {"name": name, "template": template, "variables": variables, "limits": limits}
        payload = json.dumps(given).encode()
        timer = Timer(_DEADLINE_S, self._kill)
        timer.start()
        try:
            answer = self._converse(template_child.HEAD.pack(len(payload)) + payload)
            is_late = timer.finished.is_set()
        finally:
            timer.cancel()
        if is_late:
            return {"problem": f"it does not end within {_DEADLINE_S:g} s"}, False
        if answer is None:
            return _DIES, False
        try:
            result = json.loads(answer)
        except ValueError:
            return _STRAYS, False
        is_ours = isinstance(result, dict) and result.pop("name", None) == name
        is_answer = is_ours and len(result) == 1 and isinstance(result.get("text", ""), str)
        return (result, True) if is_answer else (_STRAYS, False)

    def end(self) -> None:
        """Kill it, with all that it has started."""
        self._kill()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it has not read
                    pipe.close()
        self._child.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._child.poll() is None:
                os.killpg(self._child.pid, signal.SIGKILL)

    def _converse(self, request: bytes) -> bytes | None:
        """The answer; None where it dies before."""
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(request)
            self._child.stdin.flush()
        except BrokenPipeError:  # it is dead already
            pass
        head = self._child.stdout.read(template_child.HEAD.size)
        if len(head) < template_child.HEAD.size:
            return None
        (size,) = template_child.HEAD.unpack(head)
        if size > _MOST_BYTES:
            return b""
        body = self._child.stdout.read(size)
        return body if len(body) == size else None


def _places_of_jinja() -> list[str]:
    """Where the child finds jinja2, in whatever way this process has found it."""
    import jinja2
    import markupsafe

    return list(dict.fromkeys(str(Path(str(m.__file__)).parents[1]) for m in (jinja2, markupsafe)))
