"""The tile program as data: the planner creates it, and native code executes it
(native/programs/program.h).

Devices that run the same instructions form a class. Each class of devices has templates, a table of
tensors (the entries), and named lists of calls.

A template is a block of instructions that is used many times, for example once per layer. An
instruction is a kernel and a loop over the tiles of a tensor's rows; each iteration is a task. A
template refers to tensors by slots, which are its formal parameters. A call is one use of a
template: it binds each slot to an entry.

Devices of a class differ only in their numbers (such as the first row of their shard) and in their
device groups, the devices that they communicate with. The other members of a device group are the
peers of a device. An instruction names a peer by its place in the group. Tasks of different devices
are ordered by signals: counters that a task posts (increases by one) and that another task waits
for.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tilewise.core.dims import MAX_SIZE
from tilewise.core.frozen import freeze_maps
from tilewise.core.mesh import Axes
from tilewise.core.tree import Interval

__all__ = [
    "COPIES",
    "NO_FILE",
    "NO_HINTS",
    "POSITION",
    "Access",
    "Call",
    "Collective",
    "DeviceBinding",
    "DeviceClass",
    "Instruction",
    "LoweredTemplate",
    "Mode",
    "Notify",
    "Number",
    "NumberLike",
    "Operand",
    "Slot",
    "Source",
    "TaskHints",
    "TempSpec",
    "TensorEntry",
    "TileProgram",
    "Wait",
    "constant_part",
    "is_single",
    "is_size",
    "memory_kind",
    "plain",
    "tiles_across",
    "times",
    "upper",
    "value_on",
]


NO_FILE = (1 << 63) - 1  # above every address


class Source(enum.IntEnum):
    """What a `Number` multiplies."""

    NOTHING = 0
    SYMBOL = 1  # a symbol of the run
    DEVICE = 2  # a number of the device
    CALL = 3  # a number of the call
    POSITION = 4  # the call's position in its list


class Number(NamedTuple):
    """A number that is known only when the program runs: `constant + multiple * value`, where
    `source` and `which` select the value.

    A plain `int` may be used instead. Each field says which sources it accepts.
    """

    constant: int
    multiple: int = 0
    source: int = Source.NOTHING
    which: int = 0

    @classmethod
    def of_symbol(cls, which: int, multiple: int = 1, constant: int = 0) -> Number:
        """A number that depends on a symbol, whose value is given for every run."""
        return cls(constant, multiple, Source.SYMBOL, which)

    @classmethod
    def of_device(cls, which: int, multiple: int = 1, constant: int = 0) -> Number:
        """A number that depends on a number of the device, such as the first row of its shard."""
        return cls(constant, multiple, Source.DEVICE, which)

    @classmethod
    def of_call(cls, which: int, multiple: int = 1, constant: int = 0) -> Number:
        """A number that depends on a number of the call, such as its microbatch."""
        return cls(constant, multiple, Source.CALL, which)

    def upper(self, bounds: tuple[int, ...]) -> int:
        """The value with every symbol at its bound, for a constant or a number of a symbol."""
        assert self.source in (Source.NOTHING, Source.SYMBOL), self
        return self.constant + (self.multiple * bounds[self.which] if self.source == Source.SYMBOL else 0)


NumberLike = int | Number
"""An integer or a `Number`."""


def upper(number: NumberLike, bounds: tuple[int, ...] = ()) -> int:
    """The value of a constant, or of a number of a symbol with the symbol at its bound."""
    return number if isinstance(number, int) else number.upper(bounds)


def is_size(number: object, least: int = 0) -> bool:
    """Whether a value is a count: an integer from `least` to `MAX_SIZE`, or a `Number` of such values."""
    if not isinstance(number, Number):
        return type(number) is int and least <= number <= MAX_SIZE
    parts = (number.constant, number.multiple)
    is_within = all(type(n) is int and abs(n) <= MAX_SIZE for n in parts)
    return is_within and (number.source != Source.NOTHING or number.constant >= least)


def times(number: NumberLike, factor: int) -> NumberLike:
    """A number, multiplied by an integer."""
    if isinstance(number, int):
        return number * factor
    return number._replace(constant=number.constant * factor, multiple=number.multiple * factor)


def plain(number: NumberLike) -> NumberLike:
    """The number as an integer if it does not depend on a device, call or run; otherwise the number
    itself.
    """
    return number.constant if isinstance(number, Number) and number.source == Source.NOTHING else number


def is_single(step: NumberLike) -> bool:
    """Whether a loop with `step` rows per task is a single task over all rows."""
    return isinstance(step, int) and step <= 0


def constant_part(number: NumberLike, bounds: tuple[int, ...] = ()) -> int:
    """Like `upper`, but for a number that depends on the device or the call, its constant."""
    if isinstance(number, int) or number.source in (Source.NOTHING, Source.SYMBOL):
        return upper(number, bounds)
    return number.constant


def value_on(number: NumberLike, device: DeviceBinding) -> int:
    """The value, on one device, of a constant or a number of the device."""
    if isinstance(number, int):
        return number
    assert number.source in (Source.NOTHING, Source.DEVICE), number
    return number.constant + (number.multiple * device.numbers[number.which] if number.source else 0)


POSITION = Number(0, 1, Source.POSITION)
"""The call's position in its list."""


class Mode(enum.IntEnum):
    """Which part of a tensor an operand views, for the loop's rows [b, e)."""

    WHOLE = 0  # all rows
    ROW = 1  # rows [b / div, ceil(e / div)), clipped to the tensor
    COL = 2  # all rows, columns [b / div, ceil(e / div)), clipped to the tensor
    ROWPART = 3  # the part-th of `parts` equal shares of rows [offset + b, offset + e)
    ROWCOLS = 4  # rows as in ROW, columns [part, part + parts)
    ROWS = 5  # rows [part, part + parts), whatever the loop; only the tiles of those rows are touched
    PANELCOLS = 6  # as COL, of a packed weight: these columns of all its panels; a loop of whole panels


class Access(enum.IntEnum):
    """How a task uses the tiles of an operand. Constants have NONE.

    If an operand is in the memory of a peer, the runtime ignores its access, because signals order
    the uses of a peer's tile.
    """

    NONE = 0
    IN = 1
    OUT = 2
    INOUT = 3


@cache
def memory_kind(kind: str) -> str:
    """The slot kind with which memory was created, from any slot kind that views it."""
    return "tensor" if kind == "flat" else kind.removesuffix("_flat")


class Slot(NamedTuple):
    """A formal parameter of a template.

    `kind` is `tensor`; `carry` or `stack` (partial sums over microbatches); `ring` (one of several
    places that uses of the template take in turn, so that peers can still read the previous use);
    or `temp`. The kinds `flat`, `carry_flat`, `ring_flat` and `temp_flat` view the same memory as
    plain rows.

    The `level` of a carry is its level in the tree. The `level` of a ring is the age of a use: 0
    for the place of this use, 1 for the place of the use before.
    """

    kind: str
    id: int
    level: int = 0

    @property
    def memory(self) -> Slot:
        """The slot with which this slot's memory was created."""
        return Slot(memory_kind(self.kind), self.id, self.level)


class Operand(NamedTuple):
    """One tile operand of an instruction.

    If `group` >= 0, the operand is in the memory of a member of one of the device's device groups:
    the member with number `member` (a constant or a number of the device). The member may be the
    device itself.

    `div`, `part`, `parts` and `offset` may be numbers of symbols, of the device or of the call.
    `null` passes an absent operand to the kernel.

    `role` says how the kernel uses the operand if `access` does not say so. With `Access.NONE` the
    use follows from `access`, and an operand without access is read.

    A task may write a peer's tile: an operand with role OUT or INOUT. The task's posts are seen after
    its writes, on every device. A kernel writes all of an operand with role OUT; it uses role INOUT
    if it keeps some elements. The rows after the last one of a peer's tensor are neither read nor
    written, so a peer's packed weight must have whole panels.
    """

    slot: int
    mode: int = Mode.WHOLE
    access: int = Access.NONE
    group: int = -1
    member: NumberLike = 0
    div: NumberLike = 1
    part: NumberLike = 0
    parts: NumberLike = 1
    null: bool = False
    role: int = Access.NONE
    offset: NumberLike = 0


class Wait(NamedTuple):
    """A task may start only after a signal of its own device has increased by `increment` more.

    Iteration i waits for signal `signal_base + i` if `per_index`, otherwise for `signal_base` (a
    number of the device or the call). The device keeps the value that it expects of each signal,
    and every wait adds its increment to this value, so repeated waits refer to successive epochs.
    An increment of 0 (a constant or a number of the call) waits for the epoch of an earlier wait.
    No worker is blocked meanwhile.

    `group` and `member` name the device that posts the signal (`group` -1: not given). A wait for
    the device itself is omitted. `slot` (-1: not given) and `use` (a number of the call) say which
    tensor, and which use of the tensor, the signal is about. `Program.finish` compares these fields
    with those of the post that satisfies the wait.
    """

    signal_base: NumberLike
    per_index: bool
    increment: NumberLike
    group: int = -1
    member: NumberLike = 0
    slot: int = -1
    use: NumberLike = POSITION


class Notify(NamedTuple):
    """Post a signal: add one to a signal of a member of a device group once the task is complete.
    If the task is skipped because of an error, the post carries the error's id.

    A task that sees the new value also sees everything that this task and its predecessors wrote. A
    post to the device itself is omitted. `slot` and `use` are as in `Wait`.
    """

    group: int
    member: NumberLike
    signal_base: NumberLike
    per_index: bool
    slot: int = -1
    use: NumberLike = POSITION


class TaskHints(NamedTuple):
    """Which workers of a device run the tasks of an instruction or of a call, and how urgently.

    Attributes:
        workers: task i of n of an instruction goes to `workers[i * len(workers) // n]`. Empty: no
            choice.
        is_preference: whether a worker without work may take a task that is for another one.
        priority: None: no choice.
    """

    workers: tuple[int, ...] = ()
    is_preference: bool = False
    priority: int | None = None

    def worker_of(self, task: int, count: int) -> int | None:
        """The worker of task `task` of `count`; None: any."""
        return self.workers[task * len(self.workers) // count] if self.workers else None

    def shares(self, count: int) -> list[tuple[int, int]]:
        """Per place in `workers`, the worker and how many of `count` tasks go there."""
        size = len(self.workers)
        begins = [-(-place * count // size) for place in range(size + 1)] if size else []
        return [(w, end - begin) for w, begin, end in zip(self.workers, begins, begins[1:])]

    def over(self, other: TaskHints) -> TaskHints:
        """These hints, and those of `other` where these have no choice."""
        workers, is_preference, _ = self if self.workers else other
        return TaskHints(workers, is_preference, other.priority if self.priority is None else self.priority)


NO_HINTS = TaskHints()
"""No choice of workers or priority."""


@dataclass(frozen=True)
class Instruction:
    """A kernel over the tiles of a loop. If `kernel` is empty, the instruction only orders tasks
    and posts signals.

    Attributes:
        extent: rows of the loop. May be a number of symbols or of the call.
        step: rows per task. May be a number of symbols or of the call. A constant 0 makes one task
            of all rows.
        ints: integer attributes of the kernel. May be numbers of any source.
        first: the iteration whose task is submitted first, modulo the number of iterations. After
            the last iteration the loop continues with iteration 0. May be a number of the device,
            so that each device begins at its own tiles.
        priority: of its tasks, unless `hints` or the call's hints state one.
        hints: of its tasks. They stand before the call's.
    """

    kernel: str
    label: str
    extent: Number
    step: NumberLike
    operands: tuple[Operand, ...]
    ints: tuple[NumberLike, ...] = ()
    floats: tuple[float, ...] = ()
    waits: tuple[Wait, ...] = ()
    notifies: tuple[Notify, ...] = ()
    priority: int = 0
    first: NumberLike = 0
    hints: TaskHints = NO_HINTS


@dataclass(frozen=True)
class TempSpec:
    """A temporary of a template: its local shape, and the op that creates and uses it."""

    name: str
    extent: Number
    cols: int
    dtype: str
    tile_rows: NumberLike
    packed: bool
    max_bytes: int
    op: int


COPIES = frozenset(
    (
        "all_gather_columns",
        "all_gather_batch",
        "all_gather_parameters",
        "gather",
        "all_to_all",
        "move",
        "tile_program",
    )
)
"""Kinds of exchanges that copy complete values, or that keep partial values to themselves; the
others combine partial values.
"""


class Collective(NamedTuple):
    """What one device of a class exchanges with its device group in a template.

    Attributes:
        kind: its name in `plan.collectives.checks.CHECKS`.
        op: id of the op that it belongs to.
        axes: axes of the device group.
        source, target: the slots with this device's part before, and with the result; -1 if this
            device has no part, or gets no result.
        tensors: ids of the graph's tensors before and after; -1 for a temporary. (A slot refers to
            memory, which several tensors may share.)
        step: rows per task; 0 for one task over all rows.
        parts: per member of the device group, its columns or rows `[begin, end)` of the whole value;
            empty if members divide the rows of every tile equally. For an all-to-all, two entries per
            pair of members, ordered by sender and then by receiver: rows of the sender's source, and
            of the receiver's target.
        partial, number: the pending reduction that it completes: number `number` of those of the
            op's `partial`. Empty for a copy.
        residual: the slot that is added after the tree's root; -1 for no slot.
        stack: the slot with this device's share of the sum of earlier microbatches; -1 if devices
            combine their parts once per step.
        microbatch: number of the microbatch whose parts are added to the stack; -1 without a stack.
        first, last: the instructions `[first, last)` that carry it out.
        uses: of a tile program, the slots of its tensors, and as `Access` whether it reads their
            earlier values and whether it writes them.
    """

    kind: str
    op: int
    axes: Axes
    source: int
    target: int
    tensors: tuple[int, int]
    step: NumberLike = 0
    parts: tuple[Interval, ...] = ()
    partial: str = ""
    number: int = 0
    residual: int = -1
    stack: int = -1
    microbatch: int = -1
    first: int = -1
    last: int = -1
    uses: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class LoweredTemplate:
    """The instructions of one template, its slots, its temporaries, and the exchanges that some of
    the instructions carry out. Its signals start at `first_signal`; the signals before are those of
    its rings, which all its variants share.
    """

    name: str
    instructions: tuple[Instruction, ...]
    slots: tuple[Slot, ...]
    temps: tuple[TempSpec, ...]
    signal_ranges: tuple[int, ...] = ()
    ring_signal_ranges: tuple[int, ...] = ()
    collectives: tuple[Collective, ...] = ()
    first_signal: int = 0

    @property
    def num_signals(self) -> int:
        """The number of signals that one template needs."""
        return sum(self.signal_ranges)


def tiles_across(cols: int, tile_cols: int) -> int:
    """The number of adjacent tiles in a row of `cols` columns."""
    return max(1, -(-cols // tile_cols)) if tile_cols else 1


class TensorEntry(NamedTuple):
    """A tensor as native code sees it: its address, how it is divided into tiles, and the handles
    of the tiles (names by which the runtime orders tasks).

    Rows and rows per tile may be numbers of symbols. A tile has `tile_cols` columns; 0 stands for
    all columns.
    """

    key: tuple[object, ...]
    offset: int
    extent: Number
    cols: int
    stride: int
    dtype: str
    tile_rows: NumberLike
    first_handle: int
    tile_cols: int = 0

    @property
    def tiles_across(self) -> int:
        """The number of adjacent tiles in a row."""
        return tiles_across(self.cols, self.tile_cols)


@dataclass(frozen=True)
class Call:
    """One use of a lowered template: an entry per slot, the numbers that its instructions refer to,
    and hints for its tasks.
    """

    template: int
    binding: tuple[int, ...]
    numbers: tuple[int, ...] = ()
    hints: TaskHints = NO_HINTS


@dataclass(frozen=True)
class DeviceClass:
    """What the devices of one class have in common: templates, entries (and which of them share
    memory), named lists of calls, and the address at which each device's file begins.

    A run executes the calls of one list, in order.
    """

    templates: tuple[LoweredTemplate, ...]
    entries: tuple[TensorEntry, ...]
    aliases: Mapping[int, tuple[int, ...]]
    calls: Mapping[str, tuple[Call, ...]]
    file_begin: int = NO_FILE

    def __post_init__(self) -> None:
        freeze_maps(self, "aliases", "calls")


@dataclass(frozen=True)
class DeviceBinding:
    """One device: its class, the numbers that the class's instructions refer to, and its device
    groups.
    """

    class_id: int
    numbers: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class TileProgram:
    """Everything that the devices execute. A device's number is its index."""

    classes: tuple[DeviceClass, ...]
    devices: tuple[DeviceBinding, ...]
