"""Loading weights from files into panels: the same bits as NumPy's packing, at every instruction-set level."""

import os
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from kernel_checks import in_turn

from tilewise.core import PlanError
from tilewise.core.dtypes import DTYPES
from tilewise.kernels.isa import isa_levels
from tilewise.kernels.loading import Destination, Part, Rectangle, read_weights, store_weight, stored_dtype
from tilewise.kernels.packing import pack_weight, packed_elements

BF16 = ml_dtypes.bfloat16
SHAPES = [(1, 1), (32, 2), (33, 3), (31, 64), (70, 515), (5, 16), (96, 257)]


def _values(shape, dtype, seed=0):
    """Numbers of every magnitude of the dtype, including zeros of both signs and denormals."""
    rng = np.random.default_rng(seed)
    spread = rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 4, shape)
    spread.reshape(-1)[::7] = -0.0
    stored = spread.astype(dtype)
    assert np.isfinite(stored.astype(np.float64)).all()
    return stored


def _memory(shape, name, packed):
    """Memory of a part, filled with a value that must be overwritten."""
    elements = packed_elements(*shape) if packed else shape[0] * shape[1]
    return np.full(elements * DTYPES[name].itemsize, 0xA5, np.uint8)


def _expected(w, name, packed):
    with np.errstate(over="ignore"):
        w = w.astype(DTYPES[name].numpy)
    return (pack_weight(w, name) if packed else w.reshape(-1)).view(np.uint8)


@pytest.fixture
def file_of(tmp_path):
    """Writes an array to a file after some bytes; returns the descriptor and the array's offset."""
    opened = []

    def put(array, begin=24):
        path = tmp_path / str(len(opened))
        path.write_bytes(b"x" * begin + np.ascontiguousarray(array).tobytes())
        opened.append(os.open(path, os.O_RDONLY))
        return opened[-1], begin

    yield put
    for descriptor in opened:
        os.close(descriptor)


def _read(rectangle, parts, row=0, col=0, isa=""):
    """All columns to the same place of every part."""
    return read_weights(rectangle, [Destination(p, row, col, 0, rectangle.cols) for p in parts], isa=isa)


def _load(file, begin, stored, parts, transposed=False, row=0, col=0, isa=""):
    rows, cols = stored.shape
    rectangle = Rectangle(file, begin, stored.strides[0], rows, cols, stored_dtype(stored.dtype), transposed)
    return _read(rectangle, parts, row, col, isa)


@in_turn("isa", isa_levels())
@in_turn("transposed", [False, True])
@in_turn("name,packed", list(product(["f32", "bf16"], [False, True])))
def test_a_weight_is_packed_as_numpy_packs_it(file_of, isa, transposed, name, packed):
    """All dtypes of files, odd sizes, transposed or not; padding is zero."""
    for shape, dtype in product(SHAPES, (np.float32, BF16, np.float16, np.float64)):
        w = _values(shape, dtype)
        stored = np.ascontiguousarray(w.T if transposed else w)
        memory = _memory(shape, name, packed)
        outcome = _load(*file_of(stored), stored, [Part(memory, name, packed, *shape)], transposed, isa=isa)
        assert outcome == (w.nbytes, True, True, 0)
        np.testing.assert_array_equal(memory, _expected(w, name, packed), err_msg=f"{shape} {dtype}")


@in_turn("isa", isa_levels())
@in_turn("name,packed", list(product(["f32", "bf16"], [False, True])))
def test_an_array_is_packed_as_numpy_packs_it(isa, name, packed):
    """Any dtype and layout: slices, transposes, integers, unaligned and reversed arrays."""
    for shape in SHAPES:
        w = _values((shape[0] + 2, shape[1] + 3), np.float32)
        odd = np.frombuffer(b"x" + w.tobytes(), np.float32, offset=1).reshape(w.shape)
        for array in (
            w[2:, 3:],
            w[2:, :-3].astype(BF16),
            np.asfortranarray(w[2:, 3:]),
            w[::-1][2:, 3:],
            w[2:, 3:][:, ::-1],
            odd[2:, 3:],
            (w[2:, 3:] * 100).astype(np.int64),
            w[2:, 3:].astype(np.float64),
        ):
            memory = _memory(shape, name, packed)
            assert store_weight(array, Part(memory, name, packed, *shape), isa=isa)
            assert memory.tobytes() == _expected(array, name, packed).tobytes(), (shape, array.dtype)
    with pytest.raises(PlanError):
        store_weight(w, Part(memory, name, packed, *shape))


def test_every_half_and_every_bf16_is_converted_as_numpy_does(file_of):
    """All finite 16-bit patterns, from fp16 and from the upper half of fp32 with a tie below."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    half = halves.astype(np.uint16).view(np.float16)
    single = ((halves << 16) | (0x8000 + (halves % 3) - 1)).view(np.float32)
    for source in (half, single):
        finite = source[np.isfinite(source)]
        finite = finite[np.abs(finite.astype(np.float64)) < 3.38e38].reshape(1, -1)
        for name in ("f32", "bf16"):
            memory = _memory(finite.shape, name, False)
            assert _load(*file_of(finite), finite, [Part(memory, name, False, *finite.shape)]).is_finite
            assert memory.tobytes() == _expected(finite, name, False).tobytes()


def test_slices_give_the_whole(file_of):
    """Slices of rows and columns give the result of one reading, and read only their own bytes."""
    w = _values((100, 37), BF16)
    file, begin = file_of(w)
    memory = _memory(w.shape, "bf16", True)
    part, bytes_read = Part(memory, "bf16", True, *w.shape), 0
    for row, col in product((0, 64), (0, 10, 36)):
        piece = w[row : {0: 64, 64: 100}[row], col : {0: 10, 10: 36, 36: 37}[col]]
        where = begin + row * w.strides[0] + col * 2
        rectangle = Rectangle(file, where, w.strides[0], *piece.shape, "bf16")
        bytes_read += _read(rectangle, [part], row, col).bytes_read
    assert bytes_read == w.nbytes
    np.testing.assert_array_equal(memory, _expected(w, "bf16", True))


def test_long_rows_and_many_rows_are_read_in_chunks(file_of):
    """Rows beyond the buffer's width, and more rows than it holds."""
    for shape in ((33, 100_000), (4000, 300)):
        w = _values(shape, BF16)
        for transposed in (False, True):
            stored = np.ascontiguousarray(w.T if transposed else w)
            memory = _memory(shape, "bf16", True)
            assert _load(*file_of(stored), stored, [Part(memory, "bf16", True, *shape)], transposed).is_finite
            assert memory.tobytes() == _expected(w, "bf16", True).tobytes()


def test_a_weight_and_its_master_are_read_once(file_of):
    """Two parts of one shape are filled from one reading."""
    w = _values((40, 9), np.float32)
    low, high = _memory(w.shape, "bf16", True), _memory(w.shape, "f32", True)
    parts = [Part(low, "bf16", True, *w.shape), Part(high, "f32", True, *w.shape)]
    assert _load(*file_of(w), w, parts).bytes_read == w.nbytes
    assert low.tobytes() == _expected(w, "bf16", True).tobytes()
    assert high.tobytes() == _expected(w, "f32", True).tobytes()


@in_turn("isa", isa_levels())
@in_turn("bad,name", [(np.nan, "f32"), (-np.inf, "bf16"), (3.4e38, "bf16"), (np.inf, "f32")])
def test_values_that_are_not_finite_are_found_anywhere(file_of, isa, bad, name):
    """A single element, also one that only rounding makes infinite; the twin without it is finite."""
    shape = (37, 19)
    for packed, transposed, at in product(
        (False, True), (False, True), ((0, 0), (36, 18), (31, 17), (32, 18))
    ):
        w = np.ones(shape, np.float32)
        for value in (1.0, bad):
            w[at] = value
            stored = np.ascontiguousarray(w.T if transposed else w)
            part = Part(_memory(shape, name, packed), name, packed, *shape)
            outcome = _load(*file_of(stored), stored, [part], transposed, isa=isa)
            assert outcome.is_finite == (value == 1.0)


def test_truncated_and_unreadable_files_are_distinguished(file_of):
    """Both results name the system's error; nothing is thrown from another thread."""
    w = _values((4, 4), np.float32)
    file, begin = file_of(w)
    part = Part(_memory((5, 4), "f32", False), "f32", False, 5, 4)
    assert _read(Rectangle(file, begin, 16, 5, 4, "f32"), [part])[2:] == (False, 0)
    assert _read(Rectangle(-1, begin, 16, 5, 4, "f32"), [part])[3] != 0


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 41}, {"cols": 10}, {"row": 1}, {"row": 32}, {"col": 1}, {"rows": 31}, {"cols": 7}, {"begin": -1},
        {"row_bytes": 35}, {"dtype": "i32"}, {"memory": -4}, {"part_dtype": "i32"}, {"rows": -1}, {"row": -32},
        {"part_rows": 1 << 62}, {"parts": 0},
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_rectangle_is_rejected(file_of, change):
    """Beyond the part, within a panel or a pair, or with too little memory: nothing is read."""
    w = _values((40, 9), np.float32)
    file, begin = file_of(w)
    memory = _memory(w.shape, "f32", True)

    def call(begin=begin, row_bytes=36, rows=40, cols=9, dtype="f32", row=0, col=0, memory=memory, **part):
        arguments = Part(memory, part.get("part_dtype", "f32"), True, part.get("part_rows", 40), 9)
        rectangle = Rectangle(file, begin, row_bytes, rows, cols, dtype)
        return _read(rectangle, [arguments] * part.get("parts", 1), row, col)

    assert call().is_finite
    if "memory" in change:
        change = {"memory": memory[: change["memory"]]}
    before = memory.copy()
    with pytest.raises(PlanError):
        call(**change)
    np.testing.assert_array_equal(memory, before)


def test_a_planted_fault_is_detected(file_of):
    """The twin: one bit of one element."""
    w = _values((33, 3), BF16)
    changed = w.copy()
    changed.view(np.uint16)[32, 2] ^= 1
    memory = _memory(w.shape, "bf16", True)
    _load(*file_of(changed), changed, [Part(memory, "bf16", True, *w.shape)])
    assert memory.tobytes() != _expected(w, "bf16", True).tobytes()
