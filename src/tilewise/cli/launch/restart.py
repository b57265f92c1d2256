"""Starts a command again when it ends because a process was lost.

The command runs in a child process (`cli.restarted`), so it can be restarted however it ended. The
child receives its arguments through a socket, and also the signals that this process gets. It has
its own session, so that each signal arrives only once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from tilewise.core.errors import LOST, CommError
from tilewise.processes.children import Spawned

__all__ = ["run_again"]


def run_again(options: Sequence[str], command: Sequence[str], times: int) -> int:
    """Run a command over several processes. Run it again if a process was lost; `train` then
    resumes from its checkpoints.

    Args:
        options: options of `tilewise launch`, without the number of restarts.
        command: a command of this program, with its arguments.
        times: maximum number of restarts.

    Returns:
        The exit code of the last run; 128 plus the signal's number if a signal ended it.
    """
    before = ["launch", *options, "--"]
    arguments = [*before, *command]
    resumes = command[0] == "train" and "--resume" not in command
    for num_left in range(times, -1, -1):
        code, is_asked = _run_once(arguments)
        is_lost = code == LOST or code < 0
        if not is_lost or is_asked or num_left == 0:
            return 128 - code if code < 0 else code
        how = f"signal {-code}" if code < 0 else "the loss of a process"
        done = f"{times - num_left + 1} of {times}"
        print(f"tilewise: [cli.launch] ended by {how}; restarting ({done})", file=sys.stderr, flush=True)
        if resumes:
            arguments, resumes = [*before, "train", "--auto-resume", *command[1:]], False
    raise AssertionError("the last attempt returns")


def _run_once(arguments: Sequence[str]) -> tuple[int, bool]:
    """The exit code of a child (negative if a signal ended it), and whether a signal to this
    process asked the child to end.
    """
    from tilewise.comm.channel import Channel

    signals: list[int] = []
    spawned = Spawned("tilewise.cli.restarted", apart=True)
    channel = Channel(spawned.link, "the command")
    channel.send({"arguments": list(arguments)})

    def pass_on(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        with suppress(CommError):
            channel.send({"signal": number})

    def pause(number: int, frame: FrameType | None) -> None:
        spawned.process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        spawned.process.send_signal(signal.SIGCONT)

    handlers = {signal.SIGINT: pass_on, signal.SIGTERM: pass_on, signal.SIGTSTP: pause}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return spawned.process.wait(), bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        spawned.end()
