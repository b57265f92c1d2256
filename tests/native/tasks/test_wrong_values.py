"""Invalid values that the task runtime must reject because they would otherwise be misinterpreted,
or read wrong memory.

Each case is a call that raises the project's error before anything starts. Types for which Python
itself raises, such as text instead of a number, are not listed.
"""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import numpy as np
import pytest

from tilewise.core.errors import TilewiseError
from tilewise.runtime import (
    InOut,
    Input,
    NoDep,
    Output,
    Reduce,
    Runtime,
    TaskExecutionHints,
    TaskGroup,
    WorkerType,
)

SENTENCE = re.compile(r"^\[runtime(\.\w+)*\] .+; got .+; .+", re.DOTALL)
NAN, HUGE = float("nan"), 1 << 80


@pytest.fixture(scope="module")
def w():
    """A runtime with one object of each kind, and a second runtime with the same."""
    with Runtime(num_workers=1, window=64) as rt, Runtime(num_workers=1, window=64) as other:
        x = rt.register(np.zeros((4, 4), np.float32))
        frozen = np.zeros(4)
        frozen.flags.writeable = False
        with rt.record() as recording:
            rt.submit(None, [Input(x)])
        theirs = other.register(np.zeros((4, 4), np.float32))
        python = rt.kernel(lambda *_: None)
        world = SimpleNamespace(
            rt=rt, other=other, x=x, theirs=theirs, recording=recording, task=rt.submit(None), event=rt.event(),
            fill=rt.kernel("fill"), python=python, their_task=other.submit(None), their_event=other.event(),
            their_kernel=other.kernel("fill"), read_only=rt.register(frozen), group=TaskGroup(),
            copy=rt.kernel("copy"), heap=rt.alloc(32),
        )  # fmt: skip
        rt.wait_all()
        yield world


OPENING = {
    "window": [0, 2.5, np.float32(64), 1 << 40, 100, True],
    "num_workers": [-1, 1.5, 1 << 40],
    "heap_bytes": [0, HUGE],
    "max_handles": [0, 1 << 32],
    "worker_types": [[[9]], [[-1]], [[1.5]]],
    "shared_path": ["a\0b"],
    "peer_timeout_s": [0, NAN],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in OPENING.items() for v in values])
def test_opening(name, value):
    """A runtime opens only with numbers in range, known worker types, a path and a time."""
    with pytest.raises(TilewiseError, match=SENTENCE):
        Runtime(**{"num_workers": 1, name: value} if name != "worker_types" else {name: value})


def test_worker_types_for_another_number_of_workers():
    """As many lists of worker types as workers."""
    with pytest.raises(TilewiseError, match=SENTENCE):
        Runtime(num_workers=2, worker_types=[[WorkerType.CUBE]])


WAITS = {
    "task.wait": lambda w, t: w.task.wait(t),
    "task.result": lambda w, t: w.task.result(t),
    "task.exception": lambda w, t: w.task.exception(t),
    "wait_all": lambda w, t: w.rt.wait_all(t),
    "read": lambda w, t: w.rt.read(w.x, t),
    "write": lambda w, t: w.rt.write(w.x, t),
    "unregister": lambda w, t: w.rt.unregister(w.x, t),
    "group.wait_all": lambda w, t: w.group.wait_all(t),
    "group.wait_any": lambda w, t: TaskGroup([w.task]).wait_any(t),
    "as_completed": lambda w, t: list(w.group.as_completed(t)),
}


@pytest.mark.parametrize("call", WAITS)
def test_a_timeout_must_not_be_nan(w, call):
    """A wait with NaN would not end. Also rejected if there is nothing to wait for."""
    with pytest.raises(TilewiseError, match=SENTENCE):
        WAITS[call](w, NAN)


@pytest.mark.parametrize(
    "timeout", [None, 0, 1, 0.5, -1, np.float32(1), np.int64(2), float("inf"), 1e300, HUGE]
)
@pytest.mark.parametrize("call", ["task.wait", "wait_all", "read", "group.wait_all", "as_completed"])
def test_valid_timeouts(w, call, timeout):
    """Integers, NumPy numbers and infinity are valid; a negative timeout has passed already."""
    WAITS[call](w, timeout)


CALLS = {
    # Buffers.
    "register strided": lambda w: w.rt.register(np.zeros((4, 4))[:, 1]),
    "register empty": lambda w: w.rt.register(np.zeros(0)),
    "register objects": lambda w: w.rt.register(np.array([None])),
    "register buffer": lambda w: w.rt.register(w.x),
    "register masked": lambda w: w.rt.register(np.ma.masked_less(np.arange(4.0), 2)),
    "alloc none": lambda w: w.rt.alloc(0),
    "alloc bytes": lambda w: w.rt.alloc(b"\x04"),
    "alloc fraction": lambda w: w.rt.alloc(3.5),
    "alloc array": lambda w: w.rt.alloc(np.array(3)),
    "alloc array of sizes": lambda w: w.rt.alloc(np.array([3, 3])),
    "alloc shape of fractions": lambda w: w.rt.alloc((2, 2.5)),
    "alloc overflow": lambda w: w.rt.alloc((1 << 32, 1 << 32), np.float64),
    "alloc huge": lambda w: w.rt.alloc(HUGE),
    "alloc objects": lambda w: w.rt.alloc(4, object),
    "alloc nothing": lambda w: w.rt.alloc(4, "V0"),
    "freeze region": lambda w: w.rt.freeze(w.x[0]),
    "unregister region": lambda w: w.rt.unregister(w.x[0]),
    "unregister heap": lambda w: w.rt.unregister(w.heap),
    "region fraction": lambda w: w.x.region(0.5, (4,)),
    "region negative": lambda w: w.x.region(-4, (4,)),
    "region sizes": lambda w: w.x.region(0, (4.5,)),
    "region stride": lambda w: w.x.region(0, (2, 4), (16.0, 1)),
    "region huge": lambda w: w.x.region(HUGE, (4,)),
    "region dimensions": lambda w: w.rt.submit(None, [Input(w.x.region(0, (1,) * 6, (1,) * 6))]),
    "index None": lambda w: w.x[None],
    "index array": lambda w: w.x[np.array([1, 2])],
    "index huge": lambda w: w.x[HUGE:],
    # Parameters.
    "Input array": lambda w: Input(np.zeros(4)),
    "Output array": lambda w: Output(np.zeros(4)),
    "Output nothing": lambda w: Output(),
    "Output both": lambda w: Output(w.x, bytes=4),
    "Output fraction": lambda w: Output(bytes=3.5),
    "Output negative": lambda w: Output(bytes=-1),
    "Output none": lambda w: Output(bytes=0),
    "Output huge": lambda w: Output(bytes=HUGE),
    "Output shape and bytes": lambda w: Output(bytes=4, shape=4),
    "Output shape of fractions": lambda w: Output(shape=(2.5, 2)),
    "Output negative shape": lambda w: Output(shape=(-2, -2)),
    "Output overflow": lambda w: Output(shape=(1 << 32, 1 << 32)),
    "Output objects": lambda w: Output(shape=3, dtype=object),
    "Reduce combine unknown": lambda w: Reduce(w.x, "no such kernel"),
    "Reduce combine Python": lambda w: Reduce(w.x, w.python),
    "Reduce combine other": lambda w: Reduce(w.x, w.their_kernel),
    "Reduce region": lambda w: w.rt.submit(w.fill, [Reduce(w.x[0])]),
    "NoDep array": lambda w: NoDep(np.zeros(4)),
    "NoDep nothing": lambda w: NoDep(),
    "NoDep both": lambda w: NoDep(w.x, address=1),
    "NoDep negative": lambda w: NoDep(address=-1),
    "NoDep fraction": lambda w: NoDep(address=1.5),
    "NoDep huge": lambda w: NoDep(address=HUGE),
    # Objects of another runtime, whose ids may be equal.
    "read of another": lambda w: w.rt.read(w.theirs),
    "write of another": lambda w: w.rt.write(w.theirs),
    "unregister of another": lambda w: w.rt.unregister(w.theirs),
    "freeze of another": lambda w: w.rt.freeze(w.theirs),
    "predicate of another": lambda w: w.rt.submit(None, predicate=w.theirs),
    "after another": lambda w: w.rt.submit(None, after=[w.their_task]),
    "wait_for another": lambda w: w.rt.submit(None, wait_for=[(w.their_event, 1)]),
    "complete another": lambda w: w.rt.task_complete(w.their_task),
    "bind to another": lambda w: w.recording.replay({w.x: w.theirs}),
    # Read-only memory.
    "freeze read-only": lambda w: w.rt.freeze(w.read_only, False),
    "write read-only": lambda w: w.rt.write(w.read_only),
    # Submission.
    "kernel null": lambda w: w.rt.submit(0),
    "kernel negative": lambda w: w.rt.submit(-8),
    "kernel null function": lambda w: w.rt.submit(ctypes.CFUNCTYPE(ctypes.c_int)()),
    "name empty": lambda w: w.rt.submit(None, name=""),
    "name long": lambda w: w.rt.submit(None, name="n" * 64),
    "name zero": lambda w: w.rt.submit(None, name="a\0b"),
    "deadline zero": lambda w: w.rt.submit(None, deadline=0),
    "deadline nan": lambda w: w.rt.submit(None, deadline=NAN),
    "wait_for negative": lambda w: w.rt.submit(None, wait_for=[(w.event, -4)]),
    "kernel unknown": lambda w: w.rt.submit("no such kernel"),
    "kernel huge": lambda w: w.rt.submit(HUGE),
    "kernel other": lambda w: w.rt.submit(w.their_kernel),
    "load missing": lambda w: w.rt.load_library("/nope.so"),
    "load zero": lambda w: w.rt.load_library("a\0b"),
    "params bare": lambda w: w.rt.submit(w.fill, [w.x]),
    "params of another": lambda w: w.rt.submit(w.fill, [Input(w.theirs)]),
    "params too many": lambda w: w.rt.submit(w.fill, [Input(w.x)] * 30),
    "params bare, Python": lambda w: w.rt.submit(w.python, [3]),
    "scalars text inside": lambda w: w.rt.submit(w.fill, scalars=("a",)),
    "scalars complex inside": lambda w: w.rt.submit(w.fill, scalars=[1j]),
    "scalars dict": lambda w: w.rt.submit(w.fill, scalars={1: 2}),
    "scalars huge": lambda w: w.rt.submit(w.fill, scalars=[1 << 64]),
    "scalars huge negative": lambda w: w.rt.submit(w.fill, scalars=[-(1 << 63) - 1]),
    "scalars too many": lambda w: w.rt.submit(w.fill, scalars=[1] * 17),
    "worker_type unknown": lambda w: w.rt.submit(None, worker_type=9),
    "worker_type negative": lambda w: w.rt.submit(None, worker_type=-1),
    "worker_type huge": lambda w: w.rt.submit(None, worker_type=HUGE),
    "worker_type wraps": lambda w: w.rt.submit(None, worker_type=(1 << 32) + 1),
    "worker_type fraction": lambda w: w.rt.submit(None, worker_type=1.0),
    "wait_for fraction": lambda w: w.rt.submit(None, wait_for=[(w.event, 1.5)]),
    "hints worker": lambda w: w.rt.submit(None, hints=TaskExecutionHints(target_worker=7)),
    "hints worker huge": lambda w: w.rt.submit(None, hints=TaskExecutionHints(target_worker=(1 << 31) - 1)),
    "hints prefetch other": lambda w: w.rt.submit(
        None, hints=TaskExecutionHints(prefetch_handles=(w.theirs,))
    ),
    "hints priority huge": lambda w: TaskExecutionHints(priority=1 << 40),
    "hints priority fraction": lambda w: TaskExecutionHints(priority=1.5),
    "hints worker fraction": lambda w: TaskExecutionHints(target_worker=0.5),
    "hints worker negative": lambda w: TaskExecutionHints(target_worker=-1),
    "hints worker too large": lambda w: TaskExecutionHints(target_worker=HUGE),
    "hints node": lambda w: TaskExecutionHints(target_node=1),
    "predicate region": lambda w: w.rt.submit(None, predicate=w.x[1]),
    # Tasks, events and groups.
    "complete huge": lambda w: w.rt.task_complete(w.task, HUGE),
    "notify number": lambda w: w.task.notify(3),
    "post fraction": lambda w: w.event.post(3.5),
    "post negative": lambda w: w.event.post(-1),
    "post huge": lambda w: w.event.post(1 << 64),
    # Recordings, orchestrations, seeing inside.
    "bind to region": lambda w: w.recording.replay({w.x: w.x[0]}),
    "bind another size": lambda w: w.recording.replay({w.x: w.heap}),
    "orchestration missing": lambda w: w.rt.run_orchestration("/nope.so", "main"),
    "orchestration args huge": lambda w: w.rt.run_orchestration("/nope.so", "main", [1 << 64]),
    "trace missing folder": lambda w: w.rt.trace("/nope/x.json").__enter__(),
    "trace folder": lambda w: w.rt.trace("/").__enter__(),
    "trace zero": lambda w: w.rt.trace("a\0b"),
    "trace records": lambda w: w.rt.trace(max_records_per_thread=-1),
    "trace no records": lambda w: w.rt.trace(max_records_per_thread=0),
    "trace records huge": lambda w: w.rt.trace(max_records_per_thread=HUGE),
    "graph missing folder": lambda w: w.rt.graph("/nope/x.json").__enter__(),
    "graph page in a missing folder": lambda w: w.rt.graph("/nope/x.html").__enter__(),
    "trace one path of two": lambda w: w.rt.trace("a.json", "/no/such/folder/b.json"),
    "trace graph folder": lambda w: w.rt.trace(graph="/no/such/folder/b.json"),
    "trace without graph": lambda w: w.rt.trace().graph,
    "tiles none": lambda w: w.x.tiles(),
    "tiles too many": lambda w: w.x.tiles(2, 2, 2),
    "tile of another number": lambda w: w.x.tiles(2, 2)[0],
    "tile slice": lambda w: w.x.tiles(2, 2)[:, 0],
    "Reduce dtype": lambda w: Reduce(w.heap),
    "group after all": lambda w: TaskGroup().wait_any(),
    "index dots": lambda w: w.x[..., ...],
    "index truth": lambda w: w.x[True],
    "index truths": lambda w: w.x[np.zeros(4, bool)],
    "index slice of truths": lambda w: w.x[True:],
    "index slice of arrays": lambda w: w.x[np.array(1) :],
    "index step": lambda w: w.x[::0],
    "index backwards": lambda w: w.x[::-1],
    "index empty": lambda w: w.x[2:2],
}


@pytest.mark.parametrize("name", CALLS)
def test_invalid_calls(w, name):
    """The call raises the project's error and submits nothing."""
    before = w.rt.stats().num_submitted
    with pytest.raises(TilewiseError, match=SENTENCE):
        CALLS[name](w)
    assert w.rt.stats().num_submitted == before


def test_collections_of_other_kinds(w):
    """Arrays, sets and NumPy scalars are accepted as lists, integers and booleans."""
    rt, x = w.rt, w.x
    with rt.scope():
        first = rt.submit("sum_f32", [InOut(x), Input(x)], scalars=np.array([4]), worker_type=np.int64(1))
        rt.submit("sum_f32", np.array([InOut(x), Input(x)], object), scalars=[np.int32(4)], after={first})
        rt.submit("fill", [Output(bytes=4)], scalars=[np.uint8(4), np.True_])
    rt.wait_all()


def test_record_raises_the_first_error(w):
    """An error in the block is raised even if the runtime has ended the recording."""
    with pytest.raises(RuntimeError, match="mine"), w.rt.record():
        w.rt._native.record_end()
        raise RuntimeError("mine")
