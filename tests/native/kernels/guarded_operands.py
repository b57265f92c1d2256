"""A pytest plugin: every kernel operand ends at an inaccessible page, and operands that the table
calls `in` are on read-only pages. An access past an end, or a write to an input, kills the process.
`test_kernel_bounds.py` runs this folder's tests with it.
"""

from __future__ import annotations

import ctypes
import mmap
from itertools import cycle, groupby, islice

import numpy as np

from tilewise.kernels import isa, kernel_spec

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PAGE = mmap.PAGESIZE
moved = 0


class _Guarded:
    """A copy of an array whose last byte precedes an inaccessible page."""

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

    def protect(self) -> None:
        assert _libc.mprotect(self.base, self.bytes - _PAGE, mmap.PROT_READ) == 0

    def free(self) -> None:
        _libc.munmap(self.base, self.bytes)


def _is_read_only(name, count):
    """Per operand of a call, whether the table calls it `in`; members of adjacent lists alternate."""
    if name not in isa.kernel_names():
        return [False] * count
    operands = kernel_spec(name).operands
    members = max(0, count - sum(not o.is_list for o in operands))
    order = []
    for is_list, group in groupby(operands, key=lambda o: o.is_list):
        specs = list(group)
        order += islice(cycle(specs), members) if is_list else specs
    undeclared = [False] * (count - len(order))
    return [*(o.role == "in" for o in order), *undeclared][:count]


def _guard(run):
    def guarded(name, tiles, *rest, **options):
        global moved
        copies = {}
        written = set()

        def place(tile, is_read_only):
            array = tile[0] if isinstance(tile, tuple) else tile
            if array is None or array.size == 0:
                return tile
            key = array.__array_interface__["data"][0], array.shape, array.strides  # aliases stay aliases
            if key not in copies:
                copies[key] = array, _Guarded(array)
            inside = copies[key][1].array
            if not is_read_only:
                written.add(key)
            return (inside, *tile[1:]) if isinstance(tile, tuple) else inside

        try:
            placed = [place(t, only) for t, only in zip(tiles, _is_read_only(name, len(tiles)))]
            for key, (_, copy) in copies.items():
                if key not in written:
                    copy.protect()
            result = run(name, placed, *rest, **options)
            for key, (array, copy) in copies.items():
                if key in written and array.flags.writeable:
                    array[...] = copy.array
        finally:
            moved += len(copies)
            for _, copy in copies.values():
                copy.free()
        return result

    return guarded


isa.run = _guard(isa.run)


def pytest_sessionfinish(session, exitstatus):
    """Print how many operands were guarded, for the test that started this run."""
    print(f"\nguarded {moved} operands")
