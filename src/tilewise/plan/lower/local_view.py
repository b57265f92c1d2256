"""`LocalView`: what an op may ask about its tensors on one device, such as sizes, k splits, batch
splits (fixed parts of a contraction and of the batch) and pending reductions (how values of which
several devices have parts are completed). It creates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from tilewise.core.dims import Dim, DimLabel, Size
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import InternalError
from tilewise.core.mesh import Axes
from tilewise.core.validation import shown
from tilewise.ir.contractions import factors_of
from tilewise.ir.graph import Graph, OpNode, TensorSpec
from tilewise.ir.layout import BATCH_SPLITS, GraphLayout, PendingReduction, TensorLayout, in_space
from tilewise.ir.loop_parts import ALL_ROWS
from tilewise.ir.lowering import Ref
from tilewise.ir.program import Number, NumberLike, times, upper
from tilewise.plan.classes import DeviceNumbers
from tilewise.plan.shapes import LocalShapes

__all__ = ["LocalView"]


class LocalView:
    """A graph or template as one device of a class sees it.

    Args:
        graph, layout: what is lowered, and the layouts of its tensors.
        shapes: local sizes on a device that represents its class.
        numbers: the numbers in which devices of the class differ, such as first rows.

    Attributes:
        op: the op that is lowered now.
    """

    op: OpNode

    def __init__(
        self, graph: Graph, layout: GraphLayout, shapes: LocalShapes, numbers: DeviceNumbers
    ) -> None:
        self.graph, self.graph_layout, self.shapes = graph, layout, shapes
        self.files = frozenset(layout.files)
        self.mesh, self.numbers = shapes.mesh, numbers
        self.one = Number(1)
        self.k_splits = graph.k_splits

    def invalid(self, rule: str, got: str) -> NoReturn:
        """Raise an error that names the op with the invalid request."""
        maker = f" in op {self.op.op!r} ({self.op.label})" if hasattr(self, "op") else ""
        raise InternalError(f"[plan.lower] {rule}; got {got}{maker}; correct its lowering")

    @property
    def num_splits(self) -> int:
        """Number of batch splits that this device has in one microbatch."""
        s = self.shapes.settings
        return s.batch_splits // (s.accumulation * self.mesh.size(*s.batch_axes))

    @property
    def split_rows(self) -> NumberLike:
        """Tokens per batch split. Without a batch, all rows are one batch split."""
        s = self.shapes.settings
        return times(s.seq, s.batch // s.batch_splits) if s.batch else ALL_ROWS

    @property
    def split_cut(self) -> dict[str, NumberLike]:
        """How rows are divided into batch splits and sequence splits. Without a batch there is one
        batch split with one sequence split.
        """
        s = self.shapes.settings
        return {
            "split_rows": self.split_rows,
            "seq_len": s.seq if s.batch else 1,
            "num_k_splits": self.k_splits,
            "split_len": self.split_len,
        }

    @property
    def split_len(self) -> int:
        """The number of positions that are divided into a sequence's k splits. Padding does not
        change it.
        """
        s = self.shapes.settings
        return s.padded_bound or (upper(s.seq) if s.batch else 1)

    @property
    def padded_len(self) -> NumberLike:
        """Rows per sequence if sequences may be padded; otherwise 0."""
        s = self.shapes.settings
        return s.seq if s.padded_bound else 0

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
        """For each k split of a labelled dim, the range of its elements on this device. The ranges
        are one flat list: begin, end, begin, end, and so on.
        """
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
        """Per k split and term, the range of the contracted dim on this device. `terms` holds, per
        weight, its spec, the label of its contracted dim and the number of this dim.
        """
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
        columns = [self.shapes.k_split_ranges(spec, dim, _group(pending)) for spec, _, dim in terms]
        return [list(rows) for rows in zip(*columns)]

    def label_splits(
        self, label: DimLabel | None, size: int, pending: PendingReduction | None
    ) -> list[tuple[int, int]]:
        """The ranges of the k splits of a labelled dim on this device."""
        self._require_pending(pending)
        spec = TensorSpec((size,), dtype_named("f32"), (label,))
        return self.shapes.k_split_ranges(spec, 0, _group(pending))

    def _require_pending(self, pending: PendingReduction | None) -> None:
        if pending is not None and not isinstance(pending, PendingReduction):
            self.invalid(
                "a pending reduction must be a result of low.pending_reduction, or None for a value that is not shared",
                shown(pending),
            )

    def pending_reductions(self, partial: str) -> tuple[PendingReduction, ...]:
        """The pending reductions of a partial value of the op, one per device group. Empty if the
        value is not shared.
        """
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


def _group(pending: PendingReduction | None) -> Axes:
    return pending.group if pending is not None else ()


def _fixed(size: int | Dim) -> int:
    assert isinstance(size, int)
    return size
