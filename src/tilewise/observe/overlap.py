"""How much of a traced run's communication is hidden behind computation, and what workers waited for.

`measure_overlap` is a pure function of a `Trace` of tile programs. It derives the time of
transfers, the part of it that is hidden, the idle time of workers by cause, and the chain of tasks
that ended last. `kind_of` is the only place that tells transfers from computation.

The records have no dependencies between tasks. Where a figure needs one, it is reconstructed from
times and from the names of ops; each docstring says how, and when this is wrong.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.observe.page import duration
from tilewise.observe.trace import TaskSpan, Times, Trace

__all__ = [
    "KINDS",
    "WAIT_CAUSES",
    "Overlap",
    "PathStep",
    "TransferTime",
    "kind_of",
    "measure_overlap",
    "op_of",
]

KINDS = ("compute", "transfer", "signal", "file")

# In the order in which they are tested. A cause "device N" is added for every device that is waited for.
WAIT_CAUSES = {
    "scheduling": "ready tasks existed, none was taken",
    "transfer": "waiting tasks existed, and a transfer was in progress",
    "dependencies": "all waiting tasks depended on running tasks of the same device",
    "submission": "nothing was submitted yet",
    "tail": "after the last task was taken",
}

_KIND_OF_PART = {
    "all_gather": "transfer",
    "reduce_scatter": "transfer",
    "put": "transfer",
    "get": "transfer",
    "ack": "signal",
    "offer": "signal",
    "notify": "signal",
    "wait": "signal",
    "fence": "signal",
    "arrive": "signal",
    "leave": "signal",
    "end": "signal",
    "fetch": "file",
    "store": "file",
}
_STATEMENT = re.compile(r"(.+):\d+/")  # of a user's tile program: its name and the line
_KIND_OF_OP = {"broadcast": "transfer", "move": "transfer", "fetch": "file", "store": "file"}
_RELEASE_NS = 5_000  # longer than it takes a device to release a task after the last task it depends on


def kind_of(label: str) -> str:
    """What a task with this label does: one of `KINDS`.

    A `transfer` moves elements between devices: a part of an all-gather or a reduce-scatter
    (which adds what it reads), a move between stages, a broadcast, a put or a get. A `signal` task
    has no work; it posts when a tile may be read or overwritten. A `file` task moves a tile between
    memory and a device's file. All other tasks compute.

    Args:
        label: the label of the task's instruction. It is the label of an op (`op:parameter`), or
            that, a slash and a part of the op (`op:parameter/all_gather`), or a statement of a
            user's tile program (`program:line/put`).
    """
    before, _, part = label.rpartition("/")
    if before and part in _KIND_OF_PART:
        return _KIND_OF_PART[part]
    return _KIND_OF_OP.get(label.partition(":")[0], "compute")


def op_of(label: str) -> str:
    """The op that a task belongs to: its label without the part of the op. For a statement of a
    user's tile program, it is the name of the program.
    """
    statement = _STATEMENT.match(label)
    if statement is not None:
        return statement[1]
    before, _, part = label.rpartition("/")
    return before if before and part in _KIND_OF_PART else label


@dataclass(frozen=True)
class TransferTime:
    """Time of transfers: of one device, or of one label summed over its tasks.

    Attributes:
        name: the device's number, or the label.
        count: number of tasks.
        total_ns: time of transfers. For a device, simultaneous transfers count once.
        hidden_ns: the part of it in which a task of the same device computed.
    """

    name: str
    count: int
    total_ns: int
    hidden_ns: int

    @property
    def exposed_ns(self) -> int:
        """The part of the time in which no task of the device computed."""
        return self.total_ns - self.hidden_ns


@dataclass(frozen=True)
class PathStep:
    """A task of the critical path, and why it did not start earlier.

    Attributes:
        task: the task.
        kind: what it does, one of `KINDS`.
        start_ns, run_ns: its start and its duration.
        gap_ns: time from the end of the step before it to its start; 0 for the first step.
        reason: `worker` if its worker was busy with the step before it, `release` if it became
            ready with the end of that step, `submission` if it was submitted after that step, and
            `begin` for the first step.
    """

    task: TaskSpan
    kind: str
    start_ns: int
    run_ns: int
    gap_ns: int
    reason: str


@dataclass(frozen=True)
class Overlap:
    """How communication and computation overlapped in one run.

    Attributes:
        devices: per device, the time of its transfers.
        labels: the same per label of a transfer, summed over tasks, the most exposed first.
        idle_ns: per device and worker, the idle time by cause (see `measure_overlap`).
        busy_ns: time inside tasks by kind, summed over all workers.
        span_ns: from the first start to the last end.
        path: the critical path, in order of execution.
    """

    devices: tuple[TransferTime, ...]
    labels: tuple[TransferTime, ...]
    idle_ns: Mapping[tuple[int, int], Mapping[str, int]]
    busy_ns: Mapping[str, int]
    span_ns: int
    path: tuple[PathStep, ...]

    @property
    def transfer_ns(self) -> int:
        """Time of transfers, summed over devices."""
        return sum(device.total_ns for device in self.devices)

    @property
    def hidden_ns(self) -> int:
        """Hidden time of transfers, summed over devices."""
        return sum(device.hidden_ns for device in self.devices)

    @property
    def hidden_share(self) -> float:
        """Share of the time of transfers that is hidden, 0 to 1; 1 if there were no transfers."""
        return self.hidden_ns / self.transfer_ns if self.transfer_ns else 1.0

    @property
    def transfer_share(self) -> float:
        """Mean over the devices of the share of the run in which a transfer was in progress, 0 to 1."""
        return self.transfer_ns / max(1, self.span_ns * len(self.devices))

    @property
    def idle_shares(self) -> dict[str, float]:
        """Share of all workers' time per cause of idleness, the greatest first."""
        total: Counter[str] = Counter()
        for causes in self.idle_ns.values():
            total.update(causes)
        everything = max(1, self.span_ns * len(self.idle_ns))
        return {cause: ns / everything for cause, ns in total.most_common() if ns}

    @property
    def awaited_share(self) -> float:
        """Share of all workers' time in which they were idle because of other devices or a transfer,
        0 to 1.
        """
        return sum(
            share
            for cause, share in self.idle_shares.items()
            if cause == "transfer" or cause not in WAIT_CAUSES
        )

    def sentence(self) -> str:
        """What communication cost, without a full stop."""
        if not any(device.count for device in self.devices):
            return "no device read from another one"
        mean = duration(self.transfer_ns / len(self.devices))
        return (
            f"transfers took {mean} per device ({self.transfer_share:.1%} of the time), {self.hidden_share:.0%} of it "
            f"hidden behind computation; workers waited for other devices for {self.awaited_share:.1%} of the time"
        )


def measure_overlap(trace: Trace) -> Overlap:
    """Measure how a run's transfers and computation overlapped.

    *Time of transfers.* A transfer is in progress on a device while a task of the kind `transfer`
    runs there, or while bytes are on their way to it from another host. Bytes are on their way from
    the end of the last task of the same op, on any device, until the transfer's task is ready, if
    that last task ran on another host. Within a host, tiles are read in place and nothing is on its
    way. A transfer that is hidden is one during which a task of the kind `compute` runs on any
    worker of the same device. A device with one worker therefore hides only bytes from other hosts:
    its own copies take the worker.

    *Idle time.* At every moment at which a worker runs nothing, the cause is the first that is true
    on its device: ready tasks exist (`scheduling`); or tasks wait, and a transfer is in progress
    (`transfer`), a task runs (`dependencies`), or nothing runs (`device N`, the device of the task
    that released the next one; `dependencies` if it is the same device). Or nothing waits, but more
    is submitted later (`submission`) or not (`tail`).

    *Critical path.* From the task that ended last, each step goes to the task before it on the same
    worker, if the worker was busy when the task became ready, and otherwise to the task that
    released it.

    *The task that released a task* is not recorded. For a transfer or signal, it is the last task
    of the same op on any device, or the last task of the same device, whichever ended less than 5
    µs before the task became ready; or else the last task of the same op on another device. For any
    other task it is the last task of the same device, unless only a task of another device ended
    within the 5 µs.

    What the records cannot show: kernels that read other devices' tiles in place count as
    computation. A transfer from another host that waited for its own buffer counts as on its way.
    If two tasks end at nearly the same time, the path can follow the wrong one. Between hosts, all
    times are uncertain by `trace.clock_error_ns`.

    Args:
        trace: one run of tile programs, as `GraphInstance.timeline` returns it.
    """
    if not trace.tasks:
        return Overlap((), (), {}, {}, 0, ())
    return _Run(trace).measure()


class _Ends(NamedTuple):
    """Tasks of a group in the order of their ends."""

    times: Times
    tasks: NDArray[np.int64]

    def last(self, until: int) -> int:
        """The task that ended last until a time, or -1."""
        place = int(np.searchsorted(self.times, until, side="right")) - 1
        return int(self.tasks[place]) if place >= 0 else -1


_NO_ENDS = _Ends(np.zeros(0, np.int64), np.zeros(0, np.int64))


class _Run:
    """The columns of a trace, and tasks by group in the order of their ends."""

    def __init__(self, trace: Trace) -> None:
        self.trace, tasks = trace, trace.tasks
        self.devices = trace.devices
        self.submit, self.ready, self.start, self.end = trace.times_ns.T
        self.device = np.array([t.device for t in tasks], np.int64)
        names = sorted({t.kernel for t in tasks})
        number = {name: place for place, name in enumerate(names)}
        label = np.array([number[t.kernel] for t in tasks], np.int64)
        self.kind = np.array([KINDS.index(kind_of(name)) for name in names], np.int64)[label]
        ops = {op: place for place, op in enumerate(sorted({op_of(name) for name in names}))}
        self.op = np.array([ops[op_of(name)] for name in names], np.int64)[label]
        self.by_device = _grouped(self.end, ((int(d),) for d in self.device))
        self.by_worker = _grouped(self.end, ((t.device, t.worker) for t in tasks))
        self.by_op = _grouped(self.end, zip(self.op.tolist(), self.device.tolist()))
        self.begin_ns, self.end_ns = int(self.start.min()), int(self.end.max())

    def measure(self) -> Overlap:
        """All figures."""
        arrivals = self._arrivals()
        idle: dict[tuple[int, int], dict[str, int]] = {}
        devices, rows = [], defaultdict[str, list[int]](lambda: [0, 0, 0])
        for device in self.devices:
            mine = self.device == device
            computing = _steps(self.start, self.end, mine & (self.kind == 0))
            moving = mine & (self.kind == 1)
            spans = np.concatenate([np.stack([self.start, self.end], 1)[moving], arrivals[device]])
            transferring = _steps(spans[:, 0], spans[:, 1], slice(None))
            total, hidden = _covered(transferring), _covered(transferring, computing)
            devices.append(TransferTime(str(device), int(moving.sum()), total, hidden))
            self._add_labels(rows, np.flatnonzero(moving), computing)
            moments, causes = self._causes(device, computing, transferring)
            for worker in range(self.trace.num_workers):
                idle[device, worker] = self._idle(device, worker, moments, causes)
        labels = [TransferTime(name, *row) for name, row in rows.items()]
        kinds = np.bincount(self.kind, weights=self.end - self.start, minlength=len(KINDS))
        return Overlap(
            tuple(devices),
            tuple(sorted(labels, key=lambda row: (-row.exposed_ns, row.name))),
            idle,
            {kind: round(ns) for kind, ns in zip(KINDS, kinds.tolist())},
            self.end_ns - self.begin_ns,
            self._path(),
        )

    def _host(self, device: int) -> int:
        hosts = self.trace.hosts
        return hosts[device] if device < len(hosts) else 0

    def _last_ended(self, groups: Mapping[Hashable, _Ends], keys: Iterable[Hashable], task: int) -> int:
        """The task of some groups that ended last before a task became ready, or -1."""
        until = int(self.ready[task]) + self.trace.clock_error_ns
        tasks = [groups.get(key, _NO_ENDS).last(until) for key in keys]
        return max(((int(self.end[one]), one) for one in tasks if one not in (-1, task)), default=(0, -1))[1]

    def _of_op(self, task: int, devices: Sequence[int]) -> int:
        """The task of the same op on some devices that ended last before a task became ready, or -1."""
        return self._last_ended(self.by_op, [(int(self.op[task]), device) for device in devices], task)

    def _released_by(self, task: int) -> int:
        """The task that probably released a task, by the rule of `measure_overlap`, or -1."""
        device = int(self.device[task])
        others = [(d,) for d in self.devices if d != device]
        own = self._last_ended(self.by_device, [(device,)], task)
        if self.kind[task] == 0:
            choices, otherwise = [own, self._last_ended(self.by_device, others, task)], [own]
        else:
            choices = [self._of_op(task, self.devices), own]
            otherwise = [
                self._of_op(task, [d for (d,) in others]),
                self._last_ended(self.by_device, others, task),
            ]
        is_close = (one for one in choices if one >= 0 and self.ready[task] - self.end[one] < _RELEASE_NS)
        return next((one for one in (*is_close, *otherwise, own) if one >= 0), -1)

    def _arrivals(self) -> dict[int, Times]:
        """Per device `[transfer, 2]`: when bytes of another host were on their way to it."""
        spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        is_spread = len({self._host(device) for device in self.devices}) > 1
        for task in np.flatnonzero(self.kind == 1).tolist() if is_spread else ():
            device, source = int(self.device[task]), self._of_op(task, self.devices)
            if source >= 0 and self._host(int(self.device[source])) != self._host(device):
                begin = max(int(self.submit[task]), int(self.end[source]), self.begin_ns)
                spans[device].append((begin, max(begin, int(self.ready[task]))))
        return {d: np.array(spans[d], np.int64).reshape(-1, 2) for d in self.devices}

    def _add_labels(self, rows: dict[str, list[int]], tasks: NDArray[np.int64], computing: _Steps) -> None:
        """Add the tasks of a device's transfers to the rows of their labels."""
        before = computing.total_until(np.stack([self.start[tasks], self.end[tasks]]))
        lengths, hidden = self.end[tasks] - self.start[tasks], before[1] - before[0]
        for task, length, within in zip(tasks.tolist(), lengths.tolist(), hidden.tolist()):
            row = rows[self.trace.tasks[task].kernel]
            row[0], row[1], row[2] = row[0] + 1, row[1] + length, row[2] + within

    def _causes(self, device: int, computing: _Steps, transferring: _Steps) -> tuple[Times, list[str]]:
        """Moments, and for each the cause of idleness on a device until the next moment."""
        mine = self.device == device
        queued = _steps(self.ready, self.start, mine)
        waiting = _steps(self.submit, self.ready, mine)
        running = _steps(self.start, self.end, mine)
        last_submit = int(self.submit[mine].max())
        edges = np.array([self.begin_ns, last_submit, self.end_ns], np.int64)
        moments = np.unique(
            np.concatenate([s.moments for s in (queued, waiting, running, transferring)] + [edges])
        )
        moments = moments[(moments >= self.begin_ns) & (moments <= self.end_ns)]
        is_queued, is_waiting = queued.at(moments), waiting.at(moments)
        is_moving, is_running = transferring.at(moments), running.at(moments)
        order = np.flatnonzero(mine & (self.ready > self.submit))
        order = order[np.argsort(self.ready[order], kind="stable")]
        following = np.searchsorted(self.ready[order], moments, side="right")
        causes, awaited = [], dict[int, str]()
        for place, moment in enumerate(moments.tolist()):
            if is_queued[place]:
                causes.append("scheduling")
            elif not is_waiting[place]:
                causes.append("submission" if moment < last_submit else "tail")
            elif is_moving[place] or is_running[place]:
                causes.append("transfer" if is_moving[place] else "dependencies")
            else:
                task = int(order[following[place]])
                if task not in awaited:  # nothing runs here, so the task that becomes ready next is awaited
                    source = self._released_by(task)
                    is_own = source < 0 or self.device[source] == device
                    awaited[task] = "dependencies" if is_own else f"device {int(self.device[source])}"
                causes.append(awaited[task])
        return moments, causes

    def _idle(self, device: int, worker: int, moments: Times, causes: list[str]) -> dict[str, int]:
        """Idle time of a worker by cause."""
        tasks = self.by_worker.get((device, worker), _NO_ENDS).tasks
        busy = _steps(self.start, self.end, tasks)
        before = np.clip(busy.total_until(moments), 0, None)
        idle = np.diff(moments) - np.diff(before)
        total: Counter[str] = Counter()
        for cause, ns in zip(causes, idle.tolist()):
            total[cause] += ns
        return {cause: ns for cause, ns in total.items() if ns}

    def _path(self) -> tuple[PathStep, ...]:
        task = int(np.argmax(self.end))
        steps: list[PathStep] = []
        while True:
            before, reason = self._before(task)
            gap = max(0, int(self.start[task] - self.end[before])) if before >= 0 else 0
            start, run = int(self.start[task]), int(self.end[task] - self.start[task])
            steps.append(PathStep(self.trace.tasks[task], KINDS[self.kind[task]], start, run, gap, reason))
            if before < 0:
                return tuple(steps[::-1])
            task = before

    def _before(self, task: int) -> tuple[int, str]:
        """The step of the critical path before a task, and the reason. It is -1 for the first step."""
        one = self.trace.tasks[task]
        submit, ready, start = (int(times[task]) for times in (self.submit, self.ready, self.start))
        on_worker = self.by_worker[one.device, one.worker].last(start)
        on_device = self.by_device[one.device,]
        choices = [(on_worker, "worker")] if on_worker >= 0 and self.end[on_worker] >= ready else []
        if ready > submit:
            choices += [(self._released_by(task), "release"), (on_device.last(ready), "release")]
        choices += [(on_device.last(submit), "submission"), (on_worker, "worker")]
        for before, reason in choices:
            if (
                before >= 0
                and before != task
                and self.start[before] < start
                and self.end[before] < self.end[task]
            ):
                return before, reason
        return -1, "begin"


class _Steps(NamedTuple):
    """How many spans are open from `moments[i]` until the next moment."""

    moments: Times
    counts: Times

    def at(self, moments: Times) -> NDArray[np.bool_]:
        """Whether any span is open at some moments."""
        place = np.searchsorted(self.moments, moments, side="right")
        return np.concatenate([np.zeros(1, np.int64), self.counts])[place] > 0

    def total_until(self, moments: Times) -> Times:
        """The time until some moments in which any span was open."""
        if not len(self.moments):
            return np.zeros_like(moments)
        total = np.concatenate([[0], np.cumsum(np.diff(self.moments) * (self.counts[:-1] > 0))])
        place = np.clip(np.searchsorted(self.moments, moments, side="right") - 1, 0, len(self.moments) - 1)
        since = np.clip(moments - self.moments[place], 0, None)
        return total[place] + np.where(self.counts[place] > 0, since, 0)


def _steps(begins: Times, ends: Times, chosen: NDArray[np.bool_] | NDArray[np.int64] | slice) -> _Steps:
    begins, ends = begins[chosen], ends[chosen]
    moments, index = np.unique(np.concatenate([begins, ends]), return_inverse=True)
    index = index.reshape(-1)
    opened = np.bincount(index[: len(begins)], minlength=len(moments))
    closed = np.bincount(index[len(begins) :], minlength=len(moments))
    return _Steps(moments, np.cumsum(opened - closed))


def _covered(*all_of: _Steps) -> int:
    """The time in which each has an open span."""
    moments = np.unique(np.concatenate([steps.moments for steps in all_of]))
    is_open = np.ones(len(moments), bool)
    for steps in all_of:
        is_open &= steps.at(moments)
    return int((np.diff(moments) * is_open[:-1]).sum())


def _grouped(ends: Times, keys: Iterable[Hashable]) -> dict[Hashable, _Ends]:
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for task, key in enumerate(keys):
        groups[key].append(task)
    tables = {}
    for key, members in groups.items():
        tasks = np.array(members, np.int64)
        tasks = tasks[np.argsort(ends[tasks], kind="stable")]
        tables[key] = _Ends(ends[tasks], tasks)
    return tables
