"""Lowers the ops of a template to instructions, for one class of devices. A template is a block of
instructions that is used many times, for example once per layer.

`TemplateLowering` implements the interface to which `Op.lower` writes. It checks instructions
against the kernel table, and accumulates sums over microbatches. Collectives are in
`plan.collectives`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilewise.core.errors import PlanError
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
from tilewise.ir.op import Op, bind, op_named
from tilewise.ir.program import (
    Collective,
    Instruction,
    LoweredTemplate,
    Number,
    NumberLike,
    Operand,
    Slot,
    constant_part,
    upper,
)
from tilewise.kernels.table import KERNELS, scratch_bytes
from tilewise.plan import collectives
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.emission import make_hold, make_instruction, repeat_instruction
from tilewise.plan.lower.blocks import emit_by_blocks, operands_of
from tilewise.plan.lower.local_view import LocalView
from tilewise.plan.lower.uses import check_use
from tilewise.plan.shapes import LocalShapes, round_up

__all__ = ["LoweringTask", "TemplateLowering"]

_POSTS_FIRST = 4  # above all priorities of kernels


@dataclass(frozen=True)
class LoweringTask:
    """Everything that a variant depends on besides the devices' shapes.

    Attributes:
        name: the template's name.
        graph, layout: graph and layout of the template; for a run of root ops, of the whole graph.
        ops: the ops to lower.
        microbatch: the position among the microbatches.
        late_ops: ids of ops that run only after the last microbatch.
        returned: results and saved tensors of the template; None for root ops.
        arguments: arguments of the template.
        roots: for root ops, tensor -> the tensor whose memory it shares.
        stages: the stages of the pipeline whose devices use it.
        is_acknowledgement: of a move, whether the sender only waits until all has been read.
    """

    name: str
    graph: Graph
    layout: GraphLayout
    ops: tuple[OpNode, ...]
    microbatch: int
    late_ops: frozenset[int]
    returned: frozenset[int] | None
    arguments: frozenset[int]
    roots: Mapping[int, int]
    stages: frozenset[int] = frozenset((0,))
    is_acknowledgement: bool = False


def _trailing_ones(value: int) -> int:
    """The number of adjacent set bits at the low end of `value`. Microbatch number `value` adds as
    many carries (sums of earlier microbatches).
    """
    return (value ^ (value + 1)).bit_length() - 1


def _arrive_in_shards(pending_reductions: Sequence[PendingReduction]) -> bool:
    """Whether a sum over the batch is delivered in the storage shards of the tensor that it belongs
    to.
    """
    return any(pending.arrives_in_shards for pending in pending_reductions)


class TemplateLowering(LocalView):
    """Lowers the ops of one template (or of a run of root ops) for one class of devices and one
    position among the microbatches.

    Args:
        task: the ops, and their graph and layout.
        shapes: local sizes on a device that represents its class.
        numbers: the numbers in which devices of the class differ, such as first rows.
        roots: tensor -> the tensor whose memory it shares.

    Attributes:
        is_whole_program: False, because other instructions write and read what is exchanged.
        completed: values that the current op has combined.
        collectives: the exchanges so far.
        signal_ranges, ring_signal_ranges: sizes of the ranges of signals that collectives reserved.
        scratch_bytes: scratch memory of the largest call of a kernel.
    """

    is_whole_program = False

    def __init__(
        self, task: LoweringTask, shapes: LocalShapes, numbers: DeviceNumbers, roots: dict[int, int]
    ) -> None:
        super().__init__(task.graph, task.layout, shapes, numbers, roots)
        self.task, self.microbatch = task, task.microbatch
        self.is_last_microbatch = (
            task.microbatch == shapes.settings.accumulation - 1 or task.is_acknowledgement
        )
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
        if kernel not in ("fetch", "store") and self._is_any_in_file(tiles):
            emit = partial(
                self.emit,
                kernel,
                dtype=dtype,
                step=0,
                ints=ints,
                floats=floats,
                priority=priority,
                label=label,
            )
            return emit_by_blocks(self, kernel, over, tiles, emit)
        extent = over.extent if isinstance(over, Ref) else over
        if step is None:
            step = self.shapes.row_step(extent) if isinstance(extent, Number) else 0
        draft = make_instruction(
            kernel,
            maker=self.maker,
            label=label or self.op.label or self.op.op,
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

    def by_rows(self, op: Op) -> None:
        """Emit one call per row tile of the kernel that has the op's name (see
        `ir.lowering.Lowering.by_rows`).
        """
        declared, kernel = op.declared, KERNELS.get(op.name)
        dims = {f.name: f.dims for f in declared.operands}
        dims |= {f.name: f.dims or dims[f.like] for f in declared.results}
        loop = next((name for name, own in dims.items() if own.startswith("...")), declared.results[0].name)
        names = [o.name for o in kernel.operands if o.name in dims] if kernel is not None else []
        order = names if declared.is_elementwise else [loop, *names]
        is_packed = self.spec(getattr(op, loop)).storage == "packed"
        view_of = self.flat if is_packed else self.tensor
        views = {name: view_of(t) for name in order if (t := getattr(op, name)) is not None}
        x = views.get(loop) or view_of(getattr(op, loop))
        is_cut = declared.is_elementwise and not is_packed
        columns = self.tensor(self.op.outputs[0]).tile_cols if is_cut else 0

        def view(name: str) -> Operand:
            if columns:
                return self.col(views[name])
            is_row = dims[name].split()[0] == dims[loop].split()[0]
            return self.row(views[name]) if is_row else self.whole(views[name])

        attrs = op.attrs
        self.emit(
            op.name,
            over=Number(x.cols) if columns else x,
            step=columns or (x.tile_rows if is_packed else None),
            dtype=x.dtype,
            tiles={name: view(name) for name in names if name in views},
            ints={name: attrs[name] for name in attrs if kernel and name in kernel.int_names},
            floats={name: attrs[name] for name in attrs if kernel and name in kernel.float_names},
        )

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

    def hold(self, over: Number, step: NumberLike, operand: Operand, label: str) -> Draft:
        """Append an instruction with one empty task per tile, which only declares that it reads the
        tile (see `ir.lowering.Lowering.hold`).
        """
        made = make_hold(self.maker, label, over, step, operand, self.views.__getitem__)
        self.instructions.append(made)
        return made

    # ---- sums over the batch ------------------------------------------------------------------------------

    def accumulator(self, result: int, added: int | None = None) -> Accumulator:
        """Where and how this microbatch adds its part to a result that is a sum over the batch.

        A carry is the sum of some earlier microbatches. Microbatch j adds as many carries as the
        binary number j has trailing ones, lowest level first, and leaves its sum as the carry of
        the next level. This is how a binary counter carries, so the tree over batch splits does not
        depend on the number of microbatches. The last microbatch adds all remaining carries. If
        devices share every microbatch, they write their parts into a ring, and the owners of rows
        keep the carries.

        If this device has all batch splits, `added` is one more carry. Otherwise the reduction over
        devices adds `added`, and the result may use its memory.
        """
        declared = op_named(self.op.op).declared
        number = self._number_of(result)
        if number not in declared.accumulates:
            self.invalid("a sum over the batch must be declared with `accumulates`", f"result {number}")
        self._accumulated.add(number)
        pending_reductions = self.pending_of_sum(result)
        in_shards = _arrive_in_shards(pending_reductions)
        per_microbatch = any(r.is_completed_per_microbatch for r in pending_reductions)
        base = self.local_ref(result, self._layout_of_sum(result), -1) if in_shards else self.tensor(result)
        level, last = _trailing_ones(self.microbatch), self.is_last_microbatch

        def carry(number: int) -> Ref:
            return self.slot(Slot("carry", result, number), lambda slot: base._replace(slot=slot))

        is_shared = in_shards or any(pending.group for pending in pending_reductions)
        if (in_shards and (last or per_microbatch)) or (added is not None and is_shared):
            target = self._part_of_sum(result, base)
        elif per_microbatch:
            target = self.ring(result)
        else:
            target = base if last else carry(level)
        set_bits = [i for i in range(self.microbatch.bit_length()) if self.microbatch >> i & 1]
        carries = () if per_microbatch else set_bits if last else range(level)
        folded = [carry(i) for i in carries]
        if added is not None and not is_shared:
            folded.append(self.tensor(added))
        return Accumulator(target, tuple(folded), result, last, added if is_shared else None)

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

    def first_of_sum(self, result: int) -> NumberLike:
        """The first global row that this device adds to a sum over the batch."""
        self._number_of(result)
        in_shards = _arrive_in_shards(self.pending_of_sum(result))
        layout = self._layout_of_sum(result) if in_shards else self.layout(result)
        return self.numbers.first(self.spec(result), layout, 0)

    def _number_of(self, result: int) -> int:
        """The number of one of the op's results."""
        if result not in self.op.outputs:
            self.invalid("a sum must be a result of the op", shown(result))
        return self.op.outputs.index(result)

    def finish_accumulation(self, target: Accumulator) -> None:
        """Sum over the devices that share the batch: after the last microbatch, or in each
        microbatch if devices share every microbatch.
        """
        if not isinstance(target, Accumulator):
            self.invalid("finish_accumulation needs a result of low.accumulator", shown(target))
        for pending in self.pending_of_sum(target.result):
            if pending.is_completed_per_microbatch and not pending.arrives_in_shards:
                collectives.add_microbatch(self, target.result, pending)
                continue
            self.completed.add(pending)
            if pending.arrives_in_shards and (target.is_last or pending.is_completed_per_microbatch):
                collectives.reduce_to_shards(self, target.ref, target.result, pending, target.added)
            elif target.is_last and pending.group and target.added is not None:
                step = upper(self.instructions[-1].step)
                collectives.all_reduce(self, target.ref, target.result, target.added, pending, step=step)
            elif target.is_last and pending.group:
                collectives.all_reduce_in_place(self, target.ref, pending)

    def split_tree(self, result: int, batch_splits: Ref) -> None:
        """Combine the rows of `batch_splits`, a `split_temp` with one row per batch split, and the
        carries into a result. Then combine this result over devices.
        """
        target = self.accumulator(result)
        tiles: Tiles = {
            "out": self.whole(target.ref),
            "partials": self.whole(batch_splits),
            "carry": [self.whole(c) for c in target.carries],
        }
        cut = {
            "split_len": self.split_len,
            "num_k_splits": self.k_splits,
            "is_padded": int(self.is_padded),
        }
        self.emit("split_tree", over=self.one, step=0, tiles=tiles, ints=cut)
        self.finish_accumulation(target)

    # ---- collectives --------------------------------------------------------------------------------------

    all_reduce = collectives.all_reduce
    slice = collectives.slice_columns
    all_gather_parameters = collectives.all_gather_parameters
    gather = collectives.gather
    move = collectives.move

    def all_gather(self, source: int, target: int) -> None:
        """Gather the shards of `source` on every device, along the axes that `target` does not
        have: rows of a batch, or columns.
        """
        label = self.spec(source).labels[0]
        counts_batch = label is not None and label.is_summed_by_batch_splits
        if counts_batch and self.layout(source)[0] != self.layout(target)[0]:
            collectives.all_gather_batch(self, source, target)
        else:
            collectives.all_gather_columns(self, source, target)

    # ---- all ops ------------------------------------------------------------------------------------------

    def run(self) -> LoweredTemplate:
        """Lower every op."""
        for index, op in enumerate(self.task.ops):
            self.op_index, self.op = index, op
            self.completed = set()
            if op.id in self.task.late_ops and not self.is_last_microbatch:
                continue
            self._accumulated = set()
            self._require_whole_sums()
            bound, first = bind(op), len(self.instructions)
            bound.lower(self)
            check_use(self, op, self.instructions[first:], bound.declared)
            if self._accumulated != {*bound.declared.accumulates}:
                self.invalid(
                    "results with `accumulates` must be written through low.accumulator or low.split_tree",
                    f"{sorted(self._accumulated)} of {bound.declared.accumulates}",
                )
            left = [r for r in self.pending_of_op() if r not in self.completed]
            if left:
                self.invalid(
                    "an op must complete all of its partial values",
                    f"{left[0].partial!r} left over {show_axes(left[0].axes)}",
                )
        by_index = sorted(self.slots, key=self.slots.__getitem__)
        return LoweredTemplate(
            self.task.name,
            tuple(self._in_order_of_calls(d.freeze()) for d in self.instructions),
            tuple(by_index),
            tuple(self.temps),
            tuple(self.signal_ranges),
            tuple(self.ring_signal_ranges),
            tuple(self.collectives),
        )

    def _in_order_of_calls(self, instruction: Instruction) -> Instruction:
        """In a pipeline, ready tasks run in the order in which they were submitted: tasks with a priority
        do. Otherwise a stage would begin the next microbatch before it completes one for which
        another stage waits. Posts come first.
        """
        if not self.shapes.settings.stage_axis:
            return instruction
        more = 1 if instruction.kernel else _POSTS_FIRST
        return replace(instruction, priority=instruction.priority + more)

    def _require_whole_sums(self) -> None:
        for pending in self.pending_of_op():
            stored = {*self.shapes.settings.storage_axes}
            delivered = {axis for layout in pending.arrives for axes in layout for axis in axes}
            if pending.tree == BATCH_SPLITS and not delivered & {*pending.group} <= stored:
                raise PlanError(
                    f"[plan.lower] a sum over the batch must be whole on its devices; got {pending.partial!r} of "
                    f"{self.op.label!r} requested as {show_layout(pending.arrives[0])} over "
                    f"{show_axes(pending.group)}; drop the hint"
                )
