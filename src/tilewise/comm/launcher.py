"""What a launcher (mpiexec, srun) reports about this process and its peers, and whether MPI agrees.

If a launcher starts N copies of a program whose MPI does not know the launcher, MPI makes N worlds
of one process each. Each process would do the whole work and overwrite the files of the other
processes. So this module reads the launcher's environment variables before MPI starts. If MPI
disagrees with them, every process reports an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.comm.mpi_library import MpiLibrary, find_mpi
from tilewise.core.environment import read
from tilewise.core.errors import ConfigError
from tilewise.core.validation import shown

__all__ = ["Launched", "ending_by_mpi", "launched", "refuse_several", "require_mpi", "require_world"]

_MAX_PROCESSES = 1 << 24
# Slurm reserves step numbers from here on: for the batch script, interactive shells and processes outside of steps.
_FIRST_RESERVED_STEP = 0xFFFF_FFF0

_OPEN_MPI = "Open MPI's mpiexec"
_PMI = "mpiexec"
_SLURM = "Slurm's srun"
_PMIX = "a PMIx launcher"

_REMEDIES = {
    _OPEN_MPI: "build for that Open MPI (`tilewise build-mpi --mpicc` with the mpicc next to its mpiexec), or start "
    "with the mpiexec that belongs to this MPI",
    _PMI: "start with the mpiexec that belongs to this MPI, or build for the MPI of the one that was used "
    "(`tilewise build-mpi --mpicc` with the mpicc next to it)",
    _SLURM: "name the interface that this MPI was built for (`srun --mpi=pmi2` for MPICH and Intel MPI, "
    "`srun --mpi=pmix` for Open MPI; `srun --mpi=list` lists the interfaces), or start with its mpiexec in the job",
    _PMIX: "start with the mpiexec that belongs to this MPI, or build for an MPI that speaks PMIx "
    "(`tilewise build-mpi --mpicc` with its mpicc)",
}


@dataclass(frozen=True)
class Launched:
    """What a launcher says about this process.

    Attributes:
        launcher: the launcher's name.
        rank: the number of this process.
        size: the number of processes that the launcher started; None if unknown.
    """

    launcher: str
    rank: int
    size: int | None

    @property
    def has_several(self) -> bool:
        """Whether there may be other processes, which MPI must connect."""
        return self.size != 1

    def __str__(self) -> str:
        return f"process {self.rank} of {'an unknown number' if self.size is None else self.size}"


def launched() -> Launched | None:
    """The launcher that started this process; None without a launcher.

    If one launcher starts another (mpiexec in a Slurm job starts its helpers with srun), a process
    has the variables of both. The variables of the inner launcher are checked first.

    Raises:
        ConfigError: a variable of a launcher is not a valid number, or one of its two variables is
            missing.
    """
    for launcher, rank, size in (
        (_OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (_PMI, "PMI_RANK", "PMI_SIZE"),
    ):
        if read(rank, "") or read(size, ""):
            return _checked(launcher, rank, size)
    step = _number("SLURM_STEP_ID", 1 << 32)
    if step is not None and step < _FIRST_RESERVED_STEP:
        return _checked(
            _SLURM,
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS" if read("SLURM_STEP_NUM_TASKS", "") else "SLURM_NTASKS",
        )
    rank_of_pmix = _number("PMIX_RANK", _MAX_PROCESSES)
    return None if rank_of_pmix is None else Launched(_PMIX, rank_of_pmix, None)


def refuse_several(where: str, rule: str, remedy: str) -> None:
    """Reject an operation that one of several processes of a launcher cannot do.

    Args:
        where: the function, for the message.
        rule: why the operation is rejected.
        remedy: what the user can do.

    Raises:
        ConfigError: this is one of several processes.
    """
    launch = launched()
    if launch is not None and launch.has_several:
        raise ConfigError(f"[{where}] {rule}; got {launch} by {launch.launcher}; {remedy}")


def require_mpi(launch: Launched) -> MpiLibrary:
    """The MPI library that connects the processes of a launcher.

    Raises:
        ConfigError: there is no MPI library.
    """
    try:
        return find_mpi()
    except ConfigError as error:
        raise ConfigError(
            f"[comm.launcher] processes of {launch.launcher} must be joined by MPI; got {launch} and no MPI, so that "
            f"each would do the whole work: {error}"
        ) from None


def ending_by_mpi(launch: Launched, library: str) -> str:
    """The message for the case that MPI does not know the launcher. MPI then does not start, prints
    its own message and ends the process.

    Args:
        launch: what the launcher says.
        library: description of the MPI library.
    """
    return (
        f"[comm.launcher] MPI must start where its launcher has started processes; got {launch} by {launch.launcher}, "
        f"which {library} ended; {_REMEDIES[launch.launcher]}"
    )


def require_world(launch: Launched, rank: int, size: int, library: str) -> None:
    """Reject a process whose launcher and MPI disagree about its rank or the number of processes.

    Args:
        launch: what the launcher says.
        rank: number of this process in MPI's world.
        size: number of processes in MPI's world.
        library: description of the MPI library.

    Raises:
        ConfigError: launcher and MPI disagree. Or MPI's world has one process and the launcher does
            not say how many processes it started, because it may have started several.
    """
    is_same = (rank, size) == (launch.rank, launch.size)
    is_likely = launch.size is None and rank == launch.rank and size > 1
    if not is_same and not is_likely:
        raise ConfigError(
            f"[comm.launcher] launcher and MPI must agree; got {launch} by {launch.launcher}, and process {rank} of "
            f"{size} by {library}; {_REMEDIES[launch.launcher]}"
        )


def _checked(launcher: str, rank_name: str, size_name: str) -> Launched:
    size = _number(size_name, _MAX_PROCESSES + 1)
    rank = _number(rank_name, _MAX_PROCESSES)
    if rank is None or size is None or rank >= size:
        raise ConfigError(
            f"[comm.launcher] {rank_name} must be a number below {size_name}, as {launcher} sets them; got "
            f"{read(rank_name, '')!r} and {read(size_name, '')!r}; start with mpiexec or srun, or unset both"
        )
    return Launched(launcher, rank, size)


def _number(name: str, end: int) -> int | None:
    """A variable's value below `end`; None if it is not set."""
    text = read(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(end)) and int(text) < end):
        raise ConfigError(
            f"[comm.launcher] {name} must be a number from 0 to {end - 1}, as launchers set it; got {shown(text)}; "
            "start with mpiexec or srun, or unset it"
        )
    return int(text)
