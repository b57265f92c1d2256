"""Random programs for the task runtime, and the result of a sequential run.

A program has submitters (one thread each) with their own buffers and two shared ones, on which
submitters only commute or reduce, so that the result does not depend on their order. `run_program`
runs it on a runtime. `run_in_order` runs the same kernel one task after another and determines
which tasks a failure must, and which it may, affect.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from tilewise.core.errors import TaskFailed
from tilewise.runtime import (
    Commute,
    InOut,
    Input,
    NoDep,
    Output,
    Reduce,
    Runtime,
    TaskExecutionHints,
    TaskHandle,
)

GRID = (8, 32)  # bytes; tasks use boxes of it
SMALL = 64
INPUT, OUTPUT, INOUT, COMMUTE, REDUCE = range(5)
MODES = {INPUT: Input, OUTPUT: Output, INOUT: InOut, COMMUTE: Commute}


class _Operand(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("mode", "rows", "cols", "stride")]


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("seed", "fails", "delay_ns", "num_operands")),
        ("operands", _Operand * 8),
    ]


@dataclass(frozen=True)
class Access:
    """A task's access to a buffer: "grid", "a", "b", "commuted", "reduced", or ("own", n): the n-th
    output that the runtime allocated in this submitter. `box`: rows and columns of the grid.
    """

    buffer: object
    mode: int
    box: tuple[int, int, int, int] | None = None


@dataclass
class Step:
    """One task, or with children a task that submits them, or a "begin" or "end" of a scope."""

    kind: str
    accesses: list[Access] = field(default_factory=list)
    seed: int = 0
    fails: bool = False
    delay_us: int = 0
    after: int | None = None
    priority: int = 0
    makes: bool = False
    children: list[Step] = field(default_factory=list)


@dataclass
class Program:
    """Submitters with their steps, and the sizes of the runtime."""

    submitters: list[list[Step]]
    window: int
    num_workers: int


# Drawing.


@st.composite
def boxes(draw):
    """Rows and columns of the grid; about one in three is the whole grid."""
    if draw(st.integers(0, 2)) == 0:
        return None
    top, left = draw(st.integers(0, 7)), 4 * draw(st.integers(0, 7))
    return top, draw(st.integers(top + 1, 8)), left, 4 * draw(st.integers(left // 4 + 1, 8))


@st.composite
def accesses(draw, owned, is_child=False):
    """Up to four accesses; a buffer other than the grid occurs in a task once."""
    accesses = {}
    for _ in range(draw(st.integers(1, 3 if is_child else 4))):
        choices = ["grid", "grid", "a", "b"] + ([] if is_child else ["commuted", "reduced"]) + owned
        buffer = draw(st.sampled_from(choices))
        if buffer == "commuted":
            accesses[buffer] = Access(buffer, COMMUTE)
        elif buffer == "reduced":
            accesses[buffer] = Access(buffer, REDUCE)
        else:
            mode = draw(
                st.sampled_from([INPUT, INPUT, OUTPUT, INOUT, INOUT] + ([COMMUTE] if buffer == "b" else []))
            )
            box = draw(boxes()) if buffer == "grid" else None
            accesses[buffer, box] = Access(buffer, mode, box)
    return list(accesses.values())


@st.composite
def programs_of(draw, number, may_fail):
    steps: list[Step] = []
    scopes: list[list[object]] = [[]]
    num_owned = 0
    for place in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["task"] * 8 + ["parent", "begin", "end"]))
        if kind == "begin" and len(scopes) < 4:
            scopes.append([])
            steps.append(Step("begin"))
            continue
        if kind == "end" and len(scopes) > 1:
            scopes.pop()
            steps.append(Step("end"))
            continue
        owned = [own for scope in scopes for own in scope]
        seed = number * 1000 + place
        step = Step("task", seed=seed, delay_us=draw(st.sampled_from([0, 0, 0, 20, 200])))
        if kind == "parent":
            step.accesses = [Access("grid", INOUT), Access("a", INOUT), Access("b", INOUT)]
            step.children = [
                Step(
                    "task", draw(accesses([], True)), seed * 50 + n, may_fail and draw(st.integers(0, 9)) == 0
                )
                for n in range(draw(st.integers(1, 4)))
            ]
        else:
            step.accesses = draw(accesses(owned))
            step.fails = may_fail and draw(st.integers(0, 7)) == 0
            step.priority = draw(st.sampled_from([0, 0, 0, 1, -1]))
            if draw(st.integers(0, 3)) == 0:
                step.makes = True
                scopes[-1].append(("own", num_owned))
                num_owned += 1
            tasks = [i for i, s in enumerate(steps) if s.kind == "task"]
            if tasks and draw(st.integers(0, 4)) == 0:
                step.after = draw(st.sampled_from(tasks))
        steps.append(step)
    return steps + [Step("end") for _ in scopes[1:]]


@st.composite
def programs(draw):
    """Whole programs. Several submitters never fail: which tasks a failure reaches would depend on their order."""
    num_submitters = draw(st.sampled_from([1, 1, 1, 2, 3]))
    may_fail = num_submitters == 1 and draw(st.booleans())
    return Program(
        [draw(programs_of(n, may_fail)) for n in range(num_submitters)],
        draw(st.sampled_from([2, 4, 8, 16, 64])),
        draw(st.integers(1, 8)),
    )


# Running.


def new_memory(num_submitters):
    names = [(submitter, name) for submitter in range(num_submitters) for name in ("grid", "a", "b")] + [
        "commuted",
        "reduced",
    ]
    memory = {}
    for n, name in enumerate(names):
        shape = GRID if name[1] == "grid" else (1, SMALL)
        memory[name] = ((np.arange(np.prod(shape)) * 7 + n) % 251).astype(np.uint8).reshape(shape)
    return memory


def _work(step, shapes):
    work = _Work(step.seed, step.fails, step.delay_us * 1000, len(shapes))
    for n, (mode, rows, cols, stride) in enumerate(shapes):
        work.operands[n] = _Operand(mode, rows, cols, stride)
    return work


def _shape(access):
    if access.buffer != "grid":
        return access.mode, 1, SMALL, SMALL
    top, bottom, left, right = access.box or (0, GRID[0], 0, GRID[1])
    return access.mode, bottom - top, right - left, GRID[1]


def _shapes(step):
    return [_shape(access) for access in step.accesses] + ([(OUTPUT, 1, SMALL, SMALL)] if step.makes else [])


def run_program(program, kernels, drops_order=False):
    """Memory, and failed tasks of each submitter; `drops_order` hides inputs from the runtime, a planted fault."""
    memory = new_memory(len(program.submitters))
    failed = [set() for _ in program.submitters]
    errors = []
    with Runtime(num_workers=program.num_workers, window=program.window, heap_bytes=16 << 20) as rt:
        rt.load_library(kernels)
        mix = rt.kernel("mix")
        buffers = {name: rt.register(array) for name, array in memory.items()}

        def run_submitter(submitter):
            try:
                failed[submitter] = _run_submitter(
                    rt, mix, program.submitters[submitter], submitter, buffers, drops_order
                )
            except BaseException as error:
                errors.append(error)

        others = [
            threading.Thread(target=run_submitter, args=(n,)) for n in range(1, len(program.submitters))
        ]
        for thread in others:
            thread.start()
        run_submitter(0)
        for thread in others:
            thread.join()
        if errors:
            raise errors[0]
    return memory, failed


def _run_submitter(rt, mix, steps, submitter, buffers, drops_order):
    tasks, works, owned = [], [], []
    children: dict[tuple[int, int], TaskHandle] = {}

    def param(access):
        whole = owned[access.buffer[1]] if isinstance(access.buffer, tuple) else None
        if whole is None:
            whole = buffers.get((submitter, access.buffer)) or buffers[access.buffer]
        if access.mode == REDUCE:
            return Reduce(whole, "sum_i64")
        place = whole
        if access.box is not None:
            top, bottom, left, right = access.box
            place = whole[top:bottom, left:right]
        if drops_order and access.mode == INPUT:
            return NoDep(place)
        return MODES[access.mode](place)

    def submit(step, after=()):
        work = _work(step, _shapes(step))
        works.append(work)  # lives as long as the submitter; a parent's children are submitted next to it
        params = [param(access) for access in step.accesses] + ([Output(bytes=SMALL)] if step.makes else [])
        hints = TaskExecutionHints(priority=step.priority) if step.priority else None
        return rt.submit(mix, params, scalars=[ctypes.addressof(work)], after=after, hints=hints)

    def parent(step, number):
        def run_children(*_):
            for n, child in enumerate(step.children):
                children[number, n] = submit(child)

        return rt.submit(run_children, [param(access) for access in step.accesses])

    for step in steps:
        if step.kind == "begin":
            rt.scope_begin()
        elif step.kind == "end":
            rt.scope_end()
        elif step.children:
            tasks.append(parent(step, len(tasks)))
        else:
            tasks.append(submit(step, [tasks[_place(steps, step.after)]] if step.after is not None else ()))
            owned.extend(tasks[-1].outputs)
    with suppress(TaskFailed):
        rt.wait_all()
    every = dict(enumerate(tasks)) | children
    return {name for name, task in every.items() if task.exception() is not None}


def _place(steps, index):
    """The number of a step among the tasks."""
    return sum(step.kind == "task" for step in steps[:index])


# The oracle.


@dataclass
class _Writes:
    """The last writers of a buffer, per byte and per access that is not completely overwritten yet.
    Values: whether the task failed.
    """

    bytes_failed: np.ndarray
    pieces: list[tuple[np.ndarray, bool]] = field(default_factory=list)
    group: list[tuple[np.ndarray, bool]] | None = None  # commuting tasks since the last other access

    def close_group(self):
        """Commuting tasks do not wait for each other; their failures affect the tasks after them."""
        for where, is_failed in self.group or []:
            self.bytes_failed |= where & is_failed
            self.pieces.append((where, is_failed))
        self.group = None


def run_in_order(program, mix, failed):
    """Run tasks that did not fail one after another: memory, and messages about unexplained failures."""
    memory = new_memory(len(program.submitters))
    strange = []
    for submitter, steps in enumerate(program.submitters):
        _Submitter(memory, mix, submitter, failed[submitter], strange).run(steps)
    return memory, strange


class _Submitter:
    def __init__(self, memory, mix, submitter, failed, strange, parent=None):
        self.memory, self.mix, self.submitter, self.failed, self.strange = (
            memory,
            mix,
            submitter,
            failed,
            strange,
        )
        self.parent = parent  # the task whose children these are
        self.owned: list[np.ndarray] = []
        self.writes: dict[object, _Writes] = {}

    def run(self, steps):
        for number, step in enumerate(step for step in steps if step.kind == "task"):
            name = number if self.parent is None else (self.parent, number)
            is_failed = name in self.failed
            must, may = self._poison(step)
            if step.after is not None and _place(steps, step.after) in self.failed:
                must = may = True
            own = step.fails
            if step.makes:
                self.owned.append(np.zeros((1, SMALL), np.uint8))
            if step.children and (
                not is_failed or any((number, n) in self.failed for n in range(len(step.children)))
            ):
                # children run even when one of them fails; then their parent fails
                _Submitter(self.memory, self.mix, self.submitter, self.failed, self.strange, number).run(
                    step.children
                )
                own = any((number, n) in self.failed for n in range(len(step.children)))
            elif not is_failed:
                self._execute(step)
            if is_failed != (must or own) and not (is_failed and may):
                self.strange.append(
                    f"submitter {self.submitter} task {name}: failed {is_failed}, poisoned {must}, own {own}"
                )
            self._note(step, is_failed)

    def _array(self, access):
        if isinstance(access.buffer, tuple):
            return self.owned[access.buffer[1]]
        whole = self.memory.get((self.submitter, access.buffer))
        whole = self.memory[access.buffer] if whole is None else whole
        if access.box is None:
            return whole
        top, bottom, left, right = access.box
        return whole[top:bottom, left:right]

    def _execute(self, step):
        arrays, sums = [], []
        for access in step.accesses:
            array = self._array(access)
            if access.mode == REDUCE:
                sums.append((array, np.zeros_like(array)))
                array = sums[-1][1]
            arrays.append(array)
        if step.makes:
            arrays.append(self.owned[-1])
        calm = Step("task", step.accesses, step.seed, False, 0, makes=step.makes)
        work = _work(calm, _shapes(step))
        table = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
        scalars = (ctypes.c_uint64 * 1)(ctypes.addressof(work))
        assert self.mix(table, scalars) == 0
        is_poisoned = bool(self._state(Access("reduced", REDUCE)).bytes_failed.any())
        for target, partial in sums if not is_poisoned else ():
            target.view(np.int64)[...] += partial.view(np.int64)

    def _state(self, access):
        shape = GRID if access.buffer == "grid" else (1, SMALL)
        return self.writes.setdefault(access.buffer, _Writes(np.zeros(shape, bool)))

    def _where(self, access):
        where = np.zeros(GRID if access.buffer == "grid" else (1, SMALL), bool)
        if access.box is None:
            where[...] = True
        else:
            top, bottom, left, right = access.box
            where[top:bottom, left:right] = True
        return where

    def _poison(self, step):
        must = may = False
        for access in step.accesses:
            state, where = self._state(access), self._where(access)
            if access.mode != COMMUTE:
                state.close_group()
            if access.mode in (INPUT, INOUT, COMMUTE):
                must |= bool((state.bytes_failed & where).any())
                may |= any(is_failed and bool((piece & where).any()) for piece, is_failed in state.pieces)
        return must, may

    def _note(self, step, is_failed):
        for access in step.accesses:
            state, where = self._state(access), self._where(access)
            if access.mode == COMMUTE:
                state.group = [*(state.group or []), (where, is_failed)]
            elif access.mode == REDUCE:  # the chain of sums breaks where a partial is missing
                state.bytes_failed |= is_failed
            elif access.mode in (OUTPUT, INOUT):
                state.bytes_failed[where] = is_failed
                state.pieces = [(p, f) for p, f in state.pieces if bool((p & ~where).any())]
                state.pieces.append((where, is_failed))
        if step.makes:
            state = _Writes(np.full((1, SMALL), is_failed))
            state.pieces.append((np.ones((1, SMALL), bool), is_failed))
            self.writes["own", len(self.owned) - 1] = state
