"""Options of a submission: views for native kernels, names, deadlines; and kernels that should stop."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import CancelledError

import numba
import numpy as np
import pytest
from numba import types

from tilewise.core.errors import ConfigError, TaskFailed
from tilewise.observe import read_graph
from tilewise.runtime import InOut, Input, Output, Reduce, Runtime, TaskGroup, should_stop


@pytest.fixture
def scale(runtime, kernels):
    runtime.load_library(kernels)
    return runtime.kernel("scale_view", views=True)


def test_native_kernels_see_boxes(runtime, scale):
    """Sizes and strides equal NumPy's: of whole buffers, tiles, steps and new outputs."""
    x = np.ones((6, 8), np.float32)
    expected = x.copy()
    with runtime.registered(x) as (bx,):
        for index in (np.s_[...], np.s_[1:3, 2:5], np.s_[::2, 1::3], np.s_[4:5]):
            runtime.submit(scale, [InOut(bx[index])], scalars=[3.0])
            expected[index] *= 3
        runtime.submit(scale, [InOut(bx)], scalars=[2.0])
        assert np.array_equal(runtime.read(bx), 2 * expected)
    with runtime.scope():
        assert runtime.submit(scale, [Output(shape=(2, 3))], scalars=[0.0]).result().shape == (2, 3)
        with pytest.raises(TaskFailed, match="matrices of float"):
            runtime.submit(scale, [Output(shape=(2, 3), dtype=np.float64)], scalars=[1.0]).wait()


def test_numba_kernels_see_boxes(runtime):
    """A numba cfunc reads a strided tile through its view."""

    @numba.extending.intrinsic
    def pointer(_, address):
        return types.voidptr(types.uint64), lambda context, builder, signature, args: builder.inttoptr(
            args[0], context.get_value_type(types.voidptr)
        )

    word = numba.types.uint64
    view = numba.from_dtype(
        np.dtype(
            [
                ("data", "u8"),
                ("ndim", "u4"),
                ("type", "u4"),
                ("item_bytes", "u8"),
                ("size", "u8", 4),
                ("stride", "u8", 4),
            ]
        )
    )

    @numba.njit
    def matrix(seen, dtype):
        """The elements of a two-dimensional view, as an array with its strides."""
        return np.lib.stride_tricks.as_strided(
            numba.carray(pointer(seen.data), (1,), dtype),
            (np.intp(seen.size[0]), np.intp(seen.size[1])),
            (np.intp(seen.stride[0]), np.intp(seen.stride[1])),
        )

    @numba.cfunc(types.int32(types.CPointer(types.CPointer(view)), types.CPointer(word)))
    def row_sums(buffers, _):
        tile = matrix(numba.carray(buffers[0], 1)[0], np.float32)
        sums = matrix(numba.carray(buffers[1], 1)[0], np.float32)
        for i in range(tile.shape[0]):
            sums[i, 0] = tile[i].sum()
        return 0

    x, y = np.arange(48, dtype=np.float32).reshape(6, 8), np.zeros((3, 1), np.float32)
    kernel = runtime.kernel(row_sums, views=True)
    with runtime.registered(x, y) as (bx, by):
        runtime.submit(kernel, [Input(bx[1:4, 2:5]), Output(by)])
        assert np.array_equal(runtime.read(by)[:, 0], x[1:4, 2:5].sum(axis=1))


def test_invalid_views(runtime, kernels):
    """Only native kernels have views, and the kind of kernel must be unique."""
    with pytest.raises(ConfigError, match="Python kernel gets arrays"):
        runtime.kernel(lambda x: None, views=True)
    runtime.load_library(kernels)
    runtime.kernel("scale_view", views=True)
    with pytest.raises(ConfigError, match="as it was added"):
        runtime.kernel("scale_view", submits=True)


def test_names(runtime, tmp_path):
    """A task's name is in its error, in both kinds of trace and in the graph."""
    x = np.zeros(4, np.float32)

    def fail(_):
        raise RuntimeError("planted")

    with runtime.registered(x) as (bx,):
        with runtime.trace(
            tmp_path / "run.html", tmp_path / "run.json", graph=tmp_path / "graph.json"
        ) as tracing:
            runtime.submit("fill", [Output(bx)], scalars=[16, 0], name="potrf(3)")
            runtime.submit("fill", [Output(bx)], scalars=[16, 0])
        with runtime.graph(tmp_path / "graph.html"):
            runtime.submit("fill", [Output(bx)], scalars=[16, 0], name="potrf(4)")
        bad = runtime.submit(fail, [InOut(bx)], name="trsm('a', 1)")
        with pytest.raises(TaskFailed, match=r"planted.*'trsm\('a', 1\)'") as failed:
            bad.wait()
    assert failed.value.op.endswith("fail") and -1 <= failed.value.worker <= 1
    assert sorted(task.name or "" for task in tracing.trace.tasks) == ["", "potrf(3)"]
    assert "potrf(3)" in (tmp_path / "run.html").read_text()
    assert "potrf(4) (fill)" in (tmp_path / "graph.html").read_text()
    assert "potrf(3)" in json.dumps(json.loads((tmp_path / "run.json").read_text()))
    assert sorted(task.name for task in read_graph(tmp_path / "graph.json").tasks) == ["", "potrf(3)"]


def test_deadlines(runtime):
    """A task that waits for an event beyond its deadline fails, and its successors with it."""
    x = np.zeros(4, np.float32)
    event = runtime.event()
    with runtime.registered(x) as (bx,):
        begin = time.monotonic()
        late = runtime.submit("fill", [Output(bx)], scalars=[16, 0], wait_for=[(event, 1)], deadline=0.05)
        heir = runtime.submit("sum_f32", [InOut(bx), Input(bx)], scalars=[16])
        for task in (late, heir):
            with pytest.raises(TaskFailed, match="deadline"):
                task.wait(10)
        assert 0.04 < time.monotonic() - begin < 5
        assert isinstance(late.exception(), TaskFailed)
        runtime.submit("fill", [Output(bx)], scalars=[16, 0], deadline=60).wait()
    with pytest.raises(TaskFailed, match="deadline"):
        runtime.wait_all()


def test_running_kernels_can_detect_cancellation(runtime):
    """Cancelling a running task sets a flag for its kernel, which decides what to do."""
    assert not should_stop()
    running = threading.Event()

    def loop():
        running.set()
        end = time.monotonic() + 10
        while not should_stop() and time.monotonic() < end:
            time.sleep(0.001)
        if not should_stop():
            raise RuntimeError("no notification came")

    task = runtime.submit(loop)
    running.wait(10)
    assert not task.is_complete()
    task.cancel()
    task.wait(10)
    running.clear()
    assert runtime.submit(loop, deadline=0.2).exception(10) is None


def test_timeouts_in_messages(runtime):
    """Infinity waits, a negative number polls, and the message has the number of the call."""
    event = runtime.event()
    task = runtime.submit(None, wait_for=[(event, 1)])
    for timeout in (0.015, -1, 0):
        with pytest.raises(TimeoutError, match=f"after {timeout} s"):
            task.result(timeout)
    group = TaskGroup([task, runtime.submit(None, wait_for=[(event, 1)])])
    with pytest.raises(TimeoutError, match=r"after 0\.02 s"):
        group.wait_all(0.02)
    with pytest.raises(TimeoutError, match=r"after 0\.02 s"):
        for done in group.as_completed(0.02):
            done.wait()
    event.post()
    task.wait(float("inf"))
    runtime.wait_all(float("inf"))


def test_built_in_kernels_check_their_arguments(runtime):
    """Wrong numbers and sizes are rejected before anything is submitted."""
    x = np.zeros((4, 4), np.float32)
    with runtime.registered(x) as (bx,):
        before = runtime.stats().num_submitted
        for params, scalars in (
            ([], []),
            ([InOut(bx)], [16]),
            ([InOut(bx), Input(bx)], [65]),
            ([InOut(bx), Input(bx)], [66]),
            ([InOut(bx), Input(bx[:, 0:2])], [32]),
        ):
            with pytest.raises(ConfigError, match=r"the kernel 'sum_f32'"):
                runtime.submit("sum_f32", params, scalars=scalars)
        with pytest.raises(ConfigError, match="got 'sum_f64' for 12 bytes"):
            runtime.submit(None, [Reduce(runtime.alloc(12), "sum_f64")])
        assert runtime.stats().num_submitted == before


def test_libraries_of_the_current_folder(runtime, kernels, monkeypatch):
    """A library's name without a slash is a file in the current folder."""
    monkeypatch.chdir(kernels.parent)
    x = np.zeros(1, np.int64)
    with runtime.registered(x) as (bx,):
        runtime.run_orchestration(kernels.name, "orchestrate", [bx, 10, 1, 0])
        assert x[0] == 10
        runtime.load_library(kernels.name)
        with pytest.raises(ConfigError, match="no file of that name in the current folder"):
            runtime.run_orchestration("matmul.so", "matmul_orchestration", [])


def test_an_orchestration_gets_whole_buffers_of_its_runtime(runtime, kernels):
    """A region would become its whole buffer, and another runtime's handle might be a buffer here."""
    x = runtime.register(np.zeros(4, np.int64))
    with Runtime(num_workers=1) as other:
        for operand, error in [
            (x[0:2], "memory must be a Buffer"),
            (other.register(np.zeros(4)), "of another"),
        ]:
            with pytest.raises(ConfigError, match=error):
                runtime.run_orchestration(str(kernels), "orchestrate", [operand, 10, 1, 0])
    assert (runtime.read(x) == 0).all()


def test_errors_of_an_orchestration(runtime, kernels):
    """Only errors of calls inside it are reported as its own; it cannot close its caller's runtime."""
    for operand, error in [
        (1, "a runtime must be open"),
        (0, "error was: none"),
        (2, "outside its orchestrations"),
    ]:
        with pytest.raises(TaskFailed, match=error):
            runtime.run_orchestration(str(kernels), "orchestrate_status", [operand])
    runtime.submit(None).wait()


def test_the_name_of_a_cancelled_task(runtime):
    """The message of a cancelled task has its name, too."""
    event = runtime.event()
    task = runtime.submit(None, wait_for=[(event, 1)], name="never")
    task.cancel()
    with pytest.raises(CancelledError, match="'never'"):
        task.wait(10)
