"""Writes a file so that a reader sees either the old file or the new one, never a part.

The data is written to a hidden temporary file in the same directory, flushed to the disk, and
renamed. Then the directory is flushed, so that the rename survives a power failure. If the system
reports an error (a full disk, a missing permission), one error is raised and the old file remains.
Directories are replaced in `checkpoint.files`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewise.core.environment import on_host
from tilewise.core.errors import ResourceError

__all__ = [
    "HIDDEN",
    "name_in_utf8",
    "replace_file",
    "replace_text",
    "sync_directory",
    "sync_file",
    "writing",
]

HIDDEN = ".tilewise-tmp-"
"""The prefix of names of unfinished files."""


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A `with` block that writes `path`. It turns system errors into one kind of error.

    Raises:
        ResourceError: the system reported an error. The message names the path, the host if there
            may be several, and the system's message.
    """
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"[files.writing] output must be written completely; got {str(path)!r}{on_host()}: "
            f"{error.strerror or error}; free space or check permissions; existing content is kept"
        ) from error


@contextmanager
def name_in_utf8(directory: Path) -> Iterator[str]:
    """A UTF-8 name for a directory whose name may be any bytes. Native code needs it, because it
    takes only UTF-8. The name is valid in this process and in the `with` block only.

    Raises:
        ResourceError: the directory cannot be opened.
    """
    name = str(directory)
    if name.isprintable():  # a name that is not UTF-8 is not printable
        yield name
        return
    with writing(directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, then put it at `path` in one step.

    Raises:
        ResourceError: the file cannot be written, or `path` is a directory, a device or not a valid
            name. An existing file is kept.
    """
    if not path.name or (os.path.lexists(path) and not path.is_file()):
        raise ResourceError(
            f"[files.writing] output must be writable as a file; got {str(path)!r}, which is not a regular file; "
            "choose another name"
        )
    temporary = path.with_name(f"{HIDDEN}{path.name}-{os.getpid()}")
    with writing(path):
        try:
            write(temporary)
            sync_file(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Put a text file at `path` in one step. Raises the errors of `replace_file`."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    replace_file(path, write)
