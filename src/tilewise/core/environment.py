"""Environment variables. All Python code reads them here.

Every variable is listed in `VARIABLES` (or in native code) and on docs/environment.md; a policy
test compares the two. A run is not configured by environment variables, but by arguments and
configuration files. The variables that launchers set are read here too.
"""

from __future__ import annotations

import os

from tilewise.core.errors import ConfigError

__all__ = ["VARIABLES", "is_launched", "on_host", "read"]

VARIABLES = {
    "TILEWISE_LOG": "level of the log on standard error: debug, info, warning (default) or error",
    "TILEWISE_MPI": "a file that `tilewise build-mpi` has built: the MPI to use",
    "OMPI_COMM_WORLD_RANK": "Open MPI's mpiexec: which process this is",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec: how many it has started",
    "PMI_RANK": "mpiexec of MPICH, Intel MPI and their derivatives: which process this is",
    "PMI_SIZE": "mpiexec of MPICH, Intel MPI and their derivatives: how many it has started",
    "PMIX_RANK": "launchers that speak PMIx: which process this is",
    "SLURM_NTASKS": "Slurm: tasks of the job; of the step, where SLURM_STEP_NUM_TASKS is missing",
    "SLURM_PROCID": "Slurm: which task of its step this process is",
    "SLURM_STEP_ID": "Slurm: the step of srun that this process belongs to",
    "SLURM_STEP_NUM_TASKS": "Slurm: tasks of that step",
}


def read(name: str, default: str) -> str:
    """The value of a variable of `VARIABLES`, or `default` when it is unset or empty.

    Raises:
        ConfigError: `name` is not in the table.
    """
    if name not in VARIABLES:
        raise ConfigError(
            f"[core.environment] a variable must be in `VARIABLES`; got {name!r}; add it to "
            "core/environment.py and docs/environment.md"
        )
    return os.environ.get(name) or default


def is_launched() -> bool:
    """Whether a launcher of several processes may have started this one; `comm.launcher` finds out
    which, and how many.
    """
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID")
    return any(read(name, "") for name in names)


def on_host() -> str:
    """` on NAME`, for messages about this host's files and memory if a launcher may have started
    processes on other hosts; otherwise an empty string.
    """
    return f" on {os.uname().nodename}" if is_launched() else ""
