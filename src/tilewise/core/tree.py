"""The tree along which sums are combined. It depends only on the number of leaves.

Neighbours are paired from the left, level by level; an odd one at the end moves up unchanged (a
binary counter). So a node covers leaves [i·2^k, (i+1)·2^k), and the last node of a level covers the
rest. A device that holds an interval of leaves may combine it alone if it is a node. Complete
intervals are then joined along the same tree. This module is arithmetic only and does not know what
is summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

__all__ = [
    "MAX_COUNT",
    "Interval",
    "allowed_widths",
    "fitting_counts",
    "fold_intervals",
    "is_node",
    "is_power_of_two",
    "join_nodes",
    "node_shares",
    "node_widths",
    "share_of",
    "widths_in_words",
]

MAX_COUNT = 1024
K_SPLITS_SETTING = "graph.k_splits"  # whose widths need not be equal
_MOST_SHARE = (4, 3)  # of an equal share, as a fraction
Interval = tuple[int, int]


def is_power_of_two(value: int) -> bool:
    """Whether `value` is 1, 2, 4, …"""
    return value >= 1 and value & (value - 1) == 0


def _span(leaves: int) -> int:
    """The number of leaves below a full node that covers this many: the next power of two."""
    return 1 << (leaves - 1).bit_length()


def is_node(interval: Interval, count: int) -> bool:
    """Whether leaves `[begin, end)` are exactly the leaves of one node of the tree over `count`."""
    begin, end = interval
    if not 0 <= begin < end <= count:
        return False
    span = _span(end - begin)
    return begin % span == 0 and (end - begin == span or end == count)


def join_nodes(left: Interval, right: Interval, count: int) -> Interval | None:
    """The node with these two children; None if no node has them."""
    both = (left[0], right[1])
    span = _span(max(left[1] - left[0], 1))
    is_pair = left[1] == right[0] and left[1] - left[0] == span and left[0] % (2 * span) == 0
    return both if is_pair and is_node(right, count) and is_node(both, count) else None


def fold_intervals(intervals: Iterable[Interval], count: int) -> str:
    """Combine intervals, in order, along the tree up to its root.

    Returns:
        An empty text if every interval is a node and they make up the root; otherwise the problem, in words.
    """
    at, stack = 0, []  # type: int, list[Interval]
    for begin, end in intervals:
        if begin != at:
            what = "missing" if begin > at else "present twice or out of order"
            low, high = min(begin, at), max(begin, at)
            return f"[{low}, {high}) of {count} is {what}"
        node = (begin, end)
        if not is_node(node, count):
            return f"[{begin}, {end}) is no node of the tree over {count}"
        while stack and (joined := join_nodes(stack[-1], node, count)):
            stack.pop()
            node = joined
        stack.append(node)
        at = end
    if at != count:
        return f"[{at}, {count}) of {count} is missing"
    return "" if stack == [(0, count)] else f"{stack} do not join to the root"


def share_of(count: int, width: int, position: int) -> Interval:
    """The leaves of one of `width` devices with equal runs of leaves; a node if `count` allows the width."""
    return position * count // width, (position + 1) * count // width


def allowed_widths(count: int) -> list[int]:
    """Numbers of devices whose equal runs are nodes: 1, and each n for which count / n is a power of two."""
    odd = count // (count & -count)
    return sorted({1, *(odd << k for k in range((count // odd).bit_length()))})


@lru_cache(maxsize=4096)
def node_shares(count: int, width: int) -> tuple[Interval, ...]:
    """Per device, the leaves that it combines alone: nodes of the tree that make up all leaves.

    The shares are equal if `count` allows the width. Otherwise the largest node is halved until there
    are enough, the first of equally large ones first: 12 leaves over two devices are 8 and 4. Empty if
    that is not possible: a device would have more than 4/3 of an equal share, or devices in order
    would not combine along the tree.
    """
    if width in allowed_widths(count):
        return tuple(share_of(count, width, position) for position in range(width))
    nodes: list[Interval] = [(0, count)]
    while len(nodes) < width:
        at = max(range(len(nodes)), key=lambda i: (nodes[i][1] - nodes[i][0], -i))
        begin, end = nodes[at]
        if end - begin < 2:
            return ()
        middle = begin + _span(end - begin) // 2
        nodes[at : at + 1] = [(begin, middle), (middle, end)]
    largest = max(end - begin for begin, end in nodes)
    is_even = _MOST_SHARE[1] * largest * width <= _MOST_SHARE[0] * count
    return tuple(nodes) if is_even and _joins_in_pairs(nodes, count) else ()


def _joins_in_pairs(nodes: Sequence[Interval], count: int) -> bool:
    """Whether neighbours, paired from the left on every level, are the children of one node."""
    level = list(nodes)
    while len(level) > 1:
        pairs = [join_nodes(level[i], level[i + 1], count) for i in range(0, len(level) - 1, 2)]
        if None in pairs:
            return False
        level = [pair for pair in pairs if pair is not None] + level[len(level) - len(level) % 2 :]
    return True


def node_widths(count: int) -> list[int]:
    """Numbers of devices that can share `count` leaves (`node_shares`)."""
    return [width for width in range(1, count + 1) if node_shares(count, width)]


def fitting_counts(widths: Sequence[int], near: int) -> list[int]:
    """The four counts nearest to `near` that allow all of the widths, at most MAX_COUNT."""
    counts = [n for n in range(1, MAX_COUNT + 1) if all(w in allowed_widths(n) for w in widths)]
    return sorted(sorted(counts, key=lambda n: (abs(n - near), n))[:4])


def widths_in_words(width: int, count: int, setting: str, most: int = MAX_COUNT) -> str:
    """The advice of an error about a width that a count does not allow: the allowed widths up to `most`, and
    the counts that allow this one.
    """
    widths = node_widths(count) if setting == K_SPLITS_SETTING else allowed_widths(count)
    widths = [width for width in widths if width <= most]
    good = ", ".join(str(w) for w in widths)
    counts = ", ".join(str(n) for n in fitting_counts([width], count))
    return f"choose {good}, or set {setting} to {counts}" if counts else f"choose {good}"
