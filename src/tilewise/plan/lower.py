"""From a template to instructions, for one device.

`TemplateLowering` is what `Op.lower` writes to: operands with their access, temporaries, chunk ranges of contractions,
accumulation over microbatches. Collectives are in `plan.collectives`. Nothing here knows offsets: slots are bound to
memory later, once per use of the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.core.dims import Dim, DimLabel
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import InternalError, PlanError
from tilewise.ir.graph import Graph, OpNode, TensorSpec
from tilewise.ir.layout import GraphLayout, TensorLayout
from tilewise.ir.op import Factors, op_named
from tilewise.ir.program import Access, Instruction, LoweredTemplate, Mode, Number, Operand, Slot, TempSpec
from tilewise.ir.verify_layout import contracted_axes
from tilewise.kernels.scratch import scratch_bytes
from tilewise.plan.collectives import Collectives
from tilewise.plan.shapes import LocalShapes, round_up

__all__ = ["Accumulator", "Ref", "TemplateLowering", "alias_roots", "trailing_ones"]

ALL_ROWS = 1 << 40
_ACCESS = {"r": Access.IN, "w": Access.OUT, "rw": Access.INOUT}


def trailing_ones(value: int) -> int:
    """Set bits at the low end: how many carries microbatch number `value` folds in."""
    return (value ^ (value + 1)).bit_length() - 1


@dataclass(frozen=True)
class Ref:
    """A tensor inside a template on this device."""

    slot: int
    extent: Number
    cols: int
    dtype: str
    tile_rows: int
    packed: bool = False


@dataclass(frozen=True)
class Accumulator:
    """Where a sum over the batch goes in this microbatch: target, carries to fold in, and whether it is complete."""

    ref: Ref
    carries: tuple[Ref, ...]
    output: int
    is_last: bool


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
        rule = op_named(op.op) if op.op != "call" else None
        for result, given in getattr(rule, "in_place", ()):
            source, out = op.inputs[given], op.outputs[result]
            if source is None:
                continue
            free = (
                source in made and last[source] == n and source not in keep and op.inputs.count(source) == 1
            )
            if getattr(rule, "must_alias", False) or (free and out not in keep):
                roots[out] = root(source)
            elif free and root(source) not in keep:  # the memory is that of the tensor others will read
                roots[root(source)] = out
    return {tensor: root(tensor) for tensor in roots}


class TemplateLowering(Collectives):
    """Lowers the ops of one template (or of a run of root ops) for one device and one microbatch position."""

    def __init__(
        self,
        name: str,
        graph: Graph,
        ops: Sequence[OpNode],
        layout: GraphLayout,
        shapes: LocalShapes,
        roots: dict[int, int],
        microbatch: int,
    ) -> None:
        self.name, self.graph, self.ops, self.graph_layout, self.shapes = name, graph, ops, layout, shapes
        self.mesh, self.device = shapes.mesh, shapes.device
        self.roots, self.microbatch = roots, microbatch
        self.instructions: list[Instruction] = []
        self.slots: dict[Slot, int] = {}
        self.temps: list[TempSpec] = []
        self.signal_sites: list[int] = []
        self.one = Number(1)
        self.reduction_chunks = graph.reduction_chunks
        self._op_index = 0
        self.completed_axes: set[str] = set()  # over which the current op has combined its partial results
        self.refs: dict[Slot, Ref] = {}
        self.scratch_bytes = 0  # what the largest call of a kernel takes from its worker

    # ---- the settings that ops ask for --------------------------------------------------------------------

    @property
    def num_leaves(self) -> int:
        """Leaves that this device has in one microbatch."""
        s = self.shapes.settings
        return s.leaves // (s.accumulation * self.mesh.size(s.batch_axis))

    @property
    def leaf_rows(self) -> int:
        """Tokens per leaf; without a batch, all rows are one leaf."""
        s = self.shapes.settings
        return s.batch * s.seq // s.leaves if s.batch else ALL_ROWS

    def row_step(self, ref: Ref) -> int:
        """Rows per task of a loop over activation rows."""
        return self.shapes.settings.row_tile

    # ---- tensors ------------------------------------------------------------------------------------------

    def spec(self, tensor: int) -> TensorSpec:
        """Spec of a tensor."""
        return self.graph.spec(tensor)

    def layout(self, tensor: int) -> TensorLayout:
        """Layout of a tensor."""
        return self.graph_layout.tensors[tensor]

    def local_range(self, spec: TensorSpec, layout: TensorLayout, dim: int) -> tuple[int, int]:
        """Global elements of a dim that this device holds."""
        return self.shapes.range(spec, layout, dim)

    def factor_axis(self, op: OpNode, factor: str) -> str | None:
        """The mesh axis that shards a factor of an op, if any."""
        for tensor, dims in zip(op.inputs, self._factors(op).inputs):
            if tensor is not None and dims is not None and factor in dims:
                return self.layout(tensor)[dims.index(factor)]
        return None

    def _factors(self, op: OpNode) -> Factors:
        return op_named(op.op).factors([None if i is None else self.spec(i) for i in op.inputs], op.attrs)

    def _ref(self, slot: Slot, make: Any) -> Ref:
        if slot not in self.refs:
            self.slots[slot] = len(self.slots)
            self.refs[slot] = make(self.slots[slot])
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
            key = next(s for s, i in self.slots.items() if i == base.slot)
            slot = Slot(
                {"tensor": "flat", "temp": "temp_flat", "carry": "carry_flat"}[key.kind], key.id, key.level
            )
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
        tile_rows: int,
        name: str,
        packed: bool = False,
        max_bytes: int = 0,
    ) -> Ref:
        """A temporary that lives while this op runs."""
        extent = rows if isinstance(rows, Number) else Number(rows)
        bounds = tuple(s.max for s in self.shapes.symbols)
        size = max_bytes or extent.upper(bounds) * cols * dtype_named(dtype).itemsize
        self.temps.append(TempSpec(name, extent, cols, dtype, tile_rows, packed, size, self._op_index))
        slot = Slot("temp", len(self.temps) - 1)
        return self._ref(slot, lambda index: Ref(index, extent, cols, dtype, tile_rows, packed))

    def temp_like(self, ref: Ref, *, dtype: str, name: str) -> Ref:
        """A temporary with the rows and columns of another tensor."""
        key = next(s for s, i in self.slots.items() if i == ref.slot)
        spec, layout = self.spec(key.id), self.layout(key.id)
        size = self.shapes.bytes_max(spec, layout) // spec.dtype.itemsize * dtype_named(dtype).itemsize
        return self.temp(
            ref.extent, ref.cols, dtype, tile_rows=ref.tile_rows, name=name, packed=ref.packed, max_bytes=size
        )

    # ---- operands -----------------------------------------------------------------------------------------

    def row(self, tensor: int | Ref, access: str, div: int = 1) -> Operand:
        """The rows of the loop's current tile (divided by `div`)."""
        return Operand(self.tensor(tensor).slot, Mode.ROW, _ACCESS[access], div=div)

    def whole(self, tensor: int | Ref, access: str) -> Operand:
        """All rows."""
        return Operand(self.tensor(tensor).slot, Mode.WHOLE, _ACCESS[access])

    def col(self, tensor: int | Ref, access: str) -> Operand:
        """All rows, the columns of the loop's current range."""
        return Operand(self.tensor(tensor).slot, Mode.COL, _ACCESS[access])

    def row_at(self, ref: Ref, row: int, access: str) -> Operand:
        """One fixed row, in an instruction whose loop is one range over all rows of `ref`."""
        return Operand(ref.slot, Mode.ROWPART, _ACCESS[access], part=row, parts=ref.extent.constant)

    def null(self) -> Operand:
        """An absent operand."""
        return Operand(0, null=True)

    # ---- emission -----------------------------------------------------------------------------------------

    def emit(
        self,
        kernel: str,
        op: OpNode,
        extent: Number,
        step: int,
        operands: list[Operand],
        *,
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
        priority: int = 0,
        label: str = "",
    ) -> Instruction:
        """Append an instruction."""
        instruction = Instruction(
            kernel,
            label or op.label or op.op,
            extent,
            step,
            operands,
            list(ints),
            list(floats),
            priority=priority,
        )
        self.instructions.append(instruction)
        shapes = self._largest_shapes(operands)
        self.scratch_bytes = max(self.scratch_bytes, scratch_bytes(kernel, list(ints), shapes))
        return instruction

    def _largest_shapes(self, operands: Sequence[Operand]) -> list[tuple[int, int]]:
        """Rows and columns of the tensors behind operands, symbols at their bounds."""
        bounds = tuple(s.max for s in self.shapes.symbols)
        by_index = {ref.slot: ref for ref in self.refs.values()}
        whole = [None if o.null else by_index[o.slot] for o in operands]
        return [(0, 0) if ref is None else (ref.extent.upper(bounds), ref.cols) for ref in whole]

    def contraction_chunks(
        self, terms: Sequence[tuple[TensorSpec, DimLabel | None, int]], axis: str | None
    ) -> list[list[tuple[int, int]]]:
        """Per chunk, per term, the local range of the contracted dim (`dim` of each weight)."""
        if all(label is None for _, label, _ in terms):
            return [[(0, _fixed(spec.shape[dim])) for spec, _, dim in terms]]
        columns = [self.shapes.chunk_ranges(spec, dim, axis) for spec, _, dim in terms]
        return [list(rows) for rows in zip(*columns)]

    def label_chunks(self, label: DimLabel | None, size: int, axis: str | None) -> list[tuple[int, int]]:
        """Local ranges of the chunks of a labelled dim."""
        spec = TensorSpec((size,), dtype_named("f32"), (label,))
        return self.shapes.chunk_ranges(spec, 0, axis)

    # ---- sums over the batch ------------------------------------------------------------------------------

    def accumulator(self, op: OpNode, output: int) -> Accumulator:
        """Where output number `output` of `op` goes in this microbatch.

        Microbatch j folds in as many carries as j has trailing ones, lowest level first, and leaves its own at the
        next level: the carries of a binary counter, so the tree over leaves does not depend on the accumulation.
        """
        tensor = op.outputs[output]
        base = self.tensor(tensor)
        total = self.shapes.settings.accumulation
        level, last = trailing_ones(self.microbatch), self.microbatch == total - 1

        def carry(number: int) -> Ref:
            return self._ref(
                Slot("carry", tensor, number),
                lambda i: Ref(i, base.extent, base.cols, base.dtype, base.tile_rows, base.packed),
            )

        target = base if last else carry(level)
        return Accumulator(target, tuple(carry(i) for i in range(level)), tensor, last)

    def finish_accumulation(self, op: OpNode, target: Accumulator) -> None:
        """After the last microbatch: the sum over the devices that share the batch."""
        axis = next((a for f in sorted(self._factors(op).by_leaves) if (a := self.factor_axis(op, f))), None)
        if axis is None:
            return
        self.completed_axes.add(axis)
        if target.is_last:
            self.all_reduce_in_place(op, target.ref, axis)

    def leaf_tree(self, op: OpNode, output: int, leaves: Ref) -> None:
        """Combine one row per leaf (and carries) into output number `output`; then over devices."""
        target = self.accumulator(op, output)
        operands = [
            self.whole(target.ref, "w"),
            self.whole(leaves, "r"),
            *(self.whole(c, "r") for c in target.carries),
        ]
        self.emit("leaf_tree_f32", op, self.one, 0, operands, ints=[len(target.carries)])
        self.finish_accumulation(op, target)

    # ---- all ops ------------------------------------------------------------------------------------------

    def run(self) -> LoweredTemplate:
        """Lower every op.

        Raises:
            PlanError: an op sums over rows that do not count the batch, in a graph that has one.
        """
        for index, op in enumerate(self.ops):
            self._op_index = index
            self.completed_axes = set()
            self._check_leaves(op)
            op_named(op.op).lower(self, op)
            left = contracted_axes(self.graph, op, self.graph_layout.tensors) - self.completed_axes
            if left:
                raise InternalError(
                    f"[plan.lower] an op combines the partial results that its factors say it does; got {op.op!r} of "
                    f"{op.label!r}, which left those over axis {min(left)!r}; please report the op"
                )
        by_index = sorted(self.slots, key=self.slots.__getitem__)
        return LoweredTemplate(
            self.name, tuple(self.instructions), tuple(by_index), tuple(self.temps), tuple(self.signal_sites)
        )

    def _check_leaves(self, op: OpNode) -> None:
        factors = self._factors(op)
        if not factors.by_leaves or not self.shapes.settings.batch:
            return
        for tensor, dims in zip(op.inputs, factors.inputs):
            for factor, label in zip(dims or (), self.spec(tensor).labels if tensor is not None else ()):
                if factor in factors.by_leaves and label is not None and label.is_batch:
                    return
        raise PlanError(
            f"[plan.lower] in a graph with a batch, gradients and losses are sums over the batch; got {op.label!r} "
            f"({op.op}), whose rows do not count it; label dim 0 of its inputs 'batch'"
        )


def flat_view(base: Ref, slot: int, vector: bool) -> Ref:
    """Packed rows padded to whole panels; a vector as a column of elements."""
    if vector:
        return Ref(slot, Number(base.cols), 1, base.dtype, base.cols)
    if not base.packed:
        return Ref(slot, base.extent, base.cols, base.dtype, base.tile_rows)
    rows, cols = round_up(base.extent.constant, 32), round_up(base.cols, 2)
    return Ref(slot, Number(rows), cols, base.dtype, base.tile_rows, packed=True)


def _fixed(size: int | Dim) -> int:
    assert isinstance(size, int)
    return size
