"""One measured figure next to what is asked of it, its peers and the limit.

A benchmark shows each of its figures: a line for who reads along, and a record in the file that `TILEWISE_FIGURES`
names, from which `page.py` makes the page of all of them.
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
    """What was measured; all numbers have its unit.

    Attributes:
        name: the same in every run: by it two pages are compared.
        value: measured.
        unit: `ms`, `tokens/s`, `GB/s`; `x` for a ratio.
        less_is_better: of the value.
        must: what is asked of it; None where nothing is.
        goal: the same, of the best.
        peers: what others reached in the same run, by name.
        limit: what the machine permits, measured in the same run.
        note: anything else worth knowing.
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
        """How many times as good as a bound: 1 and more keep it."""
        better, worse = (bound, self.value) if self.less_is_better else (self.value, bound)
        return better / worse if worse else float("inf")

    @property
    def verdict(self) -> str:
        """Which of its bounds it keeps: `goal`, `must` or `missed`; nothing where nothing is asked."""
        if self.goal is not None and self.times(self.goal) >= 1:
            return "goal"
        if self.must is None:
            return ""
        return "must" if self.times(self.must) >= 1 else "missed"

    def line(self) -> str:
        """For a terminal; factors say how many times as good as that it is."""
        parts = [f"{self.name:48} {self.value:10.4g} {self.unit}"]
        for what, bound in (("must", self.must), ("goal", self.goal), ("limit", self.limit)):
            if bound is not None:
                parts.append(f"{what} {bound:g} ({self.times(bound):.2f})")
        parts += [f"{name} {value:.4g} ({self.times(value):.2f})" for name, value in self.peers.items()]
        return "  ".join([*parts, *filter(None, [self.verdict, self.note])])


def show(figure: Figure) -> None:
    """Print a figure, and leave it where the page is made of it."""
    print(figure.line(), flush=True)
    record(figure)


def record(figure: Figure) -> None:
    """Leave a figure for the page alone: it stands in a table that is printed."""
    if FILE in os.environ:
        name = Path(sys.argv[0]).resolve().relative_to(_ROOT).as_posix()
        with open(os.environ[FILE], "a", encoding="utf-8") as file:
            file.write(json.dumps({"benchmark": name, **asdict(figure)}) + "\n")
