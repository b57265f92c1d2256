"""A pytest plugin: every operand of every kernel ends at a page that cannot be touched, so reading or writing past an
end kills the process instead of passing unseen. `test_kernel_bounds.py` runs this folder's tests with it."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from tilewise.kernels import isa

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PAGE = mmap.PAGESIZE
moved = 0


class _Guarded:
    """A copy of an array whose last byte is the last before a forbidden page."""

    def __init__(self, array: np.ndarray) -> None:
        strides = zip(array.shape, array.strides)
        span = sum((n - 1) * stride for n, stride in strides) + array.itemsize
        self.bytes = (span + _PAGE - 1) // _PAGE * _PAGE + _PAGE
        self.base = _libc.mmap(
            None, self.bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        assert _libc.mprotect(self.base + self.bytes - _PAGE, _PAGE, 0) == 0
        raw = (ctypes.c_char * max(span, 1)).from_address(self.base + self.bytes - _PAGE - span)
        self.array = np.ndarray(array.shape, array.dtype, raw, strides=array.strides)
        self.array[...] = array

    def free(self) -> None:
        """Return the memory."""
        _libc.munmap(self.base, self.bytes)


def _guard(run):
    def guarded(name, tiles, *rest, **options):
        global moved
        copies = {}

        def place(tile):
            array = tile[0] if isinstance(tile, tuple) else tile
            if array is None or array.size == 0:
                return tile
            key = array.__array_interface__["data"][0], array.shape, array.strides  # aliases stay aliases
            if key not in copies:
                copies[key] = array, _Guarded(array)
            inside = copies[key][1].array
            return (inside, *tile[1:]) if isinstance(tile, tuple) else inside

        try:
            result = run(name, [place(t) for t in tiles], *rest, **options)
            for array, copy in copies.values():
                if array.flags.writeable:
                    array[...] = copy.array
        finally:
            moved += len(copies)
            for _, copy in copies.values():
                copy.free()
        return result

    return guarded


isa.run = _guard(isa.run)


def pytest_sessionfinish(session, exitstatus):
    """Say how many operands were guarded; the test that started this run reads it."""
    print(f"\nguarded {moved} operands")
