"""Lowers the ops of a template to instructions, for one class of devices. A template is a block of
instructions that is used many times, for example once per layer.

`TemplateLowering` implements the interface to which `Op.lower` writes. It checks instructions
against the kernel table, and accumulates sums over microbatches. Collectives are in
`plan.collectives`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from tilewise.core.errors import InternalError, PlanError
from tilewise.core.validation import shown
from tilewise.ir.graph import PANEL_ROWS, Graph, OpNode
from tilewise.ir.layout import (
    BATCH_SPLITS,
    GraphLayout,
    PendingReduction,
    TensorLayout,
    show_axes,
    show_layout,
)
from tilewise.ir.lowering import Accumulator, Draft, Ref, Tiles
from tilewise.ir.op import op_named
from tilewise.ir.program import (
    Collective,
    LoweredTemplate,
    Number,
    NumberLike,
    Operand,
    Slot,
    constant_part,
    upper,
)
from tilewise.kernels.table import scratch_bytes
from tilewise.plan import collectives
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.emission import make_hold, make_instruction, repeat_instruction
from tilewise.plan.lower.blocks import emit_by_blocks, operands_of
from tilewise.plan.lower.slots import SlotTable
from tilewise.plan.lower.uses import check_use
from tilewise.plan.shapes import LocalShapes, round_up

__all__ = ["TemplateLowering", "trailing_ones"]


def trailing_ones(value: int) -> int:
    """The number of adjacent set bits at the low end of `value`. Microbatch number `value` adds as
    many carries (sums of earlier microbatches).
    """
    return (value ^ (value + 1)).bit_length() - 1


def _arrive_in_shards(pending_reductions: Sequence[PendingReduction]) -> bool:
    """Whether a sum over the batch is delivered in the storage shards of the tensor that it belongs
    to.
    """
    return any(pending.arrives_in_shards for pending in pending_reductions)


class TemplateLowering(SlotTable):
    """Lowers the ops of one template (or of a run of root ops) for one class of devices and one
    position among the microbatches.

    Args:
        shapes: local sizes on a device that represents its class.
        numbers: the numbers in which devices of the class differ, such as first rows.
        late: ops that run only after the last microbatch.

    Attributes:
        completed: values that the current op has combined.
        collectives: the exchanges so far.
        scratch_bytes: scratch memory of the largest call of a kernel.
    """

    def __init__(
        self,
        name: str,
        graph: Graph,
        ops: Sequence[OpNode],
        layout: GraphLayout,
        shapes: LocalShapes,
        roots: dict[int, int],
        microbatch: int,
        numbers: DeviceNumbers,
        late: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(graph, layout, shapes, numbers, roots)
        self.name, self.ops, self.late, self.microbatch = name, ops, late, microbatch
        self.instructions: list[Draft] = []
        self.signal_ranges: list[int] = []
        self.ring_signal_ranges: list[int] = []
        self.completed: set[PendingReduction] = set()
        self.collectives: list[Collective] = []
        self.scratch_bytes = 0
        self._accumulated: set[int] = set()  # outputs of the current op that are summed over the batch

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
        """Append an instruction after checking it against the kernel table (see
        `ir.lowering.Lowering.emit`).
        """
        maker = self._maker(op)
        if kernel not in ("fetch", "store") and self._is_any_in_file(tiles):
            emit = partial(
                self.emit,
                kernel,
                op,
                dtype=dtype,
                step=0,
                ints=ints,
                floats=floats,
                priority=priority,
                label=label,
            )
            return emit_by_blocks(self, kernel, op, over, tiles, emit)
        extent = over.extent if isinstance(over, Ref) else over
        if step is None:
            step = self.shapes.row_step(extent) if isinstance(extent, Number) else 0
        draft = make_instruction(
            kernel,
            maker=maker,
            label=label or op.label or op.op,
            extent=extent,
            step=step,
            tiles=tiles,
            ref_of=self.views.__getitem__,
            dtype=dtype,
            ints=ints,
            floats=floats,
            priority=priority,
        )
        self.instructions.append(draft)
        instruction = draft.instruction
        bounds = self.shapes.bounds
        shapes = [
            (0, 0) if o.null else (self.views[o.slot].extent.upper(bounds), self.views[o.slot].cols)
            for o in instruction.operands
        ]
        self.scratch_bytes = max(
            self.scratch_bytes,
            scratch_bytes(instruction.kernel, [constant_part(i, bounds) for i in instruction.ints], shapes),
        )
        return draft

    def _require(self, op: OpNode, *tensors: int) -> None:
        """Reject values that are not ops, and tensors that the graph does not have."""
        if not isinstance(op, OpNode):
            self.invalid("an instruction must be for the op that is lowered", shown(op))
        for tensor in tensors:
            self.checked_id(tensor)

    def _maker(self, op: OpNode) -> str:
        """An op's name in messages about its instructions."""
        self._require(op)
        return f"op {op.op!r} ({op.label})"

    def _is_any_in_file(self, tiles: Tiles) -> bool:
        return bool(self.files) and any(
            self.is_in_file(self.views[operand.slot]) for _, operand in operands_of(tiles)
        )

    def rows_max(self, ref: Ref) -> int:
        """Number of rows of a tensor's flat view, on the device with the most rows."""
        tensor = self.keys[ref.slot].id
        return round_up(self.shapes.sizes_max(self.spec(tensor), self.layout(tensor))[0], PANEL_ROWS)

    def repeat(self, like: Draft, tiles: Mapping[str, Operand]) -> Draft:
        """Append an instruction like another one (see `ir.lowering.Lowering.repeat`)."""
        if not isinstance(like, Draft):
            self.invalid("repeat needs an instruction that emit returned", shown(like))
        self.instructions.append(repeat_instruction(like, tiles, self.views.__getitem__))
        return self.instructions[-1]

    def hold(self, op: OpNode, over: Number, step: NumberLike, operand: Operand, label: str) -> Draft:
        """Append an instruction with one empty task per tile, which only declares that it reads the
        tile (see `ir.lowering.Lowering.hold`).
        """
        made = make_hold(self._maker(op), label, over, step, operand, self.views.__getitem__)
        self.instructions.append(made)
        return made

    # ---- sums over the batch ------------------------------------------------------------------------------

    def accumulator(self, op: OpNode, output: int, added: int | None = None) -> Accumulator:
        """Where and how this microbatch adds its part to output number `output` of `op`.

        A carry is the sum of some earlier microbatches. Microbatch j adds as many carries as the
        binary number j has trailing ones, lowest level first, and leaves its sum as the carry of
        the next level. This is how a binary counter carries, so the tree over batch splits does not
        depend on the number of microbatches. The last microbatch adds all remaining carries. If
        devices share every microbatch, they write their parts into a ring, and the owners of rows
        keep the carries.

        If this device has all batch splits, `added` is one more carry. Otherwise the reduction over
        devices adds `added`, and the result may use its memory.
        """
        self._require(op)
        rule = op_named(op.op)
        if type(output) is not int or output not in rule.accumulates:
            raise InternalError(
                f"[plan.lower] `accumulates` must list outputs that sum over the batch; got output {output} of "
                f"{op.op!r}, which has {rule.accumulates}; correct {type(rule).__name__}.accumulates"
            )
        self._accumulated.add(output)
        tensor = op.outputs[output]
        pending_reductions = self.pending_of_sum(op, output)
        in_shards = _arrive_in_shards(pending_reductions)
        per_microbatch = any(r.is_completed_per_microbatch for r in pending_reductions)
        base = self.local_ref(tensor, self._layout_of_sum(tensor), -1) if in_shards else self.tensor(tensor)
        total = self.shapes.settings.accumulation
        level, last = trailing_ones(self.microbatch), self.microbatch == total - 1

        def carry(number: int) -> Ref:
            return self.slot(Slot("carry", tensor, number), lambda slot: base._replace(slot=slot))

        is_shared = in_shards or any(pending.group for pending in pending_reductions)
        if (in_shards and (last or per_microbatch)) or (added is not None and is_shared):
            target = self._part_of_sum(tensor, base)
        elif per_microbatch:
            target = self.ring(tensor)
        else:
            target = base if last else carry(level)
        set_bits = [i for i in range(self.microbatch.bit_length()) if self.microbatch >> i & 1]
        carries = () if per_microbatch else set_bits if last else range(level)
        folded = [carry(i) for i in carries]
        if added is not None and not is_shared:
            folded.append(self.tensor(added))
        return Accumulator(target, tuple(folded), output, last, added if is_shared else None)

    def _layout_of_sum(self, tensor: int) -> TensorLayout:
        """The layout of a device's part of a sum that is delivered in storage shards: it covers all
        storage shards of its device group.
        """
        first, *others = self.layout(tensor)
        return (self.shapes.split_axes(first)[0], *others)

    def _part_of_sum(self, tensor: int, form: Ref) -> Ref:
        """Memory for a device's part of a sum that is delivered in storage shards."""
        size = self.shapes.bytes_max(self.spec(tensor), self._layout_of_sum(tensor))
        extent, tile = form.extent, form.tile_rows
        return self.temp(
            extent, form.cols, form.dtype, tile_rows=tile, name="part", packed=form.packed, max_bytes=size
        )

    def first_of_sum(self, op: OpNode, output: int) -> NumberLike:
        """The first global row that this device adds to a sum over the batch."""
        self._require(op)
        if type(output) is not int or not 0 <= output < len(op.outputs):
            self.invalid(f"an output must be one of {len(op.outputs)}, counted from 0", shown(output))
        tensor = op.outputs[output]
        in_shards = _arrive_in_shards(self.pending_of_sum(op, output))
        layout = self._layout_of_sum(tensor) if in_shards else self.layout(tensor)
        return self.numbers.first(self.spec(tensor), layout, 0)

    def finish_accumulation(self, op: OpNode, target: Accumulator) -> None:
        """Sum over the devices that share the batch: after the last microbatch, or in each
        microbatch if devices share every microbatch.
        """
        self._require(op)
        if not isinstance(target, Accumulator):
            self.invalid("finish_accumulation needs a result of low.accumulator", shown(target))
        for pending in self.pending_of_sum(op, target.output):
            if pending.is_completed_per_microbatch and not pending.arrives_in_shards:
                collectives.add_microbatch(self, op, target.output, pending)
                continue
            self.completed.add(pending)
            result = op.outputs[target.output]
            if pending.arrives_in_shards and (target.is_last or pending.is_completed_per_microbatch):
                collectives.reduce_to_shards(self, op, target.ref, result, pending, target.added)
            elif target.is_last and pending.group and target.added is not None:
                step = upper(self.instructions[-1].step)
                collectives.all_reduce(self, op, target.ref, result, target.added, pending, step=step)
            elif target.is_last and pending.group:
                collectives.all_reduce_in_place(self, op, target.ref, pending)

    def split_tree(self, op: OpNode, output: int, batch_splits: Ref) -> None:
        """Combine the rows of `batch_splits`, a `split_temp` with one row per batch split, and the
        carries into output number `output`. Then combine this output over devices.
        """
        target = self.accumulator(op, output)
        tiles: Tiles = {
            "out": self.whole(target.ref),
            "partials": self.whole(batch_splits),
            "carry": [self.whole(c) for c in target.carries],
        }
        cut = {
            "split_len": self.split_len,
            "num_k_splits": self.k_splits,
            "is_padded": int(self.shapes.settings.padded_bound > 0),
        }
        self.emit("split_tree", op, over=self.one, step=0, tiles=tiles, ints=cut)
        self.finish_accumulation(op, target)

    # ---- collectives --------------------------------------------------------------------------------------

    def exchange(self, op: OpNode, record: Collective, producer: Draft | None = None) -> None:
        """Expand a record to instructions, and note which instructions carry it out."""
        first = len(self.instructions)
        record = collectives.EXPAND[record.kind](self, op, record, producer)
        self.collectives.append(record._replace(first=first, last=len(self.instructions)))

    def signals(self, count: int) -> int:
        """Reserve signals, and return the provisional number of the first. `place_signals` gives
        them their final numbers when it is known how many every class needs.
        """
        self.signal_ranges.append(count)
        return collectives.signal_range(len(self.signal_ranges) - 1)

    def ring_signals(self, count: int) -> int:
        """Reserve signals of a ring. All variants of the template share them."""
        self.ring_signal_ranges.append(count)
        return collectives.ring_signal_range(len(self.ring_signal_ranges) - 1)

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
        """Combine `source` over the device group of a pending reduction into `target` (plus a
        residual), tile by tile.
        """
        if not isinstance(pending, PendingReduction):
            self.invalid(
                "all_reduce needs a result of low.pending_reduction, which returns None for a value "
                "that is not shared",
                shown(pending),
            )
        collectives.all_reduce(self, op, source, target, residual, pending, step=step, producer=producer)

    def all_gather(self, op: OpNode, source: int, target: int) -> None:
        """Gather the shards of `source` on every device, along the axes that `target` does not
        have: rows of a batch, or columns.
        """
        self._require(op, source, target)
        label = self.spec(source).labels[0]
        counts_batch = label is not None and label.is_summed_by_batch_splits
        if counts_batch and self.layout(source)[0] != self.layout(target)[0]:
            collectives.all_gather_batch(self, op, source, target)
        else:
            collectives.all_gather_columns(self, op, source, target)

    def slice(self, op: OpNode, source: int, target: int) -> None:
        """Keep this device's part of `source`, along the axes that only `target` has."""
        self._require(op, source, target)
        collectives.slice_columns(self, op, source, target)

    def all_gather_parameters(self, op: OpNode, source: int, target: int) -> None:
        """Gather the storage shards of a weight on every device, along the axes that `target` does
        not have.
        """
        self._require(op, source, target)
        collectives.all_gather_parameters(self, op, source, target)

    def gather(self, op: OpNode, source: int, target: int) -> None:
        """Gather the column shards of `source` in `target` on the first device of the axes that
        shard it.
        """
        self._require(op, source, target)
        collectives.gather(self, op, source, target)

    # ---- all ops ------------------------------------------------------------------------------------------

    def run(self) -> LoweredTemplate:
        """Lower every op."""
        for index, op in enumerate(self.ops):
            self.op_index, self.op = index, op
            self.completed = set()
            if op.id in self.late and self.microbatch < self.shapes.settings.accumulation - 1:
                continue
            self._accumulated = set()
            self._require_whole_sums(op)
            rule, first = op_named(op.op), len(self.instructions)
            rule.lower(self, op)
            check_use(self, op, self.instructions[first:], rule)
            if self._accumulated != {*rule.accumulates}:
                raise InternalError(
                    "[plan.lower] outputs in `accumulates` must be written through low.accumulator or low.split_tree; "
                    f"got {op.op!r}, which so writes {sorted(self._accumulated)} of {rule.accumulates}; correct "
                    f"{type(rule).__name__}"
                )
            left = [r for r in self.pending_reductions_of(op) if r not in self.completed]
            if left:
                raise InternalError(
                    f"[plan.lower] an op must complete all of its partial values; got {op.op!r} of {op.label!r}, "
                    f"which left {left[0].partial!r} over {show_axes(left[0].axes)}; please report the op"
                )
        by_index = sorted(self.slots, key=self.slots.__getitem__)
        return LoweredTemplate(
            self.name,
            tuple(d.freeze() for d in self.instructions),
            tuple(by_index),
            tuple(self.temps),
            tuple(self.signal_ranges),
            tuple(self.ring_signal_ranges),
            tuple(self.collectives),
        )

    def _require_whole_sums(self, op: OpNode) -> None:
        for pending in self.pending_reductions_of(op):
            stored = {*self.shapes.settings.storage_axes}
            delivered = {axis for layout in pending.arrives for axes in layout for axis in axes}
            if pending.tree == BATCH_SPLITS and not delivered & {*pending.group} <= stored:
                raise PlanError(
                    f"[plan.lower] a sum over the batch must be whole on its devices; got {pending.partial!r} of "
                    f"{op.label!r} requested as {show_layout(pending.arrives[0])} over {show_axes(pending.group)}; "
                    "drop the hint"
                )
