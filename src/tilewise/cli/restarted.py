"""The child process of `cli.launch.restart`: runs a command line of this program.

If the socket to the parent closes because the parent was killed, the command stops as on Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

from tilewise.cli.main import main as run
from tilewise.comm.channel import Channel
from tilewise.core.errors import PeerLost
from tilewise.processes.threads import BackgroundThread

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Run a command line of this program, as a child process.

    Args:
        descriptor: descriptor of the socket to the parent.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    channel = Channel.of(descriptor, "the launch")
    try:
        message, _ = channel.receive()
    except PeerLost:
        os._exit(1)
    try:
        is_over = threading.Event()

        def stop() -> None:
            is_over.set()
            channel.shut()

        BackgroundThread(_hear, (channel, is_over), stop=stop).start()
        run(message["arguments"])
    except KeyboardInterrupt:  # before the command line handles it
        print("tilewise: interrupted", file=sys.stderr)
        sys.exit(130)


def _hear(channel: Channel, is_over: threading.Event) -> None:
    """Send this process the signals that the parent forwards, and SIGINT when the parent has ended."""
    with suppress(PeerLost):
        while True:
            message, _ = channel.receive()
            os.kill(os.getpid(), message["signal"])
    if not is_over.is_set():
        os.kill(os.getpid(), signal.SIGINT)
