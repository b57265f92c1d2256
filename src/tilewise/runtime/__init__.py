"""The Python interface of the task runtime, in two layers.

A task is one kernel (a function) on named buffers. `Runtime` is for users who submit their own
tasks; a task runs when its data is ready (docs/runtime.md). `Program` and `Executor` run the
planner's tile programs on all devices, without Python code per task. Both layers reject invalid
input before any work starts.
"""

from __future__ import annotations

from tilewise._native.programs import Executor, Program, device_overhead, group_bytes, populate
from tilewise._native.tasks import should_stop
from tilewise.ir.policy import TaskExecutionHints
from tilewise.ir.program import Access, Mode, Number, Operand, Source
from tilewise.observe.stats import RuntimeStats
from tilewise.observe.trace import TaskSpan, Trace
from tilewise.runtime.buffers import Buffer, Region, TileGrid
from tilewise.runtime.calls import CallHandle
from tilewise.runtime.events import Event
from tilewise.runtime.groups import TaskGroup
from tilewise.runtime.handles import Handle, TaskHandle
from tilewise.runtime.kernels import LATER, Kernel, WorkerType
from tilewise.runtime.params import Commute, InOut, Input, NoDep, Output, Reduce
from tilewise.runtime.recordings import Recording
from tilewise.runtime.runtime import Runtime

__all__ = [
    "LATER",
    "Access",
    "Buffer",
    "CallHandle",
    "Commute",
    "Event",
    "Executor",
    "Handle",
    "InOut",
    "Input",
    "Kernel",
    "Mode",
    "NoDep",
    "Number",
    "Operand",
    "Output",
    "Program",
    "Recording",
    "Reduce",
    "Region",
    "Runtime",
    "RuntimeStats",
    "Source",
    "TaskExecutionHints",
    "TaskGroup",
    "TaskHandle",
    "TaskSpan",
    "TileGrid",
    "Trace",
    "WorkerType",
    "device_overhead",
    "group_bytes",
    "populate",
    "should_stop",
]
