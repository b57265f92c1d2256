"""Replaces and removes directories so that a reader sees either the old one or the new one, never a
part.

It does for directories what `core.writing` does for files. A directory that is replaced or removed
is first renamed to a hidden name; between the two renames of a replacement there is no directory of
that name. On request it checks in advance that a place is writable.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tilewise.core import ConfigError
from tilewise.core.writing import HIDDEN, sync_directory, sync_file, writing

__all__ = [
    "check_replaceable",
    "check_writable",
    "remove_directory",
    "remove_leftovers",
    "replace_directory",
]


def check_writable(directory: Path) -> None:
    """Refuse a directory that cannot be made or written to; leaves nothing behind.

    Raises:
        ConfigError: a file or a link that leads nowhere is in the way, or there is no permission.
    """
    try:
        with tempfile.TemporaryFile(dir=_nearest_existing(directory)):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            "[checkpoint.check_writable] output must go to a directory that can be written to; got "
            f"{str(directory)!r}: {reason}; choose another directory"
        ) from None


def check_replaceable(path: Path, *, is_directory: bool) -> None:
    """Refuse a name that something of another kind has; what is to be written there replaces its own kind only.

    Raises:
        ConfigError: a directory stands where a file shall be, or the reverse.
    """
    fits = os.path.isdir(path) if is_directory else os.path.isfile(path)
    if os.path.lexists(path) and not fits:
        wanted = "a directory" if is_directory else "a file"
        raise ConfigError(
            f"[checkpoint.check_replaceable] output must be free to write {wanted} called {path.name!r}; got something "
            f"else of that name in {str(path.parent)!r}; move it away, or choose another directory"
        )


def _nearest_existing(path: Path) -> Path:
    """The path itself, or the closest directory above it that is there.

    Raises:
        OSError: it cannot be looked at, or a link on the way leads nowhere.
    """
    for candidate in (path, *path.parents):
        try:
            candidate.stat()
        except FileNotFoundError:
            if candidate.is_symlink():  # what no directory can be made over
                raise FileNotFoundError(errno.ENOENT, "a link that leads nowhere", str(candidate)) from None
            continue
        return candidate
    return Path()


def replace_directory(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary directory, then put it at `path` in one step.

    A directory that stands there is moved aside first and removed afterwards.

    Raises:
        ResourceError: it cannot be written; what stood there is kept.
    """
    temporary = path.with_name(f"{HIDDEN}{path.name}-{os.getpid()}")
    with writing(path):
        _discard(temporary)
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            for path_inside in temporary.rglob("*"):
                (sync_directory if path_inside.is_dir() else sync_file)(path_inside)
            sync_directory(temporary)
            _put_in_place(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename a finished directory; one that stood there comes back when that fails."""
    aside = path.with_name(f"{HIDDEN}{path.name}-old-{os.getpid()}")
    stood_there = path.exists()
    if stood_there:
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        if stood_there:
            os.rename(aside, path)
        raise
    sync_directory(path.parent)
    _discard(aside)


def remove_directory(path: Path) -> None:
    """Remove a directory; what has its name is whole until it is gone, also when the process is killed meanwhile. One
    that the system keeps stays."""
    aside = path.with_name(f"{HIDDEN}{path.name}-old-{os.getpid()}")
    with suppress(OSError):
        os.rename(path, aside)
        _discard(aside)


def remove_leftovers(directory: Path) -> None:
    """Remove what killed writers left in `directory`.

    Raises:
        ResourceError: it cannot be listed or written to.
    """
    with writing(directory):
        for path in directory.glob(f"{HIDDEN}*"):
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a directory, a file or a link, whose target stays; what is not there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
