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
from tilewise.core.tree import is_power_of_two, node_shares, node_widths, widths_in_words
from tilewise.core.validation import Validator

_validate = Validator("core", ShapeError)
MAX_SIZE = (1 << 40) - 1  # of one dim; keeps offsets and extents far below 63 bits

__all__ = [
    "BATCH",
    "MAX_SIZE",
    "UNLABELLED",
    "Dim",
    "DimLabel",
    "Size",
    "counts_batch",
    "k_split_range",
    "num_atoms",
    "shard_range",
    "upper_bound",
]


@dataclass(frozen=True)
class Dim:
    """A size that is set at run time, for example `Dim("seq", min=1, max=4096)`.

    Raises:
        ShapeError: the name is not a string, or the bounds are not 0 <= min <= max.
    """

    name: str
    min: int = 1
    max: int = 1 << 20

    def __post_init__(self) -> None:
        _validate.text("dims", "the name of a symbol", self.name)
        low = _validate.integer("dims", f"min of {self.name!r}", self.min, 0, MAX_SIZE)
        high = _validate.integer("dims", f"max of {self.name!r}", self.max, low, MAX_SIZE)
        object.__setattr__(self, "min", low)  # Python integers, because NumPy's may overflow later
        object.__setattr__(self, "max", high)

    def __str__(self) -> str:
        return self.name


Size = int | Dim


@dataclass(frozen=True)
class DimLabel:
    """What a tensor dim counts.

    Attributes:
        name: for example `heads`, `kv_heads`, `mlp`, `vocab`; strategies map names to mesh axes.
        atom: number of elements that stay together (the head size, 64 rows of a vocabulary, 2
            otherwise).
        group: for `kv_heads`: query heads per KV head. A KV head belongs to the k split of its
            group's first query head, and every device with one of the group's query heads has it.
        is_summed_by_batch_splits: the dim counts the sequences of a step. Losses and gradients are
            sums over it along the tree over batch splits (docs/numerics.md, rule 5), and
            microbatches divide it. `BATCH` is such a label.

    Raises:
        ShapeError: the name is not a string, atom or group is not a positive integer, or the role
            is not a boolean.
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
        """Pickles the fields; equal labels are unpickled as one object, which makes comparisons fast."""
        return _label, (self.name, self.atom, self.group, self.is_summed_by_batch_splits)


@lru_cache(maxsize=1024)
def _label(name: str, atom: int, group: int, is_summed_by_batch_splits: bool) -> DimLabel:
    return DimLabel(name, atom, group, is_summed_by_batch_splits)


BATCH = DimLabel("batch", 1, is_summed_by_batch_splits=True)
UNLABELLED = DimLabel("an unlabelled dim", 2)  # cuts a dim without a label that a hint shards


def counts_batch(label: DimLabel | None) -> bool:
    """Whether a dim with this label counts the sequences of a step."""
    return label is not None and label.is_summed_by_batch_splits


def upper_bound(size: Size) -> int:
    """The largest value of a size."""
    return size if isinstance(size, int) else size.max


def num_atoms(label: DimLabel, size: int) -> int:
    """The number of atoms of a dim of `size` elements; for KV heads, that of their query heads."""
    return -(-size // label.atom) * label.group


@lru_cache(maxsize=1 << 16)
def k_split_range(label: DimLabel, size: int, k_splits: int, k_split: int) -> tuple[int, int]:
    """Elements `[begin, end)` of k split number `k_split` of `k_splits`, of a dim of `size`
    elements.

    K split c has atoms ⌊cA/C⌋ to ⌊(c+1)A/C⌋. With a group, atoms are query heads, and a KV head
    belongs to its first.
    """
    atoms = num_atoms(label, size)
    first, last = k_split * atoms // k_splits, (k_split + 1) * atoms // k_splits
    begin, end = -(-first // label.group), -(-last // label.group)
    return min(begin * label.atom, size), min(end * label.atom, size)


def _atom_cuts(atoms: int, k_splits: int, shards: int) -> list[int]:
    """The atoms at which devices divide a dim."""
    return [begin * atoms // k_splits for begin, _ in node_shares(k_splits, shards)[1:]]


def _keeps_groups(atoms: int, group: int, k_splits: int, shards: int) -> bool:
    """Whether the sum over a group's query heads follows one tree for every sharding
    (docs/numerics.md, rule 4).

    Either each group is on one device, or each is on r devices with a power of two of its query
    heads each.
    """
    if all(cut % group == 0 for cut in _atom_cuts(atoms, k_splits, shards)):
        return True
    spread = shards * group // atoms
    return (shards * group) % atoms == 0 and group % spread == 0 and is_power_of_two(group // spread)


@lru_cache(maxsize=1 << 16)
def shard_range(label: DimLabel, size: int, k_splits: int, shards: int, shard: int) -> tuple[int, int]:
    """Elements `[begin, end)` of device `shard` of `shards`, of a dim of `size` elements.

    A device has a node of the tree over k splits (`core.tree.node_shares`), even if atoms do not
    divide evenly: 8 heads in 12 k splits over 3 devices are 2, 3 and 3; 3 heads in 12 k splits over
    2 devices are 2 and 1. KV heads are replicated if their group's query heads are
    on several devices.

    Raises:
        LayoutError: a run of k splits is not a node of their tree, or KV heads would be shared
            unevenly.
    """
    atoms = num_atoms(label, size)
    if not node_shares(k_splits, shards):
        advice = widths_in_words(shards, k_splits, "graph.k_splits", max(atoms, 1))
        raise LayoutError(
            f"[core.dims] devices must share {label.name!r} in runs of its {k_splits} k splits that are nodes of its "
            f"tree; got {shards} devices; {advice}"
        )
    first, last = (c * atoms // k_splits for c in node_shares(k_splits, shards)[shard])
    if not _keeps_groups(atoms, label.group, k_splits, shards):
        good = [
            w for w in node_widths(k_splits) if w <= atoms and _keeps_groups(atoms, label.group, k_splits, w)
        ]
        raise LayoutError(
            "[core.dims] devices must hold whole KV heads, or share one so that its group of query heads halves "
            f"evenly; got {atoms // label.group} KV heads with {label.group} query heads each over {shards} devices; "
            f"choose {', '.join(str(w) for w in good)}"
        )
    begin, end = first // label.group, -(-last // label.group)
    return min(begin * label.atom, size), min(end * label.atom, size)
