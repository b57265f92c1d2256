"""Trees over any count of leaves (nodes, joins, folds, allowed widths), compared with trees built by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.tree import (
    MAX_COUNT,
    allowed_widths,
    fitting_counts,
    fold_intervals,
    is_node,
    is_power_of_two,
    join_nodes,
    node_shares,
    node_widths,
    share_of,
    widths_in_words,
)

COUNTS = st.integers(1, MAX_COUNT)


def built(count):
    """Nodes of the tree and the parent of each pair of children, by pairing neighbours level by level."""
    level = [(i, i + 1) for i in range(count)]
    nodes, parents = set(level), {}
    while len(level) > 1:
        paired = [(a[0], b[1]) for a, b in zip(level[::2], level[1::2])]
        parents.update(zip(zip(level[::2], level[1::2]), paired))
        level = paired + level[len(paired) * 2 :]
        nodes.update(level)
    return nodes, parents


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 16, 21])
def test_nodes_and_joins(count):
    """Every interval and every pair of nodes, compared with a tree built by hand."""
    nodes, parents = built(count)
    every = [(a, b) for a in range(-1, count + 2) for b in range(-1, count + 2)]
    assert {i for i in every if is_node(i, count)} == nodes
    for left in nodes:
        for right in nodes:
            assert join_nodes(left, right, count) == parents.get((left, right))


@given(COUNTS)
def test_allowed_widths(count):
    """One holder, or n where count / n is a power of two; exactly then all equal runs are nodes."""
    good = [n for n in range(1, count + 1) if n == 1 or (count % n == 0 and is_power_of_two(count // n))]
    assert allowed_widths(count) == good
    for n in (w for w in range(1, min(count, 40) + 1) if count % w == 0):
        runs = [share_of(count, n, i) for i in range(n)]
        assert (fold_intervals(runs, count) == "") == (n in good)


@st.composite
def cuts_of_a_tree(draw):
    """A count of leaves and nodes that partition it, from left to right."""
    count = draw(st.integers(2, 60))
    _, parents = built(count)
    children = {node: pair for pair, node in parents.items()}
    nodes = [(0, count)]
    for _ in range(draw(st.integers(1, 12))):
        place = draw(st.integers(0, len(nodes) - 1))
        nodes[place : place + 1] = children.get(nodes[place], (nodes[place],))
    return count, nodes


@given(cuts_of_a_tree(), st.data())
def test_fold_reaches_the_root_or_is_rejected(cut, data):
    """Nodes in order fold, however unequal; a dropped, duplicated, swapped or moved one does not."""
    count, nodes = cut
    assert fold_intervals(nodes, count) == ""
    place = data.draw(st.integers(0, len(nodes) - 1))
    dropped = nodes[:place] + nodes[place + 1 :]
    assert "missing" in fold_intervals(dropped, count)
    assert "present twice or out of order" in fold_intervals([*nodes[: place + 1], *nodes[place:]], count)
    if len(nodes) > 1:
        other = data.draw(st.integers(0, len(nodes) - 1).filter(lambda i: i != place))
        swapped = list(nodes)
        swapped[place], swapped[other] = nodes[other], nodes[place]
        assert fold_intervals(swapped, count)


def test_leaves_that_are_not_a_node():
    """Leaves that fill no node, though none is missing or duplicated."""
    assert fold_intervals([(0, 3), (3, 8)], 8) == "[0, 3) is no node of the tree over 8"
    assert fold_intervals([(0, 6), (6, 12)], 12) == "[0, 6) is no node of the tree over 12"
    assert fold_intervals([], 4) == "[0, 4) of 4 is missing"


def test_nearest_allowed_counts():
    """The nearest counts that allow all widths; two and three together have none."""
    assert fitting_counts([3], 8) == [3, 6, 12, 24]
    assert fitting_counts([2, 4], 8) == [4, 8, 16, 32]
    assert fitting_counts([2, 3], 8) == [] and fitting_counts([MAX_COUNT + 1], 8) == []
    assert widths_in_words(3, 8, "C") == "choose 1, 2, 4, 8, or set C to 3, 6, 12, 24"
    assert widths_in_words(2000, 12, "C") == "choose 1, 3, 6, 12"


@given(COUNTS, st.integers(1, 40), st.data())
def test_shares_cover_the_leaves_once(count, width, data):
    """Ascending and without gaps, also where the width does not divide."""
    place = data.draw(st.integers(0, width - 1))
    begin, end = share_of(count, width, place)
    assert 0 <= begin <= end <= count
    assert end == (share_of(count, width, place + 1)[0] if place + 1 < width else count)


def expression(nodes):
    """The order in which neighbours are added level by level, as nested pairs."""
    level = list(nodes)
    while len(level) > 1:
        paired = list(zip(level[::2], level[1::2]))
        level = paired + level[len(paired) * 2 :]
    return level[0]


def merged(tree, shares):
    """The order in which a tree adds all leaves, with each of the shares as one leaf."""
    if tree in shares or isinstance(tree, int):
        return tree
    left, right = tree
    return merged(left, shares), merged(right, shares)


@given(st.integers(1, 64), st.integers(1, 64))
def test_node_shares(count, width):
    """Shares add up along the tree of one device, and none is much larger than the others."""
    shares = node_shares(count, width)
    assert bool(shares) == (width in node_widths(count)) and (shares or width not in allowed_widths(count))
    if not shares:
        return
    assert len(shares) == width and fold_intervals(shares, count) == ""
    assert 3 * width * max(end - begin for begin, end in shares) <= 4 * count
    subtrees = [expression(range(begin, end)) for begin, end in shares]
    assert merged(expression(range(count)), subtrees) == expression(subtrees)


def test_unequal_shares():
    """A number that does not divide: the first devices have more, and too uneven ones are refused."""
    assert node_shares(12, 2) == ((0, 8), (8, 12))
    assert node_shares(10, 3) == ((0, 4), (4, 8), (8, 10))
    assert node_widths(12) == [1, 2, 3, 6, 12] and node_widths(8) == [1, 2, 4, 8] and node_shares(20, 2) == ()
