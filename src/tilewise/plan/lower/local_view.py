"""`LocalView`: an op's tensors on one device, and the slots of the template that is being lowered.

A slot is a formal parameter of the template, to which operands of its instructions refer. Slots
have no addresses. They are bound to memory later, once per use of the template (`plan.bind`).

An op may also ask for sizes, k splits, batch splits (fixed parts of a contraction and of the batch)
and pending reductions (how values of which several devices have parts are completed).
`ir.lowering.Lowering` documents the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NoReturn

from tilewise.core.dims import Dim, DimLabel, Size
from tilewise.core.dtypes import DTYPES
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import InternalError
from tilewise.core.mesh import Axes
from tilewise.core.validation import shown
from tilewise.ir.contractions import factors_of
from tilewise.ir.graph import Graph, OpNode, TensorSpec
from tilewise.ir.layout import BATCH_SPLITS, GraphLayout, PendingReduction, TensorLayout, in_space
from tilewise.ir.loop_parts import ALL_ROWS
from tilewise.ir.lowering import Ref
from tilewise.ir.program import (
    Mode,
    Number,
    NumberLike,
    Operand,
    Slot,
    TempSpec,
    is_size,
    memory_kind,
    times,
    upper,
)
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.shapes import LocalShapes, bytes_of, round_up

__all__ = ["LocalView", "flat_view"]

_SEQUENCE_ATOM = 64  # positions that no cut of a sequence separates (docs/numerics.md, rule 5)


class LocalView:
    """A graph or template as one device of a class sees it. Creates views of tensors and
    temporaries, each with its own slot.

    Args:
        graph, layout: what is lowered, and the layouts of its tensors.
        shapes: local sizes on a device that represents its class.
        numbers: the numbers in which devices of the class differ, such as first rows.
        roots: tensor -> the tensor whose memory it shares.

    Attributes:
        op: the op that is lowered now.
        slots: number of each slot, by what the slot refers to.
        refs: view of each slot, by what the slot refers to. `views` and `keys` have the views, and
            what they refer to, by number of the slot.
        temps: the temporaries created so far.
        op_index: position of the op that is being lowered. The temporaries of an op are live while
            it runs.
    """

    op: OpNode

    def __init__(
        self,
        graph: Graph,
        layout: GraphLayout,
        shapes: LocalShapes,
        numbers: DeviceNumbers,
        roots: dict[int, int],
    ) -> None:
        self.graph, self.graph_layout, self.shapes = graph, layout, shapes
        self.files = frozenset(layout.files)
        self.mesh, self.numbers = shapes.mesh, numbers
        self.one = Number(1)
        self.k_splits = graph.k_splits
        self.num_microbatches = shapes.settings.accumulation
        self.roots = roots
        self.slots: dict[Slot, int] = {}
        self.refs: dict[Slot, Ref] = {}
        self.keys: list[Slot] = []
        self.views: list[Ref] = []
        self.temps: list[TempSpec] = []
        self.op_index = 0
        # by ids of form and layout (the graph owns both), kind, and whether it is in a file
        self._alike: dict[tuple[int, str, int, bool], Ref] = {}

    def invalid(self, rule: str, got: str) -> NoReturn:
        """Raise an error that names the op with the invalid request."""
        raise InternalError(f"[plan.lower] {rule}; got {got} in {self.maker}; correct its lowering")

    @property
    def maker(self) -> str:
        """The op's name in messages."""
        return f"op {self.op.op!r} ({self.op.label})"

    @property
    def seq(self) -> NumberLike:
        """Rows per sequence of the op's operands."""
        for tensor in self.op.given:
            spec = self.graph.spec(tensor)
            if spec.labels[0] is not None and spec.labels[0].is_summed_by_batch_splits:
                sizes = spec.shape[1 : self.shapes.split(spec)[0]]
                fixed = prod(size for size in sizes if isinstance(size, int))
                symbols = [size for size in sizes if isinstance(size, Dim)]
                return times(self.size(symbols[0]), fixed) if symbols else fixed
        return self.shapes.settings.seq

    @property
    def split_rows(self) -> NumberLike:
        """Tokens per batch split. Without a batch, all rows are one batch split."""
        s = self.shapes.settings
        return times(self.seq, s.batch // s.batch_splits) if s.batch else ALL_ROWS

    @property
    def split_cut(self) -> dict[str, NumberLike]:
        """How rows are divided into batch splits and sequence splits; into one if there is no batch."""
        s = self.shapes.settings
        return {
            "split_rows": self.split_rows,
            "seq_len": self.seq if s.batch else 1,
            "num_k_splits": self.k_splits,
            "split_len": self.split_len,
        }

    @property
    def split_len(self) -> int:
        """The number of positions that are divided into a sequence's k splits. Padding does not
        change it.
        """
        s = self.shapes.settings
        return s.padded_bound if self.is_padded else upper(self.seq) if s.batch else 1

    @property
    def is_padded(self) -> bool:
        """Whether the op's sequences have the length that may vary between runs."""
        s = self.shapes.settings
        return s.padded_bound > 0 and self.seq == s.seq

    @property
    def padded_len(self) -> NumberLike:
        """Rows per sequence if sequences may be padded; otherwise 0."""
        return self.seq if self.is_padded else 0

    def row_step(self, ref: Ref) -> NumberLike:
        """Rows per task of a loop over activation rows."""
        if not isinstance(ref, Ref):
            self.invalid("row_step needs a Ref, as low.tensor returns it", shown(ref))
        return self.shapes.row_step(ref.extent)

    def size(self, size: Size) -> NumberLike:
        """A size in the form that instructions use: for a symbolic size, a number of the symbol."""
        return Number.of_symbol(self.shapes.symbols.index(size)) if isinstance(size, Dim) else size

    def spec(self, tensor: int) -> TensorSpec:
        """The spec of a tensor."""
        return self.graph.spec(self.checked_id(tensor))

    def layout(self, tensor: int) -> TensorLayout:
        """The layout of a tensor."""
        return self.graph_layout.compute[self.checked_id(tensor)]

    def local_sizes(self, tensor: int) -> tuple[Size, ...]:
        """Sizes of the tensor's dims on this device, in one microbatch."""
        return self.shapes.sizes(self.spec(tensor), self.layout(tensor))

    def checked_id(self, tensor: int) -> int:
        """A tensor's id, after checking that the graph has it."""
        if type(tensor) is not int or not 0 <= tensor < len(self.graph.tensors):
            self.invalid("a tensor must be an id of the op's operands and outputs, or a Ref", shown(tensor))
        return tensor

    def _require_dim(self, tensor: int, dim: int, *, with_label: bool) -> None:
        """Reject a dim that the tensor does not have, or that has no k splits."""
        spec = self.spec(tensor)
        if type(dim) is not int or not 0 <= dim < len(spec.shape):
            self.invalid(f"a dim must be one of {spec}", shown(dim))
        if with_label and (spec.labels[dim] is None or isinstance(spec.shape[dim], Dim)):
            self.invalid("k splits need a labelled dim of fixed size", f"dim {dim} of {spec}")

    def first_element(self, tensor: int, dim: int) -> NumberLike:
        """The first global element of a dim on this device."""
        self._require_dim(tensor, dim, with_label=False)
        return self.numbers.first(self.spec(tensor), self.layout(tensor), dim)

    def local_splits(self, tensor: int, dim: int) -> list[NumberLike]:
        """For each k split of a labelled dim, the range of its elements on this device, as one flat list."""
        self._require_dim(tensor, dim, with_label=True)
        spec, layout = self.spec(tensor), self.layout(tensor)
        axes, k_splits = in_space(layout[dim]), self.k_splits
        if not axes:
            return [v for pair in self.shapes.owned_splits(spec, layout, dim) for v in pair]
        key = "local splits", spec.shape[dim], spec.labels[dim], axes

        shares: dict[int, list[tuple[int, int]]] = {}  # by the coordinate that they depend on

        def split_bound(i: int, device: int) -> int:
            place = self.mesh.coordinate(device, *axes)
            if place not in shares:
                shares[place] = self.shapes.on(device).owned_splits(spec, layout, dim)
            return shares[place][i // 2][i % 2]

        return [self.numbers.place((*key, i), partial(split_bound, i)) for i in range(2 * k_splits)]

    def contraction_splits(
        self, terms: Sequence[tuple[TensorSpec, DimLabel | None, int]], pending: PendingReduction | None
    ) -> list[list[tuple[int, int]]]:
        """Per k split and term, the range of the contracted dim on this device."""
        if not isinstance(terms, Sequence) or not all(
            isinstance(t, tuple)
            and len(t) == 3
            and isinstance(t[0], TensorSpec)
            and type(t[2]) is int
            and 0 <= t[2] < len(t[0].shape)
            for t in terms
        ):
            self.invalid("terms must be (spec, label, dim) of each weight", shown(terms))
        self._require_pending(pending)
        if all(label is None for _, label, _ in terms):
            return [[(0, _fixed(spec.shape[dim])) for spec, _, dim in terms]]
        group = _group(pending)
        columns = [
            self.shapes.k_split_ranges(_fixed(s.shape[dim]), s.labels[dim], group) for s, _, dim in terms
        ]
        return [list(rows) for rows in zip(*columns)]

    def label_splits(
        self, label: DimLabel | None, size: int, pending: PendingReduction | None
    ) -> list[tuple[int, int]]:
        """The ranges of the k splits of a labelled dim on this device."""
        self._require_pending(pending)
        return self.shapes.k_split_ranges(size, label, _group(pending))

    def _require_pending(self, pending: PendingReduction | None) -> None:
        if pending is not None and not isinstance(pending, PendingReduction):
            self.invalid(
                "a pending reduction must be a result of low.pending_reduction, or None for a value that is not shared",
                shown(pending),
            )

    def pending_reductions(self, partial: str) -> tuple[PendingReduction, ...]:
        """The pending reductions of a partial value of the op, one per device group."""
        names = [p.name for p in factors_of(self.graph, self.op).partial_values]
        if partial not in names:
            self.invalid(
                f"a partial value must be one of the op's: {', '.join(names) or 'none'}", shown(partial)
            )
        return self.graph_layout.pending_reductions.get((self.op.id, partial), ())

    def pending_reduction(self, partial: str) -> PendingReduction | None:
        """The only pending reduction of a partial value. None if the value is not shared."""
        (pending,) = self.pending_reductions(partial) or (None,)
        return pending

    def pending_of_op(self) -> list[PendingReduction]:
        """The pending reductions of all partial values of the op."""
        names = {p.name: None for p in factors_of(self.graph, self.op).partial_values}
        return [pending for name in names for pending in self.pending_reductions(name)]

    def pending_of_sum(self, result: int) -> list[PendingReduction]:
        """The pending reductions of a result that is summed over the batch."""
        number = self.op.outputs.index(result)
        return [r for r in self.pending_of_op() if r.tree == BATCH_SPLITS and number in r.outputs]

    # ---- slots ------------------------------------------------------------------------------------------

    def tensor(self, tensor: int | Ref) -> Ref:
        """The local view of a tensor."""
        if isinstance(tensor, Ref):
            return tensor
        root = self.roots.get(self.checked_id(tensor), tensor)
        slot = Slot("tensor", root)
        if slot in self.refs:
            return self.refs[slot]
        node, layout, index = self.graph.tensors[root], self.layout(root), len(self.slots)
        sort = id(node.spec.form), node.kind, id(layout), root in self.files
        like = self._alike.get(sort)
        if like is None:
            ref = self._alike[sort] = self.local_ref(root, layout, index)
        else:
            ref = like._replace(slot=index)
        return self._keep(slot, ref)

    def local_ref(self, tensor: int, layout: TensorLayout, slot: int) -> Ref:
        """The view of a tensor in a layout."""
        kind = self.graph.tensors[tensor].kind
        return self.shapes.view(self.spec(tensor), layout, kind, slot, in_file=tensor in self.files)

    def is_in_file(self, ref: Ref) -> bool:
        """Whether a view is a view of a tensor in the device's file."""
        key = self.keys[ref.slot]
        return key.kind in ("tensor", "flat") and key.id in self.files

    def flat(self, tensor: int | Ref) -> Ref:
        """The same memory as rows of plain elements: panels with their padding, a vector as a column."""
        if isinstance(tensor, Ref):
            base = tensor
            key = self.keys[base.slot]
            slot = Slot("flat" if key.kind == "tensor" else f"{key.kind}_flat", key.id, key.level)
            vector = key.kind != "temp" and self.spec(key.id).storage == "vector"
        else:
            root = self.roots.get(self.checked_id(tensor), tensor)
            base, slot = self.tensor(tensor), Slot("flat", root)
            vector = self.spec(root).storage == "vector"
        return self.slot(slot, lambda index: flat_view(base, index, vector))

    def before(self, tensor: int) -> Ref:
        """What `flat` returns, of the tensor in the microbatch before."""
        root = self.roots.get(self.checked_id(tensor), tensor)
        is_vector = self.spec(root).storage == "vector"
        return self.slot(
            Slot("flat", root, 1),
            lambda slot: flat_view(self.local_ref(root, self.layout(root), slot), slot, is_vector),
        )

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
        tile_cols: int = 0,
    ) -> Ref:
        """A temporary that exists while this op runs."""
        for what, value, least in (("rows", rows, 0), ("cols", cols, 1), ("tile_rows", tile_rows, 1)):
            if not is_size(value, least) or (what == "cols" and isinstance(value, Number)):
                kind = "a fixed number, " if what == "cols" else ""
                self.invalid(
                    f"{what} of a temporary must be {kind}at least {least} and below 2^40",
                    f"{shown(value)} for {name!r}",
                )
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self.invalid(
                f"a temporary's dtype must be one of {', '.join(DTYPES)}", f"{shown(dtype)} for {name!r}"
            )
        extent = rows if isinstance(rows, Number) else Number(rows)
        form = Ref(len(self.slots), extent, cols, dtype, tile_rows, packed, tile_cols)
        least = bytes_of(form, self.shapes.bounds)
        if type(max_bytes) is not int or 0 != max_bytes < least:
            self.invalid(
                f"max_bytes of a temporary must be at least its {least} bytes",
                f"{shown(max_bytes)} for {name!r}",
            )
        size = max_bytes or least
        self.temps.append(TempSpec(name, extent, cols, dtype, tile_rows, packed, size, self.op_index))
        return self._keep(Slot("temp", len(self.temps) - 1), form)

    def temp_like(self, ref: Ref, *, dtype: str, name: str, pending: PendingReduction | None = None) -> Ref:
        """A temporary with the rows and columns of a tensor, or of the shards of a device group."""
        if not isinstance(ref, Ref) or memory_kind(self.keys[ref.slot].kind) == "temp":
            self.invalid("temp_like needs a Ref, as low.tensor returns it", shown(ref))
        self._require_pending(pending)
        key = self.keys[ref.slot]
        spec, layout = self.spec(key.id), self.layout(key.id)
        cols = ref.cols
        if pending is not None:
            layout = tuple(tuple(axis for axis in axes if axis not in pending.group) for axes in layout)
            cols = self.shapes.cols(spec, layout)
        size = self.shapes.bytes_max(spec, layout) // spec.dtype.itemsize * dtype_named(dtype).itemsize
        return self.temp(
            ref.extent,
            cols,
            dtype,
            tile_rows=ref.tile_rows,
            name=name,
            packed=ref.packed,
            max_bytes=size,
            tile_cols=ref.tile_cols,
        )

    def split_temp(self, cols: int, name: str) -> Ref:
        """A temporary with one row per batch split, for the partial values of its sequence splits."""
        atoms = round_up(self.split_len, _SEQUENCE_ATOM) // _SEQUENCE_ATOM
        num_splits, s = min(atoms, self.k_splits), self.shapes.settings
        rows = s.batch_splits // (s.accumulation * self.mesh.size(*s.batch_axes))
        return self.temp(rows, num_splits * cols, "f32", tile_rows=1, name=name)

    def ring(self, tensor: int, age: int = 0) -> Ref:
        """A view with the shape of a tensor in a ring (places that uses of the template take in
        turn): in the place of this use, or of the use `age` uses before.
        """
        base = self.tensor(tensor)
        return self.slot(Slot("ring", tensor, age), lambda slot: base._replace(slot=slot))

    def stack(self, tensor: int, rows: Number, cols: int, tile_rows: int) -> Ref:
        """The stack of a sum that an owner keeps between microbatches, in f32."""
        return self.slot(Slot("stack", tensor), lambda slot: Ref(slot, rows, cols, "f32", tile_rows))

    def slot(self, slot: Slot, make: Callable[[int], Ref]) -> Ref:
        ref = self.refs.get(slot)
        return ref if ref is not None else self._keep(slot, make(len(self.slots)))

    def _keep(self, slot: Slot, ref: Ref) -> Ref:
        self.slots[slot] = ref.slot
        self.refs[slot] = ref
        self.keys.append(slot)
        self.views.append(ref)
        return ref

    def row(self, tensor: int | Ref, div: NumberLike = 1) -> Operand:
        """The rows of the loop's current tile (divided by `div`)."""
        return Operand(self.tensor(tensor).slot, Mode.ROW, div=div)

    def whole(self, tensor: int | Ref) -> Operand:
        """All rows."""
        return Operand(self.tensor(tensor).slot, Mode.WHOLE)

    def col(self, tensor: int | Ref, div: NumberLike = 1) -> Operand:
        """All rows, and the columns that are the loop's current range (divided by `div`)."""
        ref = self.tensor(tensor)
        return Operand(ref.slot, Mode.PANELCOLS if ref.packed else Mode.COL, div=div)

    def rows_at(self, ref: Ref, first: int, count: int) -> Operand:
        """Fixed rows that do not depend on the loop."""
        ref = self.tensor(ref)
        return Operand(ref.slot, Mode.ROWS, part=first, parts=count)


def flat_view(base: Ref, slot: int, vector: bool) -> Ref:
    """The flat view of a tensor: packed rows are padded to whole panels, and a vector is a column
    of elements.
    """
    if vector:
        return Ref(slot, Number(base.cols), 1, base.dtype, base.cols)
    if not base.packed:
        return base._replace(slot=slot)
    rows, cols = round_up(base.extent.constant, 32), round_up(base.cols, 2)
    return Ref(slot, Number(rows), cols, base.dtype, base.tile_rows)


def _group(pending: PendingReduction | None) -> Axes:
    return pending.group if pending is not None else ()


def _fixed(size: int | Dim) -> int:
    assert isinstance(size, int)
    return size
