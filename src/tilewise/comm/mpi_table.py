"""The table of MPI functions (native/comm/mpi/tilewise_mpi.h) as read from Python, before native
code uses it.

As a program, `python -m tilewise.comm.mpi_table TABLE [LIBRARY]` loads a built table and prints
which MPI it calls. It runs in its own process, because loading may crash.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path

from tilewise.core.errors import ConfigError

__all__ = ["VERSION", "MpiTable", "load_table", "name_of_library"]

VERSION = 1
_TEXT_BYTES = 1024
_Int32, _Int64 = POINTER(c_int32), POINTER(c_int64)


class MpiTable(ctypes.Structure):
    """What Tilewise needs of MPI: functions, and `self`, which is the first argument of each
    function.
    """

    _fields_ = (
        ("version", c_int32),
        ("self", c_void_p),
        ("start", CFUNCTYPE(c_int32, c_void_p)),
        ("finish", CFUNCTYPE(c_int32, c_void_p)),
        ("rank", CFUNCTYPE(c_int32, c_void_p)),
        ("size", CFUNCTYPE(c_int32, c_void_p)),
        ("tag_max", CFUNCTYPE(c_int32, c_void_p)),
        ("send", CFUNCTYPE(c_int32, c_void_p, c_char_p, c_int64, c_int32, c_int32, c_void_p)),
        ("receive", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_void_p)),
        ("test", CFUNCTYPE(c_int32, c_void_p, c_void_p, _Int32, _Int64)),
        ("probe", CFUNCTYPE(c_int32, c_void_p, c_int32, _Int32, _Int32, _Int64)),
        ("take", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_int32, c_int32)),
        ("describe", CFUNCTYPE(None, c_void_p, c_int32, c_char_p, c_int64)),
        ("library", CFUNCTYPE(None, c_void_p, c_char_p, c_int64)),
    )


def load_table(table: Path, library: Path | None) -> MpiTable:
    """Load a built table after its MPI library. Without `library`, the table is linked to its
    library.

    Raises:
        ConfigError: a file cannot be loaded, is not a table, or is a table of another version.
    """
    try:
        if library is not None:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        entry = ctypes.CDLL(str(table)).tilewise_mpi
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"[comm.mpi] a file built by `tilewise build-mpi` must load; got {error}; build it again with the mpicc of "
            "this machine's MPI"
        ) from None
    entry.restype = POINTER(MpiTable)
    pointer = entry()
    if not pointer or pointer.contents.version != VERSION:
        got = pointer.contents.version if pointer else "none"
        raise ConfigError(
            f"[comm.mpi] {table} must have version {VERSION} of the table; got {got}; build it again with `tilewise "
            "build-mpi`"
        )
    loaded: MpiTable = pointer.contents
    return loaded


def name_of_library(table: MpiTable) -> str:
    """The MPI library that a table calls, as the library describes itself; MPI need not be started."""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    table.library(table.self, text, _TEXT_BYTES)
    return text.value.decode(errors="replace").strip()


def _main(arguments: list[str]) -> int:
    try:
        table = load_table(Path(arguments[0]), Path(arguments[1]) if arguments[1:] else None)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print(name_of_library(table))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
