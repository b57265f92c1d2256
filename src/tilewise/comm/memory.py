"""Memory that processes of one host share: unnamed files of a fixed size.

Processes pass such a file on as a descriptor (`comm.channel`). The file is in no directory, and the
system frees it when the last process that has it ends. It is sealed against a change of size, so an
access within a checked size can never end a process.
"""

from __future__ import annotations

import fcntl
import os

from tilewise.core.errors import ResourceError
from tilewise.core.sizes import format_bytes

__all__ = [
    "content_of",
    "read_content",
    "require_memory",
    "round_to_pages",
    "shared_content",
    "shared_memory",
]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PAGE = 4096  # the unit in which native code maps memory


def round_to_pages(num_bytes: int) -> int:
    """A size rounded up to whole pages."""
    return -(-max(num_bytes, 1) // _PAGE) * _PAGE


def shared_memory(num_bytes: int, name: str) -> int:
    """A descriptor of new memory, which is zeroed and has a size of whole pages. The caller closes
    the descriptor.

    Args:
        num_bytes: minimum size; pages are allocated when they are first written.
        name: name of the memory in lists of a process's files.

    Raises:
        ResourceError: the system has not enough memory or descriptors.
    """
    return _sealed(round_to_pages(num_bytes), name, _SEALS)


def shared_content(content: bytes, name: str) -> int:
    """A descriptor of new memory with bytes that never change. The caller closes the descriptor.

    Raises:
        ResourceError: the system has not enough memory or descriptors.
    """
    return _sealed(len(content), name, _SEALS | fcntl.F_SEAL_WRITE, content)


def _sealed(num_bytes: int, name: str, seals: int, content: bytes = b"") -> int:
    try:
        descriptor = os.memfd_create(f"tilewise-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            left = memoryview(content)
            while left:
                left = left[os.pwrite(descriptor, left, len(content) - len(left)) :]
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise ResourceError(
            f"[comm.memory] the system must give memory that processes share; got {error.strerror!r} for "
            f"{format_bytes(num_bytes)}; choose smaller sizes, or raise the limits (memory, ulimit -n)"
        ) from None
    return descriptor


def require_memory(descriptor: int, num_bytes: int, *, is_constant: bool = False) -> None:
    """Reject a descriptor from another process that is not sealed memory of this size.

    Args:
        descriptor: the descriptor to check.
        num_bytes: required size: whole pages unless `is_constant`.
        is_constant: whether the content must be sealed against changes.

    Raises:
        ResourceError: the descriptor is something else.
    """
    wanted = _SEALS | (fcntl.F_SEAL_WRITE if is_constant else 0)
    try:
        seals, size = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_size
    except OSError:
        seals, size = 0, -1
    if seals & wanted != wanted or size != (num_bytes if is_constant else round_to_pages(num_bytes)):
        raise ResourceError(
            f"[comm.memory] shared memory must be sealed and have {num_bytes:,} bytes; got seals {seals:#x} and "
            f"{size:,} bytes; start the group again"
        )


def read_content(descriptor: int, num_bytes: int) -> bytes:
    """All bytes of memory that never changes.

    Raises:
        ResourceError: as for `require_memory`.
    """
    require_memory(descriptor, num_bytes, is_constant=True)
    return content_of(descriptor)


def content_of(descriptor: int) -> bytes:
    """All bytes of memory that this process has created."""
    num_bytes = os.fstat(descriptor).st_size
    content = bytearray()
    while len(content) < num_bytes:
        content += os.pread(descriptor, num_bytes - len(content), len(content))
    return bytes(content)
