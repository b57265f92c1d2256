"""`Lowering`: the protocol that `Op.lower` writes instructions to.

To lower an op is to emit the instructions that compute it. The package `plan` implements the
protocol. Ops use nothing else of `plan`.

`ir.program` explains instructions, tasks and signals. A tensor is named by its id in the graph, or
by the `Ref` that a method returned. An operand is the part of a tensor that a task reads or writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tilewise.core.dims import DimLabel, Size
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import PendingReduction, TensorLayout
from tilewise.ir.program import Instruction, Notify, Number, NumberLike, Operand, Wait

if TYPE_CHECKING:
    from tilewise.ir.op import Op

__all__ = ["Accumulator", "Draft", "Emitter", "Lowering", "Ref", "Tiles"]

Tiles = Mapping[str, Operand | Sequence[Operand] | None]
"""Operands of a kernel by the table's names."""


class Ref(NamedTuple):
    """A tensor of the template that is lowered, as this device stores it.

    Attributes:
        slot: the tensor's number in the template.
        extent: number of rows.
        cols: number of columns.
        dtype: name of its element type.
        tile_rows: rows per tile.
        packed: whether the tensor is stored in panels; the flat view of panels (`Lowering.flat`) is not.
        tile_cols: columns per tile; 0 if a tile has all columns.
    """

    slot: int
    extent: Number
    cols: int
    dtype: str
    tile_rows: NumberLike
    packed: bool = False
    tile_cols: int = 0

    @property
    def form(self) -> tuple[object, ...]:
        """Everything except the slot. References with equal forms fit the same instructions."""
        return self.extent, self.cols, self.dtype, self.tile_rows, self.packed, self.tile_cols


@dataclass(frozen=True)
class Accumulator:
    """Where and how this microbatch adds its part to a sum over the batch.

    It consists of the target, the carries to add (sums of earlier microbatches), the result that
    the sum belongs to, whether the sum is then complete, and the tensor that the reduction over
    devices adds after the tree's root.
    """

    ref: Ref
    carries: tuple[Ref, ...]
    result: int
    is_last: bool
    added: int | None = None


@dataclass
class Draft:
    """An instruction while its template is lowered. Collectives add waits and posts to it.

    Attributes:
        instruction: the instruction without waits and posts.
        waits, notifies: the waits and posts added so far.
    """

    instruction: Instruction
    waits: list[Wait] = field(default_factory=list)
    notifies: list[Notify] = field(default_factory=list)

    @property
    def step(self) -> NumberLike:
        """Rows per task."""
        return self.instruction.step

    def freeze(self) -> Instruction:
        """The finished instruction."""
        if not self.waits and not self.notifies:
            return self.instruction
        return replace(self.instruction, waits=tuple(self.waits), notifies=tuple(self.notifies))


class Emitter(Protocol):
    """Appends instructions. Ops and exchanges use it.

    Attributes:
        op: the op's node; instructions have its label unless they have their own.
    """

    op: OpNode

    def pending_reductions(self, partial: str) -> tuple[PendingReduction, ...]:
        """The pending reductions of a partial value of the op, one per device group. Empty if the
        value is not shared.
        """

    def emit(
        self,
        kernel: str,
        *,
        over: Ref | Number,
        tiles: Tiles,
        dtype: str | None = None,
        step: NumberLike | None = None,
        ints: Mapping[str, NumberLike | Sequence[NumberLike]] | None = None,
        floats: Mapping[str, float | Sequence[float]] | None = None,
        priority: int = 0,
        label: str = "",
    ) -> Draft:
        """Append an instruction: a kernel over the tiles of a loop.

        Args:
            kernel: base name in the kernel table.
            over: the rows of the loop.
            tiles: operands by the names of the kernel table; a list if the table says so. Operands
                that are absent may be omitted or None. The table says whether a task reads or
                writes an operand.
            dtype: the kernel's element type, if it has several.
            step: rows per task; by default the rows of a tile of activations. 0 makes one task over
                all rows.
            ints, floats: attributes by the names of the kernel table. Do not pass values that the
                table derives (counts, and whether an operand is f32 or packed).
            priority: priority of the tasks.
            label: name of the instruction, instead of the op's name.

        Raises:
            InternalError: an operand or attribute is missing, unknown, or does not have the kind or
                size that the kernel table says.
        """

    def hold(self, over: Number, step: NumberLike, operand: Operand, label: str) -> Draft:
        """Append an instruction with one empty task per tile, which only declares that it reads the
        tile. Such a task delays later writers of the tile, and it can post acknowledgements.

        Args:
            over: the rows of the loop.
            step: rows per task; 0 for one task over all rows.
            operand: what a task reads.
            label: name of the instruction.
        """


class Lowering(Emitter, Protocol):
    """The interface with which an op emits its instructions, for one device and one microbatch.

    Attributes:
        one: the number 1, the rows of a loop of one task.
        k_splits: number of parts into which a contraction over a labelled dim is cut.
        num_microbatches: microbatches of a step.
    """

    one: Number
    k_splits: int
    num_microbatches: int

    @property
    def split_rows(self) -> NumberLike:
        """Tokens per batch split. Without a batch, all rows are one batch split."""

    @property
    def split_cut(self) -> dict[str, NumberLike]:
        """How rows are divided into batch splits and sequence splits: the integer attributes of
        kernels that sum the rows of a batch split.
        """

    @property
    def padded_len(self) -> NumberLike:
        """Rows per sequence if sequences may be padded; otherwise 0."""

    def split_temp(self, cols: int, name: str) -> Ref:
        """A temporary with one row per batch split. In a row, the partial values of the non-empty
        sequence splits follow one another, `cols` columns each.
        """

    def row_step(self, ref: Ref) -> NumberLike:
        """Rows per task of a loop over activation rows."""

    def size(self, size: Size) -> NumberLike:
        """A size, which may be a symbol, in the form that instructions use."""

    # ---- tensors ------------------------------------------------------------------------------------------

    def spec(self, tensor: int) -> TensorSpec:
        """The spec of a tensor, with its global shape."""

    def layout(self, tensor: int) -> TensorLayout:
        """The layout of a tensor."""

    def local_sizes(self, tensor: int) -> tuple[Size, ...]:
        """Sizes of the tensor's dims on this device, in one microbatch."""

    def first_element(self, tensor: int, dim: int) -> NumberLike:
        """The first global element of a dim on this device."""

    def local_splits(self, tensor: int, dim: int) -> list[NumberLike]:
        """For each k split of a labelled dim, the range of its elements on this device. The ranges
        are one flat list: begin, end, begin, end, and so on.
        """

    def pending_reduction(self, partial: str) -> PendingReduction | None:
        """The only pending reduction of a partial value. None if the value is not shared."""

    def tensor(self, tensor: int | Ref) -> Ref:
        """The local view of a tensor."""

    def flat(self, tensor: int | Ref) -> Ref:
        """The same memory as rows of plain elements: panels with their padding, a vector as a column."""

    def temp(
        self,
        rows: int | Number,
        cols: int,
        dtype: str,
        *,
        tile_rows: NumberLike,
        name: str,
        packed: bool = False,
        max_bytes: int = 0,
    ) -> Ref:
        """A temporary that exists while this op runs.

        Args:
            rows: rows on this device; a `Number` with a symbol if their number depends on the run.
            cols: elements per row.
            dtype: element type.
            tile_rows: rows per tile; tasks wait for tiles.
            name: name of the temporary in explanations.
            packed: stored in panels, as weights are.
            max_bytes: size of the temporary; by default that of `rows` x `cols`, with symbols at
                their bounds.
        """

    def temp_like(self, ref: Ref, *, dtype: str, name: str, pending: PendingReduction | None = None) -> Ref:
        """A temporary with the shape of this device's part of a tensor.

        Args:
            ref: the tensor.
            dtype: element type.
            name: name of the temporary in explanations.
            pending: if given, the temporary is as wide as the shards of the whole device group.
        """

    # ---- operands -----------------------------------------------------------------------------------------

    def row(self, tensor: int | Ref, div: NumberLike = 1) -> Operand:
        """The rows of the loop's current tile (divided by `div`)."""

    def whole(self, tensor: int | Ref) -> Operand:
        """All rows."""

    def col(self, tensor: int | Ref, div: NumberLike = 1) -> Operand:
        """All rows, and the columns that are the loop's current range (divided by `div`). For a
        packed weight and a `div` of 1, the columns of all its panels.
        """

    def rows_at(self, ref: Ref, first: int, count: int) -> Operand:
        """Fixed rows that do not depend on the loop."""

    # ---- instructions -------------------------------------------------------------------------------------

    def by_rows(self, op: Op) -> None:
        """Emit one call per row tile of the kernel that has the op's name and the names of its
        tensors and attributes. Tensors whose dims begin as those of the loop are viewed by rows,
        others whole. The loop runs over the first operand whose dims begin with `...`, or over the
        first result.

        A weight in panels is processed as it is stored. If all tensors have the same dims and there
        may be few rows, tasks process tiles of columns.
        """

    def repeat(self, like: Draft, tiles: Mapping[str, Operand]) -> Draft:
        """Append a copy of an instruction that `emit` returned, with other tensors of the same
        form. The copy is not checked against the kernel table, so emitting thousands of equal
        instructions is fast.

        Args:
            like: an instruction whose kernel has no lists of operands.
            tiles: the operands that differ, by the table's names.

        Raises:
            InternalError: an operand is unknown, or its tensor does not have the form of the tensor
                that it replaces.
        """

    def contraction_splits(
        self, terms: Sequence[tuple[TensorSpec, DimLabel | None, int]], pending: PendingReduction | None
    ) -> list[list[tuple[int, int]]]:
        """Per k split and term, the range of the contracted dim on this device. `terms` holds, per
        weight, its spec, the label of its contracted dim and the number of this dim.
        """

    def label_splits(
        self, label: DimLabel | None, size: int, pending: PendingReduction | None
    ) -> list[tuple[int, int]]:
        """The ranges of the k splits of a labelled dim on this device."""

    def accumulator(self, result: int, added: int | None = None) -> Accumulator:
        """Where this microbatch adds its part to a result that is a sum over the batch.

        If `added` is given, the complete sum is added to this tensor, which has the same form. On a
        device that has all batch splits, `added` is the last carry.
        """

    def first_of_sum(self, result: int) -> NumberLike:
        """The first global row that this device adds to a sum over the batch."""

    def finish_accumulation(self, target: Accumulator) -> None:
        """Sum over the devices that share the batch: after the last microbatch, or in each
        microbatch if devices share every microbatch.
        """

    def split_tree(self, result: int, batch_splits: Ref) -> None:
        """Combine the rows of `batch_splits`, a `split_temp` with one row per batch split, and the
        carries into a result. Then combine this result over devices.
        """

    # ---- collectives --------------------------------------------------------------------------------------

    def all_reduce(
        self,
        source: int | Ref,
        target: int | Ref,
        residual: int | Ref | None,
        pending: PendingReduction,
        *,
        step: NumberLike | None = None,
        producer: Draft | None = None,
    ) -> None:
        """Combine `source` over the device group of a pending reduction into `target`, tile by
        tile.

        Args:
            source: `[rows, cols]`, a partial value on every member.
            target: the complete value. If the value is delivered in shards, only this device's
                columns of it.
            residual: a tensor with the shape of `target` that is added after the tree's root; or
                None.
            pending: says the tree, the device group and the layout in which the value is delivered.
            step: rows per task; by default those of a tile of `source`.
            producer: the instruction that writes `source`, over the same tiles; by default the
                instruction that was emitted last.
        """

    def all_gather(self, source: int, target: int) -> None:
        """Gather the shards of `source` on every device, along the axes that `target` does not have."""

    def slice(self, source: int, target: int) -> None:
        """Keep this device's part of `source`, along the axes that only `target` has."""

    def all_gather_parameters(self, source: int, target: int) -> None:
        """Gather the storage shards of a weight on every device, along the axes that `target` does
        not have.
        """

    def gather(self, source: int, target: int) -> None:
        """Gather the column shards of `source` in `target` on the first device of the axes that
        shard it.
        """

    def move(self, source: int, target: int) -> None:
        """Copy `source` from the stage of a pipeline that has it to the stages that have `target`."""
