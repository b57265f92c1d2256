"""The calls of tests/native/kernels/table_calls.py as tile calls: the same operands and attributes, by name."""

from __future__ import annotations

import numpy as np

from native.kernels.table_calls import NUMPY, integers_of, operands_of
from tilewise.kernels import KERNELS, packed_elements
from tilewise.tile import PackedTile

SPECS = {name: spec for spec in KERNELS.values() if not spec.internal for name in spec.names}
FLOAT = 0.5


def arrays_of(name: str, seed: int) -> list[tuple[str, tuple[int, int], bool, np.ndarray]]:
    """(operand, rows and columns, whether in panels, array) of each operand, in the kernel's order."""
    rng, made = np.random.default_rng(seed), []
    for operand, _, rows, cols, dtype, packed in operands_of(SPECS[name], name):
        shape = (packed_elements(rows, cols),) if packed else (rows, cols)
        integers = rng.integers(0, 2, shape) if dtype == "i32" else rng.uniform(0.1, 0.9, shape)
        made.append((operand, (rows, cols), packed, integers.astype(NUMPY[dtype])))
    return made


def attributes_of(name: str) -> dict[str, object]:
    """Integers and floats by name, without computed ones."""
    spec, values, made = SPECS[name], list(integers_of(SPECS[name], name)), {}
    for integer in spec.ints:
        if integer.is_list:
            rest = [i for i in spec.ints if i.is_list]
            assert len(rest) == 1 or spec.base == "update"  # whose first list is empty here
            made[integer.name], values = (values, []) if integer is rest[-1] else ([], values)
            continue
        value = values.pop(0)
        if integer.source is None:
            made[integer.name] = value
    for real in spec.floats:
        made[real.removesuffix("...")] = [FLOAT] if real.endswith("...") else FLOAT
    return made


def named_tiles(name: str, arrays, buffers) -> dict[str, object]:
    """The operands by name; lists for lists."""
    lists = {operand.name for operand in SPECS[name].operands if operand.is_list}
    made: dict = {}
    for (operand, shape, packed, _), buffer in zip(arrays, buffers, strict=True):
        tile = PackedTile(buffer, *shape) if packed else buffer
        if operand in lists:
            made.setdefault(operand, []).append(tile)
        else:
            made[operand] = tile
    return made


def in_call_order(name: str, tiles: dict[str, object]) -> list[object]:
    """Positional arguments: inputs, then outputs, without operands that may be absent."""
    needed = [operand for operand in SPECS[name].operands if not operand.optional]
    ordered = [o for o in needed if o.role == "in"] + [o for o in needed if o.role != "in"]
    return [tiles[operand.name] for operand in ordered]


def optional_tiles(name: str, tiles: dict[str, object]) -> dict[str, object]:
    """Operands that may be absent, as keywords."""
    return {o.name: tiles[o.name] for o in SPECS[name].operands if o.optional and o.name in tiles}
