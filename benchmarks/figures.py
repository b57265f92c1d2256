"""One measured figure with its bounds, its peers and the limit.

A benchmark shows each of its figures as a line on the terminal and as a record in the file that
`TILEWISE_FIGURES` names, from which `page.py` makes the page of all of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["FILE", "Figure", "record", "show"]

FILE = "TILEWISE_FIGURES"
_ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Figure:
    """A measured figure; all numbers have its unit.

    Attributes:
        name: the same in every run: two pages are compared by it.
        value: measured.
        unit: `ms`, `tokens/s`, `GB/s`; `x` for a ratio.
        less_is_better: of the value.
        must: the required value; None without one.
        goal: the desired value.
        peers: values of others in the same run, by name.
        limit: of the machine, measured in the same run.
        note: further information.
    """

    name: str
    value: float
    unit: str
    less_is_better: bool = False
    must: float | None = None
    goal: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    note: str = ""

    def times(self, bound: float) -> float:
        """The ratio to a bound: 1 and more keep it."""
        better, worse = (bound, self.value) if self.less_is_better else (self.value, bound)
        return better / worse if worse else float("inf")

    @property
    def verdict(self) -> str:
        """The bound that it keeps: `goal`, `must` or `missed`; empty without bounds."""
        if self.goal is not None and self.times(self.goal) >= 1:
            return "goal"
        if self.must is None:
            return ""
        return "must" if self.times(self.must) >= 1 else "missed"

    def line(self) -> str:
        """For a terminal; factors are relative to the figure, above 1 where it is better."""
        parts = [f"{self.name:48} {self.value:10.4g} {self.unit}"]
        for what, bound in (("must", self.must), ("goal", self.goal), ("limit", self.limit)):
            if bound is not None:
                parts.append(f"{what} {bound:g} ({self.times(bound):.2f})")
        parts += [f"{name} {value:.4g} ({self.times(value):.2f})" for name, value in self.peers.items()]
        return "  ".join([*parts, *filter(None, [self.verdict, self.note])])


def show(figure: Figure) -> None:
    """Print a figure, and record it for the page."""
    print(figure.line(), flush=True)
    record(figure)


def record(figure: Figure) -> None:
    """Record a figure only for the page: it is printed in a table."""
    if FILE in os.environ:
        name = Path(sys.argv[0]).resolve().relative_to(_ROOT).as_posix()
        with open(os.environ[FILE], "a", encoding="utf-8") as file:
            file.write(json.dumps({"benchmark": name, **asdict(figure)}) + "\n")
