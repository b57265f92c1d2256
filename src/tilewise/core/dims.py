"""Sizes and dims: symbols with bounds, and the fixed cuts that every strategy has to respect.

A *size* is an `int` or a `Dim`, a symbol whose value is bound when a program runs. A *label* names what a tensor dim
counts (`heads`, `mlp`, `vocab`, …) and its atom, the smallest piece that may be separated. Labels belong to the graph,
not to a strategy: they fix where a contraction over that dim is cut into chunks (docs/numerics.md, rule 2), so the
bits of a sum are the same however many devices share it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.core.border import Border
from tilewise.core.errors import LayoutError, ShapeError

_border = Border("core", ShapeError)
MAX_SIZE = (1 << 40) - 1  # of one dim: offsets and extents stay far from 63 bits
_BATCH = "batch"

__all__ = [
    "MAX_SIZE",
    "Dim",
    "DimLabel",
    "Size",
    "chunk_range",
    "is_power_of_two",
    "shard_range",
    "upper_bound",
]


@dataclass(frozen=True)
class Dim:
    """A size that is bound at run time, for example `Dim("seq", min=1, max=4096)`.

    Raises:
        ShapeError: the name is no text, or the bounds are not 0 <= min <= max.
    """

    name: str
    min: int = 1
    max: int = 1 << 20

    def __post_init__(self) -> None:
        _border.text("dims", "the name of a symbol", self.name)
        low = _border.integer("dims", f"min of {self.name!r}", self.min, 0, MAX_SIZE)
        high = _border.integer("dims", f"max of {self.name!r}", self.max, low, MAX_SIZE)
        object.__setattr__(self, "min", low)  # Python's integers: NumPy's may be too small for what follows
        object.__setattr__(self, "max", high)

    def __str__(self) -> str:
        return self.name


Size = int | Dim


@dataclass(frozen=True)
class DimLabel:
    """What a tensor dim counts.

    Attributes:
        name: for example `heads`, `kv_heads`, `mlp`, `vocab`; `batch` is the dim that sums over the step run along.
        atom: elements that stay together (the head size, 64 rows of a vocabulary, 2 otherwise).
        group: for `kv_heads`: query heads per KV head. A KV head belongs to the chunk of its group's first query head
            and lives on every device that holds one of the group's query heads.

    Raises:
        ShapeError: the name is no text, or atom or group are no positive integers.
    """

    name: str
    atom: int = 2
    group: int = 1

    def __post_init__(self) -> None:
        _border.text("dims", "the name of a label", self.name)
        for field in ("atom", "group"):
            value = _border.integer(
                "dims", f"the {field} of {self.name!r}", getattr(self, field), 1, MAX_SIZE
            )
            object.__setattr__(self, field, value)

    @property
    def is_batch(self) -> bool:
        """Whether the dim counts the sequences of a step, over which gradients are sums."""
        return self.name == _BATCH


def is_power_of_two(value: int) -> bool:
    """Whether `value` is 1, 2, 4, …"""
    return value >= 1 and value & (value - 1) == 0


def upper_bound(size: Size) -> int:
    """The largest value a size can take."""
    return size if isinstance(size, int) else size.max


def _atoms(label: DimLabel, size: int) -> int:
    return -(-size // label.atom) * label.group


def chunk_range(label: DimLabel, size: int, chunks: int, chunk: int) -> tuple[int, int]:
    """Elements `[begin, end)` of a dim of `size` elements that chunk number `chunk` of `chunks` holds.

    Chunk c holds atoms ⌊cA/C⌋ to ⌊(c+1)A/C⌋; with a group, atoms are query heads and a KV head goes with its first.
    """
    atoms = _atoms(label, size)
    first, last = chunk * atoms // chunks, (chunk + 1) * atoms // chunks
    begin, end = -(-first // label.group), -(-last // label.group)
    return min(begin * label.atom, size), min(end * label.atom, size)


def _can_spread(kv_heads: int, group: int, shards: int) -> bool:
    """Whether the sum over a group's query heads is one tree however it is spread (docs/numerics.md, rule 4).

    A group lies on one device, or on r devices with a power of two of its query heads each.
    """
    if kv_heads % shards == 0:
        return True
    spread = shards // kv_heads
    return shards % kv_heads == 0 and group % spread == 0 and is_power_of_two(group // spread)


def shard_range(label: DimLabel, size: int, chunks: int, shards: int, shard: int) -> tuple[int, int]:
    """Elements `[begin, end)` of a dim of `size` elements that device `shard` of `shards` on an axis holds.

    A device holds an aligned run of chunks. KV heads are replicated where their group's query heads are spread.

    Raises:
        LayoutError: `shards` is no power of two up to `chunks`, or KV heads would straddle devices unevenly.
    """
    if not is_power_of_two(shards) or shards > chunks:
        raise LayoutError(
            f"[core.dims] a dim is shared by a power of two of devices, up to its {chunks} chunks; "
            f"got {shards} devices for {label.name!r}; choose 1, 2, 4, … {chunks} or raise graph.reduction_chunks"
        )
    atoms = _atoms(label, size)
    run = chunks // shards
    first, last = shard * run * atoms // chunks, (shard + 1) * run * atoms // chunks
    kv_heads = atoms // label.group
    if label.group > 1 and not _can_spread(kv_heads, label.group, shards):
        good = [str(1 << i) for i in range(chunks.bit_length()) if _can_spread(kv_heads, label.group, 1 << i)]
        raise LayoutError(
            "[core.dims] devices must hold whole KV heads, or share one so that its group of query heads halves "
            f"evenly; got {kv_heads} KV heads with {label.group} query heads each over {shards} devices; choose "
            f"{', '.join(good)}"
        )
    begin, end = first // label.group, -(-last // label.group)
    return min(begin * label.atom, size), min(end * label.atom, size)
