"""Wrong types and values given to the Python face: every public call refuses them before anything starts.

Each case is a call and must raise the project's error with its sentence: the rule, what was given, what to do.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

from tilewise.core.errors import TilewiseError
from tilewise.runtime import (
    Commute,
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


class Odd:
    """A value whose text cannot be made: the sentence must come all the same."""

    def __repr__(self):
        raise RuntimeError("no text")


@pytest.fixture(scope="module")
def w():
    """A world to make mistakes in: a runtime with one of each thing, and a second runtime with the same."""
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
    "window": [-1, 0, "x", 3.5, 1 << 40, HUGE, None, 100, [], True],
    "num_workers": [-1, "x", 1.5, 1 << 40, (1 << 32) - 1, HUGE, [1], Odd()],
    "heap_bytes": [-1, 0, "1G", 2.5, HUGE, None],
    "max_submitters": [-1, 0, "x", 1.5, 1 << 32, None],
    "max_handles": [-1, 0, "x", 1.5, 1 << 32, None],
    "max_regions": [-1, 0, "x", 1.5, 1 << 32, None],
    "max_events": [-1, 0, "x", 1.5, 1 << 32, None],
    "worker_types": [
        [[9]], [["CUBE"]], ["CUBE"], [3], 3, [None], [[-1]], [[1.5]], [[WorkerType.CUBE, None]], {1: 2}, "CV",
    ],
    "pin": ["yes", 2, None],
    "shared_path": [3, 2.5, ["a"], b"\0", "a\0b", ""],
    "peer_timeout_s": [-1, 0, "x", None, NAN, [1]],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in OPENING.items() for v in values])
def test_opening(name, value):
    """A runtime opens only with numbers in range, known worker types, a path and a time."""
    with pytest.raises(TilewiseError, match=SENTENCE):
        Runtime(**{"num_workers": 1, name: value} if name != "worker_types" else {name: value})


def test_worker_types_of_another_number():
    """As many lists of worker types as workers."""
    with pytest.raises(TilewiseError, match=SENTENCE):
        Runtime(num_workers=2, worker_types=[[WorkerType.CUBE]])


TIMEOUTS = ["1", NAN, [], 1j, b"1", Odd()]
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


@pytest.mark.parametrize("timeout", TIMEOUTS, ids=lambda t: type(t).__name__)
@pytest.mark.parametrize("call", WAITS)
def test_timeouts(w, call, timeout):
    """A timeout is a number of seconds or None, also where nothing is left to wait for."""
    with pytest.raises(TilewiseError, match=SENTENCE):
        WAITS[call](w, timeout)


@pytest.mark.parametrize(
    "timeout", [None, 0, 1, 0.5, -1, np.float32(1), np.int64(2), float("inf"), 1e300, HUGE]
)
@pytest.mark.parametrize("call", ["task.wait", "wait_all", "read", "group.wait_all", "as_completed"])
def test_good_timeouts(w, call, timeout):
    """Whole numbers, NumPy's and infinity are times; a negative one has passed already."""
    WAITS[call](w, timeout)


CALLS = {
    # Buffers.
    "register list": lambda w: w.rt.register([1, 2]),
    "register None": lambda w: w.rt.register(None),
    "register text": lambda w: w.rt.register("text"),
    "register number": lambda w: w.rt.register(3),
    "register strided": lambda w: w.rt.register(np.zeros((4, 4))[:, 1]),
    "register empty": lambda w: w.rt.register(np.zeros(0)),
    "register objects": lambda w: w.rt.register(np.array([None])),
    "register buffer": lambda w: w.rt.register(w.x),
    "register odd": lambda w: w.rt.register(Odd()),
    "registered list": lambda w: w.rt.registered([1]).__enter__(),
    "alloc negative": lambda w: w.rt.alloc(-4),
    "alloc none": lambda w: w.rt.alloc(0),
    "alloc fraction": lambda w: w.rt.alloc(3.5),
    "alloc array": lambda w: w.rt.alloc(np.array(3)),
    "alloc array of sizes": lambda w: w.rt.alloc(np.array([3, 3])),
    "alloc text": lambda w: w.rt.alloc("3"),
    "alloc truth": lambda w: w.rt.alloc(True),
    "alloc None": lambda w: w.rt.alloc(None),
    "alloc shape of fractions": lambda w: w.rt.alloc((2, 2.5)),
    "alloc negative shape": lambda w: w.rt.alloc((-2, -2)),
    "alloc overflow": lambda w: w.rt.alloc((1 << 32, 1 << 32), np.float64),
    "alloc huge": lambda w: w.rt.alloc(HUGE),
    "alloc dtype": lambda w: w.rt.alloc(4, "no such type"),
    "alloc dtype number": lambda w: w.rt.alloc(4, 7),
    "alloc objects": lambda w: w.rt.alloc(4, object),
    "alloc nothing": lambda w: w.rt.alloc(4, "V0"),
    "freeze number": lambda w: w.rt.freeze(3),
    "freeze how": lambda w: w.rt.freeze(w.x, "yes"),
    "freeze region": lambda w: w.rt.freeze(w.x[0]),
    "unregister None": lambda w: w.rt.unregister(None),
    "unregister region": lambda w: w.rt.unregister(w.x[0]),
    "unregister heap": lambda w: w.rt.unregister(w.heap),
    "read None": lambda w: w.rt.read(None),
    "read array": lambda w: w.rt.read(np.zeros(2)),
    "read other": lambda w: w.rt.read(w.theirs),
    "write text": lambda w: w.rt.write("x"),
    "write other": lambda w: w.rt.write(w.theirs),
    "region offset": lambda w: w.x.region("0", (4,)),
    "region fraction": lambda w: w.x.region(0.5, (4,)),
    "region negative": lambda w: w.x.region(-4, (4,)),
    "region size": lambda w: w.x.region(0, 4),
    "region sizes": lambda w: w.x.region(0, (4.5,)),
    "region stride": lambda w: w.x.region(0, (2, 4), (16.0, 1)),
    "region stride text": lambda w: w.x.region(0, (4,), "1"),
    "region huge": lambda w: w.x.region(HUGE, (4,)),
    "region dimensions": lambda w: w.rt.submit(None, [Input(w.x.region(0, (1,) * 6, (1,) * 6))]),
    "index text": lambda w: w.x["a"],
    "index fraction": lambda w: w.x[1.5],
    "index None": lambda w: w.x[None],
    "index slice": lambda w: w.x["a":],
    "index slice of fractions": lambda w: w.x[0:1.5],
    "index array": lambda w: w.x[np.array([1, 2])],
    "index list": lambda w: w.x[[1, 2]],
    "index huge": lambda w: w.x[HUGE:],
    # Parameters.
    "Input array": lambda w: Input(np.zeros(4)),
    "Input None": lambda w: Input(None),
    "InOut text": lambda w: InOut("x"),
    "Commute number": lambda w: Commute(3),
    "Input of a parameter": lambda w: Input(Input(w.x)),
    "Output array": lambda w: Output(np.zeros(4)),
    "Output None": lambda w: Output(None),
    "Output nothing": lambda w: Output(),
    "Output both": lambda w: Output(w.x, bytes=4),
    "Output fraction": lambda w: Output(bytes=3.5),
    "Output negative": lambda w: Output(bytes=-1),
    "Output none": lambda w: Output(bytes=0),
    "Output text": lambda w: Output(bytes="4"),
    "Output tuple of bytes": lambda w: Output(bytes=(4, 4)),
    "Output huge": lambda w: Output(bytes=HUGE),
    "Output shape and bytes": lambda w: Output(bytes=4, shape=4),
    "Output shape": lambda w: Output(shape="ab"),
    "Output shape of fractions": lambda w: Output(shape=(2.5, 2)),
    "Output negative shape": lambda w: Output(shape=(-2, -2)),
    "Output overflow": lambda w: Output(shape=(1 << 32, 1 << 32)),
    "Output array shape": lambda w: Output(shape=np.array(3)),
    "Output dtype": lambda w: Output(shape=3, dtype="no such type"),
    "Output objects": lambda w: Output(shape=3, dtype=object),
    "Reduce combine number": lambda w: Reduce(w.x, 3),
    "Reduce combine unknown": lambda w: Reduce(w.x, "no such kernel"),
    "Reduce combine Python": lambda w: Reduce(w.x, w.python),
    "Reduce combine other": lambda w: Reduce(w.x, w.their_kernel),
    "Reduce array": lambda w: Reduce(np.zeros(4)),
    "Reduce None": lambda w: Reduce(None),
    "Reduce region": lambda w: w.rt.submit(w.fill, [Reduce(w.x[0])]),
    "NoDep array": lambda w: NoDep(np.zeros(4)),
    "NoDep nothing": lambda w: NoDep(),
    "NoDep both": lambda w: NoDep(w.x, address=1),
    "NoDep negative": lambda w: NoDep(address=-1),
    "NoDep text": lambda w: NoDep(address="1"),
    "NoDep fraction": lambda w: NoDep(address=1.5),
    "NoDep huge": lambda w: NoDep(address=HUGE),
    # Submission.
    "kernel number": lambda w: w.rt.submit(3.5),
    "kernel unknown": lambda w: w.rt.submit("no such kernel"),
    "kernel unspeakable": lambda w: w.rt.submit("\ud800"),
    "kernel bytes": lambda w: w.rt.submit(b"fill"),
    "kernel huge": lambda w: w.rt.submit(HUGE),
    "kernel other": lambda w: w.rt.submit(w.their_kernel),
    "kernel submits": lambda w: w.rt.kernel("fill", submits="yes"),
    "kernel name": lambda w: w.rt.kernel(lambda: None, name=3),
    "kernel list": lambda w: w.rt.kernel([]),
    "load number": lambda w: w.rt.load_library(3),
    "load None": lambda w: w.rt.load_library(None),
    "load missing": lambda w: w.rt.load_library("/nope.so"),
    "load zero": lambda w: w.rt.load_library("a\0b"),
    "params None": lambda w: w.rt.submit(w.fill, None),
    "params number": lambda w: w.rt.submit(w.fill, 3),
    "params text": lambda w: w.rt.submit(w.fill, "ab"),
    "params one": lambda w: w.rt.submit(w.fill, Input(w.x)),
    "params bare": lambda w: w.rt.submit(w.fill, [w.x]),
    "params None inside": lambda w: w.rt.submit(w.fill, [None]),
    "params odd inside": lambda w: w.rt.submit(w.fill, [Odd()]),
    "params generator": lambda w: w.rt.submit(None, (Output(bytes=4) for _ in range(1))),
    "params dict": lambda w: w.rt.submit(w.fill, {Input(w.x): 1}),
    "params of another": lambda w: w.rt.submit(w.fill, [Input(w.theirs)]),
    "params too many": lambda w: w.rt.submit(w.fill, [Input(w.x)] * 30),
    "params None, Python": lambda w: w.rt.submit(w.python, None),
    "params generator, Python": lambda w: w.rt.submit(w.python, (Input(w.x) for _ in range(1))),
    "params bare, Python": lambda w: w.rt.submit(w.python, [3]),
    "scalars text inside": lambda w: w.rt.submit(w.fill, scalars=("a",)),
    "scalars None inside": lambda w: w.rt.submit(w.fill, scalars=[None]),
    "scalars complex inside": lambda w: w.rt.submit(w.fill, scalars=[1j]),
    "scalars odd inside": lambda w: w.rt.submit(w.fill, scalars=[Odd()]),
    "scalars None": lambda w: w.rt.submit(w.fill, scalars=None),
    "scalars number": lambda w: w.rt.submit(w.fill, scalars=3),
    "scalars dict": lambda w: w.rt.submit(w.fill, scalars={1: 2}),
    "scalars huge": lambda w: w.rt.submit(w.fill, scalars=[1 << 64]),
    "scalars huge negative": lambda w: w.rt.submit(w.fill, scalars=[-(1 << 63) - 1]),
    "scalars too many": lambda w: w.rt.submit(w.fill, scalars=[1] * 17),
    "scalars None, Python": lambda w: w.rt.submit(w.python, scalars=None),
    "scalars number, Python": lambda w: w.rt.submit(w.python, scalars=3),
    "worker_type text": lambda w: w.rt.submit(None, worker_type="CUBE"),
    "worker_type None": lambda w: w.rt.submit(None, worker_type=None),
    "worker_type unknown": lambda w: w.rt.submit(None, worker_type=9),
    "worker_type negative": lambda w: w.rt.submit(None, worker_type=-1),
    "worker_type huge": lambda w: w.rt.submit(None, worker_type=HUGE),
    "worker_type wraps": lambda w: w.rt.submit(None, worker_type=(1 << 32) + 1),
    "worker_type fraction": lambda w: w.rt.submit(None, worker_type=1.0),
    "after None inside": lambda w: w.rt.submit(None, after=[None]),
    "after number": lambda w: w.rt.submit(None, after=5),
    "after zero": lambda w: w.rt.submit(None, after=0),
    "after a task": lambda w: w.rt.submit(None, after=w.task),
    "after id": lambda w: w.rt.submit(None, after=[w.task.id]),
    "after array": lambda w: w.rt.submit(None, after=np.array([1, 2])),
    "after other": lambda w: w.rt.submit(None, after=[w.their_task]),
    "wait_for numbers": lambda w: w.rt.submit(None, wait_for=[(3, 4)]),
    "wait_for event": lambda w: w.rt.submit(None, wait_for=[w.event]),
    "wait_for alone": lambda w: w.rt.submit(None, wait_for=w.event),
    "wait_for pair": lambda w: w.rt.submit(None, wait_for=(w.event, 1)),
    "wait_for triple": lambda w: w.rt.submit(None, wait_for=[(w.event, 1, 2)]),
    "wait_for text": lambda w: w.rt.submit(None, wait_for=[(w.event, "1")]),
    "wait_for fraction": lambda w: w.rt.submit(None, wait_for=[(w.event, 1.5)]),
    "wait_for negative": lambda w: w.rt.submit(None, wait_for=[(w.event, -1)]),
    "wait_for huge": lambda w: w.rt.submit(None, wait_for=[(w.event, 1 << 64)]),
    "wait_for other": lambda w: w.rt.submit(None, wait_for=[(w.their_event, 1)]),
    "hints text": lambda w: w.rt.submit(None, hints="high"),
    "hints number": lambda w: w.rt.submit(None, hints=3),
    "hints worker": lambda w: w.rt.submit(None, hints=TaskExecutionHints(target_worker=7)),
    "hints worker huge": lambda w: w.rt.submit(None, hints=TaskExecutionHints(target_worker=(1 << 31) - 1)),
    "hints prefetch other": lambda w: w.rt.submit(
        None, hints=TaskExecutionHints(prefetch_handles=(w.theirs,))
    ),
    "hints priority text": lambda w: TaskExecutionHints(priority="high"),
    "hints priority fraction": lambda w: TaskExecutionHints(priority=1.5),
    "hints priority None": lambda w: TaskExecutionHints(priority=None),
    "hints priority huge": lambda w: TaskExecutionHints(priority=1 << 40),
    "hints worker text": lambda w: TaskExecutionHints(target_worker="0"),
    "hints worker fraction": lambda w: TaskExecutionHints(target_worker=0.5),
    "hints worker negative": lambda w: TaskExecutionHints(target_worker=-1),
    "hints worker too large": lambda w: TaskExecutionHints(target_worker=HUGE),
    "hints node": lambda w: TaskExecutionHints(target_node=1),
    "hints node text": lambda w: TaskExecutionHints(target_node="0"),
    "hints node odd": lambda w: TaskExecutionHints(target_node=Odd()),
    "hints prefetch": lambda w: TaskExecutionHints(prefetch_inputs="yes"),
    "hints prefetch number": lambda w: TaskExecutionHints(prefetch_handles=(3,)),
    "hints prefetch alone": lambda w: TaskExecutionHints(prefetch_handles=w.x),
    "predicate array": lambda w: w.rt.submit(None, predicate=np.ones(1, np.uint32)),
    "predicate number": lambda w: w.rt.submit(None, predicate=0),
    "predicate region": lambda w: w.rt.submit(None, predicate=w.x[1]),
    "predicate other": lambda w: w.rt.submit(None, predicate=w.theirs),
    # Tasks, events and groups.
    "complete None": lambda w: w.rt.task_complete(None),
    "complete id": lambda w: w.rt.task_complete(w.task.id),
    "complete text": lambda w: w.rt.task_complete(w.task, "ok"),
    "complete huge": lambda w: w.rt.task_complete(w.task, HUGE),
    "notify number": lambda w: w.task.notify(3),
    "notify None": lambda w: w.task.notify(None),
    "raise text": lambda w: w.event.post("1"),
    "raise None": lambda w: w.event.post(None),
    "raise fraction": lambda w: w.event.post(3.5),
    "raise negative": lambda w: w.event.post(-1),
    "raise huge": lambda w: w.event.post(HUGE),
    "group number": lambda w: w.group.add(3),
    "group None": lambda w: w.group.add(None),
    "group of a number": lambda w: TaskGroup(3),
    "group of numbers": lambda w: TaskGroup([3]),
    "group of a task": lambda w: TaskGroup(w.task),
    "group of two runtimes": lambda w: TaskGroup([w.task, w.their_task]),
    # Recordings, orchestrations, seeing inside.
    "bind list": lambda w: w.recording.replay([w.x]),
    "bind number": lambda w: w.recording.replay(3),
    "bind zero": lambda w: w.recording.replay(0),
    "bind number to buffer": lambda w: w.recording.replay({3: w.x}),
    "bind to None": lambda w: w.recording.replay({w.x: None}),
    "bind to array": lambda w: w.recording.replay({w.x: np.zeros((4, 4), np.float32)}),
    "bind to region": lambda w: w.recording.replay({w.x: w.x[0]}),
    "bind other": lambda w: w.recording.replay({w.x: w.theirs}),
    "bind another size": lambda w: w.recording.replay({w.x: w.heap}),
    "orchestration missing": lambda w: w.rt.run_orchestration("/nope.so", "main"),
    "orchestration path": lambda w: w.rt.run_orchestration(3, "main"),
    "orchestration name": lambda w: w.rt.run_orchestration("/nope.so", 3),
    "orchestration args": lambda w: w.rt.run_orchestration("/nope.so", "main", ["a"]),
    "orchestration args None": lambda w: w.rt.run_orchestration("/nope.so", "main", None),
    "orchestration args huge": lambda w: w.rt.run_orchestration("/nope.so", "main", [1 << 64]),
    "trace missing folder": lambda w: w.rt.trace("/nope/x.json").__enter__(),
    "trace folder": lambda w: w.rt.trace("/").__enter__(),
    "trace number": lambda w: w.rt.trace(3),
    "trace zero": lambda w: w.rt.trace("a\0b"),
    "trace records": lambda w: w.rt.trace(max_records_per_thread=-1),
    "trace no records": lambda w: w.rt.trace(max_records_per_thread=0),
    "trace records text": lambda w: w.rt.trace(max_records_per_thread="9"),
    "trace records huge": lambda w: w.rt.trace(max_records_per_thread=HUGE),
    "graph missing folder": lambda w: w.rt.graph("/nope/x.json").__enter__(),
    "graph page in a missing folder": lambda w: w.rt.graph("/nope/x.html").__enter__(),
    "graph folder": lambda w: w.rt.graph("/").__enter__(),
    "trace second path": lambda w: w.rt.trace("a.json", b"b.json"),
    "trace one path of two": lambda w: w.rt.trace("a.json", "/no/such/folder/b.json"),
    "trace graph number": lambda w: w.rt.trace(graph=3),
    "trace graph folder": lambda w: w.rt.trace(graph="/no/such/folder/b.json"),
    "trace without graph": lambda w: w.rt.trace().graph,
    "graph second path": lambda w: w.rt.graph("a.json", None),
    "tiles text": lambda w: w.x.tiles("2", 2),
    "tiles none": lambda w: w.x.tiles(),
    "tiles list": lambda w: w.x.tiles([2, 2]),
    "tiles too many": lambda w: w.x.tiles(2, 2, 2),
    "tile text": lambda w: w.x.tiles(2, 2)["a"],
    "tile of another number": lambda w: w.x.tiles(2, 2)[0],
    "tile slice": lambda w: w.x.tiles(2, 2)[:, 0],
    "Reduce dtype": lambda w: Reduce(w.heap),
    "group after all": lambda w: TaskGroup().wait_any(),
    "index dots": lambda w: w.x[..., ...],
    "index truth": lambda w: w.x[True],
    "index truths": lambda w: w.x[np.zeros(4, bool)],
    "index NumPy truth": lambda w: w.x[np.True_],
    "index slice of truths": lambda w: w.x[True:],
    "index slice of arrays": lambda w: w.x[np.array(1) :],
    "index step": lambda w: w.x[::0],
    "index backwards": lambda w: w.x[::-1],
    "index empty": lambda w: w.x[2:2],
    "graph None": lambda w: w.rt.graph(None),
    "graph number": lambda w: w.rt.graph(3),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(w, name):
    """The call raises the project's error and submits nothing."""
    before = w.rt.stats().num_submitted
    with pytest.raises(TilewiseError, match=SENTENCE):
        CALLS[name](w)
    assert w.rt.stats().num_submitted == before


def test_collections_of_other_kinds(w):
    """Arrays, sets and NumPy's scalars stand for lists, integers and truth values."""
    rt, x = w.rt, w.x
    with rt.scope():
        first = rt.submit("sum_f32", [InOut(x), Input(x)], scalars=np.array([4]), worker_type=np.int64(1))
        rt.submit("sum_f32", np.array([InOut(x), Input(x)], object), scalars=[np.int32(4)], after={first})
        rt.submit("fill", [Output(bytes=4)], scalars=[np.uint8(4), np.True_])
    rt.wait_all()


def test_record_tells_the_first_error(w):
    """An error in the block is the one that is raised, also when the runtime has ended the recording."""
    with pytest.raises(RuntimeError, match="mine"), w.rt.record():
        w.rt._native.record_end()
        raise RuntimeError("mine")
