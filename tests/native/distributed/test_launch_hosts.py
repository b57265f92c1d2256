"""Commands over MPI: output, reports of losses, ends, and no leftovers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.hosts import find_mpiexec

pytestmark = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec: pip install mpich")

LAUNCH = """
import json, pathlib, sys
from tilewise.cli.launch import over_mpi
over_mpi._REPORT_S, over_mpi._BEGIN_S, over_mpi._OTHERS_S = 1.0, 1.0, 0.5
placed, mpiexec, launcher, *command = sys.argv[1:]
named = [pathlib.Path(path) if path else None for path in (mpiexec, launcher)]
sys.exit(over_mpi.run_over_hosts(json.loads(placed), command, *named))
"""
BEGINNING = "import os, signal, sys, time; rank = int(os.environ['PMI_RANK'])\n"
MPI = """
import contextlib, ctypes, re
mpi = ctypes.CDLL(sys.argv[2])
assert mpi.MPI_Init(None, None) == 0
for path in set(re.findall(r"/dev/shm/mpich_shm_\\w+", open("/proc/self/maps").read())):
    with contextlib.suppress(OSError):
        os.unlink(path)  # a killed process would leave it
"""
SURVIVORS = """
if rank == 1:
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.4)
print(rank, "reports", file=sys.stderr, flush=True)
sys.exit(75)
"""
WAITING = """
open(f"{sys.argv[1]}/{rank}", "w").close()
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.2)
    print("saved", rank, flush=True)
    sys.exit(130)
"""


def mpi_library():
    """The MPI library of mpiexec's installation."""
    return next(iter(sorted((Path(find_mpiexec()).resolve().parent.parent / "lib").glob("libmpi.so.*"))), "")


def launch(script, *arguments, placed=(("localhost", 3),), mpiexec="", launcher=""):
    """The words that launch a Python script."""
    words = [sys.executable, "-c", LAUNCH, json.dumps(placed), mpiexec, launcher]
    words += [sys.executable, "-I", "-S", "-c", BEGINNING + script, *arguments]
    return [str(word) for word in words]


def start(*args, **named):
    """A launch on this machine."""
    return subprocess.Popen(
        launch(*args, **named),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def running(text):
    """Other processes with these arguments."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                processes.append(int(path.parent.name))
        except OSError:
            pass
    return processes


def is_gone(text):
    """Whether none is left after a while."""
    until = time.monotonic() + 10
    while running(text) and time.monotonic() < until:
        time.sleep(0.01)
    return not running(text)


def wait_for(folder, processes=3):
    """Wait until this many have started."""
    until = time.monotonic() + 30
    while len(list(folder.iterdir())) < processes:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_output_and_exit_code_are_passed_on(tmp_path):
    """Every byte, even if the launch does not wait for the launcher's end; nothing remains."""
    script = """
if rank == 0:
    os.write(2, b"err" * 1000)
    for _ in range(8):
        sys.stdout.buffer.write(bytes(range(256)) * 512)
    sys.stdout.flush()
    sys.exit(3)
"""
    run = start(script, tmp_path)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 3 and out == bytes(range(256)) * 4096 and err == b"err" * 1000
    assert is_gone(str(tmp_path))


@pytest.mark.parametrize("is_in_mpi", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_survivors_report_a_loss(tmp_path, is_in_mpi):
    """The launcher does not end them first; the launch reports the signal."""
    run = start(MPI * is_in_mpi + SURVIVORS, tmp_path, mpi_library())
    out, err = (text.decode().splitlines() for text in run.communicate(timeout=60))
    line = f"tilewise: [cli.launch] process 1 on {os.uname().nodename} has ended by signal 9"
    assert run.returncode == 75 and sorted(err) == ["0 reports", "2 reports", line] and out == []
    assert is_gone(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "mpi.MPI_Finalize()"])
def test_processes_leave_mpi_cleanly(tmp_path, end):
    """Even if processes leave MPI at different times, or without MPI_Finalize."""
    # the number is MPI_COMM_WORLD of MPICH
    script = "print(mpi.MPI_Barrier(ctypes.c_int(0x44000000)), flush=True)\ntime.sleep(0.3 - 0.1 * rank)\n"
    run = start(MPI + script + end, tmp_path, mpi_library())
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and out.split() == [b"0"] * 3 and err == b""


@pytest.mark.slow
def test_mpiexec_alone_would_end_survivors(tmp_path):
    """The reason for stand-ins; if this fails, mpiexec no longer needs them."""
    words = [find_mpiexec(), "-disable-auto-cleanup", "-n", "3", sys.executable, "-c", BEGINNING + SURVIVORS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode not in (0, 75) and "reports" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_first_process_that_does_not_notice_a_loss_is_ended(tmp_path, ending):
    """mpiexec would wait forever for a process that failed before it called MPI; only a loss ends
    the first process.
    """
    run = start(f"if rank == 1:\n    {ending}\ntime.sleep(60)", tmp_path)
    _, err = run.communicate(timeout=30)
    how = "with exit status 3" if "exit" in ending else "by signal 9"
    assert run.returncode == (1 if "exit" in ending else 75) and f"has ended {how}" in err.decode()
    assert is_gone(str(tmp_path))


@pytest.mark.slow
def test_a_killed_first_process_is_a_loss(tmp_path):
    """The others have a moment to report."""
    run = start(SURVIVORS.replace("rank == 1", "rank == 0"), tmp_path)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 75
    assert {"1 reports", "2 reports"} < set(err.decode().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_are_forwarded(tmp_path, number):
    """Only to the first process, once; a killed launch leaves nothing behind."""
    run = start(WAITING, tmp_path)
    wait_for(tmp_path)
    os.killpg(run.pid, number)  # as a terminal does
    out, err = run.communicate(timeout=30)
    assert run.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert out == (b"saved 0\n" if number == signal.SIGINT else b"") and err == b""
    assert is_gone(str(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_launch_ended_before_a_host_answers(tmp_path, number):
    """The process that waits for the host ends too; ssh would wait for minutes."""
    waiting, begun = tmp_path / "ssh", tmp_path / "begun"
    waiting.write_text(
        f"#!{sys.executable} -IS\nimport time; open('{begun}/waits', 'w').close(); time.sleep(60)\n"
    )
    waiting.chmod(0o755)
    begun.mkdir()
    run = start("", placed=[("absent", 1)], launcher=waiting)
    wait_for(begun, 1)
    run.send_signal(number)
    err = run.communicate(timeout=30)[1]
    assert run.returncode == 128 + number
    assert err == (b"tilewise: interrupted\n" if number == signal.SIGINT else b"")
    assert is_gone(str(waiting))


@pytest.mark.slow
def test_errors_of_the_launcher(tmp_path):
    """Its message and exit code 1; a process that never starts is named."""
    failing, silent = tmp_path / "failing", tmp_path / "silent"
    failing.write_text("#!/bin/sh\necho no such host >&2; exit 255\n")
    silent.write_text('#!/bin/sh\nprintf "\\036%s 0 begun here\\036" "$9" >&2\nexec sleep 60\n')
    stderr = {}
    for path in (failing, silent):
        path.chmod(0o755)
        run = start("", mpiexec=path)
        stderr[path] = run.communicate(timeout=30)[1].decode()
        assert run.returncode == 1
    assert stderr[failing].startswith("no such host\ntilewise: [cli.launch] mpiexec must start 3 processes")
    assert "it ended with exit status 255 after 0 had started" in stderr[failing]
    assert "these did not: 1, 2;" in stderr[silent]


@pytest.mark.parametrize(("begun", "code"), [(3, 75), (2, 1)])
def test_a_launcher_that_ends_before_its_processes(tmp_path, begun, code):
    """It is a loss if all processes had started; otherwise they could not be started."""
    path = tmp_path / "mpiexec"
    reported = "".join(f"printf '\\036%s {rank} begun here\\036' \"$9\" >&2\n" for rank in range(begun))
    path.write_text(f"#!/bin/sh\n{reported}kill -9 $$\n")
    path.chmod(0o755)
    run = start("", mpiexec=path)
    err = run.communicate(timeout=30)[1].decode()
    assert run.returncode == code and f"it ended by signal 9 after {begun} had started" in err


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="own folders for a command need root")
@pytest.mark.parametrize(
    "lost", ["", "if world.rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(0.3)\nos._exit(75)"]
)
def test_no_file_remains(lost):
    """Neither of the launcher nor of MPI, with success and with a loss."""
    script = "import os, time\n"
    script += "from tilewise.comm.world import join_world\nworld = join_world()\n"
    script += lost or "world.leave()"
    words = [
        sys.executable,
        "-c",
        LAUNCH,
        json.dumps([("localhost", 2)]),
        "",
        "",
        sys.executable,
        "-c",
        script,
    ]
    mounts = "exec 9</tmp; mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm"
    own = Path(sys.prefix)
    excluded = [own.parts[2]] if own.is_relative_to("/tmp") else []  # where this Python is
    for name in excluded:
        mounts += f" && mkdir /tmp/{name} && mount -c --bind /proc/self/fd/9/{name} /tmp/{name}"
    alone = ["unshare", "--mount", "sh", "-c", f'{mounts} && "$@"; echo $?; ls -A /tmp /dev/shm', "sh"]
    done = subprocess.run([*alone, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["75" if lost else "0", "/dev/shm:", "/tmp:", *excluded], done.stderr


def test_a_command_of_this_program():
    """Only its own output is printed."""
    words = [sys.executable, "-m", "tilewise", "launch", "-n", "2", "--hosts", "localhost"]
    done = subprocess.run([*words, "--", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("tilewise ") and done.stderr == ""


@pytest.mark.slow
def test_a_closed_output_is_not_an_error():
    """The launcher gets an output that is discarded."""
    words = [sys.executable, "-m", "tilewise", "launch", "-n", "2", "--hosts", "localhost", "--", "--version"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_restarts_over_hosts(tmp_path):
    """A loss is restarted up to the limit; a mistake is reported once."""
    words = [sys.executable, "-m", "tilewise", "launch", "-n", "2", "--hosts", "localhost", "--restart", "2"]
    done = subprocess.run([*words, "train", "absent.toml"], capture_output=True, text=True)
    assert done.returncode == 2 and "restarting (" not in done.stderr
    losing = tmp_path / "mpiexec"
    losing.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/starts\nprintf "\\036%s 0 ended 75\\036" "$9" >&2\n'
    )
    losing.chmod(0o755)
    words += ["--mpiexec", str(losing), "train", "x.toml"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 75 and done.stderr.count("restarting (") == 2
    starts = (tmp_path / "starts").read_text().splitlines()
    assert [line.endswith("train --auto-resume x.toml") for line in starts] == [False, True, True]


@pytest.mark.slow
def test_two_hosts(two_hosts, tmp_path):
    """A process on each; a broken link leaves nothing behind."""
    words = [sys.executable, "-m", "tilewise", "launch", "-n", "2", "--hosts", ",".join(two_hosts.names)]
    words += ["--launcher-exec", two_hosts.launcher]
    run = two_hosts.start(two_hosts.inside(two_hosts.names[0], [*words, "--", "--version"]))
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and out.startswith("tilewise ") and err == ""
    placed = [(name, 1) for name in two_hosts.names]
    script = "open(f'{sys.argv[1]}/{rank}', 'w').close()\ntime.sleep(1 + rank)\nsys.exit(75)"
    words = launch(script, tmp_path, placed=placed, launcher=two_hosts.launcher)
    run = two_hosts.start(two_hosts.inside(two_hosts.names[0], words))
    wait_for(tmp_path, 2)
    two_hosts.cut(two_hosts.names[1])
    run.communicate(timeout=60)
    assert run.returncode == 75
    until = time.monotonic() + 20
    while two_hosts.pids(two_hosts.names[0]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not two_hosts.pids(two_hosts.names[0])
