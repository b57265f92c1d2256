"""`tilewise build-mpi`: compiles the one C file that calls MPI, with the site's own mpicc.

The file is compiled in a temporary folder, the result is loaded in a separate process, and is then
moved to its destination. An existing file is replaced only if all of this succeeds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from tilewise.core import ConfigError

__all__ = ["build_mpi"]

_COMPILE_S, _LOAD_S = 300, 60
_LAST_LINES = 8
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")


def build_mpi(
    mpicc: Annotated[str, typer.Option(metavar="PATH", help="The compiler of the MPI to use.")] = "mpicc",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Path of the built file; TILEWISE_MPI=FILE selects it. Default: next to the package's library, where "
            "Tilewise finds it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Build Tilewise's MPI support for the MPI library of this machine.

    Needed for MPI libraries without the standard binary interface of MPI 5 (Open MPI, vendors'
    MPIs, MPICH before 5). Compiles one small C file with their `mpicc`, loads it, and prints which
    MPI library it calls. MPICH 5, for example from `pip install mpich`, does not need this.

    Example: `tilewise build-mpi` and `tilewise build-mpi --mpicc ~/openmpi/bin/mpicc --out
    openmpi.so`
    """
    from tilewise.comm.mpi_library import site_table
    from tilewise.files.writing import replace_file

    target = site_table() if out is None else out.absolute()
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(
            f"[cli.build-mpi] the folder of the built file must exist and be writable; got {str(target.parent)!r}; "
            "choose another with --out FILE, and name it in TILEWISE_MPI"
        )
    location = shutil.which(mpicc)
    compiler = None if location is None else str(Path(location).absolute())
    if compiler is None:
        raise ConfigError(
            f"[cli.build-mpi] the MPI's compiler must be a program; got {mpicc!r}, which is not; install the MPI "
            "with its headers, load its module, or name its compiler with --mpicc PATH"
        )
    with TemporaryDirectory() as folder:
        built = Path(folder) / "table.so"
        _compile(compiler, built)
        library = _load(compiler, built)
        replace_file(target, lambda path: _copy(built, path))
    print(f"{target}: calls {library}")


def _compile(compiler: str, built: Path) -> None:
    from tilewise.comm.mpi_library import packaged_table

    source = packaged_table().parent / "mpi" / "tilewise_mpi.c"
    done = _run([compiler, *_FLAGS, str(source), "-o", str(built)], built.parent, _COMPILE_S)
    if done.returncode != 0 or not built.is_file():
        raise ConfigError(
            f"[cli.build-mpi] {compiler} must compile {source}; got {_ending(done)}; fix "
            "the reported errors, or choose another MPI with --mpicc PATH"
        )


def _load(compiler: str, built: Path) -> str:
    """The MPI library that the built file calls, determined in a separate process."""
    done = _run([sys.executable, "-m", "tilewise.comm.mpi_table", str(built)], built.parent, _LOAD_S)
    if done.returncode != 0 or not done.stdout.strip():
        raise ConfigError(
            f"[cli.build-mpi] the library built by {compiler} must load; got {_ending(done)}; put "
            "the MPI's libraries on the loader's path (LD_LIBRARY_PATH, or load its module)"
        )
    return done.stdout.strip()


def _run(command: list[str], folder: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"[cli.build-mpi] a program must finish within {limit_s} s; got {error}; name a working compiler with "
            "--mpicc PATH"
        ) from None


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    """Exit status and last lines of output of a process."""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return f"exit status {done.returncode}: {' | '.join(lines[-_LAST_LINES:]) or 'no output'}"


def _copy(built: Path, path: Path) -> None:
    shutil.copyfile(built, path)
    path.chmod(0o755)
