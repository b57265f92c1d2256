"""Sizes and labels of dims: symbols with bounds, and the fixed cuts that every strategy respects.

A *size* is an `int` or a `Dim`, a symbol whose value is set when a program runs. A *label* names
what a dim counts (`heads`, `mlp`, `vocab`, …) and its atom, the smallest piece that may be
separated. Labels belong to the graph, not to a strategy: they fix where a contraction over that dim
is cut into k splits (docs/numerics.md, rule 2). So the bits of a sum do not depend on how many
devices share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilewise.core.errors import LayoutError, ShapeError
from tilewise.core.tree import allowed_widths, is_power_of_two, share_of, widths_in_words
from tilewise.core.validation import Validator

_validate = Validator("core", ShapeError)
MAX_SIZE = (1 << 40) - 1  # of one dim: offsets and extents stay far from 63 bits

__all__ = [
    "BATCH",
    "MAX_SIZE",
    "UNLABELLED",
    "Dim",
    "DimLabel",
    "Size",
    "k_split_range",
    "num_atoms",
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
        _validate.text("dims", "the name of a symbol", self.name)
        low = _validate.integer("dims", f"min of {self.name!r}", self.min, 0, MAX_SIZE)
        high = _validate.integer("dims", f"max of {self.name!r}", self.max, low, MAX_SIZE)
        object.__setattr__(self, "min", low)  # Python's integers: NumPy's may be too small for what follows
        object.__setattr__(self, "max", high)

    def __str__(self) -> str:
        return self.name


Size = int | Dim


@dataclass(frozen=True)
class DimLabel:
    """What a tensor dim counts.

    Attributes:
        name: for example `heads`, `kv_heads`, `mlp`, `vocab`; strategies map names to mesh axes.
        atom: elements that stay together (the head size, 64 rows of a vocabulary, 2 otherwise).
        group: for `kv_heads`: query heads per KV head. A KV head belongs to the k split of its
            group's first query head and lives on every device that holds one of the group's query
            heads.
        is_summed_by_batch_splits: the dim counts the sequences of a step: losses and gradients are
            sums over it, along the tree over the batch splits (docs/numerics.md, rule 5), and
            microbatches cut it. `BATCH` is such a label.

    Raises:
        ShapeError: the name is no text, atom or group are no positive integers, or the role is no truth value.
    """

    name: str
    atom: int = 2
    group: int = 1
    is_summed_by_batch_splits: bool = False

    def __post_init__(self) -> None:
        _validate.text("dims", "the name of a label", self.name)
        for field in ("atom", "group"):
            value = _validate.integer(
                "dims", f"the {field} of {self.name!r}", getattr(self, field), 1, MAX_SIZE
            )
            object.__setattr__(self, field, value)
        _validate.truth("dims", f"is_summed_by_batch_splits of {self.name!r}", self.is_summed_by_batch_splits)

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[object, ...]:
        """In a pickle, its fields; equal ones become one object, which is quickly compared."""
        return _label, (self.name, self.atom, self.group, self.is_summed_by_batch_splits)


@lru_cache(maxsize=1024)
def _label(name: str, atom: int, group: int, is_summed_by_batch_splits: bool) -> DimLabel:
    return DimLabel(name, atom, group, is_summed_by_batch_splits)


BATCH = DimLabel("batch", 1, is_summed_by_batch_splits=True)
UNLABELLED = DimLabel("an unlabelled dim", 2)  # how a dim that only a hint shares is cut


def upper_bound(size: Size) -> int:
    """The largest value a size can take."""
    return size if isinstance(size, int) else size.max


def num_atoms(label: DimLabel, size: int) -> int:
    """Atoms of a dim of `size` elements; of KV heads, those of their query heads."""
    return -(-size // label.atom) * label.group


@lru_cache(maxsize=1 << 16)
def k_split_range(label: DimLabel, size: int, k_splits: int, k_split: int) -> tuple[int, int]:
    """Elements `[begin, end)` of a dim of `size` elements that k split number `k_split` of `k_splits` holds.

    K split c holds atoms ⌊cA/C⌋ to ⌊(c+1)A/C⌋; with a group, atoms are query heads and a KV head goes with its first.
    """
    atoms = num_atoms(label, size)
    first, last = k_split * atoms // k_splits, (k_split + 1) * atoms // k_splits
    begin, end = -(-first // label.group), -(-last // label.group)
    return min(begin * label.atom, size), min(end * label.atom, size)


def _atom_cuts(atoms: int, k_splits: int, shards: int) -> list[int]:
    """Where the atoms of a dim are cut between devices."""
    return [share_of(k_splits, shards, s)[0] * atoms // k_splits for s in range(1, shards)]


def _keeps_groups(atoms: int, group: int, k_splits: int, shards: int) -> bool:
    """Whether the sum over a group's query heads is one tree however it is spread (docs/numerics.md, rule 4).

    Every group lies on one device, or every one on r devices with a power of two of its query heads each.
    """
    if all(cut % group == 0 for cut in _atom_cuts(atoms, k_splits, shards)):
        return True
    spread = shards * group // atoms
    return (shards * group) % atoms == 0 and group % spread == 0 and is_power_of_two(group // spread)


@lru_cache(maxsize=1 << 16)
def shard_range(label: DimLabel, size: int, k_splits: int, shards: int, shard: int) -> tuple[int, int]:
    """Elements `[begin, end)` of a dim of `size` elements that device `shard` of `shards` holds.

    A device holds an aligned run of k splits, also where atoms do not divide: 8 heads in 12 k splits over 3 devices are
    2, 3 and 3. KV heads are replicated where their group's query heads are spread.

    Raises:
        LayoutError: runs of k splits would be no nodes of their tree, or KV heads would straddle devices unevenly.
    """
    if shards not in allowed_widths(k_splits):
        raise LayoutError(
            f"[core.dims] devices share {label.name!r} in runs of its {k_splits} k splits that are nodes of one tree; "
            f"got {shards} devices; {widths_in_words(shards, k_splits, 'graph.k_splits')}"
        )
    atoms = num_atoms(label, size)
    first, last = (c * atoms // k_splits for c in share_of(k_splits, shards, shard))
    if not _keeps_groups(atoms, label.group, k_splits, shards):
        good = [w for w in allowed_widths(k_splits) if _keeps_groups(atoms, label.group, k_splits, w)]
        raise LayoutError(
            "[core.dims] devices must hold whole KV heads, or share one so that its group of query heads halves "
            f"evenly; got {atoms // label.group} KV heads with {label.group} query heads each over {shards} devices; "
            f"choose {', '.join(str(w) for w in good)}"
        )
    begin, end = first // label.group, -(-last // label.group)
    return min(begin * label.atom, size), min(end * label.atom, size)
