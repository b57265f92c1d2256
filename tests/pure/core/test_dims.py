"""K splits and shards of a dim: fixed cuts that devices share in aligned runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.dims import Dim, DimLabel, k_split_range, shard_range
from tilewise.core.errors import LayoutError, ShapeError
from tilewise.core.mesh import MICRO, DeviceMesh


@given(st.integers(1, 700), st.sampled_from([1, 2, 16, 64]), st.sampled_from([1, 2, 7, 8, 12, 16]))
def test_k_splits_cover_a_dim_once(size, atom, k_splits):
    """Ascending, without gaps, cut only at atoms."""
    cuts = [k_split_range(DimLabel("mlp", atom), size, k_splits, c) for c in range(k_splits)]
    assert cuts[0][0] == 0 and cuts[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    assert all(b % atom == 0 for b, _ in cuts if b < size)


@given(
    st.integers(1, 700),
    st.sampled_from([1, 2, 64]),
    st.sampled_from([(8, 1), (8, 2), (8, 4), (8, 8), (12, 3), (12, 6), (12, 12), (5, 5), (10, 5), (7, 1)]),
)
def test_shards_are_runs_of_k_splits(size, atom, width):
    """A shard begins and ends at k split boundaries."""
    label = DimLabel("mlp", atom)
    k_splits, shards = width
    for s in range(shards):
        run = k_splits // shards
        begin, end = shard_range(label, size, k_splits, shards, s)
        assert begin == k_split_range(label, size, k_splits, s * run)[0]
        assert end == k_split_range(label, size, k_splits, (s + 1) * run - 1)[1]


def test_shares_may_be_unequal():
    """Eight heads in twelve k splits over three devices, and four blocks of a vocabulary."""
    heads = DimLabel("heads", 16)
    assert [shard_range(heads, 128, 12, 3, s) for s in range(3)] == [(0, 32), (32, 80), (80, 128)]
    assert [shard_range(DimLabel("vocab", 64), 200, 12, 3, s) for s in range(3)] == [
        (0, 64),
        (64, 128),
        (128, 200),
    ]


def test_kv_heads_follow_their_query_heads():
    """Two KV heads over four devices: replicated in pairs, each in the k split of its first query head."""
    label = DimLabel("kv_heads", 16, group=4)
    assert [shard_range(label, 32, 8, 4, s) for s in range(4)] == [(0, 16), (0, 16), (16, 32), (16, 32)]
    splits = [c for c in range(8) if k_split_range(label, 32, 8, c)[0] < k_split_range(label, 32, 8, c)[1]]
    assert splits == [0, 4]


@pytest.mark.parametrize(
    ("size", "k_splits", "shards", "words"),
    [
        (96, 8, 3, "got 3 devices; choose 1, 2, 4, 8, or set graph.k_splits to 3, 6, 12, 24"),
        (96, 8, 16, "set graph.k_splits to 16, 32, 64, 128"),
        (96, 12, 4, "choose 1, 2, 3, 6, 12, or set graph.k_splits to 4, 8, 16, 32"),
        (6, 12, 4, "choose 1, 2, 3, or set"),
    ],
)
def test_widths_whose_runs_are_not_nodes_are_rejected(size, k_splits, shards, words):
    """The error lists the widths that the k splits allow and that leave no device without a share, and the
    k splits that allow the width.
    """
    with pytest.raises(
        LayoutError, match=f"its {k_splits} k splits that are nodes of its tree; {words}|{words}"
    ):
        shard_range(DimLabel("mlp"), size, k_splits, shards, 0)


def test_kv_heads_across_shards_are_rejected():
    """Three KV heads over two devices cannot be spread evenly."""
    with pytest.raises(
        LayoutError, match=r"got 3 KV heads with 2 query heads each over 2 devices; choose 1$"
    ):
        shard_range(DimLabel("kv_heads", 16, group=2), 48, 8, 2, 0)
    with pytest.raises(LayoutError, match=r"over 8 devices; choose 1, 2$"):
        shard_range(DimLabel("kv_heads", 16, group=6), 32, 8, 8, 0)
    with pytest.raises(
        LayoutError, match=r"got 4 KV heads with 2 query heads each over 3 devices; choose 1$"
    ):
        shard_range(DimLabel("kv_heads", 16, group=2), 64, 12, 3, 0)


def test_whole_kv_heads_in_unequal_shares():
    """Groups that no cut divides stay whole: 8 KV heads of one query head each over three devices."""
    label = DimLabel("kv_heads", 16, group=1)
    assert [shard_range(label, 128, 12, 3, s) for s in range(3)] == [(0, 32), (32, 80), (80, 128)]
    spread = DimLabel("kv_heads", 16, group=4)
    assert [shard_range(spread, 48, 12, 6, s) for s in range(6)] == [
        (0, 16), (0, 16), (16, 32), (16, 32), (32, 48), (32, 48)
    ]  # fmt: skip


def test_mesh_coordinates_and_groups():
    """Row-major; a device group differs only in its axes, of which the first is major."""
    mesh = DeviceMesh.parse("dp=2,tp=4")
    assert mesh.num_devices == 8 and mesh.coordinate(6, "dp") == 1 and mesh.coordinate(6, "tp") == 2
    assert (
        mesh.group(6, "tp") == [4, 5, 6, 7] and mesh.group(6, "dp") == [2, 6] and mesh.group(6, "pp") == [6]
    )
    assert mesh.group(6, "tp", "dp") == [0, 4, 1, 5, 2, 6, 3, 7] and mesh.group(6) == [6]
    assert mesh.coordinate(6, "tp", "dp") == 5 and mesh.group(6, "tp", "dp").index(6) == 5
    assert mesh.coordinate(6, MICRO, "dp") == 1 and mesh.size("dp", MICRO, "tp") == 8 and mesh.size() == 1
    with pytest.raises(LayoutError, match="'micro' is reserved for the axis of time"):
        DeviceMesh({"micro": 2})
    for text in ("dp", "dp=x", "dp=2,dp=2", "", "dp=²", "dp=٢", f"dp={'9' * 5000}"):
        with pytest.raises(LayoutError, match="a mesh must have the form axis=size"):
            DeviceMesh.parse(text)
    for size in (0, 1 << 17):
        with pytest.raises(LayoutError, match=rf"the size of axis 'dp' must lie in \[1, 1024\]; got {size}"):
            DeviceMesh.parse(f"dp={size}")
    with pytest.raises(LayoutError, match="at most 1024 devices"):
        DeviceMesh({"dp": 64, "tp": 64})


def test_bounds_of_symbols():
    """A symbol's bounds are ordered."""
    with pytest.raises(ShapeError, match="max of 'tokens' must lie in"):
        Dim("tokens", 4, 2)


def test_numpy_integers_do_not_wrap():
    """Arithmetic on sizes does not overflow where a caller's own integer type would."""
    label, dim = DimLabel("vocab", np.int8(64), np.uint8(1)), Dim("n", np.uint8(1), np.uint8(200))
    assert shard_range(label, 640, 8, 2, 1) == shard_range(DimLabel("vocab", 64), 640, 8, 2, 1)
    assert {type(v) for v in (label.atom, label.group, dim.min, dim.max)} == {int}
    assert DeviceMesh({"a": np.uint8(32), "b": np.uint8(32)}).num_devices == 1024
