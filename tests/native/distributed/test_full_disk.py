"""A full disk on one host while two hosts train: the leader's, for checkpoints, or any host's, for
offloaded state. The run names the host and ends; with free space it resumes, with the same bits.

The disks are small file systems that only one host has mounted.
"""

import json
import os
import time
from pathlib import Path

import pytest

from native.distributed.test_group import are_gone
from native.distributed.test_launch import command, make_run, weights
from native.distributed.test_mpi_failures import NOTED
from tilewise.train.train_config import load_config
from tilewise.train.trainer import make_plan

pytestmark = pytest.mark.slow
CHECKPOINTS = Path("run", "checkpoints")
FIRST = "step-00000005"
FAILED = 1
END_S = 60.0  # of which most is the start of two programs


@pytest.fixture
def two_disks(two_hosts, tmp_path):
    """Gives a host a disk of a size, if this machine can."""

    def give(host, folder, size):
        Path(tmp_path, folder).mkdir(parents=True)
        try:
            return two_hosts.give_disk(two_hosts.names[host], tmp_path / folder, size)
        except RuntimeError as error:
            pytest.skip(str(error))

    return give


def configured(folder, directory, offload="", seed=0):
    """A configuration of 20 steps that keeps every checkpoint and offloads to a folder."""
    config = make_run(folder, directory)
    text = (folder / config).read_text() + "keep_checkpoints = 100\n"
    reported = f"steps = 20\nseed = {seed}\n"
    if offload:
        reported += 'offload = ["optimizer"]\n'
        text += f"offload_directory = {json.dumps(offload)}\n"
    (folder / config).write_text(text.replace("steps = 60\n", reported))
    return config


def trained_alone(hosts, folder, directory="alone", seed=0):
    """The folder of an undisturbed run in one process."""
    words = command("train", configured(folder, directory, seed=seed))
    process = hosts.start(words, cwd=folder)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return folder / directory


def contents(folder):
    """The bytes of every file of a folder by path, hidden files included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def used_bytes(disk):
    """Used bytes of a file system."""
    state = os.statvfs(disk)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


class Started:
    """A run over both hosts, resumed if possible.

    Args:
        hosts: of the run.
        folder: that it runs in.
        by: `launch`, or `mpiexec`, which reports the exit code of every process.
    """

    def __init__(self, hosts, folder, by):
        self._hosts, self._codes = hosts, []
        words = command("train", "run.toml", "--auto-resume")
        if by == "launch":
            reported = ["-n", 2, "--hosts", ",".join(hosts.names), "--launcher-exec", hosts.launcher]
            launch = command("launch", *reported, "--restart", 3)
            words = hosts.inside(hosts.names[0], [*launch, *words[len(command()) :]])
        else:
            noted = folder / "noted.sh"
            noted.write_text(NOTED)
            words = hosts.over_mpi(["/bin/sh", noted, *words])
            self._codes = [Path(f"{noted}.{number}.code") for number in range(2)]
            self._said = [Path(f"{noted}.{number}.said") for number in range(2)]
        self.process = hosts.start(words, cwd=folder)

    def end(self):
        """Its output and the exit codes, those of its processes last; it must end in time."""
        until = time.monotonic() + END_S
        stderr = self.process.communicate(timeout=END_S)[1]
        for host in self._hosts.names:
            assert are_gone(self._hosts.pids(host), until - time.monotonic())
        if self._codes:
            stderr += "".join(path.read_text() for path in self._said)
        return stderr, [self.process.returncode, *(int(path.read_text()) for path in self._codes)]

    def require_refusal(self, *words):
        """The run failed with these words in one line; no process was lost or restarted."""
        stderr, codes = self.end()
        lines = [line for line in stderr.splitlines() if "tilewise:" in line]
        assert len(lines) == 1 and all(word in lines[0] for word in words), stderr
        assert codes in ([FAILED], [FAILED, FAILED, 0]), (codes, stderr)
        assert "Traceback" not in stderr

    def require_success(self, *words):
        """The run succeeded and printed these words."""
        stderr, codes = self.end()
        assert not any(codes) and all(word in stderr for word in words), (codes, stderr)


@pytest.mark.parametrize("by", ["launch", "mpiexec"])
def test_no_space_for_a_checkpoint(two_hosts, two_disks, tmp_path, by):
    """The previous checkpoint is unchanged, and nothing of the next remains; with free space the run resumes."""
    alone = trained_alone(two_hosts, tmp_path)
    configured(tmp_path, "run")
    disk, resize = two_disks(0, CHECKPOINTS, "1500k")  # for one of them and a half
    run = Started(two_hosts, tmp_path, by)
    path = CHECKPOINTS / "step-00000010"
    run.require_refusal(
        "[files.writing]", f"'{path}' on {two_hosts.names[0]}: No space left on device; free space"
    )
    first = {name: data for name, data in contents(alone / "checkpoints").items() if name.startswith(FIRST)}
    assert contents(disk) == first and os.listdir(disk) == [FIRST]
    resize("16m")
    Started(two_hosts, tmp_path, by).require_success(f"resuming after step 5 from {CHECKPOINTS / FIRST}")
    assert contents(disk) == contents(alone / "checkpoints")
    assert weights(tmp_path, "run") == weights(tmp_path, "alone")


@pytest.mark.parametrize(
    ("host", "by"), [(1, "mpiexec"), (0, "launch")], ids=["another host-mpiexec", "the leader's-launch"]
)
def test_no_space_for_offloaded_state(two_hosts, two_disks, tmp_path, host, by):
    """The error comes before a step runs; the checkpoint to resume from is unchanged."""
    alone = trained_alone(two_hosts, tmp_path)
    configured(tmp_path, "run", "offloaded")
    (tmp_path / CHECKPOINTS).mkdir(parents=True)
    for name in os.listdir(alone / "checkpoints"):
        if name == FIRST:
            os.rename(alone / "checkpoints" / name, tmp_path / CHECKPOINTS / name)
    before = contents(tmp_path / "run")
    disk, resize = two_disks(host, "offloaded", "64k")
    (tmp_path / "offloaded").mkdir(exist_ok=True)
    run = Started(two_hosts, tmp_path, by)
    run.require_refusal(
        "[memory.SpillFile]",
        "got 'No space left on device' for ",
        f" in 'offloaded'; free disk space, or choose another directory on {two_hosts.names[host]}",
    )
    assert contents(tmp_path / "run") == before and os.listdir(disk) == []
    resize("16m")
    Started(two_hosts, tmp_path, by).require_success(f"resuming after step 5 from {CHECKPOINTS / FIRST}")
    assert os.listdir(disk) == [] and weights(tmp_path, "run") == weights(tmp_path, "alone")


def test_no_folder_for_offloaded_state(two_hosts, two_disks, tmp_path):
    """The run creates it only on the leader's host; another host without it is named."""
    configured(tmp_path, "run", "offloaded/here")
    two_disks(1, "offloaded", "16m")
    run = Started(two_hosts, tmp_path, "mpiexec")
    run.require_refusal(
        "got 'No such file or directory' for 'offloaded/here'; choose another one on " + two_hosts.names[1]
    )


@pytest.mark.parametrize("name", ["offloaded", "off\tloaded"], ids=["a usual name", "an odd one"])
def test_a_disk_that_fills_up_later(two_hosts, two_disks, tmp_path, name):
    """Space for offloaded state is reserved at the start, so the run is not affected."""
    trained_alone(two_hosts, tmp_path)
    configured(tmp_path, "run", name)
    disk, _ = two_disks(1, name, "1m")
    _, plan = make_plan(load_config(tmp_path / "run.toml"))
    run = Started(two_hosts, tmp_path, "mpiexec")
    while used_bytes(disk) < plan.file_bytes:  # it is reserved page by page
        assert run.process.poll() is None
        time.sleep(0.001)
    with pytest.raises(OSError, match="No space left on device"):
        (disk / "other").write_bytes(bytes(1 << 20))
    assert run.process.poll() is None and os.statvfs(disk).f_bfree == 0
    run.require_success()
    assert weights(tmp_path, "run") == weights(tmp_path, "alone")


def test_another_run_is_detected(two_hosts, tmp_path):
    """The twin: weights and checkpoints of another seed differ."""
    one, other = (trained_alone(two_hosts, tmp_path, f"seed{seed}", seed) for seed in (0, 1))
    assert weights(tmp_path, "seed0") != weights(tmp_path, "seed1")
    checkpoints = [contents(folder / "checkpoints") for folder in (one, other)]
    assert checkpoints[0].keys() == checkpoints[1].keys() and checkpoints[0] != checkpoints[1]
