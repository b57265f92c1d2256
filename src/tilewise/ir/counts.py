"""Counts how often templates are traced, differentiated, laid out and lowered. Tests check that every
stage does its work once per template.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TemplateCounts", "counts"]


@dataclass
class TemplateCounts:
    """The work done per template since the last `reset`."""

    traced: int = 0
    differentiated: int = 0
    sharded: int = 0
    lowered: int = 0

    def reset(self) -> None:
        """Set all counts to zero."""
        self.traced = self.differentiated = self.sharded = self.lowered = 0


counts = TemplateCounts()
