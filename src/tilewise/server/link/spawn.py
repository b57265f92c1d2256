"""Starts the engine's process, before the modules of the HTTP process are loaded: the two load at the same time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from tilewise.server.link import engine_child
from tilewise.server.link.frames import pack

__all__ = ["Spawned", "spawn_engine"]

_END_S = 5.0


@dataclass(frozen=True)
class Spawned:
    """An engine's process.

    Attributes:
        process: of it.
        link: the socket to it; it ends when this closes.
    """

    process: subprocess.Popen[bytes]
    link: socket.socket

    def end(self) -> None:
        """Wait for the end that a closed socket brings, and bring it otherwise."""
        self.link.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def spawn_engine(model: str, settings: dict[str, Any]) -> Spawned:
    """Start a process that loads a model.

    Args:
        model: a directory.
        settings: fields of `EngineSettings` by name.
    """
    ours, theirs = socket.socketpair()
    places = [place for place in sys.path if isinstance(place, str)]
    command = [sys.executable, "-I", engine_child.__file__, str(theirs.fileno()), json.dumps(places)]
    with theirs:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
    ours.sendall(pack({"model": model, "settings": settings}))
    return Spawned(process, ours)
