"""What all sections of a configuration share: strict types, known keys, paths, errors with advice."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, InstanceOf

__all__ = ["FilePath", "Section", "WrongValue"]


def _named(path: str) -> str:
    if not path:
        raise ValueError("must not be empty")
    if "\0" in path:
        raise ValueError("must be a path without zero bytes")
    return path


# File names are bytes, so names that are not UTF-8 are accepted unchanged.
FilePath = Annotated[InstanceOf[str], AfterValidator(_named)]


class WrongValue(ValueError):
    """A value that a validator rejects, with advice."""

    def __init__(self, rule: str, advice: str) -> None:
        super().__init__(rule)
        self.advice = advice


class Section(BaseModel):
    """A section. Every key must be known, and nothing is converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
