"""The table of native/comm/mpi over two processes, packaged and built by `tilewise build-mpi`."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.cli.main import main
from tilewise.comm import mpi_library, mpi_table
from tilewise.core import VARIABLES, ConfigError

PROGRAM = Path(__file__).with_name("mpi_ranks.py")
BIN, LIB = Path(sys.prefix) / "bin", Path(sys.prefix) / "lib"
SLOW_CASES = ("messages", "errors", "edges")
TABLE_OF_VERSION_2, NO_TABLE = (
    """
#include <stdint.h>
static const struct { int32_t version; void* others[13]; } table = {2, {0}};
__attribute__((visibility("default"))) const void* tilewise_mpi(void) { return &table; }
""",
    "const void* tilewise_mpi(void) { return 0; }",
)

needs_mpich = pytest.mark.skipif(
    not (BIN / "mpiexec").exists() or not (LIB / "libmpi_abi.so.1").exists(),
    reason="needs MPICH with MPI's standard binary interface (pip install mpich)",
)
needs_compiler = pytest.mark.skipif(
    not (BIN / "mpicc").exists() or shutil.which("cc") is None,
    reason="needs MPICH's mpicc (pip install mpich) and a C compiler",
)


def two_ranks(*arguments):
    """Runs the program in two processes of mpiexec; returns exit status and lines."""
    command = [BIN / "mpiexec", "-n", "2", sys.executable, PROGRAM, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, "\n".join(_lines(done))


def _lines(done):
    """Lines of standard output sorted, because processes have no order, then lines of standard error."""
    return [*sorted(filter(None, done.stdout.splitlines())), *done.stderr.splitlines()]


def run_main(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A table that `tilewise build-mpi` has built with MPICH's own mpicc."""
    file = tmp_path_factory.mktemp("mpi") / "site.so"
    command = [
        sys.executable,
        "-m",
        "tilewise",
        "build-mpi",
        "--mpicc",
        str(BIN / "mpicc"),
        "--out",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{file}: calls MPICH Version: ")
    return file


@needs_mpich
def test_the_packaged_table():
    """Messages in both directions, order, errors, the largest tag, through the standard interface."""
    code, output = two_ranks("all", mpi_library.packaged_table(), LIB / "libmpi_abi.so.1")
    assert code == 0, output
    assert output == "rank 0 of 2 is done\nrank 1 of 2 is done"


@needs_mpich
@needs_compiler
def test_a_table_built_by_build_mpi(built):
    """The same through MPICH's own interface, whose handles are numbers."""
    code, output = two_ranks("all", built)
    assert code == 0, output
    assert output == "rank 0 of 2 is done\nrank 1 of 2 is done"


@needs_mpich
@pytest.mark.parametrize(
    "case", ["order", *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_the_cases_can_fail(case):
    """The twin: a second process that sends wrong bytes makes every case fail."""
    code, output = two_ranks(f"planted-{case}", mpi_library.packaged_table(), LIB / "libmpi_abi.so.1")
    assert code != 0 and "AssertionError" in output


def one_process(case, **environment):
    """Runs the program in one process without a launcher; returns its output."""
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, PROGRAM, case, mpi_library.packaged_table(), LIB / "libmpi_abi.so.1"]
    done = subprocess.run(
        list(map(str, command)),
        env=others | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return "\n".join(_lines(done))


@needs_mpich
def test_a_matching_launcher_agrees_with_mpi():
    """Under its own mpiexec, MPI's world equals the launcher's."""
    assert two_ranks("world", mpi_library.packaged_table(), LIB / "libmpi_abi.so.1") == (
        0,
        "they agree\nthey agree",
    )


@needs_mpich
@pytest.mark.parametrize(
    ("launcher", "rank", "size"),
    [
        ("Open MPI's mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        pytest.param("Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", marks=pytest.mark.slow),
    ],
)
def test_a_foreign_launcher_is_rejected(launcher, rank, size):
    """Under another launcher, MPICH has a world of one per process: rejected with both sides."""
    output = one_process("world", **{rank: "0", size: "2", "SLURM_STEP_ID": "0"})
    assert f"got process 0 of 2 by {launcher}, and process 0 of 1 by the MPI of a test" in output


REFUSED = """
from tilewise.comm.world import join_world
try:
    join_world()
except Exception as error:
    print("agree" in str(error))
print(*(line.split("/", 1)[1].strip() for line in open("/proc/self/maps") if "mpich_shm" in line), sep="\\n")
"""


@needs_mpich
def test_a_rejected_process_leaves_no_shared_memory():
    """MPI's shared memory is unlinked when an error ends the process without MPI_Finalize."""
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        env=others | {"PMI_RANK": "0", "PMI_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    output, *shared = done.stdout.split("\n")[:-1]
    assert output == "True" and shared and all(name.endswith("(deleted)") for name in shared), done


@needs_mpich
def test_a_launcher_with_an_unsupported_interface():
    """MPICH ends the process with its own message; our advice follows it."""
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tilewise", "doctor", "--no-measure"],
        env=others | slurm | {"PMIX_NAMESPACE": "4.0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and done.stdout == ""
    output = done.stderr.splitlines()[-1]
    assert (
        output.startswith("tilewise: [comm.launcher] MPI must start")
        and "`srun --mpi=pmi2` for MPICH" in output
    )


@needs_mpich
def test_mpi_started_by_others():
    """It is used and not finalized."""
    assert one_process("guest") == "left running"


@needs_mpich
def test_mpi_with_single_thread_support():
    """It is rejected with a message."""
    assert "only one thread" in one_process("single")


CRASH = """
import ctypes, os
from tilewise.comm.mpi_library import find_mpi
from tilewise.comm.mpi_table import load_table
from tilewise.comm.world import _unlink_segments
found = find_mpi()
table = load_table(found.table, found.library)
assert table.start(table.self) == 0
_unlink_segments()
requests = (ctypes.c_int64 * 4)()
errors = [table.receive(table.self, 8, 4, 0, 1, ctypes.byref(requests)),
          table.send(table.self, b"four", 4, 0, 1, ctypes.byref(requests, 8))]
text = ctypes.create_string_buffer(200)
table.describe(table.self, errors[-1], text, 200)
print(errors, text.value.decode(), flush=True)
os.kill(os.getpid(), SIGNAL)
"""


@needs_mpich
def test_a_crash_inside_mpi_is_an_error_and_one_outside_is_not():
    """MPI crashes when it receives to address 8; a crash of the program itself ends it."""
    done = subprocess.run(
        [sys.executable, "-c", CRASH.replace("SIGNAL", str(int(signal.SIGSEGV)))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[0, -8] MPI has crashed, as it does when a process is lost\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


class TestBuildMpi:
    """Errors of `tilewise build-mpi` leave an existing file unchanged."""

    @pytest.fixture
    def table_path(self, tmp_path):
        file = tmp_path / "site.so"
        file.write_text("as before", encoding="utf-8")
        yield file
        assert file.read_text(encoding="utf-8") == "as before"
        assert [path.name for path in tmp_path.iterdir() if path.suffix == ".so"] == ["site.so"]

    def compiler(self, folder, text):
        file = folder / "mpicc"
        file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        file.chmod(0o755)
        return str(file)

    def test_no_compiler(self, table_path, capsys):
        """Without mpicc, the message says what to install or name."""
        assert run_main("build-mpi", "--mpicc", "mpicc-of-no-one", "--out", str(table_path)) == 2
        assert "'mpicc-of-no-one', which is not; install the MPI" in capsys.readouterr().err

    def test_a_compiler_that_fails(self, table_path, capsys, tmp_path):
        """The last lines of its output are shown."""
        mpicc = self.compiler(tmp_path, "seq -f 'line %g' 20 >&2; exit 3")
        assert run_main("build-mpi", "--mpicc", mpicc, "--out", str(table_path)) == 2
        output = capsys.readouterr().err
        assert "exit status 3: line 13 | " in output and "| line 20;" in output

    def test_a_compiler_that_writes_no_file(self, table_path, capsys, tmp_path):
        """Exit status 0 without a file is an error."""
        assert (
            run_main("build-mpi", "--mpicc", self.compiler(tmp_path, "true"), "--out", str(table_path)) == 2
        )
        assert "no output" in capsys.readouterr().err

    def test_a_library_that_does_not_load(self, table_path, capsys, tmp_path):
        """The built library is loaded before it replaces another."""
        mpicc = self.compiler(tmp_path, 'for last; do :; done; echo no library > "$last"')
        assert run_main("build-mpi", "--mpicc", mpicc, "--out", str(table_path)) == 2
        assert "must load" in capsys.readouterr().err

    def test_a_relative_compiler_path(self, table_path, capsys, tmp_path, monkeypatch):
        """A path relative to the current folder is found although the compiler runs in another."""
        self.compiler(tmp_path, "exit 3")
        monkeypatch.chdir(tmp_path)
        assert run_main("build-mpi", "--mpicc", "./mpicc", "--out", str(table_path)) == 2
        assert f"{tmp_path}/mpicc must compile" in capsys.readouterr().err

    def test_a_missing_output_folder(self, capsys, tmp_path):
        """It is reported before anything is compiled."""
        mpicc = self.compiler(tmp_path, f"touch {tmp_path}/was-run")
        assert run_main("build-mpi", "--mpicc", mpicc, "--out", str(tmp_path / "none" / "site.so")) == 2
        assert "--out FILE" in capsys.readouterr().err
        assert not (tmp_path / "was-run").exists()

    @needs_compiler
    def test_the_default_output_path(self, capsys, tmp_path, monkeypatch):
        """Without --out, the built file takes precedence over the packaged one."""
        monkeypatch.setattr(mpi_library, "site_table", lambda: tmp_path / "made.so")
        monkeypatch.delenv("TILEWISE_MPI", raising=False)
        before = mpi_library.find_mpi()
        assert run_main("build-mpi", "--mpicc", str(BIN / "mpicc")) == 0
        assert "made.so: calls MPICH" in capsys.readouterr().out.replace("\n", "")
        assert (before.table, mpi_library.find_mpi().table) == (
            mpi_library.packaged_table(),
            tmp_path / "made.so",
        )

    @pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
    @pytest.mark.parametrize(("table", "got"), [(TABLE_OF_VERSION_2, "2"), (NO_TABLE, "none")])
    def test_another_version(self, table_path, capsys, tmp_path, table, got):
        """A table of another version is rejected with both numbers; a library without a version, too."""
        (tmp_path / "table.c").write_text(table, encoding="utf-8")
        mpicc = self.compiler(
            tmp_path, f'for last; do :; done; cc -shared -fPIC {tmp_path}/table.c -o "$last"'
        )
        assert run_main("build-mpi", "--mpicc", mpicc, "--out", str(table_path)) == 2
        assert f"must have version 1 of the table; got {got};" in capsys.readouterr().err

    def test_a_library_that_is_not_a_table(self):
        """It is rejected."""
        with pytest.raises(ConfigError, match="tilewise_mpi"):
            mpi_table.load_table(mpi_library.packaged_table().with_name("libtilewise_pto.so"), None)
