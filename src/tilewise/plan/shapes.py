"""Local sizes: the part of every tensor that a device holds, and how its rows are divided into
tiles.

All arithmetic that turns a layout into numbers is here. No other module divides by the size of a
mesh axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod

from tilewise.core.dims import UNLABELLED, Dim, DimLabel, k_split_range, shard_range, upper_bound
from tilewise.core.dtypes import dtype as dtype_named
from tilewise.core.errors import LayoutError, PartialBlocks, PlanError
from tilewise.core.mesh import MICRO, Axes, DeviceMesh
from tilewise.core.tree import Interval, node_shares
from tilewise.core.validation import Validator
from tilewise.ir.graph import PANEL_ROWS, Graph, TensorSpec
from tilewise.ir.layout import TensorLayout, in_space
from tilewise.ir.lowering import Ref
from tilewise.ir.policy import DEFAULT_POLICY, ExecutionPolicy
from tilewise.ir.program import Number, NumberLike, Source

LocalSizes = tuple[int | Dim, ...]
_FILE_BLOCK_BYTES = 2 << 20  # in f32; large enough for a disk's full speed
_FEWEST_COLUMNS = 128  # least columns of a tile that is narrower than its tensor
_MOST_HEADS = 512  # a dim of more single elements does not count heads
WORD_BYTES = 4  # quantised weights are stored in words of 32 bits
_PRODUCTS = ("f32", "bf16")  # element types of results of products

_validate = Validator("plan", PlanError)

__all__ = ["LocalShapes", "PlanSettings", "bytes_of", "check_sizes", "round_up", "rows_in_tile", "symbols_of"]


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above `value`."""
    return -(-value // multiple) * multiple


@lru_cache(4096)
def _number(constant: int) -> Number:
    """A number without symbols. Equal numbers are one object, which pickles store once."""
    return Number(constant)


def bytes_of(ref: Ref, bounds: tuple[int, ...]) -> int:
    """Bytes of a view with every symbol at its bound, including the padding of panels."""
    rows, cols = ref.extent.upper(bounds), ref.cols
    if ref.packed:
        rows, cols = round_up(rows, 32), round_up(cols, 2)
    return rows * cols * dtype_named(ref.dtype).itemsize


@dataclass(frozen=True)
class PlanSettings:
    """The settings of a plan.

    Attributes:
        accumulation: microbatches per step.
        batch_splits: number of equal parts of the global batch. A sum over tokens first adds the
            tokens of each part, then adds the parts along a tree.
        batch: global batch of a step (the size of dims whose label `is_summed_by_batch_splits`); 0
            for graphs without a batch.
        seq: rows per batch element; an expression of a symbol if the number is only known in a
            step.
        batch_axes: how axes and microbatches divide the batch.
        row_tile: rows per tile of activations; may be a number of a symbol.
        most_rows: the largest number of rows that `row_tile` was chosen from.
        workers_per_device: worker threads of every device.
        padded_bound: maximum rows per batch element if the graph has a symbol for them, so that
            some rows may be padding. Sequence splits divide this number of rows. 0 if the graph
            fixes the number.
        storage_axes: axes that shard weights, gradients and states in storage, in whole panels.
            They are the last axes of dim 0.
        stage_axis: the axis of the pipeline; empty without a pipeline.
        is_checkpointed: whether memory includes a copy of the training state, for writing
            checkpoints.
        policy: the execution policy, whose placement is decided (not `auto`).
    """

    accumulation: int = 1
    batch_splits: int = 1
    batch: int = 0
    seq: NumberLike = 0
    row_tile: NumberLike = 128
    most_rows: int = 512
    workers_per_device: int = 1
    batch_axes: Axes = ()
    padded_bound: int = 0
    is_checkpointed: bool = False
    storage_axes: Axes = ()
    stage_axis: str = ""
    policy: ExecutionPolicy = DEFAULT_POLICY


@dataclass(frozen=True)
class LocalShapes:
    """Sizes on one device. Methods ending in `_max` return the largest size over all devices.
    Memory is planned with the largest sizes, so that every device has the same offsets. `kinds` are
    devices that represent all others; if it is empty, the maximum is taken over all devices.
    `classes` has the devices that each of them represents.
    """

    mesh: DeviceMesh
    settings: PlanSettings
    k_splits: int
    symbols: tuple[Dim, ...]
    device: int = 0
    kinds: tuple[int, ...] = ()
    classes: tuple[tuple[int, ...], ...] = ()
    _devices: dict[int, LocalShapes] = field(default_factory=dict, init=False, repr=False, compare=False)
    _cache: dict[object, LocalSizes] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The upper bound of every symbol."""
        return tuple(s.max for s in self.symbols)

    def on(self, device: int) -> LocalShapes:
        """The local sizes on another device."""
        other = self._devices.get(device)
        if other is None:
            other = LocalShapes(
                self.mesh, self.settings, self.k_splits, self.symbols, device, self.kinds, self.classes
            )
            object.__setattr__(other, "_devices", self._devices)
            self._devices[device] = other
        return other

    @cached_property
    def stage(self) -> int:
        """The device's stage of the pipeline; 0 without a pipeline."""
        axis = self.settings.stage_axis
        return self.mesh.coordinate(self.device, axis) if axis else 0

    @cached_property
    def sequences(self) -> int:
        """Sequences of a microbatch on one device; 0 without a batch."""
        settings = self.settings
        return settings.batch // (settings.accumulation * self.mesh.size(*settings.batch_axes))

    @property
    def devices_alike(self) -> tuple[int, ...]:
        """The devices of this device's class."""
        return next((of for of in self.classes if self.device in of), (self.device,))

    def range(self, spec: TensorSpec, layout: TensorLayout, dim: int, microbatch: int = 0) -> Interval:
        """Global elements `[begin, end)` of a dim of fixed size on this device. For the batch, only
        those in one microbatch.
        """
        size = spec.shape[dim]
        assert isinstance(size, int)
        return self.part(size, spec.labels[dim], layout[dim], microbatch)

    def part(self, size: int, label: DimLabel | None, axes: Axes, microbatch: int = 0) -> Interval:
        """Like `range`, of a dim with this size and label that these axes share."""
        if label is not None and label.is_summed_by_batch_splits:
            parts = self.settings.accumulation * self.mesh.size(*axes)
            if size % parts:
                raise LayoutError(
                    f"[plan.shapes] the batch must divide by devices times accumulation; got {size} over {parts}; "
                    f"choose a batch that is a multiple of {parts}"
                )
            first = self.block(axes, microbatch) * (size // parts)
            return first, first + size // parts
        used, shard = self.split_axes(axes)
        begin, end = 0, size
        if used:
            width, place = self.mesh.size(*used), self.mesh.coordinate(self.device, *used)
            begin, end = shard_range(label or UNLABELLED, size, self.k_splits, width, place)
        if shard:
            width, place = self.mesh.size(*shard), self.mesh.coordinate(self.device, *shard)
            panels = -(-(end - begin) // PANEL_ROWS)
            first, last = (begin + p * panels // width * PANEL_ROWS for p in (place, place + 1))
            begin, end = min(first, end), min(last, end)
        return begin, end

    def split_axes(self, axes: Axes) -> tuple[Axes, Axes]:
        """Axes that shard a dim in the compute layout, and axes that shard it further in the
        storage layout.
        """
        shard = tuple(axis for axis in axes if axis in self.settings.storage_axes)
        return axes[: len(axes) - len(shard)], shard

    def holder(
        self, spec: TensorSpec, layout: TensorLayout, device: int, stages: Sequence[int] = (0,)
    ) -> int:
        """The first device that has the same part of a tensor as `device`, or as it would have.

        Args:
            stages: the stages of the pipeline that have the tensor.
        """
        cut = [d for d, size in enumerate(spec.shape) if layout[d] and not isinstance(size, Dim)]
        used = {axis for d in cut for axis in layout[d]}
        device = self.mesh.first(device, *(axis for axis in self.mesh.names if axis not in used))
        if stages[0]:
            device = self.mesh.group(device, self.settings.stage_axis)[stages[0]]
        for d in cut:
            label = spec.labels[d]
            # only KV heads may be on several devices of an axis that shards them
            if label is None or label.group == 1:
                continue
            mine = self.on(device).range(spec, layout, d)
            group = self.mesh.group(device, *in_space(layout[d]))
            device = next(other for other in group if self.on(other).range(spec, layout, d) == mine)
        return device

    def block(self, axes: Axes, microbatch: int) -> int:
        """The index of this device's part of the batch in a microbatch: the coordinates on its
        axes, including time.
        """
        position = 0
        for axis in axes if MICRO in axes else (*axes, MICRO):
            is_time = axis == MICRO
            size = self.settings.accumulation if is_time else self.mesh.size(axis)
            position = position * size + (microbatch if is_time else self.mesh.coordinate(self.device, axis))
        return position

    def sizes(self, spec: TensorSpec, layout: TensorLayout) -> LocalSizes:
        """Local sizes of all dims, cached by shape, labels and layout."""
        key = spec.shape, spec.labels, layout
        local_sizes = self._cache.get(key)
        if local_sizes is None:
            local_sizes = self._cache[key] = self._sizes(spec, layout)
        return local_sizes

    def _sizes(self, spec: TensorSpec, layout: TensorLayout) -> LocalSizes:
        result: list[int | Dim] = []
        for d, size in enumerate(spec.shape):
            if isinstance(size, Dim):
                if in_space(layout[d]):
                    raise LayoutError(
                        f"[plan.shapes] devices can share only sizes known when planning; got the symbol {size} over "
                        f"{self.mesh.size(*layout[d])} devices for {spec.name or 'a result'}; share another dim, or "
                        "fix the size"
                    )
                result.append(size)
                continue
            used, shard = self.split_axes(layout[d])
            begin, end = self.range(spec, layout, d)
            if end <= begin and (not shard or self.range(spec, (*layout[:d], used), d) == (begin, end)):
                raise LayoutError(
                    f"[plan.shapes] every device needs a part; got {size} ({_what(spec, d)}) over "
                    f"{self.mesh.size(*layout[d])} devices for {spec.name or 'a result'}; choose fewer devices"
                )
            result.append(end - begin)
        return tuple(result)

    def sizes_max(self, spec: TensorSpec, layout: TensorLayout) -> list[int]:
        """Largest local sizes over all devices, with symbols at their bounds."""
        every = [self.on(d).sizes(spec, layout) for d in self.kinds or range(self.mesh.num_devices)]
        return [max(upper_bound(s) for s in column) for column in zip(*every)]

    def split(self, spec: TensorSpec) -> tuple[int, int]:
        """How many leading dims count rows, and how many trailing dims count columns."""
        n = len(spec.shape)
        return {
            "scalars": (n, 0),
            "vector": (0, 1),
            "packed": (1, 1),
            "rows": (max(n - 1, 1), min(n - 1, 1)),
        }["packed" if spec.is_packed else spec.storage]

    def extent(self, spec: TensorSpec, layout: TensorLayout) -> Number:
        """Rows of a tensor."""
        lead = self.sizes(spec, layout)[: self.split(spec)[0]]
        symbolic = [s for s in lead if isinstance(s, Dim)]
        fixed = prod(s for s in lead if isinstance(s, int))
        if not symbolic:
            return _number(fixed)
        if len(symbolic) > 1:
            raise PlanError(
                f"[plan.shapes] at most one symbolic size may count rows; got {spec}; fix the others"
            )
        return Number.of_symbol(self.symbols.index(symbolic[0]), fixed)

    def cols(self, spec: TensorSpec, layout: TensorLayout) -> int:
        """Columns of a tensor; of a quantised weight, words of 32 bits in a row of blocks."""
        tail = self.sizes(spec, layout)[self.split(spec)[0] :]
        if any(isinstance(s, Dim) for s in tail):
            raise PlanError(f"[plan.shapes] columns must have a fixed size; got {spec}; put the symbol first")
        cols = prod(s for s in tail if isinstance(s, int))
        return cols if spec.format is None else words_of_blocks(spec, cols)

    def view(
        self, spec: TensorSpec, layout: TensorLayout, kind: str, slot: int, *, in_file: bool = False
    ) -> Ref:
        """The view that a slot has of a tensor."""
        extent = self.extent(spec, layout) if spec.storage != "vector" else Number(1)
        tile, cols = self.tile_rows(spec, kind, extent, in_file=in_file), self.cols(spec, layout)
        across = self.tile_cols(spec, kind, extent, cols)
        dtype = spec.dtype.name if spec.format is None else "i32"
        return Ref(slot, extent, cols, dtype, tile, spec.is_packed, across)

    def bytes_max(self, spec: TensorSpec, layout: TensorLayout) -> int:
        """Bytes to reserve for a tensor, equal on all devices."""
        sizes = self.sizes_max(spec, layout)
        lead, _ = self.split(spec)
        rows, cols = prod(sizes[:lead]), prod(sizes[lead:])
        if spec.format is not None:
            return round_up(rows, PANEL_ROWS) * round_up(words_of_blocks(spec, cols), 2) * WORD_BYTES
        if spec.storage == "packed":
            rows, cols = round_up(rows, PANEL_ROWS), round_up(cols, 2)
        return rows * cols * spec.dtype.itemsize

    def row_step(self, extent: Number) -> NumberLike:
        """Rows per tile of activations with this many rows. If both numbers grow with the length of
        sequences, a tile has whole sequences. Activations with another number of rows per sequence
        than `seq` have tiles of whole sequences too, of about as many rows.
        """
        tile, settings = self.settings.row_tile, self.settings
        if isinstance(tile, Number) and extent[2:] != tile[2:]:
            return tile.upper(self.bounds)
        if (
            isinstance(tile, Number)
            or not self.sequences
            or extent.source
            or extent.constant % self.sequences
        ):
            return tile
        rows = extent.constant // self.sequences
        return tile if rows == settings.seq else rows_in_tile(rows, settings)

    def tile_rows(self, spec: TensorSpec, kind: str, extent: Number, *, in_file: bool = False) -> NumberLike:
        """Rows per tile of a tensor. A tile of a weight is a block of panels. A tile of a state or
        constant is the whole tensor. Activations have row tiles. In a file, tiles of weights and
        states have equal numbers of rows for all dtypes, because updates process them together.
        """
        if in_file and spec.storage == "packed":
            cols = upper_bound(spec.shape[1])
            return max(_FILE_BLOCK_BYTES // (4 * cols * PANEL_ROWS), 1) * PANEL_ROWS
        if spec.tile_hint:
            return spec.tile_hint
        if spec.is_packed:
            rows = extent.constant
            return max(round_up(rows, PANEL_ROWS), PANEL_ROWS) if rows <= 1024 else 512
        if spec.storage == "vector" or kind in ("state", "constant"):
            return max(extent.constant, 1)
        return self.row_step(extent)

    def tile_cols(self, spec: TensorSpec, kind: str, extent: Number, cols: int) -> int:
        """Columns per tile; 0 stands for all columns. Activations that may have fewer row tiles
        than a device has workers (in decoding, or with small batches) are also divided along
        columns, so that the workers share the product that computes them.
        """
        if spec.storage != "rows" or kind not in ("input", "result") or spec.dtype.name not in _PRODUCTS:
            return 0
        workers, row_tiles = self.settings.workers_per_device, self._fewest_row_tiles(extent)
        if row_tiles >= workers:
            return 0
        label = spec.labels[-1]
        if (
            label is not None
            and label.atom == 1
            and not label.is_summed_by_batch_splits
            and 1 < cols <= _MOST_HEADS
        ):
            return 1  # attention's statistics have one number per head
        parts = min(workers, cols // _FEWEST_COLUMNS)
        return round_up(-(-cols // parts), PANEL_ROWS) if parts > max(row_tiles, 1) else 0

    def _fewest_row_tiles(self, extent: Number) -> int:
        """The smallest number of row tiles of activations with this many rows, for any sizes of a run."""
        tile = self.row_step(extent)
        if isinstance(tile, Number):  # rows and tile grow together
            return -(-extent.multiple // tile.multiple)
        rows = extent.constant
        if extent.source == Source.SYMBOL:
            rows += extent.multiple * self.symbols[extent.which].min
        return -(-rows // tile)

    def owned_splits(self, spec: TensorSpec, layout: TensorLayout, dim: int) -> list[Interval]:
        """For each k split of a labelled dim, the range of its elements on this device; (0, 0) if
        the device has none of them.
        """
        size, label = spec.shape[dim], spec.labels[dim]
        assert isinstance(size, int) and label is not None
        begin, end = self.range(spec, layout, dim)
        cuts = [k_split_range(label, size, self.k_splits, c) for c in range(self.k_splits)]
        local = [(max(b, begin) - begin, min(e, end) - begin) for b, e in cuts]
        return [(b, e) if e > b else (0, 0) for b, e in local]

    def k_split_ranges(self, size: int, label: DimLabel | None, axes: Axes) -> list[Interval]:
        """The ranges, in local elements, of the k splits of a labelled dim that this device sums.
        These k splits are a node of their tree.
        """
        if label is None or label.is_summed_by_batch_splits:  # not divided: the first k split has all of it
            return [(0, size)] + [(0, 0)] * (self.k_splits - 1)
        axes, _ = self.split_axes(axes)
        shards, shard = self.mesh.size(*axes), self.mesh.coordinate(self.device, *axes)
        begin = shard_range(label, size, self.k_splits, shards, shard)[0]
        cuts = [
            k_split_range(label, size, self.k_splits, c)
            for c in range(*node_shares(self.k_splits, shards)[shard])
        ]
        return [(b - begin, e - begin) if e > b else (0, 0) for b, e in cuts]


def words_of_blocks(spec: TensorSpec, cols: int) -> int:
    """Words of 32 bits that a device's part of a row of a quantised weight takes.

    Raises:
        PartialBlocks: the part does not consist of whole blocks.
    """
    assert spec.format is not None
    if cols % spec.format.block:
        raise PartialBlocks(
            f"[plan.shapes] devices must hold whole blocks of a quantised weight; got {cols} of {spec.shape[1]} "
            f"columns of {spec.name!r} in blocks of {spec.format.block} ({spec.format}); choose fewer devices",
            spec.name,
        )
    return -(-spec.format.row_bytes(cols) // WORD_BYTES)


def rows_in_tile(rows: int, settings: PlanSettings) -> int:
    """Rows per tile of activations with `rows` rows per sequence: whole sequences that divide a batch split."""
    per_split = settings.batch // settings.batch_splits
    fits = (k for k in range(1, per_split + 1) if per_split % k == 0 and k * rows <= settings.most_rows)
    return rows * max(fits, default=1)


def symbols_of(graph: Graph) -> tuple[Dim, ...]:
    """The symbolic sizes of a graph, in order of appearance.

    Raises:
        PlanError: two symbols with one name have different bounds.
    """
    symbols: dict[str, Dim] = {}
    for family in dict.fromkeys(t.spec.family for t in graph.tensors):
        for size in family.shape:
            if isinstance(size, Dim) and symbols.setdefault(size.name, size) != size:
                raise PlanError(
                    f"[plan.make_plan] a symbol must have one pair of bounds; got two for {size.name!r}; rename one"
                )
    return tuple(symbols.values())


def check_sizes(call: str, symbols: Sequence[Dim], sizes: Mapping[str, int]) -> dict[Dim, int]:
    """The symbols for which a user gives values, with these values. The user names symbols.

    Raises:
        PlanError: there is no such symbol, or the value is out of its bounds.
    """
    by_name = {s.name: s for s in symbols}
    values = {}
    for name, value in sizes.items():
        if not by_name:
            _validate.invalid(
                call, "sizes must name symbols of the graph", f"{name!r}, and the graph has none", "drop it"
            )
        symbol = by_name[_validate.choice(call, "a size", name, list(by_name))]
        values[symbol] = _validate.integer(call, f"the size {name!r}", value, symbol.min, symbol.max)
    return values


def _what(spec: TensorSpec, dim: int) -> str:
    """What a dim counts, in words."""
    label = spec.labels[dim]
    return f"{label.name} in pieces of {label.atom}" if label else "unlabelled"
