"""Strided boxes of a small buffer, and their bytes one by one."""

from itertools import product

from hypothesis import strategies as st

from tilewise.observe.dependency_graph import GraphRegion

BUFFER_BYTES = 80


def byte_set(region):
    """The bytes of a region; None: the whole buffer."""
    if region is None:
        return set(range(BUFFER_BYTES))
    steps = product(*(range(size) for size in region.size))
    return {region.offset + sum(i * stride for i, stride in zip(step, region.stride)) for step in steps}


@st.composite
def regions(draw):
    """Whole buffers, intervals, and boxes of several stride systems, some of which wrap around or are empty."""
    form = draw(st.sampled_from(["whole", "interval", "box", "cube", "odd"]))
    if form == "whole":
        return None
    if form == "interval":
        return GraphRegion(draw(st.integers(0, 48)), (draw(st.integers(0, 16)),), (1,))
    if form == "cube":
        size = tuple(draw(st.integers(1, 2)) for _ in range(3))
        return GraphRegion(draw(st.integers(0, 30)), size, (16, 4, 1))
    if form == "odd":
        stride = tuple(draw(st.integers(1, 9)) for _ in range(2))
        return GraphRegion(
            draw(st.integers(0, 20)), (draw(st.integers(1, 3)), draw(st.integers(1, 4))), stride
        )
    return GraphRegion(
        draw(st.integers(0, 40)),
        (draw(st.integers(1, 3)), draw(st.integers(1, 6))),
        (draw(st.sampled_from([8, 12])), 1),
    )
