"""How families refuse what a config.json asks for: one sentence that names the field."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tilewise.core.errors import ConfigError
from tilewise.core.validation import shown

__all__ = ["HUGE", "MAX_POSITIONS", "TINY", "Require"]

MAX_POSITIONS = 1 << 20  # of any model
# Models compute in fp32: of numbers beyond it, norms and angles would be zero, infinite or none.
TINY, HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Require:
    """The checks of one family.

    Args:
        family: as messages name it.
    """

    family: str

    def __call__(self, holds: bool, field: str, rule: str, got: object, advice: str) -> None:
        """Refuse unless `holds`.

        Raises:
            ConfigError: `[models.FAMILY] FIELD RULE; got GOT; ADVICE`.
        """
        if not holds:
            text = " ".join(got.split()) if isinstance(got, str) else shown(got)
            raise ConfigError(f"[models.{self.family}] {field} {rule}; got {text}; {advice}")

    def integer(self, field: str, value: object, low: int, high: int) -> None:
        """A whole number in [low, high]; truth values are invalid."""
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        holds = is_integer and low <= value <= high  # type: ignore[operator]
        if low == 1:
            self(holds, field, f"must be a positive integer up to {high}", value, "set one in that range")
        self(holds, field, f"must be an integer in [{low}, {high}]", value, "correct it")

    def number(self, field: str, value: object, low: float, high: float) -> None:
        """A number in [low, high]; truth values are invalid."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        holds = is_number and low <= value <= high  # type: ignore[operator]
        self(holds, field, f"must lie in [{low:g}, {high:g}]", value, "correct it")

    def choice(self, field: str, value: object, known: Collection[str]) -> None:
        """One of some names."""
        holds = isinstance(value, str) and value in known
        self(holds, field, f"must be one of {', '.join(known)}", value, "choose one")

    def truth(self, field: str, value: object) -> None:
        """True or false."""
        self(isinstance(value, bool), field, "must be true or false", value, "write one of them")
