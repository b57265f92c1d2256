"""Boxes of a tensor and tensors in parts: any partition is read correctly; gaps are found."""

from math import prod

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.checkpoint import Box, PartedTensor, TensorPart
from tilewise.checkpoint.boxes import misfit
from tilewise.checkpoint.open_file import OpenFile
from tilewise.checkpoint.shards import save_tensors
from tilewise.checkpoint.tensors import WeightsFile, read_array

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def cut(draw, box, depth):
    """A box cut into random pieces that do not form a grid."""
    dims = [d for d, size in enumerate(box.sizes) if size > 1]
    if depth == 0 or not dims or draw(st.integers(0, 3)) == 0:
        return [box]
    dim = draw(st.sampled_from(dims))
    first = draw(st.integers(1, box.sizes[dim] - 1))
    left, right = list(box.sizes), list(box.sizes)
    left[dim], right[dim] = first, box.sizes[dim] - first
    begin = list(box.begin)
    begin[dim] += first
    halves = Box(box.begin, tuple(left)), Box(tuple(begin), tuple(right))
    return [piece for half in halves for piece in cut(draw, half, depth - 1)]


@st.composite
def cuts(draw):
    """A shape and boxes that partition it, in any order."""
    shape = draw(SHAPES)
    boxes = cut(draw, Box.whole(shape), 4)
    return shape, draw(st.permutations(boxes))


@st.composite
def inner_boxes(draw, shape):
    begin = [draw(st.integers(0, max(0, size - 1))) for size in shape]
    return Box(
        tuple(begin),
        tuple(draw(st.integers(min(1, n - b), n - b)) for n, b in zip(shape, begin, strict=True)),
    )


def counted(shape, boxes):
    """How often each element is covered, by counting; `misfit` is compared with it."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices] += 1
    return counts


@settings(max_examples=60, deadline=None)
@given(cuts())
def test_any_partition_is_accepted(given_cuts):
    """What a tensor is cut into makes it."""
    shape, boxes = given_cuts
    assert misfit(shape, boxes) is None and (counted(shape, boxes) == 1).all()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_gaps_and_overlaps_are_found(data):
    """One box removed, moved, enlarged or doubled: found exactly if counting finds it, with the right boxes."""
    shape, boxes = data.draw(cuts())
    boxes = list(boxes)
    place = data.draw(st.integers(0, len(boxes) - 1))
    if data.draw(st.booleans()):
        boxes[place] = data.draw(inner_boxes(shape))
    elif data.draw(st.booleans()):
        boxes.append(boxes[place])
    else:
        del boxes[place]
    times = counted(shape, boxes)
    wrong = misfit(shape, boxes)
    assert (wrong is None) == bool((times == 1).all() and boxes)
    if wrong is not None and wrong.words == "overlap":
        one, other = (counted(shape, [boxes[i]]) for i in wrong.boxes)
        assert (one & other).any()
    elif wrong is not None:
        assert (times <= 1).all() and f"{(times == 0).sum()} of {prod(shape)}" in wrong.words


@pytest.mark.parametrize(
    ("box", "words"),
    [
        (Box((0, 0), (4, 4)), "lies outside"),
        (Box((2, 0), (2, 3)), "lies outside"),
        (Box((-1, 0), (3, 3)), "lies outside"),
        (Box((0, 0), (-3, -3)), "lies outside"),
        (Box((0,), (3,)), "lies outside"),
        (Box((1 << 61, 0), (1 << 61, 3)), "lies outside"),
        (Box((0, 0), (3, 2)), "3 of 9 elements are missing"),
    ],
)
def test_invalid_boxes_are_found(box, words):
    """Beyond an edge, before it, with other dims, with numbers that overflow."""
    assert words in misfit((3, 3), [box]).words
    assert "overlap" in misfit((), [Box((), ())] * 2).words


def in_files(folder, array, boxes):
    """A tensor's parts, each in its own file, those at even places in memory."""
    parts = []
    for number, box in enumerate(boxes):
        part = np.array(array[box.slices], order="C")
        if number % 2:
            save_tensors(folder / f"{number}.safetensors", {"w": part})
            part = WeightsFile(folder / f"{number}.safetensors")["w"]
        parts.append(TensorPart(box, part, number))
    return PartedTensor(array.shape, array.dtype, tuple(parts))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_parts_give_the_original_tensor(tmp_path_factory, data):
    """Whole and any box of it, from arrays and files, in several dtypes; two swapped parts are detected."""
    shape, boxes = data.draw(cuts())
    dtype = data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16, np.int64, np.uint8]))
    array = np.arange(prod(shape)).reshape(shape).astype(dtype)
    parted = in_files(tmp_path_factory.mktemp("parts"), array, boxes)
    assert read_array(parted).tobytes() == np.asarray(parted).tobytes() == array.tobytes()
    assert (parted.ndim, parted.nbytes) == (array.ndim, array.nbytes)
    box = data.draw(inner_boxes(shape))
    tensor = parted.read_box(box)
    assert tensor.shape == box.sizes and tensor.dtype == array.dtype
    assert tensor.tobytes() == array[box.slices].tobytes()
    first, last = parted.parts[0], parted.parts[-1]
    values = [np.asarray(part.values) for part in (first, last)]
    if values[0].shape == values[1].shape and values[0].tobytes() != values[1].tobytes():
        swapped = (
            TensorPart(last.box, first.values),
            *parted.parts[1:-1],
            TensorPart(first.box, last.values),
        )
        assert np.asarray(PartedTensor(shape, array.dtype, swapped)).tobytes() != array.tobytes()


def test_a_box_reads_only_its_own_bytes(tmp_path, monkeypatch):
    """Rows of the parts that contain it, and only its columns."""
    array = np.arange(80, dtype=np.float32).reshape(8, 10)
    boxes = [Box((0, 0), (4, 6)), Box((0, 6), (4, 4)), Box((4, 0), (4, 10))]
    save_tensors(tmp_path / "f", {str(i): np.ascontiguousarray(array[b.slices]) for i, b in enumerate(boxes)})
    file, read, counts = WeightsFile(tmp_path / "f"), OpenFile.read_into, []
    monkeypatch.setattr(OpenFile, "read_into", lambda f, b, at: counts.append(len(b)) or read(f, b, at))
    parted = PartedTensor(
        (8, 10), array.dtype, tuple(TensorPart(b, file[str(i)]) for i, b in enumerate(boxes))
    )
    for box in (Box((1, 0), (2, 6)), Box((2, 5), (4, 3)), Box((0, 0), (8, 10)), Box((5, 2), (1, 1))):
        counts.clear()
        assert parted.read_box(box).tobytes() == array[box.slices].tobytes()
        assert sum(counts) == 4 * box.num_elements
    with pytest.raises(ValueError, match="without being copied"):
        np.array(parted, copy=False)
