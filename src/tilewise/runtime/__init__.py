"""The task runtime as Python sees it: build a tile program, run it on all devices, look at its timeline.

`Program` is written once at plan time; `Executor` owns the devices' memory and workers; nothing here runs per
task. Refuses, at `Program.finish`, whatever is malformed or could deadlock. Works through native/runtime.
"""

from __future__ import annotations

from tilewise._native.runtime import Executor, Program
from tilewise.ir.program import Access, Extent, Mode, Operand
from tilewise.runtime.timeline import TaskRecord, busy_overlap, write_trace

__all__ = [
    "Access",
    "Executor",
    "Extent",
    "Mode",
    "Operand",
    "Program",
    "TaskRecord",
    "busy_overlap",
    "write_trace",
]
