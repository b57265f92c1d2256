"""The file of a dependency graph as it is read: its fields, their types, and the ranges of numbers.

This module has the format's rules for single values and for a region in its buffer.
`dependency_graph` makes tasks of what was read, and says what is wrong with a file. The two are
separate modules because this one needs pydantic, which only readers of files load.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

__all__ = ["GraphFile", "ParamRow", "RegionRow", "TaskRow"]

_Id = Annotated[int, Field(ge=0, lt=1 << 64)]
_Bytes = Annotated[int, Field(ge=0, lt=1 << 62)]  # a place in memory, or a number of steps there
_MAX_DIMS = 8  # of a region; the runtime's own limit lies below

_Mode = Literal["input", "output", "inout", "commute", "reduce", "no_dep"]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class RegionRow(_Row):
    """A strided box of a buffer."""

    offset: _Bytes
    size: Annotated[list[_Bytes], Field(min_length=1, max_length=_MAX_DIMS)]
    stride: list[Annotated[int, Field(ge=1, lt=1 << 62)]]

    @model_validator(mode="after")
    def _is_box(self) -> RegionRow:
        if len(self.size) != len(self.stride):
            raise ValueError(f"a region has as many sizes as strides, got {self.size} and {self.stride}")
        return self

    @property
    def end(self) -> int:
        """The end of its bytes (exclusive)."""
        if 0 in self.size:
            return self.offset
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride)) + 1


class ParamRow(_Row):
    """How a task accesses a buffer."""

    mode: _Mode
    buffer: _Id
    bytes: _Bytes
    region: RegionRow | None

    @model_validator(mode="after")
    def _lies_in_buffer(self) -> ParamRow:
        if self.region is not None and self.region.end > self.bytes:
            raise ValueError(
                f"a region lies in its buffer of {self.bytes} bytes, got one to byte {self.region.end}"
            )
        return self


class TaskRow(_Row):
    """One submitted task; only its `name` may be omitted."""

    id: _Id
    kernel: str
    name: str = ""
    submitter: _Id = Field(validation_alias=AliasChoices("submitter", "lane"))  # files of before have `lane`
    scope: _Id
    depth: _Id
    domain: _Id
    params: list[ParamRow]
    after: list[_Id]
    producers: list[_Id]
    submit_ns: _Id
    end_ns: _Id


class GraphFile(_Row):
    """The whole file."""

    version: Literal[1]
    tasks: list[TaskRow]
