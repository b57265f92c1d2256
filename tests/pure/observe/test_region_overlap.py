"""Overlap of strided boxes against their sets of bytes."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pure.observe.boxes import byte_set, regions
from support.region_overlap import RegionTable
from tilewise.observe.dependency_graph import GraphRegion

HOLED = GraphRegion(0, (2, 2, 2), (5, 1, 1))  # as many steps as its span has bytes, but with holes at 3 and 4
INTO_NEXT_ROW = GraphRegion(4, (2, 5), (8, 1))  # its last byte of a row is the first of the next


@given(st.lists(regions(), min_size=1, max_size=12))
@example([HOLED, GraphRegion(3, (2,), (1,)), GraphRegion(0, (8,), (1,))])
@example([INTO_NEXT_ROW, GraphRegion(8, (1, 1), (8, 1)), GraphRegion(16, (1, 1), (8, 1))])
@settings(max_examples=100)
def test_overlap_is_exact(boxes):
    """Two regions overlap exactly when they share a byte, whatever their strides."""
    table = RegionTable(boxes)
    for number, region in enumerate(table.regions):
        sharing = [n for n, other in enumerate(table.regions) if byte_set(region) & byte_set(other)]
        assert sorted(table.overlapping(number, range(len(table.regions)))) == sharing
        assert [n for n in range(len(table.regions)) if table.has_overlap(number, n)] == sharing


@given(st.lists(regions(), min_size=1, max_size=12))
@example([HOLED, GraphRegion(3, (2,), (1,)), GraphRegion(0, (8,), (1,))])
@settings(max_examples=100)
def test_inner_regions_have_no_byte_outside(boxes):
    """Regions that are said to lie inside one have no byte outside it, and it is one of them."""
    table = RegionTable(boxes)
    for number, region in enumerate(table.regions):
        inside = table.inside(number)
        assert number in inside and (region is not None or len(inside) == len(table.regions))
        assert all(byte_set(table.regions[n]) <= byte_set(region) for n in inside)
