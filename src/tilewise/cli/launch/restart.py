"""Starts a command again when it ends because a process was lost.

The command runs in a child process, so it can be restarted however it ended. The child receives its
arguments, and the signals that this process gets, through a socket; it has its own session, so that
each signal arrives once. If the socket closes because this process was killed, the child stops as
on Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from tilewise.core.errors import LOST, CommError, PeerLost
from tilewise.core.process import Spawned
from tilewise.core.threads import BackgroundThread

if TYPE_CHECKING:
    from tilewise.comm.channel import Channel

__all__ = ["main", "run_again"]


def run_again(options: Sequence[str], command: Sequence[str], times: int) -> int:
    """Run a command over several processes, again if a process was lost; `train` resumes from its
    checkpoints.

    Args:
        options: of the launch, without the number of restarts.
        command: of this program, with its arguments.
        times: maximum number of restarts.

    Returns:
        Its last exit code; 128 plus the signal's number if a signal ended it.
    """
    before = ["launch", *options, "--"]
    arguments = [*before, *command]
    resumes = command[0] == "train" and "--resume" not in command
    for left in range(times, -1, -1):
        code, is_asked = _run_once(arguments)
        is_lost = code == LOST or code < 0
        if not is_lost or is_asked or left == 0:
            return 128 - code if code < 0 else code
        how = f"signal {-code}" if code < 0 else "the loss of a process"
        done = f"{times - left + 1} of {times}"
        print(f"tilewise: [cli.launch] ended by {how}; starting again ({done})", file=sys.stderr, flush=True)
        if resumes:
            arguments, resumes = [*before, "train", "--auto-resume", *command[1:]], False
    raise AssertionError("the last attempt returns")


def _run_once(arguments: Sequence[str]) -> tuple[int, bool]:
    """The exit code of a child, negative for a signal, and whether a signal to this process asked
    it to end.
    """
    from tilewise.comm.channel import Channel

    asked: list[int] = []
    spawned = Spawned("tilewise.cli.launch.restart", apart=True)
    channel = Channel(spawned.link, "the command")
    channel.send({"arguments": list(arguments)})

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        with suppress(CommError):
            channel.send({"signal": number})

    def pause(number: int, frame: FrameType | None) -> None:
        spawned.process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        spawned.process.send_signal(signal.SIGCONT)

    handlers = {signal.SIGINT: pass_on, signal.SIGTERM: pass_on, signal.SIGTSTP: pause}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return spawned.process.wait(), bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        spawned.end()


def main(descriptor: int) -> None:
    """The child: runs a command line of this program.

    Args:
        descriptor: of the socket to the parent.
    """
    from tilewise.cli.main import main as run
    from tilewise.comm.channel import Channel

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
    except KeyboardInterrupt:  # before the command line hears of it
        print("tilewise: interrupted", file=sys.stderr)
        sys.exit(130)


def _hear(channel: Channel, is_over: threading.Event) -> None:
    """Send this process the signals that the parent reports, and SIGINT when the parent has ended."""
    with suppress(PeerLost):
        while True:
            message, _ = channel.receive()
            os.kill(os.getpid(), message["signal"])
    if not is_over.is_set():
        os.kill(os.getpid(), signal.SIGINT)
