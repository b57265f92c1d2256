"""Kernels: Python callables with the GIL, numba, ctypes, addresses, compiled libraries, recordings."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from contextlib import suppress

import numba
import numpy as np
import pytest

from tilewise.core.errors import ConfigError, TaskFailed
from tilewise.runtime import InOut, Input, Output, Runtime, TaskGroup
from tilewise.runtime.failures import forget_exceptions

_INT64S = numba.types.CPointer(numba.types.int64)


@numba.cfunc(numba.types.intc(numba.types.CPointer(_INT64S), numba.types.CPointer(numba.types.uint64)))
def numba_add(buffers, scalars):
    """buffers[0][i] += scalars[0] for scalars[1] int64s."""
    for i in range(scalars[1]):
        buffers[0][i] += scalars[0]
    return 0


def add_one(x):
    x += 1


def test_numba_cfunc(runtime):
    """A numba cfunc runs on a registered array."""
    x = np.zeros(5, np.int64)
    with runtime.registered(x) as (hx,):
        for _ in range(10):
            runtime.submit(numba_add, [InOut(hx)], scalars=[3, 5])
    assert (x == 30).all()


def test_ctypes_and_address(runtime, kernels):
    """A ctypes function pointer, a ctypes callback and a plain address are kernels."""
    library = ctypes.CDLL(str(kernels))
    x = np.zeros(1, np.int64)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint64))
    def callback(buffers, scalars):
        ctypes.cast(buffers[0], ctypes.POINTER(ctypes.c_int64))[0] += scalars[0]
        return 0

    with runtime.registered(x) as (hx,):
        for kernel in (library.add_i64, callback, ctypes.cast(library.add_i64, ctypes.c_void_p).value):
            runtime.submit(kernel, [InOut(hx)], scalars=[-2])
            runtime.submit(runtime.kernel(kernel, name="named"), [InOut(hx)], scalars=[3])
    assert x[0] == 3


def test_compiled_library(runtime, kernels):
    """Exported functions of a library are kernels by name; scalars keep their bits."""
    runtime.load_library(kernels)
    x, y = np.zeros(1, np.int64), np.zeros(1)
    with runtime.registered(x, y) as (hx, hy):
        for value in (5, -7, np.int32(2), True, 2**64 - 1):
            runtime.submit("add_i64", [InOut(hx)], scalars=[value])
        for real in (0.5, np.float32(0.25), np.float64(-2.0)):
            runtime.submit("add_f64", [InOut(hy)], scalars=[real])
    assert x[0] == 5 - 7 + 2 + 1 - 1 and y[0] == -1.25
    with pytest.raises(ValueError, match="library must load"):
        runtime.load_library("no such library")
    with pytest.raises(ConfigError, match="a scalar must be"):
        runtime.submit("add_i64", scalars=["text"])


def test_decorator_and_read_only_inputs(runtime):
    """@rt.kernel makes a kernel; writing to an input fails the task."""

    @runtime.kernel
    def double(x, y):
        y[...] = 2 * x

    @runtime.kernel(name="naughty")
    def naughty(x):
        x[0] = 1

    x, y = np.arange(4.0), np.zeros(4)
    with runtime.registered(x, y) as (hx, hy):
        runtime.submit(double, [Input(hx), Output(hy)]).wait()
        with pytest.raises(TaskFailed, match="read-only") as caught:
            runtime.submit(naughty, [Input(hx)]).wait()
    assert caught.value.op == "naughty" and np.array_equal(y, 2 * x)


@pytest.mark.parametrize("what", ["wait", "full window"])
def test_other_threads_run(kernels, what):
    """Another Python thread makes progress while one waits for, or helps with, native kernels."""
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(1)

    with Runtime(num_workers=1 if what == "wait" else 0, window=2) as rt:
        rt.load_library(kernels)
        thread = threading.Thread(target=tick)
        thread.start()
        if what == "wait":
            rt.submit("nap", scalars=[200]).wait()
        else:
            for _ in range(6):
                rt.submit("nap", scalars=[50])
        stop.set()
        thread.join()
    assert len(ticks) > 20


def test_many_threads_submit():
    """Eight threads submit Python and native tasks on their own buffers."""
    with Runtime(num_workers=2, window=8) as rt:
        arrays = [np.zeros(1, np.int64) for _ in range(8)]

        def work(array):
            with rt.registered(array) as (buffer,):
                for n in range(100):
                    rt.submit(add_one if n % 5 == 0 else None, [InOut(buffer)])
                rt.wait_all()

        threads = [threading.Thread(target=work, args=(a,)) for a in arrays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [a[0] for a in arrays] == [20] * 8


def test_nested_tasks_in_python():
    """A Python kernel submits children on buffers that its parent declared, and may wait for them."""
    with Runtime(num_workers=1, window=4) as rt:
        x, y = np.zeros(4, np.int64), np.zeros(1)
        with rt.registered(x, y) as (hx, hy):

            def parent(v):
                children = [
                    rt.submit(lambda c, n: c.fill(n + 1), [Output(hx[n])], scalars=[n]) for n in range(4)
                ]
                children[0].wait()
                assert v[0] == 1
                with pytest.raises(ValueError, match="only what its parent declared"):
                    rt.submit(None, [InOut(hy)])
                with pytest.raises(ValueError, match="from outside its tasks"):
                    rt.close()

            rt.submit(parent, [InOut(hx)]).wait()
        assert np.array_equal(x, [1, 2, 3, 4])


def test_a_leaf_kernel_must_not_wait(runtime):
    """A native kernel without `submits` that calls the runtime gets an error; with it, it may."""
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def calls(_buffers, _scalars):
        try:
            runtime.submit(None)
        except ValueError as error:
            seen.append(str(error))
        return 0

    runtime.submit(calls).wait()
    assert "PTO_SUBMITS" in seen[0]
    runtime.submit(runtime.kernel(calls, submits=True)).wait()
    assert len(seen) == 1


_PLACES = numba.types.CPointer(numba.types.uint64)


@pytest.mark.parametrize(
    "kernel",
    [
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: None),
        ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 0.0),
        ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(lambda *_: 0),
        ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 0),
        numba.cfunc(numba.types.void(_PLACES, _PLACES))(lambda buffers, scalars: None),
        numba.cfunc(numba.types.float64(numba.types.float64))(lambda x: x),
    ],
)
def test_a_compiled_kernel_returns_a_status(runtime, kernel):
    """Without a status, the content of a register would decide whether its task fails or never ends."""
    with pytest.raises(ValueError, match=r"\[runtime.kernel\] a compiled kernel must be int"):
        runtime.kernel(kernel)


def test_callables_are_freed(runtime):
    """Callables and their references are freed once their tasks have run, been poisoned or been cancelled."""

    class Held:
        pass

    watchers = []

    def make(body):
        holder = Held()
        watchers.append(weakref.ref(holder))
        return lambda *_, holder=holder: body()

    def fail():
        raise ValueError

    event = runtime.event()
    x = np.zeros(1)
    with runtime.registered(x) as (hx,):
        for _ in range(50):
            runtime.submit(make(lambda: None))
        runtime.submit(make(fail), [InOut(hx)])
        runtime.submit(make(lambda: None), [Input(hx)])
        cancelled = runtime.submit(make(lambda: None), wait_for=[(event, 1)])
        cancelled.cancel()
        event.post()
        assert cancelled.exception() is not None
        with pytest.raises((TaskFailed, CancelledError)):  # whichever came first
            runtime.wait_all()
    runtime.submit(None).wait()
    forget_exceptions()  # the newest failures keep the code that they came from
    gc.collect()
    assert [w() for w in watchers] == [None] * len(watchers)


def test_a_callable_survives_an_interrupted_submission(runtime):
    """A signal handler that raises right after the submission drops the handle, but the task keeps its callable."""

    class Argument:
        pass

    class Interrupted(Exception):
        pass

    event, seen, argument = runtime.event(), [], Argument()
    reference = weakref.ref(argument)
    before = runtime.stats().num_submitted

    def interrupt(*_):
        if runtime.stats().num_submitted > before:
            raise Interrupted
        return interrupt

    sys.settrace(interrupt)
    try:
        with pytest.raises(Interrupted):
            runtime.submit(lambda value: seen.append(value), scalars=[argument], wait_for=[(event, 1)])
    finally:
        sys.settrace(None)
    del argument
    gc.collect()
    is_held = reference() is not None
    if not is_held:
        runtime.cancel_all()  # what would run freed memory must not
    event.post()
    with suppress(CancelledError):
        runtime.wait_all()
    assert is_held and seen == [reference()]


@pytest.mark.parametrize(
    "text", ["日" * 400, "a" + "日" * 400, "ab" + "日" * 400, "\udc80 lone", "zero \0 here", None]
)
def test_any_exception_is_reported(runtime, text):
    """A failure has its cause even if its text is long, not UTF-8, or raises itself."""

    class Odd(Exception):
        def __str__(self):
            return text  # None: a TypeError

    def fail():
        raise Odd

    error = runtime.submit(fail).exception()
    assert isinstance(error, TaskFailed) and "Odd: " in str(error)
    assert isinstance(error.__cause__, Odd)
    with pytest.raises(TaskFailed):
        runtime.wait_all()


def test_a_closed_runtime_leaves_no_references():
    """A clean run releases the runtime, its arrays, buffers, regions, kernels, tasks, groups and traces."""

    def run():
        x = np.zeros((4, 4), np.float32)

        def kernel(tile):
            tile += 1

        with Runtime(num_workers=1) as rt:
            buffer = rt.register(x)
            grid = buffer.tiles(2, 2)
            with rt.trace() as tracing, rt.scope(), TaskGroup() as group:
                task = group.add(rt.submit(kernel, [InOut(grid[0, 1])], name="one"))
                rt.submit("fill", [Output(shape=(8,))], scalars=[32, 0])
                rt.submit(kernel, [InOut(buffer)], wait_for=[(rt.event(), 0)])
            with rt.record() as recording:
                rt.submit("fill", [Output(buffer)], scalars=[64, 0])
            recording.replay()
            things = (x, kernel, rt, buffer, task, group, tracing, recording)
        return [weakref.ref(thing) for thing in things]

    gone = run()
    gc.collect()
    assert [thing() for thing in gone] == [None] * len(gone)


def test_record_and_replay(runtime, kernels):
    """A recording runs again, also on other buffers; Python kernels and wrong bindings are rejected."""
    runtime.load_library(kernels)
    x, y, z = (np.zeros(2, np.int64) for _ in range(3))
    small = np.zeros(1, np.int64)
    with runtime.registered(x, y, z, small) as (hx, hy, hz, hs):
        with runtime.record() as recording:
            runtime.submit("add_i64", [InOut(hx)], scalars=[1])
            runtime.submit("next_i64", [Output(hy), Input(hx)])
            with pytest.raises(ValueError, match="must not contain Python kernels"):
                runtime.submit(lambda: None)
            with pytest.raises(ValueError, match="have ended"):
                recording.replay()
        for _ in range(3):
            recording.replay()
        assert runtime.read(hy)[0] == 5
        recording.replay({hx: hz})
        assert runtime.read(hy)[0] == 2 and runtime.read(hz)[0] == 1
        with pytest.raises(ValueError, match="must stay apart"):
            recording.replay({hx: hy})
        with pytest.raises(ValueError, match="got 8 bytes for 16"):
            recording.replay({hx: hs})
        recording.free()
        with pytest.raises(ValueError, match="not been freed"):
            recording.replay()
