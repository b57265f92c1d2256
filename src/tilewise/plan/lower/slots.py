"""The slots of a template that is being lowered, and its temporaries. A slot is a formal parameter
of the template, to which operands of its instructions refer.

Slots have no addresses. They are bound to memory later, once per use of the template (`plan.bind`).
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise.core.dtypes import DTYPES
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.validation import shown
from tilewise.ir.graph import Graph
from tilewise.ir.layout import GraphLayout, PendingReduction, TensorLayout
from tilewise.ir.lowering import Ref
from tilewise.ir.program import Mode, Number, NumberLike, Operand, Slot, TempSpec, is_size, memory_kind
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.lower.local_view import LocalView
from tilewise.plan.shapes import LocalShapes, bytes_of, round_up

__all__ = ["SlotTable", "flat_view"]

_SEQUENCE_ATOM = 64  # positions that no cut of a sequence separates (docs/numerics.md, rule 5)


class SlotTable(LocalView):
    """Creates views of tensors and temporaries, each with its own slot.

    Args:
        roots: tensor -> the tensor whose memory it shares.

    Attributes:
        slots: number of each slot, by what the slot refers to.
        refs: view of each slot, by what the slot refers to. `views` and `keys` have the views, and
            what they refer to, by number of the slot.
        temps: the temporaries created so far.
        op_index: position of the op that is being lowered. The temporaries of an op are live while
            it runs.
    """

    def __init__(
        self,
        graph: Graph,
        layout: GraphLayout,
        shapes: LocalShapes,
        numbers: DeviceNumbers,
        roots: dict[int, int],
    ) -> None:
        super().__init__(graph, layout, shapes, numbers)
        self.roots = roots
        self.slots: dict[Slot, int] = {}
        self.refs: dict[Slot, Ref] = {}
        self.keys: list[Slot] = []
        self.views: list[Ref] = []
        self.temps: list[TempSpec] = []
        self.op_index = 0
        # by ids of form and layout (the graph owns both), kind, and whether it is in a file
        self._alike: dict[tuple[int, str, int, bool], Ref] = {}

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
        spec = self.spec(tensor)
        extent = self.shapes.extent(spec, layout) if spec.storage != "vector" else Number(1)
        in_file = tensor in self.files
        kind = self.graph.tensors[tensor].kind
        tile = self.shapes.tile_rows(spec, kind, extent, in_file=in_file)
        cols = self.shapes.cols(spec, layout)
        across = self.shapes.tile_cols(spec, kind, extent, cols)
        return Ref(slot, extent, cols, spec.dtype.name, tile, spec.storage == "packed", across)

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
        """A temporary with the rows and columns of a tensor. With a pending reduction, the
        temporary is as wide as the shards of the whole device group.
        """
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
        """A temporary with one row per batch split. In a row, the partial values of the non-empty
        sequence splits follow one another, `cols` columns each.
        """
        atoms = round_up(self.split_len, _SEQUENCE_ATOM) // _SEQUENCE_ATOM
        num_splits = min(atoms, self.k_splits)
        return self.temp(self.num_splits, num_splits * cols, "f32", tile_rows=1, name=name)

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
        """All rows, and the columns that are the loop's current range (divided by `div`). For a
        packed weight and a `div` of 1, the columns of all its panels.
        """
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
