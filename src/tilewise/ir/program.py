"""The tile program as data: what the planner makes and the native walker executes (native/programs/program.h).

A program is, per device, a table of tensors and a list of calls of templates. A template is a list of instructions; an
instruction is a kernel over the row tiles of its loop. Bindings map a template's slots to tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "Access",
    "Call",
    "DeviceProgram",
    "Extent",
    "Instruction",
    "LoweredTemplate",
    "Mode",
    "Notify",
    "Operand",
    "Slot",
    "TempSpec",
    "TensorEntry",
    "Wait",
]


class Extent(NamedTuple):
    """A number of rows: `constant + multiple * symbols[symbol]` (`symbol` -1: the constant alone)."""

    constant: int
    symbol: int = -1
    multiple: int = 0

    def upper(self, bounds: tuple[int, ...]) -> int:
        """Its value with every symbol at its bound."""
        return self.constant + (self.multiple * bounds[self.symbol] if self.symbol >= 0 else 0)


class Mode(enum.IntEnum):
    """Which part of a tensor an operand of iteration [b, e) views."""

    WHOLE = 0  # all rows
    ROW = 1  # rows [b / div, ceil(e / div)), clipped to the tensor
    COL = 2  # all rows, columns [b, e)
    ROWPART = 3  # the part-th of `parts` equal shares of rows [b, e)
    ROWCOLS = 4  # rows as in ROW, columns [part, part + parts)


class Access(enum.IntEnum):
    """How a task uses the tiles that an operand touches. Peers' tiles and constants take NONE."""

    NONE = 0
    IN = 1
    OUT = 2
    INOUT = 3


class Slot(NamedTuple):
    """What a template operand stands for: `kind` is `tensor`, `flat`, `carry`, `temp` or `temp_flat`."""

    kind: str
    id: int
    level: int = 0


class Operand(NamedTuple):
    """One tile operand of an instruction.

    `peer` is the device whose memory is read (-1: its own); `null` passes an absent operand to the kernel.
    """

    slot: int
    mode: int = Mode.WHOLE
    access: int = Access.NONE
    peer: int = -1
    div: int = 1
    part: int = 0
    parts: int = 1
    null: bool = False


class Wait(NamedTuple):
    """A task is not ready before a signal of its own device has counted `increment` further.

    Iteration i looks at signal `signal_base + i` if `per_index`, else at `signal_base`. The device keeps count of what
    it expects of each signal, so repeated waits speak of successive epochs; an increment of 0 waits for the epoch that
    an earlier wait asked for. No worker is held meanwhile.
    """

    signal_base: int
    per_index: bool
    increment: int


class Notify(NamedTuple):
    """Add one to a signal of `device` once the task is complete (or skipped: then with the error's id).

    A task that sees the new value also sees everything that this task and its predecessors wrote.
    """

    device: int
    signal_base: int
    per_index: bool


@dataclass
class Instruction:
    """A kernel over the tiles of a loop. `kernel` may be empty: then it only orders and acknowledges."""

    kernel: str
    label: str
    extent: Extent
    step: int
    operands: list[Operand]
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    notifies: list[Notify] = field(default_factory=list)
    priority: int = 0


@dataclass(frozen=True)
class TempSpec:
    """A temporary of a template: its local shape and the op that makes and uses it."""

    name: str
    extent: Extent
    cols: int
    dtype: str
    tile_rows: int
    packed: bool
    max_bytes: int
    op: int


@dataclass(frozen=True)
class LoweredTemplate:
    """Instructions of one template for one device, its slots, and its temporaries."""

    name: str
    instructions: tuple[Instruction, ...]
    slots: tuple[Slot, ...]
    temps: tuple[TempSpec, ...]
    signal_sites: tuple[int, ...] = ()

    @property
    def num_signals(self) -> int:
        """Signals that one template needs."""
        return sum(self.signal_sites)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as the walker sees it: where it lies, how it is cut, which handles guard its tiles."""

    key: tuple[object, ...]
    offset: int
    extent: Extent
    cols: int
    stride: int
    dtype: str
    tile_rows: int
    first_handle: int


@dataclass(frozen=True)
class Call:
    """One use of a lowered template: an entry per slot."""

    template: int
    binding: tuple[int, ...]


@dataclass(frozen=True)
class DeviceProgram:
    """Everything one device executes, in order."""

    templates: tuple[LoweredTemplate, ...]
    calls: tuple[Call, ...]
    entries: tuple[TensorEntry, ...]
    aliases: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
