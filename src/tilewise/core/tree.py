"""The tree along which sums are combined. It depends only on the number of leaves.

Neighbours are paired from the left, level by level; an odd one at the end moves up unchanged (a
binary counter). So a node covers leaves [i·2^k, (i+1)·2^k), and the last node of a level covers the
rest. A device that holds an interval of leaves may combine it alone if it is a node. Complete
intervals are then joined along the same tree. This module is arithmetic only and does not know what
is summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = [
    "MAX_COUNT",
    "Interval",
    "allowed_widths",
    "fitting_counts",
    "fold_intervals",
    "is_node",
    "is_power_of_two",
    "join_nodes",
    "share_of",
    "widths_in_words",
]

MAX_COUNT = 1024
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


def fitting_counts(widths: Sequence[int], near: int) -> list[int]:
    """The four counts nearest to `near` that allow all of the widths, at most MAX_COUNT."""
    counts = [n for n in range(1, MAX_COUNT + 1) if all(w in allowed_widths(n) for w in widths)]
    return sorted(sorted(counts, key=lambda n: (abs(n - near), n))[:4])


def widths_in_words(width: int, count: int, setting: str) -> str:
    """The advice of an error about a width that a count does not allow: the allowed widths, and the counts that allow
    this one."""
    good = ", ".join(str(w) for w in allowed_widths(count))
    counts = ", ".join(str(n) for n in fitting_counts([width], count))
    return f"choose {good}, or set {setting} to {counts}" if counts else f"choose {good}"
