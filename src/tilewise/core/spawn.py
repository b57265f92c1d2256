"""Child processes that run one module's `main` and talk through a socket: the engine of a server, workers of a group.

They are started by file and know nothing of the parent's main module. A child ends when its socket does, which is the
module's duty; a parent that is killed leaves none behind.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import weakref

from tilewise.core import child

__all__ = ["Spawned"]

_END_S = 5.0


class Spawned:
    """A child process. It ends when this is dropped; its end is waited for with `end`.

    Args:
        module: whose `main` it calls, with the number of its socket.
        apart: in a session of its own, which Ctrl-C in a terminal does not reach.
        is_heard: whether its standard output is this process's; else it is closed.

    Attributes:
        process: the child.
        link: the socket to it; it ends when this closes.
    """

    def __init__(self, module: str, *, apart: bool = False, is_heard: bool = True) -> None:
        self.link, theirs = socket.socketpair()
        places = [place for place in sys.path if isinstance(place, str)]
        command = [sys.executable, "-I", child.__file__, str(theirs.fileno()), json.dumps(places), module]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=None if is_heard else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=apart,
            )
        weakref.finalize(self, _kill, self.process, self.link)

    def end(self, patience_s: float = _END_S) -> None:
        """Wait for the end that a closed socket brings, and bring it otherwise."""
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
