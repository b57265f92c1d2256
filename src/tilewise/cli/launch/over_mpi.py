"""Runs a command on several hosts by mpiexec.

mpiexec does not start the command itself but a stand-in for each process, which starts the command
and reports how it ended (stand_in.py).

The command's standard output passes through mpiexec unchanged. Its standard error passes through
this module, which removes the stand-ins' reports. When the first process has ended, the other
processes get a moment to report. Then this module ends mpiexec, and with it the processes on all
hosts. The same happens if this process is killed.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from tilewise.cli.launch import stand_in
from tilewise.cli.launch.stand_in import END, FORWARDED, MARK
from tilewise.core.errors import LOST, ConfigError

__all__ = ["Reports", "build_command", "find_mpiexec", "run_over_hosts"]

_BEGIN_S = 60.0  # from the first process's start to the last's
_REPORT_S = 20.0  # from a loss to the first process's report of it
_OTHERS_S = 2.0  # from the first process's end to the others'
_SURVIVORS_S = 5.0  # the same, if others have a loss to report
_LEAVE_S = 1.0  # from the end of all processes to that of mpiexec
_END_S = 5.0
_CHUNK = 1 << 16
_LONGEST = 400  # bytes of a stand-in's report
_PR_SET_PDEATHSIG = 1


def find_mpiexec(named: Path | None = None) -> str:
    """The mpiexec to use: the given one, otherwise the one next to this Python, otherwise the one
    on the search path.

    Raises:
        ConfigError: there is no mpiexec.
    """
    if named is not None:
        if not os.access(named, os.X_OK) or named.is_dir():
            raise ConfigError(f"[cli.launch] --mpiexec must be a program; got {str(named)!r}; give its path")
        return str(named.absolute())
    own_mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    mpiexec = own_mpiexec or shutil.which("mpiexec")
    if mpiexec is None:
        raise ConfigError("[cli.launch] --hosts needs mpiexec; got none; pip install mpich")
    return mpiexec


def build_command(
    mpiexec: str, placed: Sequence[tuple[str, int]], command: Sequence[str], word: str, launcher: Path | None
) -> list[str]:
    """The command line that starts a command on hosts.

    Args:
        mpiexec: the mpiexec of MPICH, or one with the same options.
        placed: hosts, and the number of processes of each.
        command: the command with its arguments. Its program must have the same path on all hosts.
        word: the key that marks the reports of this launch's stand-ins.
        launcher: a program that is called like ssh.
    """
    hosts = ",".join(f"{name}:{count}" for name, count in placed)
    words = [mpiexec, "-hosts", hosts, "-n", str(sum(count for _, count in placed))]
    if launcher is not None:
        words += ["-launcher", "ssh", "-launcher-exec", str(launcher.absolute())]
    return [*words, sys.executable, "-I", "-S", stand_in.__file__, word, *command]


class Reports:
    """Extracts the stand-ins' reports from standard error.

    Args:
        word: the key of the launch. Text between marks without this key is not a report and is
            kept.

    Attributes:
        begun: hosts of the processes that have begun, by number.
        ended: exit codes of the processes that have ended, negative for a signal.
    """

    def __init__(self, word: str) -> None:
        self.begun: dict[int, str] = {}
        self.ended: dict[int, int] = {}
        self._opening = f"{MARK}{word} ".encode()
        self._partial = b""

    def take(self, data: bytes) -> bytes:
        """Take the next bytes of standard error, and return them without reports. If they end
        within a report, its beginning is held back.
        """
        data, self._partial, out = self._partial + data, b"", b""
        while data:
            before, mark, after = data.partition(MARK.encode())
            out += before
            data = mark + after
            size = min(len(data), len(self._opening))
            if data[:size] != self._opening[:size]:
                out, data = out + data[:1], data[1:]
                continue
            report, closing, rest = data[1:].partition(MARK.encode())
            if not closing and len(data) < _LONGEST:
                self._partial = data
                break
            if closing and self._read(report.decode("utf-8", "replace").split(" ")):
                data = rest
            else:
                out, data = out + data[:1], data[1:]
        return out

    def rest(self) -> bytes:
        """The bytes that were held back, at the end of the stream."""
        partial, self._partial = self._partial, b""
        return partial

    def _read(self, words: list[str]) -> bool:
        with suppress(ValueError):
            _, rank, event, more = words
            if event == "begun":
                self.begun[int(rank)] = more
            elif event == "ended":
                self.ended[int(rank)] = int(more)
            return event in ("begun", "ended")
        return False


def run_over_hosts(
    placed: Sequence[tuple[str, int]],
    command: Sequence[str],
    mpiexec: Path | None = None,
    launcher: Path | None = None,
) -> int:
    """Run a command on hosts until it ends.

    Args:
        placed: hosts, and the number of processes of each.
        command: the command with its arguments. Its program must have the same path on all hosts.
        mpiexec: the mpiexec to use; None for the result of `find_mpiexec`.
        launcher: a program that is called like ssh.

    Returns:
        The exit code of the command's first process. 75 if a process was lost, 1 if the command
        could not be started, and 128 plus the signal's number if a signal to this process ended it.

    Raises:
        ConfigError: there is no mpiexec.
    """
    word = secrets.token_hex(8)
    words = build_command(find_mpiexec(mpiexec), placed, command, word, launcher)
    return _Run(words, word, sum(count for _, count in placed)).wait()


class _Run:
    """mpiexec with all processes that it has started."""

    def __init__(self, words: Sequence[str], word: str, processes: int) -> None:
        self._reports = Reports(word)
        self._processes = processes
        self._signal: int | None = None
        self._is_given_up = False  # a signal arrived before the first process had started
        self._is_cut = False  # mpiexec has ended before the first process
        self._first_s = self._loss_s = self._end_s = (
            0.0  # times of the first start, the first loss and the first process's end; 0.0 before
        )
        libc = ctypes.CDLL(None)  # loaded before the fork, because little is allowed between fork and exec
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            stderr=subprocess.PIPE,
            start_new_session=True,  # this process forwards Ctrl-C once to the first process
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def wait(self) -> int:
        before = {number: signal.signal(number, self._forward) for number in FORWARDED}
        try:
            self._read_reports()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signal == signal.SIGINT and 0 not in self._reports.ended:
            _write(b"tilewise: interrupted\n")
        return self._code()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if 0 in self._reports.begun:
            self._process.send_signal(FORWARDED[signal.Signals(number)])
        else:
            self._is_given_up = True

    def _read_reports(self) -> None:
        """Read until mpiexec has closed its standard error, or there is nothing more to wait for."""
        assert self._process.stderr is not None
        stream = self._process.stderr.fileno()
        while not self._is_over():
            if select.select([stream], [], [], 0.05)[0]:
                data = os.read(stream, _CHUNK)
                if not data:
                    break
                _write(self._reports.take(data))
            elif self._process.poll() is not None:
                break
        else:
            self._report_losses()
            return
        self._is_cut = 0 not in self._reports.ended and self._signal is None
        self._report_losses()
        if self._is_cut:
            self._report_early_end()

    def _report_losses(self) -> None:
        """Print losses that the first process does not know, or can no longer report."""
        ended = self._reports.ended
        for rank, code in sorted(ended.items()) if self._signal is None else ():
            if code < 0 or (code and 0 not in ended):
                host = self._reports.begun.get(rank, "its host")
                _write(
                    f"tilewise: [cli.launch] process {rank} on {host} has ended {_ending(code)}\n".encode()
                )

    def _report_early_end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        code = self._process.poll()
        how = "with its output closed" if code is None else _ending(code)
        text = (
            f"tilewise: [cli.launch] mpiexec must start {self._processes} processes and run until they end; it ended "
            f"{how} after {len(self._reports.begun)} had started; see its messages above, and check that every host "
            f"can be reached and has this folder, {sys.executable} and its installation of tilewise\n"
        )
        _write(text.encode())

    def _is_over(self) -> bool:
        if self._is_given_up:
            return True
        begun, ended, now = self._reports.begun, self._reports.ended, time.monotonic()
        self._first_s = self._first_s or (now if begun else 0.0)
        self._loss_s = self._loss_s or (now if any(ended.values()) else 0.0)
        self._end_s = self._end_s or (now if 0 in ended else 0.0)
        if len(begun) < self._processes and self._first_s and now > self._first_s + _BEGIN_S:
            late = ", ".join(str(rank) for rank in range(self._processes) if rank not in begun)
            text = (
                f"tilewise: [cli.launch] all processes must start within {_BEGIN_S:g} s; these did not: {late}; check "
                f"that {sys.executable} and its installation of tilewise exist on every host\n"
            )
            _write(text.encode())
            return True
        if self._end_s:
            is_late = now > self._end_s + (_SURVIVORS_S if ended[0] == LOST else _OTHERS_S)
            return is_late or len(ended) == self._processes
        return bool(self._loss_s) and now > self._loss_s + _REPORT_S

    def _end(self) -> None:
        """End mpiexec. If all its processes have ended, mpiexec ends by itself and removes its
        files. Otherwise its processes are ended with it, and its helpers that wait for unreachable
        hosts are killed.
        """
        if len(self._reports.ended) == self._processes:
            with suppress(subprocess.TimeoutExpired):
                self._process.send_signal(END)
                self._process.wait(_LEAVE_S)
        pid = self._process.pid
        children: list[int] = []
        with suppress(OSError):
            children = [
                int(child)
                for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
            ]
        self._process.kill()
        self._process.wait()
        self._pass_on_rest()
        until = time.monotonic() + (_LEAVE_S if self._is_given_up else _END_S)
        while (running := [child for child in children if _is_running(child)]) and time.monotonic() < until:
            time.sleep(0.01)
        for child in running:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def _pass_on_rest(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            while select.select([stream], [], [], 0)[0] and (data := os.read(stream.fileno(), _CHUNK)):
                _write(self._reports.take(data))
        _write(self._reports.rest())

    def _code(self) -> int:
        ended = self._reports.ended
        first = ended.get(0)
        if first is not None and first >= 0:
            return first
        if self._signal is not None:
            return 128 + self._signal
        if self._is_cut and len(self._reports.begun) == self._processes:
            return LOST
        return LOST if any(code < 0 or code == LOST for code in ended.values()) else 1


def _ending(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit status {code}"


def _write(data: bytes) -> None:
    """Write everything to standard error. It is not an error if the reader has closed it."""
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False
