"""The program that mpiexec starts instead of a command: it starts the command, and reports to the
launch how it ended.

MPICH's launcher kills all processes of a host if one of them ends by a signal (even with
`-disable-auto-cleanup`), or ends between MPI's start and MPI's end. It waits for ever if a process
ends before MPI's start. So the launcher must not see how a command ends. A stand-in outlives its
command and keeps its connection to the launcher until `tilewise launch` has reports from all
stand-ins. Then a signal ends all stand-ins, and the launcher ends and removes its files.

The stand-in runs as a file, with any Python. Its arguments are the launch's key and the command. A
report is a few bytes between two marks on its standard error. Ctrl-C and SIGTERM of `tilewise
launch` arrive as SIGALRM and SIGUSR1, and only the stand-in of the first process passes them on.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from contextlib import suppress
from types import FrameType

__all__ = ["END", "FORWARDED", "MARK", "main"]

MARK = "\x1e"
FORWARDED = {signal.SIGINT: signal.SIGALRM, signal.SIGTERM: signal.SIGUSR1}
"""The signals that the launch sends instead of these; MPICH's launcher forwards them silently."""
END = signal.SIGQUIT
"""The signal that the launch sends when all commands have ended."""
_PATIENCE_S = 60.0  # for a launch that does not answer
_READ_S = 5.0
_ANSWER_S = 0.2


def main() -> None:
    """Run the command until it ends."""
    word, command = sys.argv[1], sys.argv[2:]
    if "PMI_RANK" not in os.environ:
        sys.exit(
            "tilewise: [cli.launch] mpiexec must be MPICH's or compatible; got one without PMI_RANK; see --mpiexec"
        )
    rank = int(os.environ["PMI_RANK"])
    for number in (*FORWARDED.values(), END):  # the command inherits this
        signal.signal(number, signal.SIG_IGN)
    _report(word, rank, "begun", socket.gethostname())
    process = subprocess.Popen(command, close_fds=False)

    def forward(number: int, frame: FrameType | None) -> None:
        if rank == 0:
            process.send_signal(next(original for original, sent in FORWARDED.items() if sent == number))

    for number in FORWARDED.values():
        signal.signal(number, forward)
    for number in FORWARDED:  # sent to the whole process group: the command has received it, too
        signal.signal(number, lambda number, frame: None)
    code = process.wait()
    _wait_for_reader()
    signal.signal(END, lambda number, frame: _leave())
    _report(word, rank, "ended", str(code))
    time.sleep(_PATIENCE_S)
    sys.exit(1 if code else 0)


def _wait_for_reader() -> None:
    """Wait until the launcher has read all of standard output, because the launch may end it after
    the report of the end.
    """
    until = time.monotonic() + _READ_S
    with suppress(OSError):
        while any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))) and time.monotonic() < until:
            time.sleep(0.001)


def _leave() -> None:
    """End, after telling the launcher that MPI has ended. Without this the launcher prints a long
    error.
    """
    with suppress(OSError, KeyError, ValueError):
        descriptor = int(os.environ["PMI_FD"])
        os.write(descriptor, b"cmd=finalize\n")
        select.select([descriptor], [], [], _ANSWER_S)
    sys.exit()


def _report(word: str, rank: int, event: str, more: str) -> None:
    os.write(2, f"{MARK}{word} {rank} {event} {more}{MARK}".encode())


if __name__ == "__main__":
    main()
