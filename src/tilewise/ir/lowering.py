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
        packed: lies in panels; the flat view of panels (`Lowering.flat`) does not.
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
        """All but which tensor it is."""
        return self.extent, self.cols, self.dtype, self.tile_rows, self.packed, self.tile_cols


@dataclass(frozen=True)
class Accumulator:
    """Where a sum over the batch goes in this microbatch: target, carries to fold in, and whether it is complete; and
    what the reduction over devices adds behind the tree's root."""

    ref: Ref
    carries: tuple[Ref, ...]
    output: int
    is_last: bool
    added: int | None = None


@dataclass
class Draft:
    """An instruction while its template is lowered: collectives add waits and posts to it.

    Attributes:
        instruction: all but those.
        waits, notifies: so far.
    """

    instruction: Instruction
    waits: list[Wait] = field(default_factory=list)
    notifies: list[Notify] = field(default_factory=list)

    @property
    def step(self) -> NumberLike:
        """Rows per task."""
        return self.instruction.step

    def freeze(self) -> Instruction:
        """What the template will hold."""
        if not self.waits and not self.notifies:
            return self.instruction
        return replace(self.instruction, waits=tuple(self.waits), notifies=tuple(self.notifies))


class Lowering(Protocol):
    """One op's way to instructions on one device, in one microbatch."""

    one: Number
    k_splits: int

    @property
    def num_splits(self) -> int:
        """Batch splits that this device has in one microbatch."""

    @property
    def split_rows(self) -> NumberLike:
        """Tokens per batch split; without a batch, all rows are one batch split."""

    @property
    def split_cut(self) -> dict[str, NumberLike]:
        """How rows fall on batch splits and sequence splits: the integers of kernels that add up
        rows of a batch split."""

    @property
    def padded_len(self) -> NumberLike:
        """Rows per sequence where sequences may end in padding; 0 where they do not."""

    def split_temp(self, cols: int, name: str) -> Ref:
        """A row per batch split: a partial value of so many columns for every sequence split that is not
        empty, side by side."""

    def row_step(self, ref: Ref) -> NumberLike:
        """Rows per task of a loop over activation rows."""

    def size(self, size: Size) -> NumberLike:
        """A size, which may be a symbol, as instructions say it."""

    # ---- tensors ------------------------------------------------------------------------------------------

    def spec(self, tensor: int) -> TensorSpec:
        """Spec of a tensor: its global shape."""

    def layout(self, tensor: int) -> TensorLayout:
        """Layout of a tensor."""

    def first_element(self, tensor: int, dim: int) -> NumberLike:
        """The first global element of a dim that this device holds."""

    def local_splits(self, tensor: int, dim: int) -> list[NumberLike]:
        """Of every k split of a labelled dim, the local elements that this device holds: begin and end, one after the
        other."""

    def pending_reductions(self, op: OpNode, partial: str) -> tuple[PendingReduction, ...]:
        """What becomes of a value of which this op makes parts: a pending reduction per device group, none
        where it is not shared."""

    def pending_reduction(self, op: OpNode, partial: str) -> PendingReduction | None:
        """The one pending reduction of a partial value; None where it is not shared."""

    def tensor(self, tensor: int | Ref) -> Ref:
        """The local view of a tensor."""

    def flat(self, tensor: int | Ref) -> Ref:
        """The same memory as rows of plain elements: panels padded, a vector as a column."""

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
        """A temporary that lives while this op runs.

        Args:
            rows: of this device; of a symbol where they depend on a run.
            cols: elements per row.
            dtype: of the elements.
            tile_rows: rows per tile, which is what tasks wait for.
            name: in explanations.
            packed: in panels, as weights are.
            max_bytes: room for it; by default what rows and columns at their bounds take.
        """

    def temp_like(self, ref: Ref, *, dtype: str, name: str, pending: PendingReduction | None = None) -> Ref:
        """A temporary shaped as this device's part of a tensor.

        Args:
            ref: of the tensor.
            dtype: of the elements.
            name: in explanations.
            pending: with one, as wide as the shards of all its device group together.
        """

    # ---- operands -----------------------------------------------------------------------------------------

    def row(self, tensor: int | Ref, div: NumberLike = 1) -> Operand:
        """The rows of the loop's current tile (divided by `div`)."""

    def whole(self, tensor: int | Ref) -> Operand:
        """All rows."""

    def col(self, tensor: int | Ref, div: NumberLike = 1) -> Operand:
        """All rows, the columns of the loop's current range (divided by `div`); of a packed weight, undivided, those of
        all its panels."""

    def rows_at(self, ref: Ref, first: int, count: int) -> Operand:
        """Fixed rows, whatever the loop."""

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
        """Append an instruction: a kernel over the tiles of a loop, as the kernel table says.

        Args:
            kernel: base name in the table.
            op: for whom; names the instruction.
            over: the rows of the loop.
            tiles: operands by the table's names; lists for lists. Absent ones may be left out or None. How a task uses
                them (reads, writes) stands in the table.
            dtype: the kernel's element type, where it has several.
            step: rows per task; by default those of a tile of activations; 0 for one task over all rows.
            ints, floats: by the table's names. What the table fills in by itself (counts, whether an operand is f32 or
                packed) is not given.
            priority: of the tasks.
            label: the instruction's name, instead of the op's.

        Raises:
            InternalError: something is missing, unknown, or of another kind or size than the table says.
        """

    def repeat(self, like: Draft, tiles: Mapping[str, Operand]) -> Draft:
        """Append an instruction like one that `emit` returned, on other tensors of the same form: thousands of equal
        ones are held to the table once.

        Args:
            like: of a kernel without lists of operands.
            tiles: the operands that differ, by the table's names.

        Raises:
            InternalError: an operand is unknown, or its tensor has another form than the one that it replaces.
        """

    def hold(self, op: OpNode, over: Number, step: NumberLike, operand: Operand, label: str) -> Draft:
        """Append an empty task per tile that reads the tile: it orders and acknowledges.

        Args:
            op: for whom.
            over: the rows of the loop.
            step: rows per task; 0 for one task over all.
            operand: what a task reads.
            label: the instruction's name.
        """

    def contraction_splits(
        self, terms: Sequence[tuple[TensorSpec, DimLabel | None, int]], pending: PendingReduction | None
    ) -> list[list[tuple[int, int]]]:
        """Per k split, per term, the local range of the contracted dim (`dim` of each weight)."""

    def label_splits(
        self, label: DimLabel | None, size: int, pending: PendingReduction | None
    ) -> list[tuple[int, int]]:
        """Local ranges of the k splits of a labelled dim."""

    def accumulator(self, op: OpNode, output: int, added: int | None = None) -> Accumulator:
        """Where output number `output` of `op`, a sum over the batch, goes in this microbatch. The complete sum may be
        added to a tensor like it, `added`: the last of the carries on a device that has all batch splits."""

    def first_of_sum(self, op: OpNode, output: int) -> NumberLike:
        """The first global row of what this device adds to a sum over the batch."""

    def finish_accumulation(self, op: OpNode, target: Accumulator) -> None:
        """After the last microbatch: the sum over the devices that share the batch."""

    def split_tree(self, op: OpNode, output: int, batch_splits: Ref) -> None:
        """Combine a row per batch split, of `split_temp`, and carries into output number `output`;
        then over devices."""

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
        """Combine `source` over a pending reduction's device group into `target`, tile by tile.

        Args:
            op: for whom.
            source: `[rows, cols]`, a partial value on every member.
            target: the complete value; where the pending reduction arrives in shards, this device's columns of it.
            residual: added behind the tree's root, shaped like `target`; or None.
            pending: tree, device group and layout of arrival.
            step: rows per task; by default those of a tile of `source`.
            producer: the instruction that writes `source`, over the same tiles; by default the last one emitted.
        """

    def all_gather(self, op: OpNode, source: int, target: int) -> None:
        """Bring the shards of `source` together on every device, along the axes that `target` lacks."""

    def slice(self, op: OpNode, source: int, target: int) -> None:
        """Keep this device's part of `source`, along the axes that `target` has more."""

    def all_gather_parameters(self, op: OpNode, source: int, target: int) -> None:
        """Bring the parts of a weight together on every device, from the storage shards along the
        axes that `target` lacks."""

    def gather(self, op: OpNode, source: int, target: int) -> None:
        """Bring the column shards of `source` together in `target` on the first device of the axes that shard it."""
