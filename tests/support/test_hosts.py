"""Two "hosts" on this machine: separate, connected, with links that break and mend, and fully removed."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from support.hosts import Hosts, remains

ECHO = """
import os, socket, sys, time
rank, address, size = int(os.environ["PMI_RANK"]), sys.argv[1], int(sys.argv[2])
if rank == 0:
    with socket.create_server(("", 4321)) as server:
        peer, _ = server.accept()
        with peer:
            left = size
            while left:
                left -= len(peer.recv(min(left, 1 << 16)))
            peer.sendall(b"whole")
else:
    for _ in range(500):
        try:
            link = socket.create_connection((address, 4321), 10)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    with link:
        started = time.monotonic()
        link.sendall(bytes(size))
        assert link.recv(5) == b"whole"
    print("seconds", time.monotonic() - started)
print(rank, socket.gethostname(), len(os.listdir("/dev/shm")))
"""
REACH = """
import socket, sys
try:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as link:
        link.settimeout(0.3)
        link.connect((sys.argv[1], 9))
except OSError as error:
    print(type(error).__name__, error.errno)
"""


def python(script, *arguments):
    return [sys.executable, "-I", "-S", "-c", script, *map(str, arguments)]


def reach(hosts):
    """The result of a connection from the first host to the second, where nothing listens."""
    words = hosts.inside(hosts.names[0], python(REACH, hosts.names[1]))
    return hosts.start(words).communicate(timeout=10)[0].strip()


def test_two_processes_are_on_two_hosts(two_hosts):
    """Names and shared memory are separate; one reaches the other by its name."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm"):
        done = two_hosts.run(python(ECHO, two_hosts.names[0], 1000))
    assert done.returncode == 0, done.stderr
    output = [line for line in sorted(done.stdout.splitlines()) if not line.startswith("seconds")]
    assert output == [f"0 {two_hosts.names[0]} 0", f"1 {two_hosts.names[1]} 0"]
    assert os.uname().nodename not in two_hosts.names


@pytest.mark.slow
def test_words_are_passed_unchanged(two_hosts):
    """Spaces, quotes and dollars too, on both hosts; the exit code is returned."""
    odd = ["a  b", "$HOME", "'q\" *", "", ";exit 3"]
    later = [
        "/bin/sh",
        "-c",
        'sleep 1; exec "$@"',
        "sh",
    ]  # mpiexec ends by SIGPIPE if a host ends while it starts
    done = two_hosts.run([*later, "/usr/bin/printf", "<%s>", *odd], ppn=2)
    assert done.stdout == "".join(f"<{word}>" for word in odd) * 4
    assert two_hosts.run([*later, "/bin/sh", "-c", "exit 7"]).returncode == 7


@pytest.mark.slow
def test_links_break_and_mend(two_hosts):
    """A connection is refused at once, times out without a cable, fails at once without routes."""
    refused = "ConnectionRefusedError 111"
    assert reach(two_hosts) == refused
    two_hosts.cut(two_hosts.names[1])
    assert reach(two_hosts).startswith(("TimeoutError", "OSError 113"))
    two_hosts.mend(two_hosts.names[1])
    assert reach(two_hosts) == refused
    two_hosts.drop_routes(two_hosts.names[0])
    assert reach(two_hosts) == "OSError 101"
    two_hosts.mend(two_hosts.names[0])
    assert reach(two_hosts) == refused


@pytest.mark.slow
def test_command_over_its_time_is_ended(two_hosts):
    """Its background processes too; the hosts can be used again."""
    with pytest.raises(TimeoutError, match="it said: begun"):
        two_hosts.run(["/bin/sh", "-c", "echo begun; setsid sleep 100 & sleep 100"], timeout_s=0.4)
    for name in two_hosts.names:
        while two_hosts.pids(name):
            time.sleep(0.01)
    assert two_hosts.run(["/bin/true"]).returncode == 0


@pytest.mark.usefixtures("two_hosts")  # skips where there can be none
def test_nothing_is_left_after_a_failure(tmp_path):
    """With processes running: no namespace, no link, no process."""
    links, before = os.listdir("/sys/class/net"), remains(os.getpid())
    with pytest.raises(ZeroDivisionError), Hosts(tmp_path) as hosts:
        process = hosts.start(hosts.inside(hosts.names[1], ["/bin/sh", "-c", "setsid sleep 100 & sleep 100"]))
        while len(pids := hosts.pids(hosts.names[1])) < 3:
            time.sleep(0.01)
        assert len(remains(os.getpid())) == len(before) + 3
        raise ZeroDivisionError
    assert process.poll() == -signal.SIGKILL
    assert not [pid for pid in pids if Path("/proc", str(pid), "exe").exists()]
    assert remains(os.getpid()) == before and os.listdir("/sys/class/net") == links


@pytest.mark.slow
@pytest.mark.usefixtures("two_hosts")
def test_remains_of_a_killed_run_are_removed(tmp_path):
    """By the next run that makes hosts; those of a running one stay."""
    script = (
        "import sys, time; from support.hosts import Hosts\n"
        "hosts = Hosts(sys.argv[1]); print(flush=True); time.sleep(100)"
    )
    folder = str(Path(__file__).parents[1])
    words = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": folder}) as other:
        other.stdout.read(1)
        Hosts(tmp_path).close()
        left = remains(other.pid)
        other.kill()
    assert len(left) == 3
    Hosts(tmp_path).close()
    assert not remains(other.pid)


@pytest.mark.slow
def test_rate_limit_holds(two_hosts):
    """Two megabytes at sixteen megabits a second take most of a second, and far less without a limit."""
    seconds = []
    for rate in ("16mbit", None):
        two_hosts.shape("16mbit")
        two_hosts.shape(rate)
        output = two_hosts.run(python(ECHO, two_hosts.names[0], 2_000_000)).stdout
        seconds.append(float(output.partition("seconds ")[2].split()[0]))
    assert seconds[0] > 0.7 and seconds[1] < seconds[0] / 2


@pytest.mark.slow
def test_disk_belongs_to_one_host(two_hosts, tmp_path):
    """All processes started there find it, by a relative path too; its size can be changed."""
    (tmp_path / "disk").mkdir()
    disk, resize = two_hosts.give_disk(two_hosts.names[1], tmp_path / "disk", "64k")

    def write(host, kibibytes):
        words = ["dd", "if=/dev/zero", "of=disk/$(hostname)", "bs=1024", f"count={kibibytes}"]
        reported = two_hosts.inside(host, ["sh", "-c", " ".join(words)])
        return two_hosts.start(reported, cwd=tmp_path).communicate(timeout=10)[1]

    for host in two_hosts.names:
        assert "No space left" not in write(host, 48)
        assert ("No space left" in write(host, 96)) == (host == two_hosts.names[1])
    assert os.listdir(tmp_path / "disk") == two_hosts.names[:1] and os.listdir(disk) == two_hosts.names[1:]
    resize("128k")
    assert "No space left" not in write(two_hosts.names[1], 96)
    assert not two_hosts.pids(two_hosts.names[1])
