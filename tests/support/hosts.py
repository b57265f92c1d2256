"""Several "hosts" on this machine: network namespaces joined by a switch, and a launcher that stands in for ssh.

A host has a network, a name and a /dev/shm of its own; process numbers are this machine's, and so are files outside of
the disks that a host is given. The switch is a bridge in one more namespace, so nothing appears among this machine's
own links. Names carry the process that made them: two runs do not meet, and what a killed run left behind is removed by
the next.
"""

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["Hosts", "find_mpiexec", "missing", "remains"]

_NAME = re.compile(r"tw([0-9]+)n[0-9]+(switch|[a-z])")
_NUMBERS = itertools.count()
_END_S = 10.0
_LAUNCHER = """#!/bin/sh
# Stands in for ssh: [OPTION...] HOST COMMAND... As with ssh, the words of the command become one text for a shell.
while [ "${1#-}" != "$1" ]; do shift; done
case $1 in
CASES
*) echo "no host $1" >&2; exit 255 ;;
esac
shift
set -- ip netns exec "$host" unshare --uts --ipc --mount sh -c '
    hostname "$0" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && exec sh -c "$2"
' "$host" TABLE "$*"
[ -e FOLDER/"$host".disks ] || exec "$@"
mounts=/proc/$(cat FOLDER/"$host".disks)/ns/mnt
exec nsenter --mount="$mounts" sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"
"""
_DISK = """
mount -t tmpfs -o "size=$1" none "$0" && echo mounted && exec sleep infinity
"""


def find_mpiexec():
    """Next to this Python, otherwise on the path; None if mpiexec is not installed."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def missing():
    """Why hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if absent:
        return f"no {' and no '.join(absent)}"
    if find_mpiexec() is None:
        return "no mpiexec: pip install mpich"
    trial = f"tw{os.getpid()}n{next(_NUMBERS)}a"
    made = _ip("netns", "add", trial, check=False)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    _ip("netns", "del", trial)
    return ""


def remains(pid):
    """Namespaces of a process that still exist."""
    return [name for name in _namespaces() if int(_NAME.fullmatch(name)[1]) == pid]


def _ip(*arguments, check=True):
    done = subprocess.run(["ip", *map(str, arguments)], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done


def _namespaces():
    names = (line.split()[0] for line in _ip("netns", "list").stdout.splitlines() if line)
    return [name for name in names if _NAME.fullmatch(name)]


def _pids(name):
    return [int(pid) for pid in _ip("netns", "pids", name, check=False).stdout.split()]


def _end_all(name):
    """Kill the processes of a namespace; return their number."""
    pids = _pids(name)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def _remove(names):
    """End its processes, then remove the namespaces with their links."""
    until = time.monotonic() + _END_S
    for name in names:
        while _end_all(name) and time.monotonic() < until:
            time.sleep(0.005)
        _ip("netns", "del", name, check=False)  # another run may have removed a killed run's
        if name in _namespaces():
            raise RuntimeError(f"{name} could not be removed; in it run {_pids(name)}")


class Hosts:
    """Hosts with `names` and `addresses` until `close`; `launcher` in the folder runs commands there, like ssh."""

    def __init__(self, folder, count=2):
        own = f"tw{os.getpid()}n{next(_NUMBERS)}"
        self.names = [own + chr(ord("a") + number) for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self.launcher = Path(folder, "in_host.sh")
        self._switch = f"{own}switch"
        self._started = []
        self._disks = []  # processes that hold them
        _remove(
            name for name in _namespaces() if not Path("/proc", _NAME.fullmatch(name)[1]).exists()
        )  # of killed runs
        self._write_launcher(Path(folder, "hosts"))
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _write_launcher(self, table):
        pairs = list(zip(self.addresses, self.names))
        table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in pairs))
        cases = "\n".join(f"{address} | {name}) host={name} ;;" for address, name in pairs)
        text = _LAUNCHER.replace("CASES", cases).replace("TABLE", shlex.quote(str(table)))
        text = text.replace("FOLDER", shlex.quote(str(table.parent)))
        self.launcher.write_text(text)
        self.launcher.chmod(0o755)

    def _make(self):
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for name, address in zip(self.names, self.addresses):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            peer = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "add", f"to-{name[-1]}", *peer)
            _ip("-n", self._switch, "link", "set", f"to-{name[-1]}", "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def inside(self, host, command):
        return [str(self.launcher), host, shlex.join(map(str, command))]

    def over_mpi(self, command, ppn=1, num_processes=None, options=()):
        """The words that run a command over all hosts, from the first; one process per place by default."""
        reported = ("-hosts", ",".join(self.names), "-ppn", ppn, "-n", num_processes or ppn * len(self.names))
        by = ("-launcher", "ssh", "-launcher-exec", self.launcher)
        return self.inside(self.names[0], [find_mpiexec(), *reported, *by, *options, *command])

    def start(self, words, **options):
        """Start a process from words of `inside` or `over_mpi`; it ends with the hosts at the latest."""
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        reported = {"stdin": subprocess.DEVNULL, "text": True} | pipes | options
        self._started.append(subprocess.Popen(words, **reported))
        return self._started[-1]

    def run(self, command, ppn=1, num_processes=None, timeout_s=60.0, options=(), **popen):
        """Run a command over all hosts to its end; after the time all that runs in the hosts is ended."""
        process = self.start(self.over_mpi(command, ppn, num_processes, options), **popen)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            for name in self.names:
                _end_all(name)
            out, err = process.communicate()
            raise TimeoutError(f"{command} ran {timeout_s} s; it said: {out}{err}") from error
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def pids(self, host):
        return [pid for pid in _pids(host) if pid not in self._disks]

    def give_disk(self, host, folder, size):
        """Mount a small disk that only one host sees: its place on this machine, and a function to resize it."""
        holder = self.start(self.inside(host, ["exec", "sh", "-c", _DISK, folder, size]))
        if holder.stdout.readline() != "mounted\n":
            raise RuntimeError(f"{host} takes no disk: {holder.communicate()[1].strip()}")
        self._disks.append(holder.pid)
        self.launcher.with_name(f"{host}.disks").write_text(str(holder.pid))

        def resize(size):
            reported = ["mount", "-o", f"remount,size={size}", folder]
            subprocess.run(["nsenter", "-t", str(holder.pid), "-m", *map(str, reported)], check=True)

        return Path(f"/proc/{holder.pid}/root{folder}"), resize

    def shape(self, rate):
        """Limit every host's sending rate, in words of tc (`1gbit`); None removes the limit."""
        for name in self.names:
            if rate is None:
                words = ["del", "dev", "eth0", "root"]
            else:
                words = f"replace dev eth0 root tbf rate {rate} burst 256kb latency 20ms".split()
            subprocess.run(["tc", "-n", name, "qdisc", *words], check=True, capture_output=True)

    def cut(self, host):
        """Disconnect a host: nothing arrives, and no error is reported."""
        _ip("-n", self._switch, "link", "set", f"to-{host[-1]}", "down")

    def drop_routes(self, host):
        """Remove all routes of a host: sending fails at once."""
        for kind in ("-4", "-6"):
            _ip(kind, "-n", host, "route", "flush", "table", "main")

    def mend(self, host):
        """Undo `cut` and `drop_routes`."""
        _ip("-n", self._switch, "link", "set", f"to-{host[-1]}", "up")
        _ip("-n", host, "route", "replace", "10.77.0.0/24", "dev", "eth0")

    def close(self):
        """End what runs in the hosts, and remove them."""
        _remove(name for name in _namespaces() if name in (*self.names, self._switch))
        for process in self._started:
            if process.poll() is None:
                process.kill()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            process.wait()
        self._started.clear()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
