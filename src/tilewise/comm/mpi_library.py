"""Finds the MPI that this process would use: the MPI library, and a table of functions (a small
library of ours) that calls it.

This module only searches. It loads a library only if nothing but the loader knows the library's
path. The table is either built by a site's own mpicc (`tilewise build-mpi`) or comes with the
package. The latter uses MPI's standard binary interface, which every library named libmpi_abi.so.1
provides; pip's mpich has one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewise import _native
from tilewise.core.environment import read
from tilewise.core.errors import ConfigError

__all__ = ["MpiLibrary", "find_mpi", "packaged_table", "site_table"]

_ABI_LIBRARY = "libmpi_abi.so.1"


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library to use.

    Attributes:
        table: the table: a built file with the symbol `tilewise_mpi`.
        library: the MPI library, which is loaded before the table, with global symbols
            (RTLD_GLOBAL). The loader searches for a name without a folder. None if the table is
            linked to its library.
        name: description of the MPI library.
    """

    table: Path
    library: Path | None
    name: str


def packaged_table() -> Path:
    """The table that comes with the package, for MPI's standard binary interface."""
    return _folder() / "libtilewise_mpi_abi.so"


def site_table() -> Path:
    """The path where `tilewise build-mpi` puts a table for the MPI of this machine."""
    return _folder() / "libtilewise_mpi_site.so"


def find_mpi() -> MpiLibrary:
    """The MPI to use: the table that TILEWISE_MPI names, otherwise the one that `tilewise
    build-mpi` built, otherwise a library with the standard interface.

    Raises:
        ConfigError: there is no MPI, or TILEWISE_MPI does not name a file.
    """
    if named := read("TILEWISE_MPI", ""):
        if not os.path.isfile(named):  # accepts names of any length
            raise ConfigError(
                "[comm.mpi] TILEWISE_MPI must name a file that `tilewise build-mpi` has built; got "
                f"{named!r}, which is no file; build it, or unset the variable"
            )
        return MpiLibrary(Path(named).resolve(), None, f"the MPI of TILEWISE_MPI ({named})")
    if (built := site_table()).is_file():
        return MpiLibrary(built, None, f"the MPI of `tilewise build-mpi` ({built})")
    if (library := _abi_library()) is not None and packaged_table().is_file():
        return MpiLibrary(packaged_table(), library, f"MPI by its standard binary interface ({library})")
    raise ConfigError(
        f"[comm.mpi] several processes started by a launcher need MPI; got no {_ABI_LIBRARY} in {sys.prefix}/lib, "
        "next to mpiexec or known to the loader, and no file of `tilewise build-mpi`; `pip install mpich`, or run "
        "`tilewise build-mpi` with this machine's mpicc"
    )


def _folder() -> Path:
    return Path(str(_native.__file__)).parent / "lib"


def _abi_library() -> Path | None:
    for folder in _library_folders():
        if (path := folder / _ABI_LIBRARY).is_file():
            return path
    try:
        ctypes.CDLL(_ABI_LIBRARY)  # the loader's own paths; there is no other way to ask for them
    except OSError:
        return None
    return Path(_ABI_LIBRARY)


def _library_folders() -> Iterator[Path]:
    """Library folders of this Python's environment, and of the MPI whose mpiexec is on the search
    path.
    """
    yield Path(sys.prefix) / "lib"
    if (mpiexec := shutil.which("mpiexec")) is not None:
        for program in (Path(mpiexec), Path(mpiexec).resolve()):
            yield program.parent.parent / "lib"
            yield program.parent.parent / "lib64"
