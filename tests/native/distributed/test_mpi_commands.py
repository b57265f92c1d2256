"""Commands and scripts under mpiexec: they end like one process, and print its output once."""

import shutil
import subprocess
import sys

import pytest

from native.distributed.test_launch import command, make_run, weights
from support.hosts import find_mpiexec
from tilewise.core.errors import LOST

MPIEXEC = find_mpiexec()
pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install mpich")

GROUP = """
import sys, time
import tilewise as tw
with tw.ProcessGroup() as group:
    group.start()
    print("inside", group.num_processes)
"""


def under_mpi(folder, words, num_processes=2):
    """Run to the end."""
    reported = [MPIEXEC, "-n", str(num_processes), *words]
    return subprocess.run(
        reported, capture_output=True, text=True, timeout=60, cwd=folder, stdin=subprocess.DEVNULL
    )


def script(folder, *lines, num_processes=2):
    """Run the lines of a script."""
    return under_mpi(folder, [sys.executable, "-c", "\n".join(lines)], num_processes)


def trained(folder, directory, num_processes, *options, mesh="dp = 2"):
    """Train by a configuration; returns the weights of a finished run."""
    config = make_run(folder, directory)
    text = (folder / config).read_text().replace("steps = 60", "steps = 8").replace("every = 5", "every = 3")
    (folder / config).write_text(text.replace("dp = 2", mesh))
    words = command("train", config, *options)
    done = under_mpi(folder, words, num_processes)
    assert done.returncode == 0 and done.stdout == f"{directory}/model\n", done.stderr
    return weights(folder, directory)


def go_back(run):
    """Remove everything that a run wrote after its first checkpoint."""
    latest, *others = sorted((run / "checkpoints").glob("step-*"))
    assert others
    for path in (*others, run / "model"):
        shutil.rmtree(path)
    return latest


@pytest.mark.slow
def test_training_is_equal_and_resumes_over_any_number_of_processes(tmp_path):
    """Two processes and one train the same; a run of two resumes over four, and over one."""
    alone = trained(tmp_path, "alone", 1)
    assert trained(tmp_path, "two", 2) == alone
    for num_processes, mesh in ((4, "dp = 4"), (1, "dp = 2"), (3, "dp = 4")):
        go_back(tmp_path / "two")
        assert trained(tmp_path, "two", num_processes, "--resume", mesh=mesh) == alone
    words = command("generate", "two/model", "def f", "--max-tokens", "12")
    written = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    for num_processes in (1, 2):
        done = under_mpi(tmp_path, [*words, "--tp", "2"], num_processes)
        assert (done.returncode, done.stdout) == (0, written)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("verify", "--nonsense"), "No such option: --nonsense"),
        pytest.param(("verify", "none.toml", "--mesh", "dp=2"), "no such file", marks=pytest.mark.slow),
        pytest.param(("verify", "run.toml", "--mesh", "dp=3"), "got 3 parts", marks=pytest.mark.slow),
        pytest.param(("launch", "-n", "2", "doctor"), "process 0 of 2 by mpiexec", marks=pytest.mark.slow),
        pytest.param(
            ("launch", "-n", "2", "--restart", "1", "doctor"), "remove `launch`", marks=pytest.mark.slow
        ),
        pytest.param(("serve", "x"), "`tilewise launch -n N serve ...`", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_mistake_is_reported_once(tmp_path, arguments, words):
    """One line, and the command's exit code from mpiexec."""
    make_run(tmp_path, "run")
    done = under_mpi(tmp_path, command(*arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("tilewise: ") and words in done.stderr


@pytest.mark.parametrize(
    "second", [("train", "other.toml"), pytest.param(("doctor", "--no-measure"), marks=pytest.mark.slow)]
)
def test_two_commands_in_one_run_are_rejected(tmp_path, second):
    """Both are named, once, before anything is written."""
    first = command("train", make_run(tmp_path, "run"))
    make_run(tmp_path, "other")
    before = sorted(tmp_path.iterdir())
    done = under_mpi(tmp_path, [*first, ":", "-n", "1", *command(*second)], 1)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done.stderr
    assert "train run.toml' in the leader and '" in done.stderr
    assert f"{' '.join(second)}' in process 1" in done.stderr and "the same command line" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("other", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_process_that_ends_before_it_joins(tmp_path, other):
    """MPI would wait for it forever; the others report it in time and leave no memory."""
    joining = ["from tilewise.comm import world", "world._JOIN_S = 1.0", "world.join_world()"]
    keeping = [
        "import os, pathlib",
        "unlink = world._unlink_segments",
        "def kept():",
        "    unlink()",
        "    maps = pathlib.Path('/proc/self/maps').read_text().splitlines()",
        "    lines = [line for line in maps if 'mpich_shm' in line]",
        "    print(bool(lines) and all(line.endswith('(deleted)') for line in lines), flush=True)",
        "world._unlink_segments = kept",
    ]
    program = "\n".join([joining[0], *keeping, *joining[1:]])
    done = under_mpi(tmp_path, [sys.executable, "-c", program, ":", "-n", "1", other], 1)
    assert done.returncode & LOST == LOST and done.stdout.startswith("True\n"), done.stderr
    assert "must join within 1 s; got process 0 of 2" in done.stderr


@pytest.mark.slow
def test_one_process_under_mpiexec_needs_no_mpi(tmp_path):
    """The command runs as it does without mpiexec."""
    words = command("verify", make_run(tmp_path, "run"), "--mesh", "dp=2", "--steps", "1")
    done = under_mpi(tmp_path, words, 1)
    alone = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, alone.stdout, alone.stderr)


def test_one_process_of_mpiexec_is_a_group(tmp_path):
    """A script for any number of processes runs in one."""
    done = script(tmp_path, GROUP, "print('after')", num_processes=1)
    assert (done.returncode, done.stdout, done.stderr) == (0, "inside 1\nafter\n", "")


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_the_leader_continues_after_its_group(tmp_path, code):
    """Its output and exit code arrive, even long after the others have ended."""
    rest = ["time.sleep(0.4)", "print('after')", f"sys.exit({code})"]
    done = script(tmp_path, GROUP, *rest)
    assert (done.returncode, done.stdout, done.stderr) == (code, "inside 2\nafter\n", "")


@pytest.mark.slow
def test_an_error_of_the_script_ends_all_processes(tmp_path):
    """It is printed once; the waiting workers end with it."""
    done = script(tmp_path, GROUP, "    raise ValueError('mine')")
    assert done.returncode == 1 and done.stderr.count("ValueError: mine") == 1
    assert done.stdout == "inside 2\n" and done.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_a_second_group_is_rejected(tmp_path):
    """Processes of a launcher can be joined once."""
    done = script(tmp_path, GROUP, "tw.ProcessGroup()")
    assert done.returncode == 1
    assert "processes of a launcher can join only once; got a second time, after the end" in done.stderr


@pytest.mark.slow
def test_a_forked_copy_does_not_join(tmp_path):
    """It would receive messages of its parent, which continues and ends well."""
    lines = ["    import os", "    pid = os.fork()", "    if pid == 0:", "        tw.ProcessGroup()"]
    done = script(
        tmp_path,
        GROUP,
        *lines,
        "    os.waitpid(pid, 0)",
        "    group.ask(0, 'compute', 0.01)",
        "print('whole')",
    )
    assert (done.returncode, done.stdout) == (0, "inside 2\nwhole\n")
    assert "got a forked copy" in done.stderr


@pytest.mark.slow
def test_another_number_of_processes_is_rejected_in_all(tmp_path):
    """Each process reports the requested and the actual number."""
    done = script(tmp_path, "import tilewise as tw", "tw.ProcessGroup(3)", "print('not here')")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("got 3 and 2 processes; leave it out") == 2


@pytest.mark.slow
def test_a_script_without_a_group_runs_in_every_process(tmp_path):
    """Like any program: only `ProcessGroup` joins processes."""
    done = script(tmp_path, "import tilewise as tw", "import os", "os.write(1, b'here,')", num_processes=3)
    assert (done.returncode, done.stdout) == (0, "here," * 3)
