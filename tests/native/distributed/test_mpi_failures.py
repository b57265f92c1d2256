"""A process under mpiexec is lost: the others name it in time and exit with code 75.

mpiexec leaves the others alone (`-disable-auto-cleanup`), as a launcher that waits for their
reports does.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from native.distributed.test_group import are_gone
from native.distributed.test_launch import command, make_run, wait_for_checkpoint, weights
from support.hosts import find_mpiexec

MPIEXEC = find_mpiexec()
pytestmark = [
    pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install mpich"),
    pytest.mark.slow,
]
KEEP = "-disable-auto-cleanup"
LOST = 75
NOTED = """#!/bin/sh
# A command whose process, exit code and messages are kept, whatever becomes of its launcher.
trap : USR1
echo $$ > "$0.$PMI_RANK.pid"
"$@" 2> "$0.$PMI_RANK.said"
code=$?
echo $code > "$0.$PMI_RANK.code"
exit $code
"""
BELOW = """#!/bin/sh
# The second process has fewer instructions.
[ "$PMI_RANK" = 1 ] && export TILEWISE_ISA=LEVEL
exec "$@"
"""


def wait_for_steps(run, metrics):
    """Wait until a run has done some steps."""
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.01)


class Run:
    """A training run under mpiexec in the middle of its steps, and the state of its processes.

    Args:
        folder: where it runs.
        words: the command's prefix.
        num_processes: number of processes.
        is_long: whether it runs for minutes and writes no checkpoint; otherwise it has written its
            first.
    """

    def __init__(self, folder, words, num_processes, is_long=True):
        self.numbers = range(num_processes)
        self.given = make_run(folder, "broken")
        text = (folder / self.given).read_text().replace("dp = 2", f"dp = {num_processes}")
        if is_long:
            text = text.replace("steps = 60", "steps = 100000").replace("every = 5", "every = 10000")
        (folder / self.given).write_text(text)
        self.noted = folder / "noted.sh"
        self.noted.write_text(NOTED)
        self.process = words(["/bin/sh", self.noted, *command("train", self.given)])
        if is_long:
            wait_for_steps(self.process, folder / "broken" / "metrics.jsonl")
        else:
            wait_for_checkpoint(self.process, folder / "broken")
        shells = [int(self._note(number, "pid")) for number in self.numbers]
        self.pids = [
            int(Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0]) for shell in shells
        ]

    def _note(self, number, what):
        return Path(f"{self.noted}.{number}.{what}").read_text()

    def require_reports(self, survivors, lost, within_s=10.0):
        """Each survivor has named one lost process, once, and has exited with the code of a loss."""
        assert are_gone([self.pids[number] for number in survivors], within_s)
        for number in survivors:
            until = time.monotonic() + 2
            code = Path(f"{self.noted}.{number}.code")  # the shell makes it before it writes into it
            while not (code.exists() and code.read_text()) and time.monotonic() < until:
                time.sleep(0.01)
            lines = [line for line in self._note(number, "said").splitlines() if "tilewise:" in line]
            assert len(lines) == 1 and int(self._note(number, "code")) == LOST, lines
            assert any(f"process {other}" in lines[0] for other in lost), lines


@pytest.fixture
def start_on(two_hosts, tmp_path):
    """Starts a training run on two hosts with this many processes each."""

    def start(ppn, **named):
        def words(command_words):
            reported = two_hosts.over_mpi(command_words, ppn=ppn, options=[KEEP])
            return two_hosts.start(reported, cwd=tmp_path)

        return Run(tmp_path, words, 2 * ppn, **named)

    return start


@pytest.mark.parametrize("stopped", [1, 0], ids=["a worker", "the leader"])
def test_a_stopped_process(start_on, stopped):
    """The other host reports that it is stopped; when continued, it detects that it is alone and ends."""
    run = start_on(1)
    os.kill(run.pids[stopped], signal.SIGSTOP)
    run.require_reports([1 - stopped], [stopped])
    os.kill(run.pids[stopped], signal.SIGCONT)
    assert are_gone(run.pids, 15.0)
    run.process.wait(20)


@pytest.mark.parametrize("killed", [1, 0], ids=["a worker", "the leader"])
def test_a_killed_process_of_another_host(start_on, killed):
    """MPICH crashes in the survivor, inside the call that detects the closed connection; the
    survivor reports it and exits.
    """
    run = start_on(1)
    os.kill(run.pids[killed], signal.SIGKILL)
    run.require_reports([1 - killed], [killed])
    run.process.wait(20)


@pytest.mark.parametrize("how", ["cut", "drop_routes"])
def test_a_broken_link(start_on, two_hosts, how, tmp_path):
    """Every process on both sides names one of the other side."""
    run = start_on(2 if how == "cut" else 1)
    middle = len(run.numbers) // 2
    sides = [run.numbers[:middle], run.numbers[middle:]]
    getattr(two_hosts, how)(two_hosts.names[1])
    run.require_reports(sides[0], run.numbers)
    run.require_reports(sides[1], run.numbers)
    two_hosts.mend(two_hosts.names[1])


def test_a_run_that_lost_a_host_resumes_without_it(start_on, two_hosts, tmp_path):
    """From its last checkpoint, only on the leader's host, to the weights of an undisturbed run."""
    run = start_on(1, is_long=False)
    two_hosts.cut(two_hosts.names[1])
    run.require_reports([0], [1])
    run.require_reports([1], [0])
    two_hosts.mend(two_hosts.names[1])
    assert not (tmp_path / "broken" / "model").exists()
    for name, options in (("broken", ["--auto-resume"]), ("alone", [])):
        words = command("train", make_run(tmp_path, name), *options)
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert weights(tmp_path, "broken") == weights(tmp_path, "alone")


def test_a_killed_worker_on_the_leaders_host(tmp_path):
    """The leader detects it at once."""

    def words(config):
        return subprocess.Popen(
            [MPIEXEC, KEEP, "-n", "2", *config], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )

    run = Run(tmp_path, words, 2, is_long=False)
    os.kill(run.pids[1], signal.SIGKILL)
    run.require_reports([0], [1], 3.0)
    run.process.communicate(timeout=20)
    assert run.process.returncode == LOST | 128 + signal.SIGKILL  # MPICH combines the exit codes


@pytest.mark.parametrize(("hosts", "level"), [(1, "baseline"), (2, "baseline"), (1, "none")])
def test_processes_with_different_facts(tmp_path, two_hosts, hosts, level):
    """They are rejected at the start with both values, once; so is one that cannot collect them."""
    wrapper = tmp_path / "below.sh"
    wrapper.write_text(BELOW.replace("LEVEL", level))
    words = ["/bin/sh", wrapper, *command("verify", tmp_path / make_run(tmp_path, "run"), "--mesh", "dp=2")]
    if hosts == 2:
        done = two_hosts.run(words)
    else:
        done = subprocess.run([MPIEXEC, "-n", "2", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("tilewise: [") == 1
    if level == "none":
        assert "got 'none'; choose one of" in done.stderr and "(process 1)" in done.stderr
        assert "Traceback" not in done.stderr
        return
    assert "the same instruction set; got '" in done.stderr
    assert "in the leader and 'baseline' in process 1; start them" in done.stderr
