"""`Lowering`: the protocol that `Op.lower` and collectives write instructions to.

`plan` implements it; ops and collectives use nothing else of `plan`. A tensor is named by its id in
the graph, or by the `Ref` that a method returned. An operand is a part of a tensor, selected by the
loop of its instruction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from tilewise.core.dims import DimLabel, Size
from tilewise.ir.graph import OpNode, TensorSpec
from tilewise.ir.layout import PendingReduction, TensorLayout
from tilewise.ir.program import Instruction, Notify, Number, NumberLike, Operand, Wait

__all__ = ["Accumulator", "Draft", "Lowering", "Ref", "Tiles"]

Tiles = Mapping[str, Operand | Sequence[Operand] | None]
"""Operands of a kernel by the table's names."""


class Ref(NamedTuple):
    """A tensor inside a template on this device.

    Attributes:
        slot: its number in the template.
        extent: its rows.
        cols: its columns.
        dtype: name of its element type.
        tile_rows: rows per tile.
        packed: whether the tensor is stored in panels; the flat view of panels (`Lowering.flat`) is not.
        tile_cols: columns per tile; 0 for all.
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
        """Everything except which tensor it is."""
        return self.extent, self.cols, self.dtype, self.tile_rows, self.packed, self.tile_cols


@dataclass(frozen=True)
class Accumulator:
    """The target of a sum over the batch in this microbatch, the carries to add, whether the sum is
    then complete, and what the reduction over devices adds after the tree's root.
    """

    ref: Ref
    carries: tuple[Ref, ...]
    output: int
    is_last: bool
    added: int | None = None


@dataclass
class Draft:
    """An instruction while its template is lowered. Collectives add waits and posts to it.

    Attributes:
        instruction: the instruction without waits and posts.
        waits, notifies: those added so far.
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


class Lowering(Protocol):
    """The interface with which an op emits its instructions, for one device and one microbatch."""

    one: Number
    k_splits: int

    @property
    def num_splits(self) -> int:
        """Number of batch splits that this device has in one microbatch."""

    @property
    def split_rows(self) -> NumberLike:
        """Tokens per batch split; without a batch, all rows are one batch split."""

    @property
    def split_cut(self) -> dict[str, NumberLike]:
        """How rows are divided into batch splits and sequence splits: the integer attributes of
        kernels that sum the rows of a batch split.
        """

    @property
    def padded_len(self) -> NumberLike:
        """Rows per sequence if sequences may be padded; otherwise 0."""

    def split_temp(self, cols: int, name: str) -> Ref:
        """A temporary with one row per batch split. A row has a partial value of `cols` columns for
        every non-empty sequence split, side by side.
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

    def first_element(self, tensor: int, dim: int) -> NumberLike:
        """The first global element of a dim on this device."""

    def local_splits(self, tensor: int, dim: int) -> list[NumberLike]:
        """For each k split of a labelled dim, the local elements on this device as begin and end,
        in one flat list.
        """

    def pending_reductions(self, op: OpNode, partial: str) -> tuple[PendingReduction, ...]:
        """The pending reductions of a partial value of this op, one per device group; empty if it
        is not shared.
        """

    def pending_reduction(self, op: OpNode, partial: str) -> PendingReduction | None:
        """The only pending reduction of a partial value; None if it is not shared."""

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
            rows: on this device; a symbol if they depend on the run.
            cols: elements per row.
            dtype: element type.
            tile_rows: rows per tile; tasks wait for tiles.
            name: its name in explanations.
            packed: stored in panels, as weights are.
            max_bytes: its size; by default that of rows and columns at their bounds.
        """

    def temp_like(self, ref: Ref, *, dtype: str, name: str, pending: PendingReduction | None = None) -> Ref:
        """A temporary with the shape of this device's part of a tensor.

        Args:
            ref: the tensor.
            dtype: element type.
            name: its name in explanations.
            pending: if given, the temporary is as wide as the shards of the whole device group.
        """

    # ---- operands -----------------------------------------------------------------------------------------

    def row(self, tensor: int | Ref, div: NumberLike = 1) -> Operand:
        """The rows of the loop's current tile (divided by `div`)."""

    def whole(self, tensor: int | Ref) -> Operand:
        """All rows."""

    def col(self, tensor: int | Ref, div: NumberLike = 1) -> Operand:
        """All rows, and the columns of the loop's current range (divided by `div`). For a packed
        weight without `div`, the columns of all its panels.
        """

    def rows_at(self, ref: Ref, first: int, count: int) -> Operand:
        """Fixed rows that do not depend on the loop."""

    # ---- instructions -------------------------------------------------------------------------------------

    def emit(
        self,
        kernel: str,
        op: OpNode,
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
            op: the op that it belongs to; names the instruction.
            over: the rows of the loop.
            tiles: operands by the table's names, lists for lists. Absent ones may be omitted or
                None. The table says whether a task reads or writes them.
            dtype: the kernel's element type, if it has several.
            step: rows per task; by default those of a tile of activations; 0 for one task over all
                rows.
            ints, floats: attributes by the table's names. Values that the table derives (counts, whether an
                operand is f32 or packed) are not passed.
            priority: priority of the tasks.
            label: name of the instruction, instead of the op's.

        Raises:
            InternalError: something is missing, unknown, or of another kind or size than the table
                says.
        """

    def repeat(self, like: Draft, tiles: Mapping[str, Operand]) -> Draft:
        """Append an instruction like one that `emit` returned, with other tensors of the same form.
        The kernel table is checked only once, so thousands of equal instructions are fast.

        Args:
            like: an instruction whose kernel has no lists of operands.
            tiles: the operands that differ, by the table's names.

        Raises:
            InternalError: an operand is unknown, or its tensor has another form than the one that
                it replaces.
        """

    def hold(self, op: OpNode, over: Number, step: NumberLike, operand: Operand, label: str) -> Draft:
        """Append an empty task per tile that reads the tile. It delays later writers, and can post
        acknowledgements.

        Args:
            op: the op that it belongs to.
            over: the rows of the loop.
            step: rows per task; 0 for one task over all rows.
            operand: what a task reads.
            label: name of the instruction.
        """

    def contraction_splits(
        self, terms: Sequence[tuple[TensorSpec, DimLabel | None, int]], pending: PendingReduction | None
    ) -> list[list[tuple[int, int]]]:
        """Per k split and term, the local range of the contracted dim (`dim` of each weight)."""

    def label_splits(
        self, label: DimLabel | None, size: int, pending: PendingReduction | None
    ) -> list[tuple[int, int]]:
        """Local ranges of the k splits of a labelled dim."""

    def accumulator(self, op: OpNode, output: int, added: int | None = None) -> Accumulator:
        """The target of output number `output` of `op`, a sum over the batch, in this microbatch.
        The complete sum may be added to `added`, a tensor of the same form: it is then the last
        carry on a device that has all batch splits.
        """

    def first_of_sum(self, op: OpNode, output: int) -> NumberLike:
        """The first global row that this device adds to a sum over the batch."""

    def finish_accumulation(self, op: OpNode, target: Accumulator) -> None:
        """After the last microbatch, sum over the devices that share the batch."""

    def split_tree(self, op: OpNode, output: int, batch_splits: Ref) -> None:
        """Combine the rows of `split_temp` (one per batch split) and the carries into output number
        `output`, then combine over devices.
        """

    # ---- collectives --------------------------------------------------------------------------------------

    def all_reduce(
        self,
        op: OpNode,
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
            op: the op that it belongs to.
            source: `[rows, cols]`, a partial value on every member.
            target: the complete value; if it is delivered in shards, this device's columns of it.
            residual: added after the tree's root, with the shape of `target`; or None.
            pending: tree, device group and layout of delivery.
            step: rows per task; by default those of a tile of `source`.
            producer: the instruction that writes `source`, over the same tiles; by default the last
                one emitted.
        """

    def all_gather(self, op: OpNode, source: int, target: int) -> None:
        """Gather the shards of `source` on every device, along the axes that `target` does not have."""

    def slice(self, op: OpNode, source: int, target: int) -> None:
        """Keep this device's part of `source`, along the axes that only `target` has."""

    def all_gather_parameters(self, op: OpNode, source: int, target: int) -> None:
        """Gather the storage shards of a weight on every device, along the axes that `target` does
        not have.
        """

    def gather(self, op: OpNode, source: int, target: int) -> None:
        """Gather the column shards of `source` in `target` on the first device of the axes that
        shard it.
        """
