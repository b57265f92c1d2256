"""Files for Perfetto and chrome://tracing, in the Chrome trace event format.

`write_perfetto` writes traces of tasks. Other functions make single events, from which
`graph.parallel.debugger` builds its files. Arguments are in ns. Times in files are in microseconds
since the run's first moment.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tilewise.observe.overlap import kind_of
from tilewise.observe.trace import Curve, TaskSpan, Trace

__all__ = ["Event", "name_event", "slice_event", "write_events", "write_perfetto"]

Event = dict[str, object]

MAX_ARROWS = 20_000  # more than that hide the picture and slow the viewer down
SUBMITTER_THREADS = 1_000_000  # thread ids of submitters start here, those of workers at 0


def name_event(kind: str, process: int, thread: int, name: str) -> Event:
    """An event that names a process (`process_name`) or a thread (`thread_name`)."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def slice_event(
    name: str, category: str, process: int, thread: int, begin_ns: int, end_ns: int, args: dict[str, object]
) -> Event:
    """An event that is a bar on a thread's track. Times are in ns since the first moment of the
    run.
    """
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": begin_ns / 1e3,
        "dur": (end_ns - begin_ns) / 1e3,
        "args": args,
    }


def write_events(
    path: str | Path, events: Iterable[Event], about: Mapping[str, object] | None = None
) -> None:
    """Write events as one JSON file, piece by piece, so that a long trace is never in memory as a
    whole.

    Args:
        path: file to write.
        events: the events.
        about: facts about the whole trace.
    """
    with Path(path).open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ns", ')
        if about:
            file.write(f'"otherData": {json.dumps(about)}, ')
        file.write('"traceEvents": [')
        for place, event in enumerate(events):
            file.write((",\n" if place else "\n") + json.dumps(event))
        file.write("\n]}\n")


def write_perfetto(path: str | Path, trace: Trace) -> None:
    """Write a trace of tasks. It shows a process per device, a thread per worker and a thread per
    submitter.

    A submitter's track shows its stalls (times when it had to wait), the tasks that it ran
    meanwhile, and a mark per submission. Counters show live and ready tasks, the scope depth of
    each submitter, and the heap's fill level where submitters stalled. If the producers of tasks
    are known, arrows from them are drawn, unless there would be more than 20,000. The category of a
    task that does not compute says what it does (`overlap.kind_of`). Devices of several hosts are on
    one clock; their names have the host and the error of the clock.

    Args:
        path: file to write; opens in Perfetto (ui.perfetto.dev) and chrome://tracing.
        trace: what the runtime recorded.
    """
    about = {"clock_error_us": trace.clock_error_ns / 1e3} if trace.clock_error_ns else None
    write_events(path, _events(trace), about)


def _events(trace: Trace) -> Iterator[Event]:
    yield from _names(trace)
    times = (trace.times_ns - trace.begin_ns).tolist()
    for task, row in zip(trace.tasks, times):
        yield _task_slice(task, row)
        yield _submit_mark(task, row[0])
    for stall in trace.stalls:
        begin, end = stall.begin_ns - trace.begin_ns, stall.end_ns - trace.begin_ns
        args: dict[str, object] = {"live_tasks": stall.live_tasks, "heap_used_bytes": stall.heap_used_bytes}
        thread = SUBMITTER_THREADS + stall.submitter
        yield slice_event(f"stall: {stall.cause}", "stall", stall.device, thread, begin, end, args)
    for device in trace.devices:
        yield from _counter("live tasks", device, trace.live_tasks(device), trace.begin_ns)
        yield from _counter("ready tasks", device, trace.ready_tasks(device), trace.begin_ns)
    yield from _counter("heap bytes", trace.devices[0], trace.heap_used_bytes(), trace.begin_ns)
    yield from _scope_depths(trace, times)
    yield from _arrows(trace, times)


def _names(trace: Trace) -> Iterator[Event]:
    submitters = {(t.device, t.submitter) for t in trace.tasks} | {
        (s.device, s.submitter) for s in trace.stalls
    }
    submitters |= {(t.device, -1 - t.worker) for t in trace.tasks if t.worker < 0}
    workers = {(d, w) for d in trace.devices for w in range(trace.num_workers)}
    workers |= {(t.device, t.worker) for t in trace.tasks if t.worker >= 0}
    for device in trace.devices:
        yield name_event("process_name", device, 0, f"device {device}{_host_text(trace, device)}")
    for device, worker in sorted(workers):
        yield name_event("thread_name", device, worker, f"worker {worker}")
    for device, submitter in sorted(submitters):
        yield name_event(
            "thread_name", device, SUBMITTER_THREADS + submitter, f"submitter {submitter} (submits)"
        )


def _host_text(trace: Trace, device: int) -> str:
    """The host of a device and the error of its clock, if the run used several hosts."""
    if len(set(trace.hosts)) < 2:
        return ""
    return f" (host {trace.hosts[device]}, clocks agree within {trace.clock_error_ns / 1e3:g} µs)"


def _thread(task: TaskSpan) -> int:
    return task.worker if task.worker >= 0 else SUBMITTER_THREADS + (-1 - task.worker)


def _task_slice(task: TaskSpan, times: list[int]) -> Event:
    submit, ready, start, end = times
    args: dict[str, object] = {
        "task": task.task,
        "kernel": task.kernel,
        "submitter": task.submitter,
        "scope_depth": task.scope_depth,
        "status": task.status,
        "priority": task.priority,
        "submit_us": submit / 1e3,
        "blocked_us": (ready - submit) / 1e3,
        "queued_us": (start - ready) / 1e3,
    }
    if task.row:
        args["row"] = task.row
    if task.target:
        args["pinned to worker" if task.target > 0 else "prefers worker"] = abs(task.target) - 1
    if task.producers:
        args["producers"] = list(task.producers)
    kind = kind_of(task.kernel)
    category = "task" if kind == "compute" else kind
    return slice_event(task.name or task.kernel, category, task.device, _thread(task), start, end, args)


def _submit_mark(task: TaskSpan, submit_ns: int) -> Event:
    return {
        "name": f"submit {task.name or task.kernel}",
        "cat": "submit",
        "ph": "i",
        "s": "t",
        "pid": task.device,
        "tid": SUBMITTER_THREADS + task.submitter,
        "ts": submit_ns / 1e3,
        "args": {"task": task.task},
    }


def _counter_event(name: str, device: int, moment_ns: int, value: int) -> Event:
    return {"name": name, "ph": "C", "pid": device, "ts": moment_ns / 1e3, "args": {"value": value}}


def _counter(name: str, device: int, curve: Curve, origin_ns: int) -> Iterator[Event]:
    last: int | None = None
    for moment, value in zip(curve.times_ns.tolist(), curve.values.tolist()):
        if value != last:
            yield _counter_event(name, device, moment - origin_ns, value)
            last = value


def _scope_depths(trace: Trace, times: list[list[int]]) -> Iterator[Event]:
    """The scope depth of every submitter, which is known at its submissions."""
    depth: dict[tuple[int, int], int] = {}
    for submit, task in sorted(((row[0], t) for t, row in zip(trace.tasks, times)), key=lambda pair: pair[0]):
        if depth.get((task.device, task.submitter)) != task.scope_depth:
            depth[task.device, task.submitter] = task.scope_depth
            yield _counter_event(
                f"scope depth, submitter {task.submitter}", task.device, submit, task.scope_depth
            )


def _arrows(trace: Trace, times: list[list[int]]) -> Iterator[Event]:
    """An arrow from the end of each producer to the start of its consumer. Both ends must lie
    inside their slices.
    """
    index = {t.task: i for i, t in enumerate(trace.tasks)}
    consumers: defaultdict[int, list[int]] = defaultdict(list)
    for place, task in enumerate(trace.tasks):
        for producer in task.producers:
            if producer in index:
                consumers[index[producer]].append(place)
    if sum(map(len, consumers.values())) > MAX_ARROWS:
        return
    arrow = 0
    for producer, places in consumers.items():
        for consumer in places:
            arrow += 1
            ends = (
                ("s", producer, max(times[producer][2], times[producer][3] - 1)),
                ("f", consumer, times[consumer][2]),
            )
            for phase, place, moment in ends:
                yield _arrow_event(phase, arrow, trace.tasks[place], moment)


def _arrow_event(phase: str, arrow: int, task: TaskSpan, moment_ns: int) -> Event:
    event: Event = {
        "name": "waits for",
        "cat": "dependency",
        "ph": phase,
        "id": arrow,
        "pid": task.device,
        "tid": _thread(task),
        "ts": moment_ns / 1e3,
    }
    return event if phase == "s" else event | {"bp": "e"}
