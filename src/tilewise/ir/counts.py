"""Counts how often templates are traced, differentiated, laid out and lowered.

Tests check that every stage does its work once per template.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TemplateCounts", "counts"]


@dataclass
class TemplateCounts:
    """Work done per template, since the last `reset`."""

    traced: int = 0
    differentiated: int = 0
    sharded: int = 0
    lowered: int = 0

    def reset(self) -> None:
        """Start counting anew."""
        self.traced = self.differentiated = self.sharded = self.lowered = 0


counts = TemplateCounts()
