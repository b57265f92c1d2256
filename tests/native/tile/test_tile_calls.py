"""Tile calls: the bits of the kernels, checks of calls, order, failures, and what recordings see."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilewise.kernels.declared import DECLARED

from native.kernels.table_calls import integers_of
from native.tile.table_tiles import (
    FLOAT,
    SPECS,
    arrays_of,
    attributes_of,
    in_call_order,
    named_tiles,
    optional_tiles,
)
from tilewise import tile
from tilewise.core.errors import ConfigError, ShapeError, TaskFailed
from tilewise.kernels.isa import run
from tilewise.runtime import InOut, Input, Output, Runtime, TaskExecutionHints, TaskGroup


@pytest.fixture(scope="module")
def runtime():
    """A runtime with one worker."""
    with Runtime(num_workers=1, window=64) as rt:
        yield rt


def bits_of_kernel(name: str, without: frozenset[str]) -> list[np.ndarray]:
    """All operands after a direct call, with some of them absent."""
    arrays = arrays_of(name, seed=1)
    tiles = [
        None if operand in without else (array, *shape) if packed else array
        for operand, shape, packed, array in arrays
    ]
    run(name, tiles, integers_of(SPECS[name], name), [FLOAT] * len(SPECS[name].floats))
    return [array for _, _, _, array in arrays]


def bits_of_tile(runtime: Runtime, name: str, without: frozenset[str], suffix: str) -> list[np.ndarray]:
    """The same after a tile call."""
    arrays = arrays_of(name, seed=1)
    with runtime.registered(*(array for *_, array in arrays)) as buffers:
        tiles = named_tiles(name, arrays, buffers)
        keywords = optional_tiles(name, {o: t for o, t in tiles.items() if o not in without})
        call = getattr(tile, SPECS[name].base + suffix)
        handle = call(*in_call_order(name, tiles), **attributes_of(name), **keywords)
        if handle is not None:
            handle.wait()
    return [array for _, _, _, array in arrays]


def differences(name: str, ours: list[np.ndarray], theirs: list[np.ndarray]) -> list[int]:
    """Numbers of operands whose bits differ."""
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a.tobytes() != b.tobytes()]


@pytest.mark.parametrize("name", SPECS)
def test_tile_calls_have_the_bits_of_the_kernel(runtime, name):
    """Blocking and asynchronous calls, with operands that may be absent and without them."""
    optional = frozenset(o.name for o in SPECS[name].operands if o.optional)
    needed = ("matmul_dw", "tree_resume")  # these attributes need the operands
    for without in {frozenset(), frozenset() if SPECS[name].base in needed else optional}:
        expected = bits_of_kernel(name, without)
        for suffix in ("", "_async"):
            ours = bits_of_tile(runtime, name, without, suffix)
            assert differences(name, ours, expected) == [], (without, suffix)
    expected[0].reshape(-1).view(np.uint8)[0] ^= 1  # the twin
    assert differences(name, ours, expected) == [0]


def test_every_kernel_has_tile_calls_or_a_reason():
    """Kernels that only tile programs can call say why in their declaration."""
    internal = {fields["base"] for fields in DECLARED if fields["internal"]}
    quantised = {"matmul_quantised", "matmul_dx_quantised", "embedding_quantised"}
    of_many_dims = {"rearrange", "concat", "reduce_sum", "reduce_max", "gather_elements", "scatter_add"}
    assert (
        internal
        == {"fetch", "store", "peak", "one_hot", "unfold", "fold", "dropout"} | of_many_dims | quantised
    )
    names = {fields["base"] for fields in DECLARED} - internal  # KERNELS also has those of other tests
    assert {*tile.__all__} >= names | {f"{name}_async" for name in names}
    assert not internal & {*tile.__all__}


def matrices(count: int, rows: int = 8, cols: int = 6, dtype=np.float32) -> list[np.ndarray]:
    return [np.full((rows, cols), i + 0.25, dtype) for i in range(count)]


def test_invalid_calls_are_rejected(runtime):
    """Nothing is submitted, and the error says what is wrong."""
    x, out, half = *matrices(2), *matrices(1, dtype=ml_dtypes.bfloat16)
    cube, wide = np.zeros((2, 3, 4), np.float32), np.zeros((8, 7), np.float32)
    long, text = np.zeros((8, 6), np.int64), np.zeros((8, 6), "S4")
    w = np.zeros((6, 5), np.float32)
    other = Runtime(num_workers=0)
    arrays = (x, out, half, cube, wide, long, text, w)
    before = runtime.stats().num_submitted
    with other, other.registered(np.zeros((8, 6), np.float32)) as (foreign,), runtime.registered(*arrays) as (
        hx, hout, hhalf, hcube, hwide, hlong, htext, hw,
    ):  # fmt: skip
        packed, hpart, hsix, hrow = tile.pack(runtime, w), hout[:6, :5], hout[:6], hout[:1]
        cases = [
            (lambda: tile.gelu(hx, hwide), ConfigError, r"gelu\] sizes of one name .* got 8 x 6 for 'x', where 7"),
            (lambda: tile.gelu(hx[:4], hout), ConfigError, "sizes of one name"),
            (lambda: tile.gelu(hx, hhalf), ConfigError, "'out' must be f32; got bf16|'out' must be bf16|'x' must be"),
            (lambda: tile.gelu(hlong, hout), ConfigError, "must be f32, bf16, f64 or i32; got type"),
            (lambda: tile.head_sum(hhalf[:1], hrow, num_k_splits=1, range=[0, 1]), ConfigError, "f32; got bf16"),
            (lambda: tile.gelu(None, hout), ConfigError, "'x' must be passed"),
            (lambda: tile.gelu(hx, 3), ConfigError, "an operand must be a buffer or region"),
            (lambda: tile.gelu(x, hout), ConfigError, "an operand must be a buffer or region"),
            (lambda: tile.gelu(hx, hcube), ConfigError, "one or two dimensions"),
            (lambda: tile.gelu(hx, htext), ConfigError, "an operand must be a buffer or region"),
            (lambda: tile.gelu(hx[:, ::2], hout[:, ::2]), ConfigError, "contiguous columns"),
            (lambda: tile.gelu(hx, foreign), ConfigError, "belong to one runtime"),
            (lambda: tile.gelu(hx[:6], hx[2:]), ConfigError, "share no bytes with another operand in part"),
            (lambda: tile.softmax(hx[:4], hx[3:7]), ConfigError, "share no bytes with another operand;"),
            (lambda: tile.softmax(hx, hx), ConfigError, "share no bytes with another operand;"),
            (lambda: tile.gelu(hx[:, :4], hx[:, 2:]), ConfigError, "share no bytes"),
            (lambda: tile.gelu(packed, hpart), ConfigError, "'x' must be stored in rows; got a tile in panels"),
            (lambda: tile.matmul([hpart], [hw], hx, num_k_splits=1, range=[0, 5]), ConfigError, "sizes of one name"),
            (lambda: tile.matmul([hpart], [hw], hsix, num_k_splits=1, range=[0, 5]), ConfigError, "stored in panels"),
            (lambda: tile.matmul([hpart], [packed], hsix, num_k_splits=1, range=[0]), ConfigError, "as declared"),
            (lambda: tile.matmul([hpart], [packed], hsix, num_k_splits=1, range=[0, 6]), ConfigError, "5 columns of"),
            (lambda: tile.matmul([hpart], [packed], hsix, num_k_splits=1, range=[3, 2]), ConfigError, "ranges of k"),
            (lambda: tile.matmul([hx, hx], [packed], hx, num_k_splits=1, range=[]), ConfigError, "equal lengths"),
            (lambda: tile.gemm(hx, hx, hout, trans_a=0, trans_b=0, accumulate=0), ConfigError, "must satisfy"),
            (lambda: tile.scale(hx, hout, factor="much"), ConfigError, "a float of a kernel"),
            (lambda: tile.rope(hx, hx, hx, hout, head_dim=2.5, inverse=0), ConfigError, "an integer of a kernel"),
            (lambda: tile.PackedTile(hx, 6, 5), ConfigError, "one dimension"),
            (lambda: tile.PackedTile(packed.buffer, 60, 5), ConfigError, "must have 384 elements"),
            (lambda: tile.pack(runtime, cube), ShapeError, "must be 2-D"),
            (lambda: tile.gelu_async(hx, hout, hints=TaskExecutionHints(target_worker=9)), ConfigError, "worker"),
            (lambda: tile.gelu_async(hx, hout, worker_type="cube"), ConfigError, "worker_type"),
            (lambda: tile.gelu_async(hx, hout, speed=3), TypeError, "speed"),
        ]  # fmt: skip
        for call, kind, message in cases:
            with pytest.raises(kind, match=message):
                call()
        runtime.unregister(packed.buffer)
    with pytest.raises(ConfigError, match="must lie in a registered buffer"):
        tile.gelu(hx, hout)
    assert runtime.stats().num_submitted == before


PLACES = st.tuples(st.integers(0, 7), st.integers(0, 5))


@given(PLACES, PLACES, PLACES, st.booleans())
def test_outputs_share_no_bytes_with_inputs(first, second, shape, is_elementwise):
    """Two parts of one array are accepted exactly if no element is in both, or if one call works in place."""
    rows, cols = shape[0] + 1, shape[1] + 1
    array, numbers = np.ones((16, 12), np.float32), np.arange(16 * 12).reshape(16, 12)
    parts = [(slice(r, r + rows), slice(c, c + cols)) for r, c in (first, second)]
    is_accepted = not {*numbers[parts[0]].flat} & {*numbers[parts[1]].flat} or (
        is_elementwise and parts[0] == parts[1]
    )
    with Runtime(num_workers=0) as rt, rt.registered(array) as (handle,):
        call = tile.gelu_async if is_elementwise else tile.softmax_async
        with nullcontext() if is_accepted else pytest.raises(ConfigError, match="share no bytes"):
            call(handle[parts[0]], handle[parts[1]])


def test_blocking_waits_for_its_own_task_only(runtime):
    """A task that waits for an event is left alone; one that writes the input is waited for."""
    x, out, other = matrices(3)
    event, second = runtime.event(), runtime.event()
    with runtime.registered(x, out, other) as (hx, hout, hother):
        unrelated = runtime.submit(None, [Output(hother)], wait_for=[(event, 1)])
        tile.relu(hx, hout)
        assert (out == x).all() and not unrelated.is_complete()
        fill = runtime.submit("fill", [Output(hx)], scalars=[x.nbytes, 0], wait_for=[(second, 1)])
        timer = threading.Timer(0.02, second.post)
        timer.start()
        tile.relu(hx, hout)
        assert fill.is_complete() and (out == 0).all() and not unrelated.is_complete()
        event.post()
        timer.join()


def test_calls_are_ordered_by_their_data(runtime):
    """A chain over parts of buffers, with names and attributes of tasks."""
    x, out = matrices(2, 64, 64)
    with runtime.registered(x, out) as (hx, hout):
        with TaskGroup() as group:
            for i in range(0, 64, 16):
                rows = slice(i, i + 16)
                for _ in range(5):
                    group.add(tile.scale_async(hx[rows, :32], hout[rows, :32], factor=2.0, name="double"))
                    group.add(tile.copy_async(hout[rows, :32], hx[rows, :32], after=[*group][-1:]))
        assert (x[:, :32] == 0.25 * 32).all() and (x[:, 32:] == 0.25).all()


def test_a_failed_input_fails_the_call(runtime):
    """A blocking call raises the failure of the task that should have written its input, once."""
    x, out = matrices(2)
    with Runtime(num_workers=1) as rt, rt.registered(x, out) as (hx, hout):

        @rt.kernel
        def fail(array):
            raise ValueError("on purpose")

        failed = rt.submit(fail, [InOut(hx)])
        with pytest.raises(TaskFailed, match="on purpose"):
            tile.gelu(hx, hout)
        assert isinstance(failed.exception(), TaskFailed)
        rt.write(hx)[:] = 1
        tile.relu(hx, hout)
        assert (out == 1).all()


def test_recordings_and_traces_see_blocking_calls(runtime, tmp_path):
    """A blocking call is a task: it is recorded, replayed and traced under its kernel's name."""
    x, out = matrices(2)
    with runtime.registered(x, out) as (hx, hout):
        with runtime.record() as recording:
            tile.scale(hx, hout, factor=2.0)
            tile.copy(hout, hx)
        recording.replay()
        recording.replay()
        runtime.wait_all()
        assert (x == 0.25 * 8).all()
        with runtime.trace(tmp_path / "run.json") as tracing:
            tile.scale(hx, hout, factor=2.0)
            tile.scale_async(hx, hout, factor=2.0, name="mine").wait()
        assert [(span.kernel, span.name) for span in tracing.trace.tasks] == [
            ("scale_f32", None),
            ("scale_f32", "mine"),
        ]


def test_a_call_inside_a_task(runtime):
    """A Python kernel may call tiles of its parameters."""
    x, out = matrices(2)
    with runtime.registered(x, out) as (hx, hout):

        @runtime.kernel
        def outer(x_array, out_array):
            tile.relu(hx, hout)

        runtime.submit(outer, [Input(hx), Output(hout)]).wait()
        assert (out == x).all()


def test_shapes_of_operands(runtime):
    """One dimension is one row; rows that the index selects one by one have a stride."""
    x, out, bias = *matrices(2), np.arange(6, dtype=np.float32)
    with runtime.registered(x, out, bias) as (hx, hout, hbias):
        tile.add_bias(hx, hbias, hout)
        assert (out == x + bias).all()
        tile.relu(hx[::2], hout[::2])
        assert (out[::2] == x[::2]).all() and (out[1::2] == x[1::2] + bias).all()
        tile.scale(hx[3], hout[4], factor=4.0)
        assert (out[4] == 4 * x[3]).all()


def test_elementwise_calls_in_place(runtime):
    """A tile may be input and output of an elementwise kernel; such calls form a chain."""
    (x,) = matrices(1)
    with runtime.registered(x) as (hx,):
        tile.scale(hx, hx, factor=2.0)
        for _ in range(20):
            tile.scale_async(hx[:4], hx[:4], factor=-1.0)
        last = tile.add_async(hx, hx, hx)
        last.wait()
        assert (x == 1.0).all()


def test_many_threads_call_at_once():
    """Each thread's calls on its own tiles; the first calls of a kernel race for its id."""
    arrays = matrices(8, 16, 16)
    with Runtime(num_workers=1) as rt, rt.registered(*arrays) as buffers:
        barrier = threading.Barrier(4)

        def work(source, target):
            barrier.wait()
            for _ in range(50):
                tile.scale(source, target, factor=0.5)
                tile.scale(target, source, factor=2.0)

        threads = [threading.Thread(target=work, args=buffers[i : i + 2]) for i in range(0, 8, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rt.stats().num_completed == 400
    assert all((arrays[i] == i + 0.25).all() for i in range(0, 8, 2))
