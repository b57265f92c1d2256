"""Starts the engine's process, before the modules of the HTTP process are loaded: the two load at the same time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import weakref
from typing import Any

from tilewise.server.link import engine_child
from tilewise.server.link.frames import pack

__all__ = ["Spawned", "spawn_engine"]

_END_S = 5.0


class Spawned:
    """An engine's process. It ends when this is dropped; its end is waited for with `end`.

    Args:
        process: of it.
        link: the socket to it; it ends when this closes.
    """

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.process, self.link = process, link
        weakref.finalize(self, _kill, process, link)

    def load(self, model: str, settings: dict[str, Any]) -> None:
        """Say what it has to load.

        Args:
            model: a directory.
            settings: fields of `EngineSettings` by name.
        """
        self.link.sendall(pack({"model": model, "settings": settings}))

    def end(self) -> None:
        """Wait for the end that a closed socket brings, and bring it otherwise."""
        self.link.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            _kill(self.process, self.link)


def _kill(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    if process.poll() is None:
        process.kill()
        process.wait()


def spawn_engine() -> Spawned:
    """Start a process that loads its modules, and a model when it is told of one."""
    ours, theirs = socket.socketpair()
    places = [place for place in sys.path if isinstance(place, str)]
    command = [sys.executable, "-I", engine_child.__file__, str(theirs.fileno()), json.dumps(places)]
    with theirs:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
    return Spawned(process, ours)
