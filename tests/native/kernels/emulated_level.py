"""A pytest plugin: an additional instruction-set level, `neon`, whose kernels run in an emulated
aarch64 process.

`--kernel-server COMMAND` starts `native/kernels/kernel_server.cc`. This folder's tests then see the
levels avx2 and neon, with neon in use. Every call at neon also runs on this machine's avx2, and
both must give the same bits. Operands of the emulated process end at inaccessible pages.
`test_kernel_neon.py` runs this folder's tests with it.
"""

from __future__ import annotations

import ctypes
import shlex
import subprocess
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tilewise.kernels import isa
from tilewise.kernels.packing import padded_columns

LEVEL, PEER = "neon", "avx2"
num_compared = 0


@dataclass
class _Segment:
    """Bytes [begin, end) of this process that some operands share."""

    begin: int
    end: int

    def read(self) -> bytes:
        return ctypes.string_at(self.begin, self.end - self.begin)


def _array_of(tile):
    return tile[0] if isinstance(tile, tuple) else tile


def _span(array):
    begin = array.__array_interface__["data"][0]
    if array.size == 0:
        return begin, begin
    return begin, begin + sum((n - 1) * s for n, s in zip(array.shape, array.strides)) + array.itemsize


def _segments(arrays):
    """The spans of all arrays, overlapping ones merged, so that operands that alias here alias there."""
    segments: list[_Segment] = []
    for begin, end in sorted(_span(array) for array in arrays):
        if segments and begin < segments[-1].end:
            segments[-1].end = max(end, segments[-1].end)
        else:
            segments.append(_Segment(begin, end))
    return segments


def _place(array, segments):
    """The segment of an array, and its offset there."""
    begin, end = _span(array)
    return next((i, begin - s.begin) for i, s in enumerate(segments) if s.begin <= begin and end <= s.end)


def _extent(tile):
    """Rows, columns and stride in elements, in the kernels' terms."""
    if isinstance(tile, tuple):
        return tile[1], tile[2], padded_columns(tile[2])
    return *tile.shape, tile.strides[0] // tile.itemsize


class KernelServer:
    """The other process; `run` replaces `tilewise.kernels.isa.run`."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stderr is not None
        self.level = self.process.stderr.readline().decode().strip()

    def close(self) -> None:
        self.process.communicate(timeout=60)

    def _read(self, count: int) -> bytes:
        assert self.process.stdout is not None
        data = self.process.stdout.read(count)
        if len(data) != count:
            raise RuntimeError(f"the kernel server ended with {self.process.wait(60)}")
        return data

    def run(self, name, tiles, ints=(), floats=(), *, row_begin=0, repeat=1, scratch_bytes=64 << 20) -> None:
        """Run one kernel there and copy every operand's memory back."""
        segments = _segments([_array_of(tile) for tile in tiles if tile is not None])
        places = []
        for tile in tiles:
            placed = (-1, 0, 0, 0, 0)
            if tile is not None:
                placed = *_place(_array_of(tile), segments), *_extent(tile)
            places += placed
        head = [
            len(name),
            len(segments),
            len(tiles),
            len(ints),
            len(floats),
            row_begin,
            repeat,
            scratch_bytes,
        ]
        sizes = [s.end - s.begin for s in segments]
        parts = [
            np.array(head, np.int64).tobytes(),
            name.encode(),
            *(np.array(numbers, np.int64).tobytes() for numbers in (sizes, places, ints)),
            np.array(floats, np.float64).tobytes(),
            *(s.read() for s in segments),
        ]
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(parts))
        self.process.stdin.flush()
        length = int(np.frombuffer(self._read(8), np.int64)[0])
        if length:
            raise RuntimeError(self._read(length).decode())
        for segment, size in zip(segments, sizes):
            data = self._read(size)
            if data != segment.read():  # memory that stays as it is may be read-only
                ctypes.memmove(segment.begin, data, size)


def _copies(tiles):
    """Copies of the operands that share memory like the originals."""
    segments = _segments([_array_of(tile) for tile in tiles if tile is not None])
    memory = [bytearray(s.read()) for s in segments]

    def copy(tile):
        if tile is None:
            return None
        array = _array_of(tile)
        number, offset = _place(array, segments)
        copied = np.ndarray(array.shape, array.dtype, memory[number], offset, array.strides)
        return (copied, *tile[1:]) if isinstance(tile, tuple) else copied

    return [copy(tile) for tile in tiles]


def _bits(array):
    """Bit patterns; all NaNs are equal, because sign and payload depend on the processor."""
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.itemsize]
    values = np.ascontiguousarray(array)
    if array.dtype.kind != "f" and array.dtype != ml_dtypes.bfloat16:
        return values.view(kind)
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(values), kind(0), values.view(kind))


def run_and_compare(server, native, peer, name, tiles, ints=(), floats=(), **options) -> None:
    """Run a kernel natively at `peer` on copies, then there; both must give the same bits in every operand."""
    global num_compared
    copies = _copies(tiles)
    native(name, copies, ints, floats, isa=peer, **options)  # also refuses what cannot be run
    server.run(name, tiles, ints, floats, **options)
    if name.startswith("peak"):  # counts the level's own registers
        return
    for number, (tile, copy) in enumerate(zip(tiles, copies)):
        if tile is not None:
            got, want = _bits(_array_of(tile)), _bits(_array_of(copy))
            np.testing.assert_array_equal(got, want, f"operand {number} of {name} differs from {peer}'s")
    num_compared += 1


def pytest_addoption(parser):
    """The option for the server's command."""
    parser.addoption("--kernel-server", required=True, help="command that serves kernels of the level neon")


def pytest_configure(config):
    """Register the level before a test imports `run`."""
    server = KernelServer(shlex.split(config.getoption("--kernel-server")))
    assert server.level == LEVEL
    native = isa.run

    def run(name, tiles, ints=(), floats=(), *, isa="", **options):
        if isa in ("", LEVEL):
            run_and_compare(server, native, PEER, name, tiles, ints, floats, **options)
        else:
            native(name, tiles, ints, floats, isa=isa, **options)

    isa.run = run
    isa.isa_levels = lambda: [PEER, LEVEL]
    isa.isa_in_use = lambda: LEVEL
    config.add_cleanup(server.close)


def pytest_sessionfinish(session, exitstatus):
    """Print how many calls were compared, for the test that started this run."""
    print(f"\ncompared {num_compared} calls")
