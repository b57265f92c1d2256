"""`Tensor`, and the loop of a kernel over the tiles of its operands.

A kernel's declaration names the sizes of its operands. Those of its `each` line may be divided: an
operand with such a size is divided along it, all others are passed whole. So elementwise kernels
are divided along rows and columns, and kernels that need whole rows along rows only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from tilewise.core.errors import ShapeError
from tilewise.core.limits import num_cores
from tilewise.core.validation import Validator, shown
from tilewise.kernels import KERNELS, KernelSpec, OperandSpec
from tilewise.runtime import Buffer, Region, TaskGroup
from tilewise.runtime.tile_calls import PackedTile, TaskOptions, Tile, find_kernel, joined, submit

__all__ = ["Matrix", "Tensor", "automatic_steps", "submit_tiles", "tile_of"]

_validate = Validator("tensor", ShapeError)

TASKS_PER_CORE = 4  # so that cores that are slower, or busy, get less work
TILE_BYTES = 1 << 15  # smaller tiles take less time than their tasks' order
MIN_COLUMNS = 64


@dataclass(frozen=True)
class Tensor:
    """A matrix and the shape of its tiles.

    Attributes:
        buffer: a buffer of one dimension (one row) or two.
        tile: rows and columns of a tile; None for automatic ones. Tiles at the end are smaller if
            they do not divide the matrix.
    """

    buffer: Buffer
    tile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _shape_of("Tensor", self.buffer)
        check_steps("Tensor", self.tile)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return _shape_of("Tensor", self.buffer)


Matrix = Buffer | Tensor | PackedTile
Operands = Sequence[Matrix | Sequence[Matrix] | None]


def check_steps(call: str, tile: tuple[int, int] | None) -> None:
    """Raise ShapeError unless a tile has a row and a column or more."""
    if tile is not None and (
        len(tile) != 2
        or any(not isinstance(step, int) or isinstance(step, bool) or step < 1 for step in tile)
    ):
        _validate.invalid(
            call, "a tile must have 1 or more rows and columns", shown(tile), "pass (rows, columns)"
        )


def submit_tiles(
    kernel: str,
    operands: Operands,
    ints: tuple[int, ...],
    floats: tuple[float, ...],
    tile: tuple[int, int] | None,
    options: TaskOptions,
) -> TaskGroup:
    """Submit a kernel for every tile.

    Args:
        kernel: its name without dtype.
        operands: per declared operand a matrix, a list of matrices, or None if it is absent.
        ints: integers of every call.
        floats: floats of every call.
        tile: rows and columns of a tile; None for the hint of a tensor, or automatic ones.
        options: attributes of the tasks.

    Raises:
        ShapeError: sizes of one name differ.
        ConfigError: a call does not match the kernel's declaration.
    """
    spec, number = KERNELS[kernel], find_kernel(kernel)
    check_steps(kernel, tile)
    sizes = _sizes_of(spec, operands)
    steps = _steps_of(spec, operands, sizes, tile)
    group = TaskGroup()
    for places in product(*(range(-(-sizes[name] // step)) for name, step in steps.items())):
        at = dict(zip(steps, places))
        tiles = tuple(_tiles_at(spec, operands, steps, at))
        group.add(submit(number, tiles, ints, floats, options))
    return group


def tile_of(buffer: Buffer, steps: tuple[int, int], place: tuple[int, int]) -> Tile:
    """One tile of a matrix; the buffer itself if it is the only one."""
    rows, cols = _shape_of("tile", buffer)
    if steps[0] >= rows and steps[1] >= cols:
        return buffer
    is_row = len(buffer.shape) == 1
    tile: Region = buffer.tiles(steps[1])[place[1]] if is_row else buffer.tiles(*steps)[place]
    return tile


def automatic_steps(rows: int, cols: int, item_bytes: int, *, columns: bool) -> tuple[int, int]:
    """Rows and columns of a tile: some tiles per core, but none so small that ordering tasks takes
    most of the time.

    Args:
        rows: of the matrix.
        cols: of the matrix.
        item_bytes: of an element.
        columns: whether columns may be divided.
    """
    tasks = TASKS_PER_CORE * num_cores()
    row_bytes = cols * item_bytes
    step = max(1, -(-rows // tasks), -(-TILE_BYTES // row_bytes))
    tasks_per_row = -(-tasks // -(-rows // step))
    if not columns or tasks_per_row == 1 or row_bytes < 2 * TILE_BYTES:
        return min(step, rows), cols
    width = max(-(-cols // tasks_per_row), TILE_BYTES // item_bytes)
    return min(step, rows), min(cols, -(-width // MIN_COLUMNS) * MIN_COLUMNS)


def _shape_of(call: str, matrix: Matrix) -> tuple[int, int]:
    shape = matrix.shape
    if len(shape) == 1:
        return 1, shape[0]
    if len(shape) != 2:
        _validate.invalid(
            call, "a matrix must have one or two dimensions", f"shape {shape}", "register a 2-D array"
        )
    return shape[0], shape[1]


def _members(spec: KernelSpec, operands: Operands) -> Iterator[tuple[OperandSpec, Matrix]]:
    """Operands that are present, and the members of lists."""
    for operand, value in zip(spec.operands, operands, strict=True):
        if value is not None:
            for matrix in value if isinstance(value, Sequence) else (value,):
                yield operand, matrix


def _sizes_of(spec: KernelSpec, operands: Operands) -> dict[str, int]:
    """The sizes along which the kernel may be divided."""
    sizes: dict[str, int] = {}
    for operand, matrix in _members(spec, operands):
        for name, size in zip(operand.sizes, _shape_of(spec.base, matrix)):
            if name in spec.each and sizes.setdefault(name, size) != size:
                _validate.invalid(
                    spec.base,
                    f"sizes of one name must be equal; {operand.name} is [{' '.join(operand.sizes)}]",
                    f"{name} = {size} there and {sizes[name]} before",
                    "pass matrices of matching shapes",
                )
    return sizes


def _steps_of(
    spec: KernelSpec, operands: Operands, sizes: Mapping[str, int], tile: tuple[int, int] | None
) -> dict[str, int]:
    """The elements of a tile per divided size. The first output decides which sizes are rows and columns."""
    outputs = [(o, m) for o, m in _members(spec, operands) if o.role != "in" and {*o.sizes} & {*spec.each}]
    operand, matrix = outputs[0]
    if tile is None:
        hints = [m.tile for _, m in (*outputs, *_members(spec, operands)) if isinstance(m, Tensor) and m.tile]
        tile = hints[0] if hints else None
    if tile is None:
        rows, cols = _shape_of(spec.base, matrix)
        buffer: Buffer = matrix if isinstance(matrix, Buffer) else matrix.buffer
        item = buffer.dtype.itemsize
        tile = automatic_steps(rows, cols, item, columns=operand.sizes[1] in spec.each)
    return {name: min(step, sizes[name]) for name, step in zip(operand.sizes, tile) if name in spec.each}


def _tiles_at(
    spec: KernelSpec, operands: Operands, steps: Mapping[str, int], at: Mapping[str, int]
) -> Iterator[Tile | None]:
    """The operands of one call."""
    lists: list[list[Tile]] = []
    after: list[Tile | None] = []
    for operand, value in zip(spec.operands, operands, strict=True):
        if isinstance(value, Sequence):
            lists.append([_tile_at(operand, matrix, steps, at) for matrix in value])
            continue
        tile = None if value is None else _tile_at(operand, value, steps, at)
        if lists:
            after.append(tile)
        else:
            yield tile
    yield from joined(spec.base, *lists)
    yield from after


def _tile_at(operand: OperandSpec, matrix: Matrix, steps: Mapping[str, int], at: Mapping[str, int]) -> Tile:
    if isinstance(matrix, PackedTile):
        return matrix
    buffer = matrix.buffer if isinstance(matrix, Tensor) else matrix
    rows, cols = _shape_of(operand.name, buffer)
    names = operand.sizes or ("_", "_")
    shape = (steps.get(names[0], rows), steps.get(names[1], cols))
    return tile_of(buffer, shape, (at.get(names[0], 0), at.get(names[1], 0)))
