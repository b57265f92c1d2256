"""Collectives on symmetric tensors, as methods of a device group.

Names of methods and arguments are those of `torch.distributed`. Its calls are made by every process
for itself. Here one process leads, so one call is made for all devices. `axis` says which devices
exchange data: those along one axis of the mesh (or the product of some axes), in all groups along it
at the same time. A rank is a place along the axis.

A collective is a program of one exchange, with the planner's records (`plan.collectives.arrays`). It
is made at the first call with its tensors.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from tilewise.core.errors import LayoutError, PlanError, ShapeError
from tilewise.core.mesh import Axes, DeviceMesh
from tilewise.core.tree import Interval
from tilewise.core.validation import Validator, shown
from tilewise.ir.program import TileProgram
from tilewise.plan.collectives.arrays import FlatArray, array_program
from tilewise.runtime import CallHandle, Program
from tilewise.session.assemble import native_program

if TYPE_CHECKING:
    from tilewise.tiles.group import SymmTensor

__all__ = ["Collectives"]

AxisLike: TypeAlias = "str | tuple[str, ...] | None"
SplitSizes: TypeAlias = "Sequence[int] | Sequence[Sequence[int]] | None"
_Made: TypeAlias = "tuple[Program, TileProgram] | tuple[()]"  # empty: there is nothing to do
# by sender and receiver, rows of the sender's tensor and of the receiver's
_Moves: TypeAlias = "dict[tuple[int, int], tuple[Interval, Interval]]"
_REDUCED = ("f32", "bf16")
_OPS = ("sum", "max", "min")
_MOST_PROGRAMS = 512
_validate = Validator("tiles", PlanError)


class Collectives(ABC):
    """The collectives of a `DeviceGroup`.

    With `async_op`, a call returns a `CallHandle` and the exchange runs in the background, after
    all programs that were called or started before. Otherwise the call waits for the end.

    All calls raise before anything runs:

    - `ShapeError` if shapes or dtypes do not fit;
    - `PlanError` if a tensor belongs to another group or is packed, or there is no such rank or op;
    - `LayoutError` if the mesh has no such axis.
    """

    mesh: DeviceMesh
    _first_signal: int  # of those that collectives use

    def __init__(self) -> None:
        self._exchanges: dict[tuple[object, ...], _Made] = {}
        self._keeping = threading.Lock()

    @abstractmethod
    def run_program(self, native: Program, program: TileProgram) -> None:
        """Run a program on all devices, and wait for its end."""

    @abstractmethod
    def start_program(self, native: Program, program: TileProgram, result: object = None) -> CallHandle:
        """Run a program in the background."""

    # ---- reductions ---------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: SymmTensor, op: str = "sum", axis: AxisLike = None, async_op: bool = False
    ) -> CallHandle | None:
        """Combine all devices' copies of a tensor, in place.

        The copies are combined along a fixed tree: neighbours in pairs, then pairs of pairs. Sums are
        in fp32 and rounded once, so all devices get the same bits.

        Args:
            tensor: f32 or bf16.
            op: `sum`, `max` or `min`.
            axis: an axis of the mesh, several, or None for all.
            async_op: return a handle at once.

        Cost: each of n devices reads 2 (n - 1) / n of the tensor from others.
        """
        key = "all_reduce", tensor, op, axis
        made = self._exchanges.get(key)
        if made is None:
            self._require_reducible("all_reduce", op, tensor)
            axes = self._axes("all_reduce", axis)
            array = _flat(tensor)
            if self.mesh.size(*axes) == 1:
                made = self._keep(key, ())
            else:
                made = self._keep(key, self._made("all_reduce", "all_reduce", axes, array, array, op))
        return self._launch(made, tensor, async_op)

    def reduce_scatter_tensor(
        self,
        output: SymmTensor,
        input: SymmTensor,
        op: str = "sum",
        axis: AxisLike = None,
        async_op: bool = False,
    ) -> CallHandle | None:
        """Combine all devices' copies of `input`; the device of rank r gets the r-th part.

        Args:
            output: the part of a device; as many elements as `input` has, divided by the number of
                devices along the axis.
            input: f32 or bf16.
            op, axis, async_op: as in `all_reduce`.
        """
        key = "reduce_scatter_tensor", output, input, op, axis
        made = self._exchanges.get(key)
        if made is None:
            self._require_reducible("reduce_scatter_tensor", op, output, input)
            axes = self._axes("reduce_scatter_tensor", axis)
            parts = self._parts("reduce_scatter_tensor", axes, input, output)
            arrays = _flat(input), _flat(output)
            exchange = self._made("reduce_scatter", "reduce_scatter_rows", axes, *arrays, op, parts)
            made = self._keep(key, exchange)
        return self._launch(made, output, async_op)

    # ---- copies -------------------------------------------------------------------------------------------

    def all_gather_into_tensor(
        self,
        output_tensor: SymmTensor,
        input_tensor: SymmTensor,
        axis: AxisLike = None,
        async_op: bool = False,
    ) -> CallHandle | None:
        """Give every device the copies of all devices along the axis, one after another by rank.

        Args:
            output_tensor: as many elements as `input_tensor` has, times the number of devices.
            input_tensor: of any dtype.
            axis, async_op: as in `all_reduce`.
        """
        key = "all_gather_into_tensor", output_tensor, input_tensor, axis
        made = self._exchanges.get(key)
        if made is None:
            self._require("all_gather_into_tensor", output_tensor, input_tensor)
            axes = self._axes("all_gather_into_tensor", axis)
            parts = self._parts("all_gather_into_tensor", axes, output_tensor, input_tensor)
            arrays = _flat(input_tensor), _flat(output_tensor)
            made = self._keep(key, self._made("all_gather", "all_gather_batch", axes, *arrays, parts=parts))
        return self._launch(made, output_tensor, async_op)

    def all_to_all_single(
        self,
        output: SymmTensor,
        input: SymmTensor,
        output_split_sizes: SplitSizes = None,
        input_split_sizes: SplitSizes = None,
        axis: AxisLike = None,
        async_op: bool = False,
    ) -> CallHandle | None:
        """Send the j-th part of a device's `input` to the device of rank j, which puts the parts of
        all devices one after another, by rank, into `output`.

        Args:
            output, input: of any dtype, equal in all dims but the first.
            output_split_sizes: rows that a device gets from each rank. For each device of the axis,
                because one call is made for all: a list of lists. One list stands for all devices.
            input_split_sizes: rows that a device sends to each rank, in the same form. The sizes
                that are not given follow from the others; without any, all parts are equal.
            axis, async_op: as in `all_reduce`.
        """
        sizes = _hashable(output_split_sizes), _hashable(input_split_sizes)
        key = "all_to_all_single", output, input, *sizes, axis
        made = self._exchanges.get(key)
        if made is None:
            self._require("all_to_all_single", output, input)
            axes = self._axes("all_to_all_single", axis)
            if output.shape[1:] != input.shape[1:]:
                _invalid_shape(
                    "all_to_all_single", "tensors must be equal in all dims but the first", output, input
                )
            rows = _split_rows(self.mesh.size(*axes), output, input, *sizes)
            width, members = prod(input.shape[1:]), len(rows)
            moves: _Moves = {}
            for i in range(members):
                for j in range(members):
                    sent, got = sum(rows[i][:j]) * width, sum(r[j] for r in rows[:i]) * width
                    count = rows[i][j] * width
                    moves[i, j] = (sent, sent + count), (got, got + count)
            made = self._keep(key, self._copies("all_to_all", axes, input, output, moves))
        return self._launch(made, output, async_op)

    def broadcast(
        self, tensor: SymmTensor, src: int = 0, axis: AxisLike = None, async_op: bool = False
    ) -> CallHandle | None:
        """Copy the tensor of rank `src` to all devices along the axis.

        Args:
            tensor: of any dtype.
            src: the rank.
            axis, async_op: as in `all_reduce`.
        """
        key = "broadcast", tensor, src, axis
        made = self._exchanges.get(key)
        if made is None:
            self._require("broadcast", tensor)
            axes = self._axes("broadcast", axis)
            self._require_rank("broadcast", "src", src, axes)
            rows = 0, prod(tensor.shape)
            moves = {(src, to): (rows, rows) for to in range(self.mesh.size(*axes)) if to != src}
            made = self._keep(key, self._copies("broadcast", axes, tensor, tensor, moves))
        return self._launch(made, tensor, async_op)

    def gather(
        self,
        tensor: SymmTensor,
        gather_tensor: SymmTensor,
        dst: int = 0,
        axis: AxisLike = None,
        async_op: bool = False,
    ) -> CallHandle | None:
        """Copy the tensors of all devices along the axis to the device of rank `dst`, one after another.

        Args:
            tensor: of any dtype.
            gather_tensor: as many elements as `tensor` has, times the number of devices. Only that of
                rank `dst` is written.
            dst: the rank.
            axis, async_op: as in `all_reduce`.
        """
        key = "gather", tensor, gather_tensor, dst, axis
        made = self._exchanges.get(key)
        if made is None:
            self._require("gather", tensor, gather_tensor)
            axes = self._axes("gather", axis)
            self._require_rank("gather", "dst", dst, axes)
            parts = self._parts("gather", axes, gather_tensor, tensor)
            moves = {(rank, dst): (parts[0], part) for rank, part in enumerate(parts)}
            made = self._keep(key, self._copies("gather", axes, tensor, gather_tensor, moves))
        return self._launch(made, gather_tensor, async_op)

    def scatter(
        self,
        tensor: SymmTensor,
        scatter_tensor: SymmTensor,
        src: int = 0,
        axis: AxisLike = None,
        async_op: bool = False,
    ) -> CallHandle | None:
        """Copy the r-th part of a tensor of rank `src` to the device of rank r.

        Args:
            tensor: the parts, of any dtype.
            scatter_tensor: as many elements as `tensor` has, times the number of devices. Only that
                of rank `src` is read.
            src: the rank.
            axis, async_op: as in `all_reduce`.
        """
        key = "scatter", tensor, scatter_tensor, src, axis
        made = self._exchanges.get(key)
        if made is None:
            self._require("scatter", tensor, scatter_tensor)
            axes = self._axes("scatter", axis)
            self._require_rank("scatter", "src", src, axes)
            parts = self._parts("scatter", axes, scatter_tensor, tensor)
            moves = {(src, rank): (part, parts[0]) for rank, part in enumerate(parts)}
            made = self._keep(key, self._copies("scatter", axes, scatter_tensor, tensor, moves))
        return self._launch(made, tensor, async_op)

    def send(
        self,
        tensor: SymmTensor,
        dst: int,
        src: int,
        recv_tensor: SymmTensor | None = None,
        axis: AxisLike = None,
        async_op: bool = False,
    ) -> CallHandle | None:
        """Copy the tensor of rank `src` to rank `dst`. One call is both the sender's and the
        receiver's.

        Args:
            tensor: of any dtype.
            dst, src: the ranks.
            recv_tensor: where the receiver puts it; by default into its own copy of `tensor`.
            axis, async_op: as in `all_reduce`.
        """
        recv_tensor = tensor if recv_tensor is None else recv_tensor
        key = "send", tensor, recv_tensor, dst, src, axis
        made = self._exchanges.get(key)
        if made is None:
            self._require("send", tensor, recv_tensor)
            axes = self._axes("send", axis)
            for what, rank in (("dst", dst), ("src", src)):
                self._require_rank("send", what, rank, axes)
            if tensor.shape != recv_tensor.shape:
                _invalid_shape("send", "both tensors must have one shape", tensor, recv_tensor)
            rows = 0, prod(tensor.shape)
            moves = {} if tensor is recv_tensor and src == dst else {(src, dst): (rows, rows)}
            made = self._keep(key, self._copies("send", axes, tensor, recv_tensor, moves))
        return self._launch(made, recv_tensor, async_op)

    def recv(
        self,
        tensor: SymmTensor,
        src: int,
        dst: int,
        send_tensor: SymmTensor | None = None,
        axis: AxisLike = None,
        async_op: bool = False,
    ) -> CallHandle | None:
        """The same as `send`, from the receiver's side: fill the tensor of rank `dst` with that of
        rank `src`, by default the sender's copy of `tensor`.
        """
        sent = tensor if send_tensor is None else send_tensor
        return self.send(sent, dst, src, tensor, axis, async_op)

    # ---- making and running -------------------------------------------------------------------------------

    def _launch(self, made: _Made, result: SymmTensor, async_op: bool) -> CallHandle | None:
        if not made:
            return CallHandle("a program", None, result=result) if async_op else None
        if async_op:
            return self.start_program(*made, result)
        self.run_program(*made)
        return None

    def _keep(self, key: tuple[object, ...], made: _Made) -> _Made:
        with self._keeping:
            self._exchanges[key] = made
            if len(self._exchanges) > _MOST_PROGRAMS:
                del self._exchanges[next(iter(self._exchanges))]
        return made

    def _made(
        self,
        name: str,
        kind: str,
        axes: Axes,
        source: FlatArray,
        target: FlatArray,
        combine: str = "",
        parts: Sequence[Interval] = (),
    ) -> tuple[Program, TileProgram]:
        program = array_program(
            self.mesh,
            name,
            kind,
            axes,
            source,
            target,
            combine=combine,
            parts=parts,
            first_signal=self._first_signal,
        )
        return native_program(program, ()), program

    def _copies(
        self,
        name: str,
        axes: Axes,
        source: SymmTensor,
        target: SymmTensor,
        moves: _Moves,
    ) -> _Made:
        """A program that copies rows between pairs of ranks."""
        members, nothing = range(self.mesh.size(*axes)), ((0, 0), (0, 0))
        parts = [part for i in members for j in members for part in moves.get((i, j), nothing)]
        if all(begin == end for begin, end in parts):
            return ()
        return self._made(name, "all_to_all", axes, _flat(source), _flat(target), parts=parts)

    # ---- checks -------------------------------------------------------------------------------------------

    def _axes(self, call: str, axis: AxisLike) -> Axes:
        """The names of the axes."""
        axes = self.mesh.names if axis is None else (axis,) if isinstance(axis, str) else axis
        if not set(axes) <= set(self.mesh.names) or len(set(axes)) < len(axes):
            raise LayoutError(
                f"[tiles.{call}] an axis must be one of the mesh's: {', '.join(self.mesh.names)}; got {shown(axis)}; "
                "pass one of them, a tuple of some, or None for all"
            )
        return axes

    def _require(self, call: str, *tensors: SymmTensor) -> None:
        for tensor in tensors:
            if tensor.group is not self or tensor.is_packed:
                _validate.invalid(
                    call,
                    "a tensor must be a plain one of the group",
                    f"{tensor!r} of {'it' if tensor.group is self else 'another group'}",
                    "allocate it with symm_tensor of this group",
                )
        if len({tensor.dtype for tensor in tensors}) > 1:
            _invalid_shape(call, "both tensors must have one dtype", *tensors)
        if len(tensors) > 1 and tensors[0] is tensors[1] and call != "send":
            _validate.invalid(call, "the tensors must differ", "one tensor twice", "allocate another")

    def _require_reducible(self, call: str, op: str, *tensors: SymmTensor) -> None:
        self._require(call, *tensors)
        for tensor in tensors:
            if tensor.dtype not in _REDUCED:
                raise ShapeError(
                    f"[tiles.{call}] values must be {' or '.join(_REDUCED)} to be combined; got {tensor!r}; "
                    "convert them"
                )
        if op not in _OPS:
            _validate.invalid(call, f"an op must be {', '.join(_OPS)}", shown(op), "choose one of them")

    def _require_rank(self, call: str, what: str, rank: int, axes: Axes) -> None:
        _validate.integer(call, what, rank, 0, self.mesh.size(*axes) - 1)

    def _parts(self, call: str, axes: Axes, whole: SymmTensor, part: SymmTensor) -> list[Interval]:
        """The rows of each rank's part of the whole."""
        members, rows = self.mesh.size(*axes), prod(part.shape)
        if prod(whole.shape) != members * rows:
            raise ShapeError(
                f"[tiles.{call}] one tensor must have {members} times the elements of the other, one part per device "
                f"along {', '.join(axes)}; got {whole!r} and {part!r}; allocate other shapes"
            )
        return [(rank * rows, (rank + 1) * rows) for rank in range(members)]


def _flat(tensor: SymmTensor) -> FlatArray:
    return FlatArray(prod(tensor.shape), tensor.dtype, tensor.offset)


def _invalid_shape(call: str, rule: str, *tensors: SymmTensor) -> NoReturn:
    got = " and ".join(map(repr, tensors))
    raise ShapeError(f"[tiles.{call}] {rule}; got {got}; allocate others")


def _hashable(sizes: Any) -> Any:
    """Split sizes as tuples."""
    if sizes is None:
        return None
    return tuple(tuple(s) if isinstance(s, Sequence) else s for s in sizes)


def _split_rows(
    members: int, output: SymmTensor, input: SymmTensor, output_sizes: Any, input_sizes: Any
) -> list[list[int]]:
    """Rows from each rank to each rank."""

    def matrix(sizes: Any, tensor: SymmTensor) -> list[list[int]]:
        rows = [*sizes] if sizes and isinstance(sizes[0], tuple) else [sizes] * members
        is_square = len(rows) == members and all(isinstance(r, tuple) and len(r) == members for r in rows)
        if not is_square or not all(type(n) is int and n >= 0 for row in rows for n in row):
            raise ShapeError(
                f"[tiles.all_to_all_single] split sizes must be {members} numbers of rows, or as many for each of "
                f"{members} devices; got {shown(sizes)}; count the devices along the axis"
            )
        if max(map(sum, rows)) > tensor.shape[0]:
            raise ShapeError(
                f"[tiles.all_to_all_single] split sizes must add up to at most the {tensor.shape[0]} rows of the "
                f"tensor; got {max(map(sum, rows))}; allocate a larger tensor"
            )
        return [[*row] for row in rows]

    if output_sizes is None and input_sizes is None:
        rows, rest = divmod(input.shape[0], members)
        if rest or input.shape != output.shape:
            raise ShapeError(
                f"[tiles.all_to_all_single] without split sizes, both tensors must have one shape, whose first dim "
                f"divides by {members}; got {output!r} and {input!r}; pass split sizes"
            )
        return [[rows] * members for _ in range(members)]
    sent = matrix(input_sizes, input) if input_sizes is not None else None
    got = matrix(output_sizes, output) if output_sizes is not None else None
    if sent is None:
        assert got is not None
        sent = [[*column] for column in zip(*got)]
        matrix(tuple(map(tuple, sent)), input)
    else:
        wanted = [[*column] for column in zip(*sent)]
        matrix(tuple(map(tuple, wanted)), output)
        if got is not None and got != wanted:
            raise ShapeError(
                f"[tiles.all_to_all_single] a device must get what the others send to it; got {wanted} sent and {got} "
                "expected; correct one of them, or leave it out"
            )
    return sent
