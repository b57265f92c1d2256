"""The tile program as data: what the planner makes and the native walker executes (native/runtime/program.h).

A program is, per device, a table of tensors and a list of calls of templates. A template is a list of instructions; an
instruction is a kernel over the row tiles of its loop. Bindings map a template's slots to tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "Access",
    "Extent",
    "Instruction",
    "LoweredTemplate",
    "Mode",
    "Operand",
    "Slot",
    "TensorEntry",
    "Wait",
]


class Extent(NamedTuple):
    """A number of rows: `const + mult * symbols[symbol]` (`symbol` -1: just the constant)."""

    const: int
    symbol: int = -1
    mult: int = 0

    def upper(self, bounds: tuple[int, ...]) -> int:
        """Its value with every symbol at its bound."""
        return self.const + (self.mult * bounds[self.symbol] if self.symbol >= 0 else 0)


class Mode:
    """Which rows of an operand a task covers (numbers are part of the native format)."""

    WHOLE, ROW, COL, ROWPART = 0, 1, 2, 3


class Access:
    """How a task uses an operand's tiles (numbers are part of the native format)."""

    NONE, IN, OUT, INOUT = 0, 1, 2, 3


class Slot(NamedTuple):
    """What a template operand stands for: `kind` is `tensor`, `flat`, `carry`, `temp` or `temp_flat`."""

    kind: str
    id: int
    level: int = 0


class Operand(NamedTuple):
    """One operand of an instruction; `peer` is the device whose memory is read (-1: its own)."""

    slot: int
    mode: int = Mode.WHOLE
    access: int = Access.NONE
    peer: int = -1
    div: int = 1
    part: int = 0
    parts: int = 1
    null: bool = False


class Wait(NamedTuple):
    """Ready only when signal `base (+ loop index)` has risen by `increment` more."""

    base: int
    per_index: bool
    increment: int


class Notify(NamedTuple):
    """On completion, raise signal `base (+ loop index)` of `device` by one."""

    device: int
    base: int
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
    num_signals: int


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
    num_tiles: int


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
