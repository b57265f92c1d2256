"""`tilewise run`: a script gets its arguments, and the devices of a launcher."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.hosts import Hosts, missing

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT = """
import sys
import numpy as np
import tilewise as tw

with tw.DeviceGroup({"tp": 2}, memory_bytes=1 << 16) as group:
    print(type(group._executor).__name__, sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""


def words(*arguments):
    """A command line."""
    return [sys.executable, "-m", "tilewise", *map(str, arguments)]


@pytest.mark.parametrize(
    ("launcher", "executor"), [((), "Executor"), (("launch", "-n", 2), "GroupExecutor")], ids=str
)
def test_a_script_runs_alone_and_launched(tmp_path, launcher, executor):
    """It runs once, with its arguments; its exit code is the command's."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        words(*launcher, "run", tmp_path / "script.py", 3, "--flag"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (3, f"{executor} ['3', '--flag']\n"), done.stderr


def _on_hosts():
    """The examples of tile programs. One that reads peers' tiles and one that writes them run in CI."""
    for path in sorted(EXAMPLES.glob("*.py")):
        if "tile_program" in path.read_text():
            in_ci = path.name in ("09_matmul_reduce_scatter.py", "10_matmul_all_reduce.py")
            yield pytest.param(path, marks=pytest.mark.slow if in_ci else pytest.mark.soak, id=path.stem)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("path", [*_on_hosts()])
def test_examples_of_tile_programs_run_on_two_hosts(tmp_path, path):
    """Devices on two hosts put and read tiles over MPI."""
    with Hosts(tmp_path) as hosts:
        done = hosts.run(words("run", path))
        assert done.returncode == 0 and "largest difference" in done.stdout, done.stderr
