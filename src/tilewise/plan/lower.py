"""From a template to instructions, for one device.

`TemplateLowering` is what `Op.lower` writes to: operands with their access, temporaries, chunk ranges of contractions,
accumulation over microbatches. Collectives are in `plan.collectives`. Nothing here knows offsets: slots are bound to
memory later, once per use of the template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tilewise.core.dims import Dim, DimLabel, Size
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import InternalError, PlanError
from tilewise.core.mesh import Axes
from tilewise.ir.contractions import factors_of
from tilewise.ir.graph import Graph, OpNode, TensorSpec
from tilewise.ir.layout import LEAVES, GraphLayout, Record, TensorLayout, in_space, show_axes, show_layout
from tilewise.ir.lowering import Accumulator, Draft, Ref, Tiles
from tilewise.ir.op import op_named
from tilewise.ir.program import (
    Access,
    Completion,
    Instruction,
    LoweredTemplate,
    Mode,
    Number,
    NumberLike,
    Operand,
    Slot,
    TempSpec,
    known_part,
    times,
    upper,
)
from tilewise.kernels.scratch import scratch_bytes
from tilewise.plan import collectives
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.emission import make_instruction
from tilewise.plan.shapes import LocalShapes, round_up

__all__ = ["TemplateLowering", "alias_roots", "trailing_ones"]

ALL_ROWS = 1 << 40
_SEQUENCE_ATOM = 64  # positions that no cut of a sequence separates (docs/numerics.md, rule 5)


def trailing_ones(value: int) -> int:
    """Set bits at the low end: how many carries microbatch number `value` folds in."""
    return (value ^ (value + 1)).bit_length() - 1


def alias_roots(graph: Graph, ops: Sequence[OpNode], keep: frozenset[int]) -> dict[int, int]:
    """Tensor -> tensor whose memory it shares, for ops that may write over an operand that no later op reads.

    `keep` are tensors that others still read (results, saved tensors, outputs).
    """
    last: dict[int, int] = {}
    made: dict[int, int] = {}
    for n, op in enumerate(ops):
        last.update({i: n for i in op.inputs if i is not None})
        made.update(dict.fromkeys(op.outputs, n))
    roots: dict[int, int] = {}

    def root(tensor: int) -> int:
        while tensor in roots:
            tensor = roots[tensor]
        return tensor

    for n, op in enumerate(ops):
        if op.op == "call":
            continue
        rule = op_named(op.op)
        for result, given in rule.in_place:
            source, out = op.inputs[given], op.outputs[result]
            if source is None:
                continue
            free = (
                source in made and last[source] == n and source not in keep and op.inputs.count(source) == 1
            )
            if rule.must_alias or (free and out not in keep):
                roots[out] = root(source)
            elif free and root(source) not in keep:  # the memory is that of the tensor others will read
                roots[root(source)] = out
    return {tensor: root(tensor) for tensor in roots}


class TemplateLowering:
    """Lowers the ops of one template (or of a run of root ops) for one class of devices and one microbatch position.

    Args:
        shapes: of a device that stands for its class.
        numbers: in which the devices of a class differ.
        late: ops that run after the last microbatch only.
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
        self.late = late
        self.name, self.graph, self.ops, self.graph_layout, self.shapes = name, graph, ops, layout, shapes
        self.mesh, self.numbers = shapes.mesh, numbers
        self.roots, self.microbatch = roots, microbatch
        self.instructions: list[Draft] = []
        self.slots: dict[Slot, int] = {}
        self.temps: list[TempSpec] = []
        self.signal_sites: list[int] = []
        self.ring_sites: list[int] = []
        self.one = Number(1)
        self.reduction_chunks = graph.reduction_chunks
        self._op_index = 0
        self._accumulated: set[int] = set()  # outputs of the current op that are summed over the batch
        self.completed: set[Record] = set()  # what the current op has combined
        self.completions: list[Completion] = []  # where each shared value lies before and after
        self.refs: dict[Slot, Ref] = {}
        self.keys: list[Slot] = []  # by number
        self.views: list[Ref] = []
        self.scratch_bytes = 0  # what the largest call of a kernel takes from its worker

    # ---- the settings that ops ask for --------------------------------------------------------------------

    @property
    def num_leaves(self) -> int:
        """Leaves that this device has in one microbatch."""
        s = self.shapes.settings
        return s.leaves // (s.accumulation * self.mesh.size(*s.batch_axes))

    @property
    def leaf_rows(self) -> NumberLike:
        """Tokens per leaf; without a batch, all rows are one leaf."""
        s = self.shapes.settings
        return times(s.seq, s.batch // s.leaves) if s.batch else ALL_ROWS

    @property
    def leaf_cut(self) -> dict[str, NumberLike]:
        """How rows fall on leaves and sequence chunks; without a batch there is one of each."""
        s = self.shapes.settings
        return {
            "leaf_rows": self.leaf_rows,
            "seq_len": s.seq if s.batch else 1,
            "num_chunks": self.reduction_chunks,
            "chunked_len": self._chunked_len,
        }

    @property
    def _chunked_len(self) -> int:
        """Over how many positions a sequence's chunks are counted: padding moves no cut."""
        s = self.shapes.settings
        return s.padded_bound or (upper(s.seq) if s.batch else 1)

    @property
    def padded_len(self) -> NumberLike:
        """Rows per sequence where sequences may end in padding; 0 where they do not."""
        s = self.shapes.settings
        return s.seq if s.padded_bound else 0

    def leaf_temp(self, cols: int, name: str) -> Ref:
        """A row per leaf: a partial of so many columns for every sequence chunk that is not empty, side by side."""
        atoms = round_up(self._chunked_len, _SEQUENCE_ATOM) // _SEQUENCE_ATOM
        kept = min(atoms, self.reduction_chunks)
        return self.temp(self.num_leaves, kept * cols, "f32", tile_rows=1, name=name)

    def row_step(self, ref: Ref) -> NumberLike:
        """Rows per task of a loop over activation rows."""
        return self.shapes.row_step(ref.extent)

    def size(self, size: Size) -> NumberLike:
        """A size as instructions say it: a number of its symbol where it is one."""
        return Number.of_symbol(self.shapes.symbols.index(size)) if isinstance(size, Dim) else size

    # ---- tensors ------------------------------------------------------------------------------------------

    def spec(self, tensor: int) -> TensorSpec:
        """Spec of a tensor."""
        return self.graph.spec(tensor)

    def layout(self, tensor: int) -> TensorLayout:
        """Layout of a tensor."""
        return self.graph_layout.use[tensor]

    def first_element(self, tensor: int, dim: int) -> NumberLike:
        """The first global element of a dim that this device holds."""
        return self.numbers.first(self.spec(tensor), self.layout(tensor), dim)

    def local_chunks(self, tensor: int, dim: int) -> list[NumberLike]:
        """Of every chunk of a labelled dim, the local elements that this device holds: begin and end, one after the
        other."""
        spec, layout = self.spec(tensor), self.layout(tensor)
        axes, chunks = in_space(layout[dim]), self.reduction_chunks
        if not axes:
            return [v for pair in self.shapes.held_chunks(spec, layout, dim) for v in pair]
        key = "held", spec.shape[dim], spec.labels[dim], axes

        shares: dict[int, list[tuple[int, int]]] = {}  # by the coordinate that they depend on

        def held(i: int, device: int) -> int:
            place = self.mesh.coordinate(device, *axes)
            if place not in shares:
                shares[place] = self.shapes.on(device).held_chunks(spec, layout, dim)
            return shares[place][i // 2][i % 2]

        return [self.numbers.place((*key, i), partial(held, i)) for i in range(2 * chunks)]

    def records(self, op: OpNode, partial: str) -> tuple[Record, ...]:
        """What becomes of a value of which this op makes parts: a record per team, none where it is not shared."""
        return self.graph_layout.records.get((op.id, partial), ())

    def record(self, op: OpNode, partial: str) -> Record | None:
        """The one record of a partial value; None where it is not shared."""
        (record,) = self.records(op, partial) or (None,)
        return record

    def _ref(self, slot: Slot, make: Callable[[int], Ref]) -> Ref:
        if slot not in self.refs:
            self.slots[slot] = len(self.slots)
            self.refs[slot] = make(self.slots[slot])
            self.keys.append(slot)
            self.views.append(self.refs[slot])
        return self.refs[slot]

    def tensor(self, tensor: int | Ref) -> Ref:
        """The local view of a tensor."""
        if isinstance(tensor, Ref):
            return tensor
        root = self.roots.get(tensor, tensor)
        spec, layout = self.spec(root), self.layout(root)

        def make(index: int) -> Ref:
            extent = self.shapes.extent(spec, layout) if spec.storage != "vector" else Number(1)
            tile = self.shapes.tile_rows(spec, self.graph.tensors[root].kind, extent)
            cols = self.shapes.cols(spec, layout)
            return Ref(index, extent, cols, spec.dtype.name, tile, spec.storage == "packed")

        return self._ref(Slot("tensor", root), make)

    def flat(self, tensor: int | Ref) -> Ref:
        """The same memory as rows of plain elements: panels padded, a vector as a column."""
        if isinstance(tensor, Ref):
            base = tensor
            key = self.keys[base.slot]
            slot = Slot("flat" if key.kind == "tensor" else f"{key.kind}_flat", key.id, key.level)
            vector = key.kind != "temp" and self.spec(key.id).storage == "vector"
        else:
            root = self.roots.get(tensor, tensor)
            base, slot = self.tensor(tensor), Slot("flat", root)
            vector = self.spec(root).storage == "vector"
        return self._ref(slot, lambda index: flat_view(base, index, vector))

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
        """A temporary that lives while this op runs."""
        extent = rows if isinstance(rows, Number) else Number(rows)
        size = max_bytes or extent.upper(self.shapes.bounds) * cols * dtype_named(dtype).itemsize
        self.temps.append(TempSpec(name, extent, cols, dtype, tile_rows, packed, size, self._op_index))
        slot = Slot("temp", len(self.temps) - 1)
        return self._ref(slot, lambda index: Ref(index, extent, cols, dtype, tile_rows, packed))

    def temp_like(self, ref: Ref, *, dtype: str, name: str, record: Record | None = None) -> Ref:
        """A temporary with the rows and columns of another tensor; with a record, of all its team's shards."""
        key = self.keys[ref.slot]
        spec, layout = self.spec(key.id), self.layout(key.id)
        cols = ref.cols
        if record is not None:
            layout = tuple(tuple(axis for axis in axes if axis not in record.team) for axes in layout)
            cols = self.shapes.cols(spec, layout)
        size = self.shapes.bytes_max(spec, layout) // spec.dtype.itemsize * dtype_named(dtype).itemsize
        return self.temp(
            ref.extent, cols, dtype, tile_rows=ref.tile_rows, name=name, packed=ref.packed, max_bytes=size
        )

    # ---- operands -----------------------------------------------------------------------------------------

    def row(self, tensor: int | Ref, div: NumberLike = 1) -> Operand:
        """The rows of the loop's current tile (divided by `div`)."""
        return Operand(self.tensor(tensor).slot, Mode.ROW, div=div)

    def whole(self, tensor: int | Ref) -> Operand:
        """All rows."""
        return Operand(self.tensor(tensor).slot, Mode.WHOLE)

    def col(self, tensor: int | Ref) -> Operand:
        """All rows, the columns of the loop's current range."""
        return Operand(self.tensor(tensor).slot, Mode.COL)

    def rows_at(self, ref: Ref, first: int, count: int) -> Operand:
        """Fixed rows, whatever the loop."""
        return Operand(ref.slot, Mode.ROWS, part=first, parts=count)

    # ---- emission -----------------------------------------------------------------------------------------

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
        """Append an instruction, held to the kernel table (see `ir.lowering.Lowering.emit`)."""
        extent = over.extent if isinstance(over, Ref) else over
        draft = make_instruction(
            kernel,
            maker=f"op {op.op!r} ({op.label})",
            label=label or op.label or op.op,
            extent=extent,
            step=self.shapes.row_step(extent) if step is None else step,
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
            scratch_bytes(instruction.kernel, [known_part(i, bounds) for i in instruction.ints], shapes),
        )
        return draft

    def hold(self, op: OpNode, over: Number, step: NumberLike, operand: Operand, label: str) -> Draft:
        """Append an empty task per tile that reads the tile: it orders and acknowledges."""
        held = operand._replace(access=Access.IN)
        self.instructions.append(Draft(Instruction("", label, over, step, (held,), priority=2)))
        return self.instructions[-1]

    def contraction_chunks(
        self, terms: Sequence[tuple[TensorSpec, DimLabel | None, int]], record: Record | None
    ) -> list[list[tuple[int, int]]]:
        """Per chunk, per term, the local range of the contracted dim (`dim` of each weight)."""
        if all(label is None for _, label, _ in terms):
            return [[(0, _fixed(spec.shape[dim])) for spec, _, dim in terms]]
        columns = [self.shapes.chunk_ranges(spec, dim, _team(record)) for spec, _, dim in terms]
        return [list(rows) for rows in zip(*columns)]

    def label_chunks(self, label: DimLabel | None, size: int, record: Record | None) -> list[tuple[int, int]]:
        """Local ranges of the chunks of a labelled dim."""
        spec = TensorSpec((size,), dtype_named("f32"), (label,))
        return self.shapes.chunk_ranges(spec, 0, _team(record))

    # ---- sums over the batch ------------------------------------------------------------------------------

    def accumulator(self, op: OpNode, output: int) -> Accumulator:
        """Where output number `output` of `op` goes in this microbatch.

        Microbatch j folds in as many carries as j has trailing ones, lowest level first, and leaves its own at the
        next level: the carries of a binary counter, so the tree over leaves does not depend on the accumulation. The
        last one folds in all that are left. Where devices share every microbatch, what they make of it goes into a
        ring, and its owners keep the carries.
        """
        rule = op_named(op.op)
        if output not in rule.accumulates:
            raise InternalError(
                f"[plan.lower] an output that is summed over the batch stands in `accumulates`; got output {output} of "
                f"{op.op!r}, which has {rule.accumulates}; correct {type(rule).__name__}.accumulates"
            )
        self._accumulated.add(output)
        tensor = op.outputs[output]
        base = self.tensor(tensor)
        total = self.shapes.settings.accumulation
        level, last = trailing_ones(self.microbatch), self.microbatch == total - 1
        if any(r.is_completed_per_microbatch for r in self._records_of_sum(op, output)):
            return Accumulator(self.ring(tensor), (), output, last)

        def carry(number: int) -> Ref:
            return self._ref(Slot("carry", tensor, number), lambda slot: replace(base, slot=slot))

        target = base if last else carry(level)
        held = [i for i in range(self.microbatch.bit_length()) if self.microbatch >> i & 1]
        return Accumulator(target, tuple(carry(i) for i in (held if last else range(level))), output, last)

    def finish_accumulation(self, op: OpNode, target: Accumulator) -> None:
        """The sum over the devices that share the batch: after the last microbatch, or in each that they share."""
        for record in self._records_of_sum(op, target.output):
            if record.is_completed_per_microbatch:
                collectives.add_microbatch(self, op, target.output, record)
                continue
            self.completed.add(record)
            if target.is_last and record.team:
                collectives.all_reduce_in_place(self, op, target.ref, record)

    def ring(self, tensor: int, age: int = 0) -> Ref:
        """What has the shape of a tensor and lies in a ring: in this use's place, or that of the use `age` before."""
        base = self.tensor(tensor)
        return self._ref(Slot("ring", tensor, age), lambda slot: replace(base, slot=slot))

    def stack(self, tensor: int, rows: Number, cols: int, tile_rows: int) -> Ref:
        """What an owner keeps of a sum between microbatches, in f32."""
        return self._ref(Slot("stack", tensor), lambda slot: Ref(slot, rows, cols, "f32", tile_rows))

    def leaf_tree(self, op: OpNode, output: int, leaves: Ref) -> None:
        """Combine a row per leaf, of `leaf_temp`, and carries into output number `output`; then over devices."""
        target = self.accumulator(op, output)
        tiles: Tiles = {
            "out": self.whole(target.ref),
            "partials": self.whole(leaves),
            "carry": [self.whole(c) for c in target.carries],
        }
        cut = {
            "chunked_len": self._chunked_len,
            "num_chunks": self.reduction_chunks,
            "is_padded": int(self.shapes.settings.padded_bound > 0),
        }
        self.emit("leaf_tree", op, over=self.one, step=0, tiles=tiles, ints=cut)
        self.finish_accumulation(op, target)

    # ---- collectives --------------------------------------------------------------------------------------

    def signals(self, count: int) -> int:
        """Reserve signals; numbered within their site until every device's need is known."""
        self.signal_sites.append(count)
        return collectives.signal_site(len(self.signal_sites) - 1)

    def ring_signals(self, count: int) -> int:
        """The same for a ring, whose signals all variants of the template share."""
        self.ring_sites.append(count)
        return collectives.ring_site(len(self.ring_sites) - 1)

    def all_reduce(
        self,
        op: OpNode,
        source: int | Ref,
        target: int | Ref,
        residual: int | Ref | None,
        record: Record,
        *,
        step: NumberLike | None = None,
        producer: Draft | None = None,
    ) -> None:
        """Combine `source` over a record's team into `target` (plus a residual), tile by tile."""
        collectives.all_reduce(self, op, source, target, residual, record, step=step, producer=producer)

    def all_gather(self, op: OpNode, source: int, target: int) -> None:
        """Bring the shards of `source` together on every device, along the axes that `target` lacks."""
        collectives.all_gather_columns(self, op, source, target)

    def slice(self, op: OpNode, source: int, target: int) -> None:
        """Keep this device's part of `source`, along the axes that `target` has more."""
        collectives.slice_columns(self, op, source, target)

    def gather(self, op: OpNode, source: int, target: int) -> None:
        """Bring the column shards of `source` together in `target` on the first device of the axes that shard it."""
        collectives.gather(self, op, source, target)

    # ---- all ops ------------------------------------------------------------------------------------------

    def run(self) -> LoweredTemplate:
        """Lower every op."""
        for index, op in enumerate(self.ops):
            self._op_index = index
            self.completed = set()
            if op.id in self.late and self.microbatch < self.shapes.settings.accumulation - 1:
                continue
            self._accumulated = set()
            self._refuse_sums_in_shards(op)
            rule = op_named(op.op)
            rule.lower(self, op)
            if self._accumulated != {*rule.accumulates}:
                raise InternalError(
                    f"[plan.lower] an output in `accumulates` is written through low.accumulator or low.leaf_tree; got "
                    f"{op.op!r}, which writes {sorted(self._accumulated)} of {rule.accumulates} so; correct "
                    f"{type(rule).__name__}"
                )
            left = [r for r in self._records_of(op) if r not in self.completed]
            if left:
                raise InternalError(
                    f"[plan.lower] an op completes every value that it makes in parts; got {op.op!r} of {op.label!r}, "
                    f"which left {left[0].partial!r} over {show_axes(left[0].axes)}; please report the op"
                )
        by_index = sorted(self.slots, key=self.slots.__getitem__)
        return LoweredTemplate(
            self.name,
            tuple(d.freeze() for d in self.instructions),
            tuple(by_index),
            tuple(self.temps),
            tuple(self.signal_sites),
            tuple(self.ring_sites),
            tuple(self.completions),
        )

    def _refuse_sums_in_shards(self, op: OpNode) -> None:
        for record in self._records_of(op):
            if record.arrives_in_shards and record.tree == LEAVES:
                raise PlanError(
                    f"[plan.lower] a sum over the batch arrives whole on its devices; got {record.partial!r} of "
                    f"{op.label!r} asked for as {show_layout(record.arrives[0])} over {show_axes(record.team)}; drop "
                    "the hint"
                )

    def _records_of(self, op: OpNode) -> list[Record]:
        partials = {p.name: None for p in factors_of(self.graph, op).partials}
        return [record for name in partials for record in self.records(op, name)]

    def _records_of_sum(self, op: OpNode, output: int) -> list[Record]:
        """Those of an output that is summed over the batch."""
        return [r for r in self._records_of(op) if r.tree == LEAVES and output in r.outputs]


def _team(record: Record | None) -> Axes:
    return record.team if record is not None else ()


def flat_view(base: Ref, slot: int, vector: bool) -> Ref:
    """Packed rows padded to whole panels; a vector as a column of elements."""
    if vector:
        return Ref(slot, Number(base.cols), 1, base.dtype, base.cols)
    if not base.packed:
        return Ref(slot, base.extent, base.cols, base.dtype, base.tile_rows)
    rows, cols = round_up(base.extent.constant, 32), round_up(base.cols, 2)
    return Ref(slot, Number(rows), cols, base.dtype, base.tile_rows)


def _fixed(size: int | Dim) -> int:
    assert isinstance(size, int)
    return size
