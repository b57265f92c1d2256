"""Allows one run at a time in an output directory.

The lock is a file in the directory, which the system locks for as long as the process lives. So a
process that has died never blocks another one, and leaves no lock to remove. The file contains the
process id, for the error message of a second run. It is removed at the end of the run.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilewise.core import ConfigError, Validator, get_logger
from tilewise.files.writing import writing

__all__ = ["lock_directory"]

_validate = Validator("checkpoint")
_NAME = ".tilewise-lock"
_ATTEMPTS = 1000
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock `directory` for one run. It is created if it does not exist, and removed again if it
    stays empty.

    Raises:
        ConfigError: another run has locked the directory (the message names its process, if known),
            or `directory` is not a path.
        ResourceError: the lock file cannot be written.
    """
    directory = _validate.path("lock_directory", "a directory", directory)
    with writing(directory / _NAME):
        made = [path for path in (directory, *directory.parents) if not path.exists()]
        descriptor = _acquire(directory / _NAME)
    try:
        yield
    finally:
        with suppress(OSError):
            (directory / _NAME).unlink()
        os.close(descriptor)
        with suppress(OSError):  # not empty: the run wrote something
            for path in made:
                path.rmdir()


def _acquire(path: Path) -> int:
    """The open and locked file at `path`, with our process id in it."""
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"[checkpoint.lock] an output directory takes one run at a time; got {str(path.parent)!r}, which "
                f"{f'process {holder}' if holder.isdecimal() else 'another process'} writes to; wait for it, or choose "
                "another directory"
            ) from None
        except OSError as error:
            get_logger("checkpoint").warning(
                "%s cannot be locked (%s); two runs at a time would overwrite each other's files",
                path.parent,
                error.strerror,
            )
        if _is_at(descriptor, path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            return descriptor
        os.close(descriptor)  # the previous run has removed this file meanwhile


def _open(path: Path) -> int:
    """Open the file at `path`. Its directory is created if needed."""
    for _ in range(_ATTEMPTS):
        # A run that ends may remove the directory meanwhile, even between the two system calls of `mkdir`.
        with suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, _OPEN, 0o666)
    return os.open(path, _OPEN, 0o666)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
