"""Memory that processes share: fixed size, and rejection of other descriptors."""

import mmap
import os
import resource

import pytest

from tilewise.comm.memory import read_content, require_memory, shared_content, shared_memory
from tilewise.core import ResourceError


@pytest.fixture
def closing():
    """Closes descriptors at the end."""
    descriptors = []

    def keep(descriptor):
        descriptors.append(descriptor)
        return descriptor

    yield keep
    for descriptor in descriptors:
        os.close(descriptor)


def test_memory_is_zero_and_keeps_its_size(closing):
    """Whole pages, the same for all mappings; its size and seals cannot change."""
    memory = closing(shared_memory(5000, "test"))
    require_memory(memory, 5000)
    with mmap.mmap(memory, 8192) as one, mmap.mmap(memory, 8192) as other:
        assert one[:] == bytes(8192)
        one[4999] = 7
        assert other[4999] == 7
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)
    assert not os.get_inheritable(memory)


def test_content_never_changes(closing):
    """It can be read but not written."""
    content = os.urandom(10_001)
    memory = closing(shared_content(content, "test"))
    assert read_content(memory, len(content)) == content
    with pytest.raises(PermissionError):
        os.pwrite(memory, b"x", 0)
    for size in (len(content) - 1, len(content) + 1):
        with pytest.raises(ResourceError, match="10,001 bytes"):
            read_content(memory, size)


def test_other_descriptors_are_refused(closing, tmp_path):
    """Memory of another size, without seals, or with writable content; a file; a pipe."""
    with pytest.raises(ResourceError, match=r"must be sealed and have 8,193 bytes; got seals 0x7 and 8,192"):
        require_memory(closing(shared_memory(8192, "test")), 8193)
    plain = closing(os.memfd_create("plain", os.MFD_ALLOW_SEALING))
    os.ftruncate(plain, 4096)
    (tmp_path / "file").write_bytes(bytes(4096))
    for other in (plain, closing(os.open(tmp_path / "file", os.O_RDWR)), *map(closing, os.pipe())):
        with pytest.raises(ResourceError, match="must be sealed"):
            require_memory(other, 4096)
    with pytest.raises(ResourceError, match="must be sealed"):
        read_content(closing(shared_memory(4096, "test")), 4096)


def test_memory_that_the_system_does_not_provide():
    """It is an error with the size, and nothing stays open."""
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(
            ResourceError, match=r"memory that processes share; got 'File too large' for 2\.00 MiB"
        ):
            shared_memory(2 << 20, "test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == before
