"""Traces a tile program: runs the user's function once and records what it calls.

The recorded statements are in the order of the program's text. Loops over tiles are kept as loops.
If the function branches on a rank, the devices for which the condition has the other value are left
to a second trace, so each trace holds the statements of the devices that take the same branches.
`tiles.emit` makes instructions of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from tilewise.core.errors import PlanError, ShapeError
from tilewise.core.mesh import Axes, DeviceMesh
from tilewise.core.validation import shown
from tilewise.kernels.calls import problem_of
from tilewise.kernels.table import KERNELS
from tilewise.tiles.symbols import Env, Index, IndexLike, Loop, grid_values, loops_of, values_of

__all__ = ["Block", "Line", "Post", "SignalRange", "Statement", "TensorForm", "Tracer", "View", "WaitItem"]

_PACKAGE = os.path.dirname(os.path.dirname(__file__))


class Line(NamedTuple):
    """A line of the user's program."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class TensorForm(NamedTuple):
    """What a trace depends on of a symmetric tensor: its number among the program's tensors, its
    shape, its dtype, and whether it is stored in panels.
    """

    number: int
    shape: tuple[int, ...]
    dtype: str
    is_packed: bool

    @property
    def rows(self) -> int:
        """The size of the first dim."""
        return self.shape[0]

    @property
    def cols(self) -> int:
        """Elements per row."""
        return prod(self.shape[1:])


class SignalRange(NamedTuple):
    """Several signals: the number of the first one, and how many."""

    first: int
    size: int


@dataclass(frozen=True, eq=False)
class SignalView:
    """Signals as a program sees them: `ready[3]`, `ready[t]`, `ready[0:4]`. An element is one
    signal.
    """

    tracer: Tracer
    range: SignalRange
    index: IndexLike = 0
    is_element: bool = False

    def __len__(self) -> int:
        return self.range.size

    def __getitem__(self, index: Any) -> SignalView:
        if self.is_element:
            self.tracer.invalid("one signal has no elements", shown(index), "index the array of signals")
        if isinstance(index, slice):
            first, end, step = index.indices(self.range.size)
            if step != 1:
                self.tracer.invalid("a slice of signals has step 1", str(step), "drop the step")
            return SignalView(self.tracer, SignalRange(self.range.first + first, max(0, end - first)))
        if isinstance(index, int):
            index += self.range.size if index < 0 else 0
            self.tracer.within("a signal's index", index, self.range.size)
        elif not isinstance(index, Index):
            self.tracer.invalid(
                "a signal's index must be an integer", shown(index), "index with a tile or rank"
            )
        return SignalView(self.tracer, self.range, index, is_element=True)

    def elements(self) -> list[SignalView]:
        """The single signals."""
        return [self] if self.is_element else [self[i] for i in range(self.range.size)]


@dataclass(frozen=True, eq=False)
class View:
    """Rows of a symmetric tensor on one device, as a program sees them.

    Attributes:
        form: the tensor.
        owner: the device that has the rows; None for the device that runs the program.
        begin: first row.
        num_rows: number of rows.
        waits: the waits whose tokens were consumed.
        columns: first column and number of columns; None for all.
    """

    tracer: Tracer
    form: TensorForm
    owner: IndexLike | None
    begin: IndexLike
    num_rows: int
    waits: tuple[WaitItem, ...] = ()
    columns: tuple[IndexLike, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the view's dims."""
        if self.columns is not None:
            return self.num_rows, self.columns[1]
        return self.num_rows, *self.form.shape[1:]

    @property
    def dtype(self) -> str:
        """The element type."""
        return self.form.dtype

    @property
    def is_packed(self) -> bool:
        """Whether the tensor is stored in panels."""
        return self.form.is_packed

    def __len__(self) -> int:
        return self.num_rows

    def __bool__(self) -> NoReturn:
        self._read("a condition")

    def __float__(self) -> NoReturn:
        self._read("a number")

    __int__ = __index__ = __float__

    def __array__(self, *arguments: object, **options: object) -> NoReturn:
        self._read("an array")

    def _read(self, what: str) -> NoReturn:
        self.tracer.invalid(
            "a traced program does not see values of tensors",
            f"a tensor as {what}",
            "compute with kernels; decide before the program, and pass the result as an argument",
        )

    def __getitem__(self, index: Any) -> View:
        rows, columns = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(None))
        view = self._rows(rows)
        return view if columns == slice(None) else view._columns(columns)

    def _rows(self, rows: Any) -> View:
        tracer = self.tracer
        if not isinstance(rows, slice) or rows.step is not None:
            tracer.invalid("rows must be a slice without a step", shown(rows), "write x[begin:end]")
        begin = 0 if rows.start is None else rows.start
        end = self.num_rows if rows.stop is None else rows.stop
        count = tracer.constant(end - begin, "the number of rows of a slice")
        if isinstance(begin, int) and isinstance(end, int) and not 0 <= begin < end <= self.num_rows:
            tracer.invalid(
                f"rows must be within the {self.num_rows} rows of the tensor",
                f"[{begin}:{end}]",
                "check the slice",
            )
        return self._part(begin, count)

    def _columns(self, columns: Any) -> View:
        tracer = self.tracer
        if not isinstance(columns, slice) or columns.step is not None or self.columns is not None:
            tracer.invalid(
                "columns must be one slice without a step", shown(columns), "write x[:, begin:end]"
            )
        if len(self.form.shape) != 2 or self.form.is_packed:
            tracer.invalid("columns can be sliced of a plain 2-D tensor", str(self.form.shape), "slice rows")
        begin = 0 if columns.start is None else columns.start
        end = self.form.cols if columns.stop is None else columns.stop
        count = tracer.constant(end - begin, "the number of columns of a slice")
        if isinstance(begin, int) and not 0 <= begin < begin + count <= self.form.cols:
            tracer.invalid(
                f"columns must be within the tensor's {self.form.cols}",
                f"[{begin}:{begin + count}]",
                "check the slice",
            )
        return replace(self, columns=(begin, count))

    def tile(self, index: IndexLike, *, rows: int) -> View:
        """The rows `x[index * rows : (index + 1) * rows]`."""
        rows = self.tracer.constant(rows, "rows per tile")
        if rows < 1:
            self.tracer.invalid("a tile must have rows", str(rows), "pass rows=1 or more")
        if isinstance(index, int):
            self.tracer.within("a tile's index", index, max(1, self.num_rows // rows))
        return self._part(index * rows, rows)

    def _part(self, begin: IndexLike, count: int) -> View:
        begin = self.begin + begin if not isinstance(self.begin, int) or self.begin else begin
        return replace(self, begin=begin, num_rows=count)

    def on(self, owner: IndexLike) -> View:
        """The same rows on another device."""
        return replace(self, owner=owner)

    def after(self, waits: tuple[WaitItem, ...]) -> View:
        """The same rows, to be read after more waits."""
        every = tuple(dict.fromkeys((*self.waits, *waits)))
        return replace(self, waits=every)

    def whole(self) -> View:
        """The whole tensor on the device that runs the program."""
        return View(self.tracer, self.form, None, 0, self.form.rows)


@dataclass(eq=False)
class WaitItem:
    """A wait for one signal: until it has grown to `value` since the program began.

    Attributes:
        place: the statement that stands where the wait was called.
    """

    signal: SignalView
    value: IndexLike
    scope: str
    line: Line
    loops: tuple[Loop, ...]
    place: Statement = field(init=False)


@dataclass(frozen=True, eq=False)
class Token:
    """The result of a wait."""

    items: tuple[WaitItem, ...]


@dataclass(frozen=True, eq=False)
class Post:
    """A notify: `value` posts of one signal of a device."""

    signal: SignalView
    device: IndexLike
    value: int
    scope: str
    line: Line


@dataclass(eq=False)
class Statement:
    """A call of the program that becomes an instruction.

    Attributes:
        name: a kernel of the table; empty if the statement only orders others.
        dtype: the kernel's element type; None if the kernel has one.
        label: what kind of statement it is, for labels of tasks.
        operands: views by the kernel's names.
        ints, floats: attributes by the kernel's names.
        reads: without a kernel, views whose writers it waits for.
        orders: without a kernel, views whose later users wait for it.
        loops: the tile loops around it.
        waits: waits that must be over before it starts.
        is_wait: whether it stands for a wait, and is needed only if no other statement has the wait.
        is_joined: whether a later statement without a kernel waits for it.
    """

    label: str
    line: Line
    loops: tuple[Loop, ...]
    name: str = ""
    dtype: str | None = None
    operands: Mapping[str, Any] = field(default_factory=dict)
    ints: Mapping[str, Any] = field(default_factory=dict)
    floats: Mapping[str, Any] = field(default_factory=dict)
    reads: list[View] = field(default_factory=list)
    orders: list[View] = field(default_factory=list)
    waits: list[WaitItem] = field(default_factory=list)
    notifies: list[Post] = field(default_factory=list)
    is_wait: bool = False
    is_joined: bool = False

    def views(self) -> Iterator[View]:
        """All views of its operands."""
        for operand in self.operands.values():
            for view in operand if isinstance(operand, list | tuple) else (operand,):
                if view is not None:
                    yield view


class _Posted(NamedTuple):
    """A statement that posts a signal, and how many statements of the block it follows."""

    carrier: Statement
    place: int


def _statements(item: Statement | Block) -> Iterator[Statement]:
    return item.statements() if isinstance(item, Block) else iter((item,))


@dataclass(eq=False)
class Block:
    """Statements in order, and blocks of tile loops between them.

    Attributes:
        loop: the loop whose body it is; None for the function.
        is_fenced: whether a fence separates the next put from earlier ones.
        posts: the last statement that posts a signal with a known index.
    """

    loop: Loop | None
    items: list[Statement | Block] = field(default_factory=list)
    is_fenced: bool = False
    posts: dict[tuple[int, int], _Posted] = field(default_factory=dict)

    def statements(self) -> Iterator[Statement]:
        """All statements, also those of inner loops."""
        for item in self.items:
            if isinstance(item, Block):
                yield from item.statements()
            else:
                yield item


class Tracer:
    """Records the statements of a program for the devices that take the same branches. It is the
    interpreter of the primitives (`comm.primitives`) while the function runs.

    Args:
        name: the program's name.
        mesh: all devices.
        devices: the devices to trace; after the trace, those that took the branches taken.
        barrier: signals for `barrier()`, one per device.
        axes: the axes of the mesh along which the program's devices are numbered; by default all.

    Attributes:
        body: what was recorded.
        others: devices that take other branches.
        forms, signals: tensors and signals of its arguments; signals by the arguments' names.
    """

    def __init__(
        self,
        name: str,
        mesh: DeviceMesh,
        devices: Sequence[int],
        barrier: SignalRange,
        axes: Axes | None = None,
    ) -> None:
        self.name, self.mesh, self.axes = name, mesh, mesh.names if axes is None else axes
        self.devices: NDArray[np.int64] = np.asarray(devices, np.int64)
        self.barrier_signals = barrier
        self.body = Block(None)
        self.others: list[tuple[int, ...]] = []
        self.forms: list[TensorForm] = []
        self.signals: dict[str, SignalRange] = {}
        self._stack = [self.body]
        self._groups: dict[Axes, NDArray[np.int64]] = {}  # per device, the devices along some axes
        self._num_barriers = 0
        self._entered: list[WaitItem] = []  # the waits of the last barrier
        self._broken: Line | None = None

    # ---- errors and symbols -------------------------------------------------------------------------------

    def line(self) -> Line:
        """The line of the user's program that is executed."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        return Line("?", 0) if frame is None else Line(frame.f_code.co_filename, frame.f_lineno)

    def invalid(
        self, rule: str, got: str, advice: str, line: Line | None = None, error: type[Exception] = PlanError
    ) -> NoReturn:
        """Raise an error that names the line of the user's program."""
        raise error(f"[tiles.{self.name}] {rule}; got {got} at {line or self.line()}; {advice}")

    def within(self, what: str, index: int, count: int) -> None:
        """Reject an index that is out of range."""
        if not 0 <= index < count:
            self.invalid(f"{what} must be between 0 and {count - 1}", str(index), "check the index")

    def known_value(self, index: Index) -> int | None:
        """The value of an expression if it is equal on all traced devices and in all iterations of its loops."""
        values = np.unique(grid_values(index, self.devices))
        return int(values[0]) if len(values) == 1 else None

    def constant(self, value: Any, what: str) -> int:
        """An integer that is equal on all devices and in all iterations."""
        if isinstance(value, Index):
            constant = self.known_value(value)
            if constant is None:
                self.invalid(
                    f"{what} must be equal in all iterations and on all devices",
                    "an expression that is not",
                    "use constant sizes",
                )
            return constant
        if not isinstance(value, int) or isinstance(value, bool):
            self.invalid(f"{what} must be an integer", shown(value), "pass an integer")
        return value

    def decide(self, index: Index) -> bool:
        """The value of a condition. Devices with the other value are left to another trace."""
        if index.loops:
            self.invalid(
                "a condition must not depend on the index of a tile loop",
                "one that does",
                "loop with range(), which repeats the statements",
            )
        is_true = np.broadcast_to(np.asarray(index.evaluate(Env(self.devices, {}))) != 0, self.devices.shape)
        chosen = bool(is_true[0])
        if not np.all(is_true == chosen):
            self.others.append(tuple(self.devices[is_true != chosen].tolist()))
            self.devices = self.devices[is_true == chosen]
        return chosen

    # ---- devices ------------------------------------------------------------------------------------------

    def rank(self, axis: str | None) -> Any:
        """The number of the device, or its coordinate on an axis."""
        axes = self._axes(axis)
        return self._of_device(lambda device: self.mesh.coordinate(device, *axes))

    def _of_device(self, function: Any) -> Index:
        table = np.array([function(device) for device in range(self.mesh.num_devices)], np.int64)
        return Index(self, lambda env: table[env.devices])

    def num_ranks(self, axis: str | None) -> int:
        """The number of devices, of the mesh or of an axis."""
        return self.mesh.size(*self._axes(axis))

    def _axes(self, axis: str | None) -> Axes:
        """The axes along which devices are numbered."""
        if axis is None:
            return self.axes
        if axis not in self.axes:
            self.invalid(f"an axis must be one of {', '.join(self.axes)}", shown(axis), "name one of them")
        return (axis,)

    def device_of(self, rank: Any, axis: str | None = None) -> Index:
        """The number of the device with a rank, among all devices or along an axis."""
        count = self.num_ranks(axis)
        if isinstance(rank, int) and not isinstance(rank, bool):
            self.within("a rank", rank, count)
        elif not isinstance(rank, Index):
            self.invalid("a rank must be an integer", shown(rank), "pass rank() or an expression of it")
        axes = self._axes(axis)
        if axes not in self._groups:
            groups = [self.mesh.group(device, *axes) for device in range(self.mesh.num_devices)]
            self._groups[axes] = np.array(groups, np.int64)
        table = self._groups[axes]
        line = self.line()

        def evaluate(env: Env) -> Any:
            values = np.asarray(values_of(rank, env))
            if values.min() < 0 or values.max() >= count:
                self.invalid(
                    f"a rank must be between 0 and {count - 1}",
                    str(int(values.min() if values.min() < 0 else values.max())),
                    "check the expression, for example with % num_ranks()",
                    line,
                )
            devices = np.broadcast_to(env.devices, np.broadcast_shapes(env.devices.shape, values.shape))
            return table[devices, values]

        return Index(self, evaluate, loops_of(rank))

    def symm_at(self, tensor: Any, rank: Any, axis: str | None) -> View:
        """The same rows on another device."""
        return self.view(tensor, "symm_at").on(self.device_of(rank, axis))

    def view(self, tensor: Any, what: str) -> View:
        """Check that a value is a tensor of this program."""
        if isinstance(tensor, View) and tensor.tracer is self:
            return tensor
        self.invalid(
            f"{what} needs a symmetric tensor that was passed to the program",
            shown(tensor),
            "pass it as an argument",
        )

    # ---- statements ---------------------------------------------------------------------------------------

    @property
    def block(self) -> Block:
        """The innermost block."""
        return self._stack[-1]

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around the current line."""
        return tuple(block.loop for block in self._stack[1:] if block.loop is not None)

    def _add(self, statement: Statement) -> Statement:
        if self._broken is not None:
            self._invalid_break()
        for view in statement.views():
            for wait in view.waits:
                if wait not in statement.waits:
                    statement.waits.append(wait)
        if any(view.owner is not None for view in statement.views()):  # no tile of its own may order it
            statement.waits += self._entered
        for wait in statement.waits:
            if any(loop not in statement.loops for loop in wait.loops):
                self.invalid(
                    "a token must be consumed inside of the tile loop of its wait",
                    f"the token of {wait.line}",
                    "wait again after the loop",
                )
        self.block.items.append(statement)
        return statement

    def _invalid_break(self) -> NoReturn:
        self.invalid(
            "a tile loop must run all its iterations",
            "a break or return",
            "loop over fewer tiles, or loop with range()",
            self._broken,
        )

    def kernel(self, name: str, arguments: dict[str, Any]) -> None:
        """A kernel on views."""
        statement = Statement(name, self.line(), self.loops, name)
        _sort_arguments(self, statement, arguments)
        self._add(statement)

    def put(self, dst: Any, src: Any) -> None:
        """A copy into another device's memory."""
        self._put(dst, src)

    def _put(self, dst: Any, src: Any) -> Statement:
        src = self.view(src, "put")
        if src.owner is not None:
            self.invalid("put reads the calling device's tensor", "a tensor of another device", "use get")
        return self._copy("put", self.view(dst, "put"), src)

    def get(self, dst: Any, src: Any) -> None:
        """A copy from another device's memory."""
        dst = self.view(dst, "get")
        if dst.owner is not None:
            self.invalid("get writes the calling device's tensor", "a tensor of another device", "use put")
        self._copy("get", dst, self.view(src, "get"))

    def _copy(self, label: str, dst: View, src: View) -> Statement:
        if (dst.shape, dst.dtype) != (src.shape, src.dtype):
            self.invalid(
                f"{label} copies between tiles of one shape and dtype",
                f"{src.dtype}{list(src.shape)} into {dst.dtype}{list(dst.shape)}",
                "slice one of them",
                error=ShapeError,
            )
        if label == "put" and dst.is_packed:
            self.invalid(
                "put writes plain tensors",
                "a packed one",
                "put it as plain rows, or let the other device get it",
            )
        if self.block.is_fenced and label == "put":
            self.block.is_fenced = False
            self._join(
                f"{label}/fence", self.block.items, orders=[src.whole() if loops_of(src.begin) else src]
            )
        operands = {"dst": [dst], "src": [src]}
        return self._add(Statement(label, self.line(), self.loops, "copy_pairs", dst.dtype, operands))

    def put_signal(self, dst: Any, src: Any, signal: Any, value: Any, op: str) -> None:
        """A put whose end posts a signal on the same device."""
        statement = self._put(dst, src)
        owner = self.view(dst, "put_signal").owner
        if owner is None:
            self.invalid("put_signal writes another device's tensor", "the own one", "use symm_at")
        statement.notifies.append(self._post(signal, owner, value, op, "sys"))

    def notify(self, signal: Any, rank: Any, value: Any, op: str, scope: str, axis: str | None) -> None:
        """A post that follows everything before it; in a tile loop, everything of its iteration."""
        post = self._post(signal, self.device_of(rank, axis), value, op, scope)
        key = (post.signal.range.first, post.signal.index) if isinstance(post.signal.index, int) else None
        # posts of one signal follow one another (native/programs/run/expand.cc)
        earlier = self.block.posts.get(key) if key is not None else None
        before = self.block.items[earlier.place + 1 if earlier else 0 :]
        kernels = [s for item in before for s in _statements(item) if s.name]
        last = self.block.items[-1] if self.block.items else None
        if earlier is not None and not before:
            carrier = earlier.carrier
        elif isinstance(last, Statement) and (kernels == [last] or (last.is_wait and not kernels)):
            last.is_wait = False
            carrier = last
        else:
            carrier = self._join("notify", before)
        carrier.notifies.append(post)
        if key is not None:
            self.block.posts[key] = _Posted(carrier, len(self.block.items) - 1)

    def _join(
        self, label: str, before: Sequence[Statement | Block], orders: Sequence[View] = ()
    ) -> Statement:
        """A statement without a kernel that follows others."""
        reads: dict[tuple[object, ...], View] = {}
        loops = set(self.loops)
        statements = [s for item in before for s in _statements(item)]
        for statement in statements:
            if not statement.name:
                continue
            statement.is_joined = True
            for view in statement.views():
                if view.owner is None:
                    is_inside = set(statement.loops) <= loops
                    view = view if is_inside and not view.form.is_packed else view.whole()
                    reads.setdefault(
                        (
                            view.form,
                            id(view.begin) if isinstance(view.begin, Index) else view.begin,
                            view.num_rows,
                        ),
                        view,
                    )
        statement = Statement(label, self.line(), self.loops, reads=list(reads.values()), orders=list(orders))
        statement.waits = [
            item for s in statements if s.is_wait and set(s.loops) <= loops for item in s.waits
        ]
        return self._add(statement)

    def _post(self, signal: Any, device: IndexLike, value: Any, op: str, scope: str) -> Post:
        if not isinstance(signal, SignalView) or not signal.is_element:
            self.invalid("a post needs one signal of the program", shown(signal), "pass ready[i]")
        if op != "add":
            self.invalid(
                "signals of a traced program only count up",
                f"op={op!r}",
                'use op="add" and wait for the count with cmp="ge"',
            )
        value = self.constant(value, "a post's value")
        if not 1 <= value <= 64:
            self.invalid("a post adds 1 to 64", str(value), "post several signals")
        return Post(signal, device, value, scope, self.line())

    # ---- waiting ------------------------------------------------------------------------------------------

    def wait_all(self, signals: Any, value: Any, cmp: str, scope: str, timeout: float | None) -> Token:
        """A wait for one or several signals."""
        if not isinstance(signals, SignalView):
            self.invalid("a wait needs signals of the program", shown(signals), "pass ready[i] or ready")
        if cmp != "ge":
            self.invalid(
                "signals of a traced program only count up, so a wait compares with ge",
                f"cmp={cmp!r}",
                'count the posts, and wait with cmp="ge"',
            )
        if timeout is not None:
            self.invalid(
                "waits of a traced program have the time limit of the devices",
                f"timeout={timeout}",
                "pass deadline_s to DeviceGroup",
            )
        elements = signals.elements()
        values = list(value) if isinstance(value, Sequence) else [value] * len(elements)
        if len(values) != len(elements):
            self.invalid("there must be a value per signal", f"{len(values)} for {len(elements)}", "pass one")
        line, loops = self.line(), self.loops
        items = tuple(WaitItem(s, v, scope, line, loops) for s, v in zip(elements, values))
        statement = Statement("wait", line, loops, waits=list(items), is_wait=True)
        for item in items:
            if not isinstance(item.value, int | Index) or isinstance(item.value, bool):
                self.invalid("a wait's value must be an integer", shown(item.value), "pass a count")
            item.place = statement
        self._add(statement)
        return Token(items)

    def wait_any(self, *arguments: object) -> NoReturn:
        """Not possible in a traced program."""
        self._invalid_primitive("wait_any", "wait for each signal, and let tasks run as their signals arrive")

    def wait_some(self, *arguments: object) -> NoReturn:
        """Not possible in a traced program."""
        self._invalid_primitive(
            "wait_some", "wait for each signal, and let tasks run as their signals arrive"
        )

    def fetch_add(self, *arguments: object) -> NoReturn:
        """Not possible in a traced program."""
        self._invalid_primitive("fetch_add", "divide the work by rank, or notify and wait for a count")

    def compare_swap(self, *arguments: object) -> NoReturn:
        """Not possible in a traced program."""
        self._invalid_primitive("compare_swap", "decide by rank, or notify and wait for a count")

    def _invalid_primitive(self, primitive: str, advice: str) -> NoReturn:
        self.invalid(
            "a traced program must not decide by values that are known only while it runs",
            primitive,
            f"{advice}; tw.comm.local() has this call",
        )

    def consume_token(self, tensor: Any, token: Any) -> View:
        """The tensor, to be read after a wait."""
        if not isinstance(token, Token):
            self.invalid("a token must be the result of wait()", shown(token), "pass what wait() returned")
        return self.view(tensor, "consume_token").after(token.items)

    def fence(self) -> None:
        """Later puts follow earlier ones."""
        self.block.is_fenced = any(s.name for s in self.block.statements())

    quiet = fence

    def barrier(self) -> None:
        """Everything after follows everything before, on all devices."""
        if self.loops:
            self.invalid("a barrier must not be in a tile loop", "one in a loop", "loop with range()")
        me, n, first = self.rank(None), self.num_ranks(None), self.barrier_signals
        line = self.line()
        arrive = self._join("barrier/arrive", self.block.items)
        for distance in range(1, n):
            signal = SignalView(self, first, me, is_element=True)
            arrive.notifies.append(Post(signal, self.device_of((me + distance) % n), 1, "sys", line))
        self._num_barriers += 1
        signals = [SignalView(self, first, (me + distance) % n, is_element=True) for distance in range(1, n)]
        items = [WaitItem(s, self._num_barriers, "sys", line, ()) for s in signals]
        whole = [View(self, form, None, 0, form.rows) for form in self.forms]
        leave = Statement("barrier/leave", line, (), orders=whole, waits=items)
        for item in items:
            item.place = leave
        self._add(leave)
        self._entered = items

    def tiles(self, count: Any, first: Any) -> Iterator[Any]:
        """A loop whose body is traced once."""
        count = self.constant(count, "the number of tiles")
        if count < 0:
            self.invalid("the number of tiles must not be negative", str(count), "check it")
        if count == 0:
            return
        loop, line = Loop(count, first), self.line()
        block = Block(loop)
        self.block.items.append(block)
        self._stack.append(block)
        try:
            yield Index(self, lambda env: env.loops[loop], frozenset((loop,)))
        except GeneratorExit:
            self._broken = line
            return
        finally:
            self._stack.pop()

    def finish(self) -> None:
        """Check the end of the function."""
        if self._broken is not None:
            self._invalid_break()


def arguments_of(tracer: Tracer, function: Callable[..., None], forms: Sequence[Any]) -> list[Any]:
    """The arguments of a program's function as it sees them: views of tensors, signals, and other
    values as they are.
    """
    arguments: list[Any] = []
    names = function.__code__.co_varnames if hasattr(function, "__code__") else ()
    for form, name in zip_longest(forms, names[: len(forms)], fillvalue="signals"):
        if isinstance(form, TensorForm):
            if form not in tracer.forms:
                tracer.forms.append(form)
            arguments.append(View(tracer, form, None, 0, form.rows))
        elif isinstance(form, SignalRange):
            tracer.signals[name] = form
            arguments.append(SignalView(tracer, form))
        else:
            arguments.append(form)
    return arguments


def _sort_arguments(tracer: Tracer, statement: Statement, arguments: Mapping[str, Any]) -> None:
    """Divide a kernel call's arguments into operands, integers and floats, and choose the dtype."""
    name = statement.name
    spec = KERNELS.get(name)
    if spec is None:
        tracer.invalid(
            "a kernel must be one of the kernel table",
            shown(name),
            "see tilewise.kernels.table.KERNELS, or register it with tw.tile_kernel",
        )
    names = spec.operand_names | spec.int_names | spec.float_names
    if not arguments.keys() <= names:
        odd = sorted(set(arguments) - names)[0]
        tracer.invalid(
            f"the arguments of kernel {name!r} are {', '.join(sorted(names))}", shown(odd), "rename it"
        )
    operands: dict[str, Any] = {}
    for operand in spec.operands:
        value = arguments.get(operand.name)
        if value is not None and operand.is_list:
            value = [tracer.view(v, f"kernel {name!r}") for v in value]
        elif value is not None:
            value = tracer.view(value, f"kernel {name!r}")
        operands[operand.name] = value
    problem = problem_of(spec, {**arguments, **operands})
    if problem is not None:
        rule, got, advice = problem
        tracer.invalid(rule, f"{got} for kernel {name!r}", advice, error=ShapeError)
    statement.operands = operands
    statement.ints = {i: _plain(arguments[i]) for i in spec.int_names if i in arguments}
    statement.floats = {f: arguments[f] for f in spec.float_names if f in arguments}
    if len(spec.names) > 1:
        own = [operands[o.name] for o in spec.operands if o.dtypes == ("dt",)]
        views = [view for value in own for view in (value if isinstance(value, list) else [value])]
        statement.dtype = next((view.dtype for view in views if view is not None), None)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool | np.integer) else value
