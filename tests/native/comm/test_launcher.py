"""Environment variables of launchers, and when MPI must agree with them; without a launcher."""

import pytest

from tilewise.comm import launcher, mpi_library
from tilewise.comm.launcher import Launched, launched, require_mpi, require_world
from tilewise.core import VARIABLES, ConfigError

OPEN_MPI, PMI, SLURM, PMIX = "Open MPI's mpiexec", "mpiexec", "Slurm's srun", "a PMIx launcher"
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """An environment without launcher variables, because the tests may run in a job."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def started_with(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return launched()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launched(PMI, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launched(PMI, 0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3"}, Launched(OPEN_MPI, 3, 4)),
        (STEP, Launched(SLURM, 2, 4)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": ""}, Launched(SLURM, 2, 8)),
        ({**STEP, "PMIX_RANK": "2"}, Launched(SLURM, 2, 4)),
        ({"PMIX_RANK": "5"}, Launched(PMIX, 5, None)),
        # a batch script, and a shell of Slurm's: one process, however many tasks the job has
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        ({**STEP, "SLURM_STEP_ID": "4294967291"}, None),
        ({**STEP, "SLURM_STEP_ID": "4294967290"}, None),
        # mpiexec within a job starts its helpers with srun, one a host
        ({**STEP, "PMI_RANK": "6", "PMI_SIZE": "7"}, Launched(PMI, 6, 7)),
        ({**STEP, "OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "7"}, Launched(OPEN_MPI, 6, 7)),
    ],
)  # fmt: skip
def test_launchers_are_known_by_their_variables(monkeypatch, variables, expected):
    """Inner launchers take precedence over outer ones; batch scripts are one process."""
    launcher = started_with(monkeypatch, variables)
    assert launcher == expected
    assert launcher is None or launcher.has_several is (launcher.size != 1)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"PMI_RANK": "1"}, "PMI_SIZE"),
        ({"PMI_SIZE": "1"}, "PMI_RANK"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "PMI_RANK"),
        ({"PMI_RANK": "-1", "PMI_SIZE": "2"}, "'-1'"),
        ({"PMI_RANK": "0", "PMI_SIZE": "0"}, "PMI_SIZE"),
        ({"PMI_RANK": "0", "PMI_SIZE": "99999999999"}, "PMI_SIZE"),
        ({"PMI_RANK": "0", "PMI_SIZE": "9" * 10_000}, "PMI_SIZE"),
        ({"PMI_RANK": "\N{ARABIC-INDIC DIGIT ONE}", "PMI_SIZE": "2"}, "PMI_RANK"),
        ({"OMPI_COMM_WORLD_RANK": "0x1", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
        ({**STEP, "SLURM_PROCID": "4"}, "SLURM_STEP_NUM_TASKS"),
        ({**STEP, "SLURM_STEP_ID": "0.batch"}, "SLURM_STEP_ID"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "SLURM_NTASKS"),
        ({"PMIX_RANK": "one"}, "PMIX_RANK"),
    ],
)  # fmt: skip
def test_variables_that_no_launcher_sets_are_refused(monkeypatch, variables, named):
    """A value that is not a valid number, or one variable of a pair, is an error that names the variable."""
    with pytest.raises(ConfigError) as caught:
        started_with(monkeypatch, variables)
    assert named in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("launcher", "rank", "size"),
    [(Launched(PMI, 1, 2), 1, 2), (Launched(PMI, 0, 1), 0, 1), (Launched(SLURM, 3, 4), 3, 4),
     (Launched(PMIX, 1, None), 1, 2)],
)  # fmt: skip
def test_a_world_that_agrees_is_taken(launcher, rank, size):
    """Rank and size of launcher and MPI are equal, or the launcher gives no size and MPI has several processes."""
    require_world(launcher, rank, size, "MPICH 5")


@pytest.mark.parametrize(
    ("launcher", "rank", "size", "remedy"),
    [
        (Launched(SLURM, 0, 4), 0, 1, "srun --mpi=list"),
        (Launched(OPEN_MPI, 2, 4), 0, 1, "tilewise build-mpi --mpicc"),
        (Launched(PMI, 0, 2), 0, 1, "mpiexec"),
        (Launched(PMI, 1, 2), 0, 2, "mpiexec"),
        (Launched(PMI, 0, 1), 0, 2, "mpiexec"),
        (Launched(PMIX, 0, None), 0, 1, "PMIx"),
        (Launched(PMIX, 2, None), 1, 4, "PMIx"),
    ],
)
def test_a_world_that_differs_is_refused(launcher, rank, size, remedy):
    """N copies that MPI treats as N worlds, or different ranks, are rejected with both sides and advice."""
    with pytest.raises(ConfigError) as caught:
        require_world(launcher, rank, size, "the MPI of a test")
    text = str(caught.value)
    assert str(launcher) in text and launcher.launcher in text
    assert f"process {rank} of {size} by the MPI of a test" in text and remedy in text


def test_processes_that_nothing_joins_are_refused(monkeypatch):
    """Several processes without MPI are an error that says what to install."""

    def none():
        raise ConfigError("[comm.mpi] none; `pip install mpich`")

    monkeypatch.setattr(launcher, "find_mpi", none)
    with pytest.raises(ConfigError, match=r"process 1 of 4 and no MPI.*pip install mpich"):
        require_mpi(Launched(SLURM, 1, 4))
    monkeypatch.setattr(launcher, "find_mpi", lambda: "found")
    assert require_mpi(Launched(SLURM, 1, 4)) == "found"


class TestFindMpi:
    """The choice of the MPI library, with folders made for the test."""

    @pytest.fixture
    def folders(self, tmp_path, monkeypatch):
        """A package folder with the packaged table, an environment, and a loader that knows no library."""
        package, environment, path = (tmp_path / name for name in ("package", "environment", "path"))
        for folder in (package, environment / "lib", path / "bin", path / "lib"):
            folder.mkdir(parents=True)
        (package / "libtilewise_mpi_abi.so").touch()
        monkeypatch.setattr(mpi_library, "_folder", lambda: package)
        monkeypatch.setattr(mpi_library, "_ABI_LIBRARY", "libmpi_abi_of_a_test.so.1")
        monkeypatch.setattr(mpi_library.sys, "prefix", str(environment))
        monkeypatch.setenv("PATH", str(path / "bin"))
        return package, environment, path

    def test_the_order(self, folders, monkeypatch, tmp_path):
        """Next to mpiexec, the environment's library, the site's table, the variable: in ascending precedence."""
        package, environment, path = folders
        packaged = package / "libtilewise_mpi_abi.so"
        (path / "bin" / "mpiexec").touch(mode=0o755)
        (neighbour := path / "lib" / "libmpi_abi_of_a_test.so.1").touch()
        library = mpi_library.find_mpi()
        assert (library.table, library.library) == (packaged, neighbour) and str(neighbour) in library.name
        (own := environment / "lib" / "libmpi_abi_of_a_test.so.1").touch()
        library = mpi_library.find_mpi()
        assert (library.table, library.library) == (packaged, own)
        (site := package / "libtilewise_mpi_site.so").touch()
        library = mpi_library.find_mpi()
        assert (library.table, library.library) == (site, None) and "build-mpi" in library.name
        (named := tmp_path / "named.so").touch()
        monkeypatch.setenv("TILEWISE_MPI", str(named))
        library = mpi_library.find_mpi()
        assert (library.table, library.library) == (named, None) and "TILEWISE_MPI" in library.name

    def test_a_library_of_the_loader(self, folders, monkeypatch):
        """A library that is in none of the folders is found by the loader."""
        monkeypatch.setattr(mpi_library, "_ABI_LIBRARY", "libc.so.6")
        assert str(mpi_library.find_mpi().library) == "libc.so.6"

    def test_no_library(self, folders, monkeypatch, tmp_path):
        """Without a library, the message says what to install; a variable that names no file is an error."""
        with pytest.raises(ConfigError, match=r"pip install mpich.*tilewise build-mpi"):
            mpi_library.find_mpi()
        monkeypatch.setenv("TILEWISE_MPI", str(tmp_path / "missing.so"))
        with pytest.raises(ConfigError, match=r"TILEWISE_MPI must name a file.*missing\.so"):
            mpi_library.find_mpi()
