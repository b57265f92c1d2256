"""What a traced run of tasks did: its records, and the figures that follow from them.

A `Trace` has records of tasks and of stalls (times when a submitter had to wait). From these it
derives idle time by cause, time per kernel, the critical path, fill levels and delays. The native
task runtime fills the records. `perfetto` and `trace_report` show them.

Records are never rejected. A time of 0 is unknown and is replaced by the next later time that is
known. Threads stamp times independently, so the times of a task are made to ascend (submit, ready,
start, end).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "IDLE_CAUSES",
    "STALL_CAUSES",
    "CriticalPath",
    "Curve",
    "KernelTime",
    "Stall",
    "TaskSpan",
    "Trace",
    "WorkerTime",
]

Times = NDArray[np.int64]

STALL_CAUSES = ("window", "heap", "handles", "regions")

# In the order in which they are tested: what a worker without a task could have hoped for at that moment.
IDLE_CAUSES = {
    "scheduling": "ready tasks existed, none was taken",
    "dependencies": "all waiting tasks depended on running ones",
    "submission": "nothing was submitted yet",
    "tail": "after the last task was taken",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpan:
    """One task of a traced run. Times are in ns of one steady clock (`time.monotonic_ns`), or 0 if
    unknown.

    Attributes:
        task: id of the task.
        kernel, name: name of the kernel, and name of the task if it was given one.
        device: the device on which it ran.
        worker: the worker that ran it; -1 - submitter if a submitter ran it while it waited.
        submitter: number of the submitting thread, from 0.
        scope_depth: number of scopes that were open in the submitting thread.
        status: 0 if the task succeeded.
        priority: priority with which it was submitted.
        submit_ns, ready_ns, start_ns, end_ns: when it was submitted, became ready (all producers
            were complete), began and ended.
        row: the first row of its tile, if it is a task of a tile program. `kernel` is then the
            label of the task's instruction.
        target: of a tile program's task, 1 + the worker that it was for; negative if it only preferred
            this worker; 0 if it was for any.
        producers: ids of the tasks that it had to wait for, if they were recorded
            (`Runtime.trace(graph=...)`).
    """

    task: int
    kernel: str
    name: str | None = None
    device: int = 0
    worker: int
    submitter: int
    scope_depth: int
    status: int
    priority: int
    submit_ns: int
    ready_ns: int
    start_ns: int
    end_ns: int
    row: int = 0
    target: int = 0
    producers: tuple[int, ...] = ()

    @property
    def pinned_worker(self) -> int | None:
        """The worker that had to run it; None if others might."""
        return self.target - 1 if self.target > 0 else None

    @property
    def preferred_worker(self) -> int | None:
        """The worker that it preferred; None without a preference."""
        return -1 - self.target if self.target < 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """A time when a submitter could not go on, because it lacked room (see STALL_CAUSES) or waited
    for a task.
    """

    submitter: int
    cause: str
    begin_ns: int
    end_ns: int
    live_tasks: int
    heap_used_bytes: int
    device: int = 0


@dataclass(frozen=True, eq=False)
class Curve:
    """A step function: its value is `values[i]` from `times_ns[i]` until `times_ns[i + 1]`, and 0
    before the first time.
    """

    times_ns: Times
    values: Times

    def at(self, moments_ns: Times) -> Times:
        """The values at some moments."""
        index = np.searchsorted(self.times_ns, moments_ns, side="right")
        return np.concatenate([np.zeros(1, np.int64), self.values])[index]

    @property
    def peak(self) -> int:
        """The highest value."""
        return int(self.values.max(initial=0))


@dataclass(frozen=True)
class KernelTime:
    """The time of one kernel. `share` is its share of the time of all kernels. If a kernel waits
    for other tasks, the waiting counts.
    """

    kernel: str
    count: int
    total_ns: int
    median_ns: int
    share: float


@dataclass(frozen=True)
class WorkerTime:
    """How a worker spent the run: the busy time, and the idle time by cause (the keys of
    IDLE_CAUSES).
    """

    device: int
    worker: int
    busy_ns: int
    idle_ns: dict[str, int]


@dataclass(frozen=True)
class CriticalPath:
    """The chain of tasks that bounds the run from below, in order of execution.

    `run_ns` is the time inside the chain's tasks. `span_ns` is the time from its first start to its
    last end. `is_from_edges` says which rule made the chain (see `Trace.critical_path`).
    """

    tasks: tuple[TaskSpan, ...]
    run_ns: int
    span_ns: int
    is_from_edges: bool


@dataclass(frozen=True)
class Trace:
    """The records of one traced run.

    Attributes:
        tasks, stalls: the records.
        num_workers: number of workers per device.
        dropped: number of records that did not fit.
        hosts: per device, the number of its host; empty if all devices are on one host.
        clock_error_ns: bound of the error of times of one host compared with those of another.
            Times are those of the first host's clock; the others' offsets were measured.
    """

    tasks: tuple[TaskSpan, ...]
    stalls: tuple[Stall, ...]
    num_workers: int
    dropped: int = 0
    hosts: tuple[int, ...] = ()
    clock_error_ns: int = 0

    @classmethod
    def of_program(
        cls,
        rows: Iterable[tuple[Any, ...]],
        num_workers: int,
        *,
        dropped: int = 0,
        hosts: Sequence[int] = (),
        clock_error_ns: int = 0,
    ) -> Trace:
        """Make a trace of tile programs from the rows that an executor's `timeline()` returns.

        Args:
            rows: device, worker, label, row, the submit, ready, start and end time in ns, priority and
                target of each task; the last two may be left out.
            num_workers: number of workers per device.
            dropped: number of records that did not fit.
            hosts: per device, the number of its host; empty if all devices are on one host.
            clock_error_ns: bound of the error of times between hosts.
        """
        names = (
            "device",
            "worker",
            "kernel",
            "row",
            "submit_ns",
            "ready_ns",
            "start_ns",
            "end_ns",
            "priority",
            "target",
        )
        tasks = (
            TaskSpan(task=n, submitter=0, scope_depth=0, status=0, **{"priority": 0, **dict(zip(names, row))})
            for n, row in enumerate(rows)
        )
        return cls(tuple(tasks), (), num_workers, dropped, tuple(hosts), clock_error_ns)

    @cached_property
    def times_ns(self) -> Times:
        """`[task, 4]`: submit, ready, start and end, without gaps and ascending."""
        rows = [(t.submit_ns, t.ready_ns, t.start_ns, t.end_ns) for t in self.tasks]
        times = np.array(rows, np.int64).reshape(-1, 4)
        for column in (2, 1, 0):
            times[:, column] = np.where(times[:, column] == 0, times[:, column + 1], times[:, column])
        return np.maximum.accumulate(times, axis=1)

    @cached_property
    def _places(self) -> Times:
        """`[task, 2]`: device and worker."""
        return np.array([(t.device, t.worker) for t in self.tasks], np.int64).reshape(-1, 2)

    @property
    def begin_ns(self) -> int:
        """The first moment of the run: a submission or a stall."""
        firsts = [s.begin_ns for s in self.stalls]
        return min([*firsts, int(self.times_ns[:, 0].min())] if self.tasks else firsts, default=0)

    @property
    def end_ns(self) -> int:
        """The last moment of the run: a task's end or a stall's."""
        lasts = [s.end_ns for s in self.stalls]
        return max([*lasts, int(self.times_ns[:, 3].max())] if self.tasks else lasts, default=0)

    @property
    def span_ns(self) -> int:
        """Nanoseconds from the first moment to the last."""
        return self.end_ns - self.begin_ns

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that took part in the run."""
        return tuple(sorted({t.device for t in self.tasks} | {s.device for s in self.stalls})) or (0,)

    def live_tasks(self, device: int | None = None) -> Curve:
        """How many tasks were submitted and not complete, over time (the fill level of the windows)."""
        return self._count(device, 0, 3)

    def pending_tasks(self, device: int | None = None) -> Curve:
        """How many tasks waited for others, over time."""
        return self._count(device, 0, 1)

    def ready_tasks(self, device: int | None = None) -> Curve:
        """How many tasks were ready but did not run yet, over time (the length of the ready
        queues).
        """
        return self._count(device, 1, 2)

    def heap_used_bytes(self) -> Curve:
        """Fill level of the heap. It is known only where submitters stalled."""
        points = sorted((s.begin_ns, s.heap_used_bytes) for s in self.stalls)
        table = np.array(points, np.int64).reshape(-1, 2)
        return Curve(table[:, 0], table[:, 1])

    def workers(self) -> tuple[WorkerTime, ...]:
        """How every worker spent the run.

        For every moment at which a worker ran nothing, the cause is the first of IDLE_CAUSES that
        is true on its device at that moment. Submitters that helped are not included, because their
        records do not say what else they did.
        """
        times = []
        for device in self.devices:
            moments, spent = self._spent_by_cause(device)
            for worker in range(self.num_workers):
                gaps = self._gaps(device, worker)
                idle = {
                    cause: round(float(np.diff(np.interp(gaps, moments, total), axis=1).sum()))
                    for cause, total in spent.items()
                }
                times.append(WorkerTime(device, worker, self.span_ns - sum(idle.values()), idle))
        return tuple(times)

    @property
    def utilisation(self) -> float:
        """Share of the workers' time in which they ran tasks, 0 to 1."""
        rows = self.workers()
        return sum(w.busy_ns for w in rows) / max(1, self.span_ns * len(rows))

    @property
    def all_busy_share(self) -> float:
        """Share of the time from the first start to the last end in which every device ran a task, 0 to 1."""
        if not self.tasks:
            return 0.0
        starts, ends = self.times_ns[:, 2], self.times_ns[:, 3]
        moments = np.unique(np.concatenate([starts, ends]))
        is_busy = np.ones(len(moments), bool)
        for device in self.devices:
            is_busy &= self._count(device, 2, 3).at(moments) > 0
        return float((np.diff(moments) * is_busy[:-1]).sum() / max(1, moments[-1] - moments[0]))

    def kernels(self) -> tuple[KernelTime, ...]:
        """Time per kernel, the longest first."""
        durations: defaultdict[str, list[int]] = defaultdict(list)
        for task, (_, _, start, end) in zip(self.tasks, self.times_ns.tolist()):
            durations[task.kernel].append(end - start)
        everything = max(1, sum(map(sum, durations.values())))
        rows = [
            KernelTime(kernel, len(d), sum(d), int(np.median(d)), sum(d) / everything)
            for kernel, d in durations.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.kernel)))

    def scheduling_delay_ns(self) -> tuple[int, int]:
        """Nanoseconds from ready to start: the median and the 99th percentile over all tasks."""
        if not self.tasks:
            return 0, 0
        median, p99 = np.percentile(self.times_ns[:, 2] - self.times_ns[:, 1], [50, 99], method="lower")
        return int(median), int(p99)

    @property
    def num_helped(self) -> int:
        """Number of tasks that submitters ran while they waited."""
        return sum(t.worker < 0 for t in self.tasks)

    @cached_property
    def critical_path(self) -> CriticalPath:
        """The chain of tasks that bounds the run.

        If producers were recorded, it is the chain along producers whose tasks have the greatest
        sum of durations.

        Otherwise the chain is reconstructed backwards from the task that ended last. The
        predecessor of a task that waited is the task that ended last between the waiting task's
        submission and the moment when it became ready. The chain begins with a task that was ready
        when it was submitted, or that has no such predecessor. If two tasks ended at nearly the
        same time (within the time that a release takes), the reconstruction can choose the wrong
        one.
        """
        has_edges = any(t.producers for t in self.tasks)
        chain = self._longest_chain() if has_edges else self._released_chain()
        runs = self.times_ns[chain, 3] - self.times_ns[chain, 2]
        span = int(self.times_ns[chain[-1], 3] - self.times_ns[chain[0], 2]) if chain else 0
        return CriticalPath(tuple(self.tasks[i] for i in chain), int(runs.sum()), span, has_edges)

    def _count(self, device: int | None, enter: int, leave: int) -> Curve:
        times = self.times_ns
        if device is not None:
            times = times[self._places[:, 0] == device]
        moments, index = np.unique(np.concatenate([times[:, enter], times[:, leave]]), return_inverse=True)
        index = index.reshape(-1)
        entered = np.bincount(index[: len(times)], minlength=len(moments))
        left = np.bincount(index[len(times) :], minlength=len(moments))
        return Curve(moments, np.cumsum(entered - left))

    def _spent_by_cause(self, device: int) -> tuple[Times, dict[str, Times]]:
        """Moments, and per cause the total time up to each moment in which the cause was true on
        this device.
        """
        ready, pending = self.ready_tasks(device), self.pending_tasks(device)
        submits = self.times_ns[self._places[:, 0] == device, 0]
        last_submit = submits.max(initial=self.begin_ns)
        edges = np.array([self.begin_ns, last_submit, self.end_ns], np.int64)
        moments = np.unique(np.concatenate([ready.times_ns, pending.times_ns, edges]))
        holds = {
            "scheduling": ready.at(moments) > 0,
            "dependencies": pending.at(moments) > 0,
            "submission": moments < last_submit,
            "tail": np.ones(len(moments), bool),
        }
        steps, open_ = np.diff(moments), np.ones(len(moments), bool)
        spent: dict[str, Times] = {}
        for cause, applies in holds.items():
            spent[cause] = np.concatenate([[0], np.cumsum(steps * (applies & open_)[:-1])])
            open_ &= ~applies
        return moments, spent

    def _gaps(self, device: int, worker: int) -> Times:
        """`[gap, 2]`: the times when a worker ran nothing. Spans of tasks may nest, because a task
        that waits helps to run other tasks.
        """
        spans = self.times_ns[(self._places == (device, worker)).all(axis=1), 2:]
        spans = spans[np.argsort(spans[:, 0], kind="stable")]
        begins = np.concatenate([[self.begin_ns], np.maximum.accumulate(spans[:, 1])])
        ends = np.concatenate([spans[:, 0], [self.end_ns]])
        return np.stack([begins, np.maximum(begins, ends)], axis=1)

    def _longest_chain(self) -> list[int]:
        """Tasks along producers with the greatest sum of durations, visited after all their producers."""
        index = {t.task: i for i, t in enumerate(self.tasks)}
        before = [[index[p] for p in t.producers if p in index] for t in self.tasks]
        after: defaultdict[int, list[int]] = defaultdict(list)
        for task, producers in enumerate(before):
            for producer in producers:
                after[producer].append(task)
        unmet = [len(producers) for producers in before]
        length = (self.times_ns[:, 3] - self.times_ns[:, 2]).tolist()
        came_from = [-1] * len(before)
        ready = [task for task, count in enumerate(unmet) if count == 0]
        for task in ready:
            if before[task]:
                came_from[task] = max(before[task], key=length.__getitem__)
                length[task] += length[came_from[task]]
            for consumer in after[task]:
                unmet[consumer] -= 1
                if unmet[consumer] == 0:
                    ready.append(consumer)
        return _chain(max(ready, key=length.__getitem__, default=-1), came_from)

    def _released_chain(self) -> list[int]:
        """The tasks on the reconstructed chain back from the last end. Each was released by the one
        before it.
        """
        times = self.times_ns
        by_end = np.argsort(times[:, 3], kind="stable")
        ends = times[by_end, 3]
        chain = [int(by_end[-1])] if self.tasks else []
        while chain:
            submit, ready, start, _ = times[chain[-1]].tolist()
            first, last = np.searchsorted(ends, [submit, ready], side="right")
            earlier = (int(by_end[place]) for place in range(int(last) - 1, int(first) - 1, -1))
            releasing = next((task for task in earlier if times[task, 2] < start), None)
            if releasing is None:
                break
            chain.append(releasing)
        return chain[::-1]


def _chain(last: int, came_from: Sequence[int]) -> list[int]:
    """Follow `came_from` back to its beginning, and return the chain in order of execution."""
    chain: list[int] = []
    while last >= 0:
        chain.append(last)
        last = came_from[last]
    return chain[::-1]
