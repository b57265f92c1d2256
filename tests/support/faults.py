"""Plants a fault in the next run of an instance, through its native executor."""

from __future__ import annotations

from tilewise.session import GraphInstance

__all__ = ["inject"]


def inject(instance: GraphInstance, kind: str, device: int, label: str, index: int) -> None:
    """Make one task fail or be late in the next run.

    Args:
        instance: of any plan, also one over several processes.
        kind: `throw`, `stall` for its worker, or `delay` for a millisecond.
        device: the task's.
        label: its instruction's.
        index: which of the instruction's tasks.
    """
    instance._executor.inject(kind, device, label, index)
