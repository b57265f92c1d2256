"""Regions: indices, boxes in bytes, grids of tiles, and errors when they are made."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest

from tilewise.core.errors import ConfigError
from tilewise.runtime import InOut, Input, Output, Reduce, Runtime


@pytest.fixture(scope="module")
def rt():
    with Runtime(num_workers=1) as runtime:
        yield runtime


def random_entry(rng, length):
    """An integer or an ascending slice within a dimension."""
    start = rng.randrange(length)
    if rng.random() < 0.3:
        return rng.choice([start, start - length, np.int64(start)])
    stop = rng.randrange(start + 1, length + 1)
    bounds = [start, stop, rng.choice([None, 1, 2, 3])]
    if rng.random() < 0.3:
        bounds[0] = None
    if rng.random() < 0.3:
        bounds[1] = rng.choice([None, length + 5, -1 if start < length - 1 and bounds[0] else None])
    return slice(*bounds)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5), (2, 3, 2, 3)])
def test_an_index_selects_what_numpy_selects(rt, shape):
    """The region's array is NumPy's view; a kernel writes exactly there."""
    rng = random.Random(str(shape))
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    with rt.registered(x) as (buffer,):
        num_refused = 0
        for _ in range(60):
            index = tuple(random_entry(rng, length) for length in shape[: rng.randrange(len(shape) + 1)])
            if rng.random() < 0.3:
                index = (*index[:1], ..., *(random_entry(rng, shape[-1]) for _ in index[1:2]))
            expected = x[index]
            try:
                region = buffer[index]
            except ConfigError as error:  # four dimensions with a step in the last one
                assert len(shape) == 4 and "at most 4 dimensions" in str(error)
                num_refused += 1
                continue
            assert np.array_equal(region.array.reshape(expected.shape), expected), index
            assert np.shares_memory(region.array, x) and region.buffer is buffer
            assert region.shape == region.array.shape and region.array.dtype == x.dtype
        assert 0 < num_refused < 30 if len(shape) == 4 else num_refused == 0


def test_shapes_of_arrays(rt):
    """Integers remove a dimension; one element stays an array, so that a kernel can write to it."""
    x, scalar = np.zeros((4, 6)), np.zeros(())
    with rt.registered(x, scalar) as (buffer, point):
        assert buffer[1].shape == (6,) and buffer[:, 2].shape == (4,) and buffer[1, 2].shape == (1,)
        assert buffer[()].shape == buffer[...].shape == (4, 6) and point[()].shape == ()
        rt.submit(lambda one: one.fill(7), [InOut(buffer[1, 2])]).wait()
        assert x[1, 2] == 7 and x.sum() == 7
        for outside in (4, (0, 0, 0)):
            with pytest.raises(IndexError):
                buffer[outside]


def test_arrays_of_read_only_memory_and_odd_types(rt):
    """Read-only memory cannot be written through a region; dates and records are shown unchanged."""
    fixed = np.arange(4)
    fixed.flags.writeable = False
    dates = np.array(["2020-01-01", "2021-01-01"], "datetime64[D]")
    records = np.zeros(3, [("a", np.int16), ("b", np.float64)])
    with rt.registered(fixed, dates, records) as buffers:
        assert not buffers[0][1:].array.flags.writeable
        assert buffers[1][1:].array[0] == dates[1]
        buffers[2][1:].array["b"] = 3
        assert records["b"].tolist() == [0, 3, 3]


HUGE = (1 << 63) - 1
OUTSIDE = {
    "offset": (256, (1,), (1,)), "size": (0, (257,), (1,)), "both": (250, (8,), (1,)), "rows": (0, (5, 64), (64, 1)),
    "stride": (0, (2, 1), (256, 1)), "offset of all": (HUGE, (1,), (1,)), "size of all": (0, (HUGE,), (1,)),
    "wraps": (0, (3, 1), (1 << 62, 1)), "wraps further": (1, (HUGE, 2), (HUGE, 1)), "sum wraps": (HUGE, (HUGE,), (1,)),
    "zero": (0, (0,), (1,)), "zero rows": (0, (0, 4), (16, 1)), "last stride": (0, (4,), (2,)),
    "last stride 0": (0, (4,), (0,)), "ascending": (0, (2, 2, 4), (16, 64, 1)), "none": (0, (), ()),
    "five": (0, (1,) * 5, (1,) * 5), "fewer strides": (0, (2, 4), (1,)),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_box_in_bytes_must_lie_inside(rt, name):
    """A box that leaves its buffer, or is invalid, is rejected when it is made."""
    with (
        rt.registered(np.zeros(256, np.uint8)) as (buffer,),
        pytest.raises(ConfigError, match=r"^\[runtime\.region\]"),
    ):
        buffer.region(*OUTSIDE[name])


def test_a_box_in_bytes_up_to_the_end(rt):
    """Boxes whose last byte is the buffer's last are valid, and their arrays have those bytes."""
    x = np.arange(256, dtype=np.uint8)
    with rt.registered(x) as (buffer,):
        assert buffer.region(255, (1,)).array.tolist() == [255]
        assert buffer.region(0, (256,)).array.sum() == x.sum()
        assert buffer.region(8, (3, 8), (120, 1)).array.tolist() == [
            list(range(n, n + 8)) for n in (8, 128, 248)
        ]


def test_grid(rt):
    """Tiles are regions, made once; the last ones are smaller; indices outside are rejected."""
    x = np.arange(10 * 6).reshape(10, 6)
    with rt.registered(x) as (buffer,):
        grid = buffer.tiles(4, 3)
        assert grid.shape == (3, 2) and len(grid) == 6 and grid.buffer is buffer
        assert grid[1, 1] is grid[1, 1] is grid[-2, np.int64(-1)] and buffer.tiles(4, 3) is grid
        assert [tile.shape for tile in grid] == [(4, 3)] * 4 + [(2, 3)] * 2
        assert np.array_equal(grid[2, 1].array, x[8:, 3:])
        rows = buffer.tiles(4)
        assert rows.shape == (3,) and rows[0] is not grid[0, 0] and np.array_equal(rows[0].array, x[:4])
        for tile in grid:
            rt.submit(lambda out: out.fill(1), [Output(tile)])
        assert rt.read(buffer).sum() == x.size
        for place in ((3, 0), (0, 2), (0, -3), (1 << 80, 0)):
            with pytest.raises(IndexError, match=r"^\[runtime\.tiles\] a tile must lie in the grid"):
                grid[place]


def test_a_grid_is_collected_with_its_buffer(rt):
    """A buffer and its grids refer to each other; the garbage collector frees the cycle."""
    buffer = rt.alloc((8, 8))
    gone = weakref.ref(buffer), weakref.ref(buffer.tiles(2, 2)[0, 0])
    del buffer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_repr(rt):
    """A region's text has its buffer, box, shape and dtype."""
    with rt.registered(np.zeros((8, 8), np.float32)) as (buffer,):
        name = repr(buffer).split(",")[0]
        assert repr(buffer[0:4, ::2]) == f"Region({name})[0:4, ::2], shape=(4, 4), dtype=float32)"
        assert repr(buffer[..., 3]) == f"Region({name})[..., 3], shape=(8,), dtype=float32)"
        assert repr(buffer.region(4, (2, 8), (32, 1))) == (
            f"Region({name}).region(4, (2, 8), (32, 1)), shape=(2, 8), dtype=uint8)"
        )
        assert repr(buffer.tiles(4, 4)[1, 0]) == f"Region({name})[4:8, 0:4], shape=(4, 4), dtype=float32)"


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_a_reduction_uses_the_dtype_of_its_buffer(rt, dtype):
    """Without a combine function, partial values are added in their dtype."""
    with rt.registered(np.full(3, 10, dtype)) as (total,), rt.scope():
        for n in range(4):
            rt.submit(lambda part, n: part.fill(n), [Reduce(total)], scalars=[n])
        assert rt.read(total).tolist() == [16, 16, 16]


@pytest.mark.parametrize("dtype", [np.uint64, np.float16, ">f4"])
def test_a_reduction_without_a_sum_is_rejected(rt, dtype):
    """A dtype without a built-in sum needs a combine function, and the error says so."""
    with rt.registered(np.zeros(4, dtype)) as (total,):
        with pytest.raises(
            ConfigError, match=r"must be of float32, float64 or int64; got a buffer of .*; pass combine"
        ):
            Reduce(total)
        Reduce(total, "sum_i64")


@pytest.mark.filterwarnings("ignore:nanobind")
def test_native_classes_have_no_public_constructor(rt):
    """Regions and grids come only from buffers; objects made without a constructor are rejected without a crash."""
    with rt.registered(np.zeros((4, 4))) as (buffer,):
        grid = buffer.tiles(2, 2)
        for kind in (type(buffer[0]), type(grid)):
            with pytest.raises(TypeError):
                kind()
            half = kind.__new__(kind)
            for use in (
                lambda half=half: half[0],
                lambda half=half: half.array,
                lambda half=half: Input(half),
            ):
                with pytest.raises((TypeError, AttributeError, ConfigError)):
                    use()
        for sizes in ((0,), (-1, 2), (1.5,), (True,), (1 << 80,)):
            with pytest.raises(ConfigError, match=r"^\[runtime\.tiles\]"):
                buffer.tiles(*sizes)
        for place in ((0, 0, 0), (0.5, 1), (True, 0)):
            with pytest.raises(ConfigError, match=r"^\[runtime\.tiles\] a tile must be named by 2 integers"):
                grid[place]
    with rt.registered(np.zeros((1 << 13, 1 << 12), np.uint8)) as (large,):
        with pytest.raises(ConfigError, match="at most 16777216 tiles"):
            large.tiles(1, 1)
        assert large.tiles(1 << 20, 1 << 40)[0, 0].shape == large.shape
