"""Buffers: registration, boxes, lifetimes, and errors before any work."""

from __future__ import annotations

import gc
import sys
import weakref

import numpy as np
import pytest

from tilewise.core.errors import ConfigError, ResourceError
from tilewise.runtime import (
    Commute,
    InOut,
    Input,
    NoDep,
    Output,
    Reduce,
    Runtime,
    TaskGroup,
)


class Watched(np.ndarray):
    """An array whose end can be observed."""


def watched(size=16):
    array = np.zeros(size, np.float32).view(Watched)
    return array, weakref.ref(array)


def add_one(x):
    x += 1


def triple(x):
    x *= 3


def test_buffer_protocol(runtime):
    """A bytearray is a buffer; immutable bytes are read-only."""
    source, target = b"tilewise", bytearray(8)
    with runtime.registered(source, target) as (hs, ht):
        runtime.submit("copy", [Output(ht), Input(hs)], scalars=[8]).wait()
        with pytest.raises(ValueError, match="frozen buffer must only be read"):
            runtime.submit(None, [Output(hs)])
    assert target == source


def test_overlapping_memory_is_rejected(runtime):
    """Arrays that share bytes would be two buffers whose tasks are not ordered."""
    x = np.zeros(8)
    with runtime.registered(x[2:6]):
        for part in (x, x[5:], x[:3], x[3:4], x[2:6]):
            with pytest.raises(ValueError, match=r"shares bytes|registered once"):
                runtime.register(part)
        with runtime.registered(x[:2], x[6:]):
            pass
    with runtime.registered(x):
        pass


def test_registration_keeps_the_array_alive(runtime):
    """Unregistering waits for its tasks, then releases it."""
    array, alive = watched()
    event = runtime.event()
    buffer = runtime.register(array)
    task = runtime.submit(None, [InOut(buffer)], wait_for=[(event, 1)])
    del array
    with pytest.raises(TimeoutError):
        runtime.unregister(buffer, timeout=0.05)
    gc.collect()
    assert alive() is not None
    event.post()
    runtime.unregister(buffer)
    del buffer, task
    gc.collect()
    assert alive() is None


def test_unregister_after_failure(runtime):
    """The buffer of a failed task can be unregistered, and is released."""
    array, alive = watched()
    buffer = runtime.register(array)

    def bad(x):
        raise ValueError("no")

    assert runtime.submit(bad, [InOut(buffer)]).exception() is not None
    runtime.unregister(buffer)
    del array, buffer
    gc.collect()
    assert alive() is None


def test_stale_handle(runtime):
    """Use after unregistering is an error, before anything is submitted."""
    x = np.zeros(4)
    buffer = runtime.register(x)
    runtime.unregister(buffer)
    before = runtime.stats().num_submitted
    with pytest.raises(ValueError, match="handle must be alive"):
        runtime.submit(None, [Input(buffer)])
    assert runtime.stats().num_submitted == before


def test_stale_output(runtime):
    """An output that the runtime allocated ends with its scope."""
    with runtime.scope():
        output = runtime.submit("fill", [Output(bytes=64)], scalars=[64, 0]).outputs[0]
    with pytest.raises(ValueError, match="handle must be alive"):
        runtime.submit(None, [Input(output)])


def test_closed_runtime():
    """Every call after close is rejected."""
    rt = Runtime(num_workers=1)
    task, event, heap = rt.submit(None), rt.event(), rt.alloc(8)
    group = TaskGroup([task])
    rt.close()
    rt.close()
    calls = (
        rt.wait_all, rt.stats, lambda: rt.submit(None), task.wait, lambda: rt.register(np.zeros(1)), group.wait_all,
        lambda: list(group.as_completed()), lambda: event.value, lambda: heap[0:2].array, lambda: rt.read(heap[0]),
        lambda: Reduce(heap, "sum_f32"), lambda: rt.trace().__enter__(), lambda: rt.graph().__enter__(),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ConfigError, match="must be open"):
            call()
    assert heap[0:2].shape == (2,) and "shape=(2,)" in repr(heap[0:2])


def test_regions_run_in_parallel(runtime):
    """Tasks on disjoint boxes do not wait for each other; overlapping ones do."""
    grid = np.zeros((8, 8), np.int64)
    event = runtime.event()
    with runtime.registered(grid) as (buffer,):
        small_task = runtime.submit(None, [InOut(buffer[0:4, 0:4])], wait_for=[(event, 1)])
        runtime.submit(None, [InOut(buffer[0:4, 4:8])]).wait(5)
        runtime.submit(None, [InOut(buffer[4])]).wait(5)
        overlapping = runtime.submit(None, [Input(buffer[3, :])])
        whole = runtime.submit(None, [Input(buffer)])
        with pytest.raises(TimeoutError):
            overlapping.wait(0.05)
        event.post()
        whole.wait(5)
    assert small_task.is_complete() and overlapping.is_complete()


@pytest.mark.parametrize(
    "index", [np.s_[1:3], np.s_[..., 2], np.s_[1, 1:3, ::2], np.s_[0, 0, 0], np.s_[:, 1:2]]
)
def test_region_of_three_dimensions(runtime, index):
    """A Python kernel gets exactly the box of NumPy's index."""
    cube = np.zeros((4, 4, 8), np.int32)
    expected = cube.copy()
    expected[index] = 7

    def fill(box):
        box[...] = 7

    with runtime.registered(cube) as (buffer,):
        runtime.submit(fill, [InOut(buffer[index])]).wait()
    assert np.array_equal(cube, expected)


def test_outputs_allocated_by_the_runtime(runtime):
    """They have the requested shape, are read-only, and can be inputs of other tasks."""

    def fill(x, y):
        x[...], y[...] = 3, 4

    with runtime.scope():
        task = runtime.submit(fill, [Output(shape=(2, 3), dtype=np.int32), Output(bytes=5)])
        x, y = task.result()
        assert x.shape == (2, 3) and x.dtype == np.int32 and (x == 3).all() and (y == 4).all()
        assert not x.flags.writeable
        assert runtime.submit(lambda x: x.fill(7), [Output(bytes=1)]).result().tolist() == [7]
        total = runtime.submit(lambda a, out: out.fill(a.sum()), [Input(task.outputs[0]), Output(shape=1)])
        assert total.result() == [18]
        assert runtime.submit(None).result() is None


def test_results_outlive_the_runtime():
    """An array on the runtime's memory stays readable after close."""
    with Runtime(num_workers=1) as rt:
        result = rt.submit(lambda x: x.fill(2), [Output(shape=4)]).result()
    assert result.sum() == 8.0 and not rt._native.is_open


def test_alloc_read_write(runtime):
    """Allocated memory can be written and read between tasks."""
    with runtime.scope():
        buffer = runtime.alloc((4, 4), np.float64)
        runtime.write(buffer)[...] = 2.0
        runtime.submit(triple, [InOut(buffer)])
        value = runtime.read(buffer)
        assert (value == 6).all() and not value.flags.writeable


def test_reduce_and_commute(runtime):
    """Partial values are added in order; all commuting tasks count."""
    total, count = np.zeros(4, np.float32), np.zeros(1, np.int64)
    with runtime.registered(total, count) as (ht, hc):
        for n in range(10):
            runtime.submit(lambda part, n: part.fill(n), [Reduce(ht, "sum_f32")], scalars=[n])
            runtime.submit(add_one, [Commute(hc)])
        assert (runtime.read(ht) == 45).all() and runtime.read(hc)[0] == 10


def test_no_dep(runtime):
    """NoDep passes the address and orders nothing."""
    x = np.zeros(4)
    event = runtime.event()
    with runtime.registered(x) as (buffer,):
        runtime.submit(None, [InOut(buffer)], wait_for=[(event, 1)])
        runtime.submit(lambda a, b: a.fill(b), [NoDep(buffer), NoDep(address=17)]).wait(5)
        event.post()
    assert (x == 17).all()


def test_heap_too_small():
    """An output larger than the heap is an error at once, with the option to raise."""
    with Runtime(num_workers=1, heap_bytes=1 << 20) as rt, pytest.raises(ResourceError, match="heap_bytes"):
        rt.submit(None, [Output(bytes=1 << 21)])


def test_deadlock_is_reported():
    """A scope that uses the whole heap while it requests more is a proven deadlock, reported at once."""
    with Runtime(num_workers=1, heap_bytes=1 << 20) as rt, rt.scope():
        rt.submit(None, [Output(bytes=1 << 19)])
        rt.submit(None, [Output(bytes=1 << 19)])
        with pytest.raises(ResourceError, match="increase heap_bytes"):
            rt.submit(None, [Output(bytes=1 << 19)])


def test_no_reference_is_kept(runtime):
    """10,000 submissions leave the reference counts of kernel, buffer and parameters unchanged."""
    buffer = runtime.register(np.zeros(4, np.float32))
    kernel, params = runtime.kernel("fill"), [InOut(buffer)]
    objects = (buffer, kernel, params, params[0])
    before = [sys.getrefcount(o) for o in objects]
    for _ in range(10_000):
        runtime.submit(kernel, params, scalars=(16, 1))
    runtime.wait_all()
    assert [sys.getrefcount(o) for o in objects] == before
    runtime.unregister(buffer)
