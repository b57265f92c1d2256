"""Plants a fault in the next run of an instance, through its native executor."""

from __future__ import annotations

from tilewise.session import GraphInstance

__all__ = ["inject"]


def inject(instance: GraphInstance, kind: str, device: int, label: str, index: int) -> None:
    """Make one task of a device's instruction fail (`throw`), stop its worker (`stall`) or be late (`delay`)."""
    instance._executor.inject(kind, device, label, index)
