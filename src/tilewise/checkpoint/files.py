"""Replaces and removes directories so that a reader sees either the old directory or the new one,
never a part of one.

This module does for directories what `files.writing` does for files. A directory that is replaced
or removed is first renamed to a hidden name. A replacement consists of two renames; between them
there is no directory with the final name. `check_writable` checks in advance that a directory can
be written.
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
from tilewise.files.writing import HIDDEN, sync_directory, sync_file, writing

__all__ = [
    "check_replaceable",
    "check_writable",
    "remove_directory",
    "remove_leftovers",
    "replace_directory",
]


def check_writable(directory: Path) -> None:
    """Reject a directory that cannot be created or written. The check leaves nothing behind.

    Raises:
        ConfigError: a file or a dangling link has its name, or there is no permission.
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
    """Reject a path at which something of another kind exists, because a file replaces only a file
    and a directory only a directory.

    Raises:
        ConfigError: there is a directory where a file is to be written, or the reverse.
    """
    fits = os.path.isdir(path) if is_directory else os.path.isfile(path)
    if os.path.lexists(path) and not fits:
        wanted = "a directory" if is_directory else "a file"
        raise ConfigError(
            f"[checkpoint.check_replaceable] {wanted} called {path.name!r} must be free to write; got something "
            f"else in {str(path.parent)!r}; move it away, or choose another directory"
        )


def _nearest_existing(path: Path) -> Path:
    """The path itself, or its closest existing parent directory.

    Raises:
        OSError: the path cannot be accessed, or a link on the way is dangling.
    """
    for candidate in (path, *path.parents):
        try:
            candidate.stat()
        except FileNotFoundError:
            if candidate.is_symlink():  # `mkdir` cannot replace it
                raise FileNotFoundError(errno.ENOENT, "the link is dangling", str(candidate)) from None
            continue
        return candidate
    return Path()


def replace_directory(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary directory, then put it at `path` in one step.

    An existing directory is first renamed and finally removed.

    Raises:
        ResourceError: the directory cannot be written. An existing directory is kept.
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
    """Rename a finished directory to its final name. If this fails, the existing directory gets its
    name back.
    """
    aside = path.with_name(f"{HIDDEN}{path.name}-old-{os.getpid()}")
    existed = path.exists()
    if existed:
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        if existed:
            os.rename(aside, path)
        raise
    sync_directory(path.parent)
    _discard(aside)


def remove_directory(path: Path) -> None:
    """Remove a directory. It disappears in one step, even if the process is killed meanwhile. If
    the system does not allow it, the directory stays.
    """
    aside = path.with_name(f"{HIDDEN}{path.name}-old-{os.getpid()}")
    with suppress(OSError):
        os.rename(path, aside)
        _discard(aside)


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files of killed writers from `directory`.

    Raises:
        ResourceError: `directory` cannot be listed or written to.
    """
    with writing(directory):
        for path in directory.glob(f"{HIDDEN}*"):
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a directory, a file or a link (not the link's target). It is not an error if nothing
    exists there.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
