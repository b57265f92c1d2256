"""Collectives on symmetric tensors, compared with NumPy."""

import asyncio
import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core.errors import LayoutError, PlanError, ShapeError, TaskFailed
from tilewise.core.mesh import DeviceMesh
from tilewise.ir.program import Access
from tilewise.ir.validate.program import validate_acknowledgements
from tilewise.plan.collectives.arrays import FlatArray, array_program
from tilewise.session.assemble import native_program
from tilewise.tiles import DeviceGroup
from tilewise.tiles.checker import find_race

NUMPY = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "i32": np.dtype(np.int32)}
OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
MESHES = ({"tp": 1}, {"tp": 2}, {"tp": 3}, {"tp": 4}, {"dp": 2, "tp": 2})
GROUPS = {}


@pytest.fixture(scope="module", autouse=True)
def groups():
    """One group per mesh, opened when first used."""
    yield
    for group in GROUPS.values():
        group.close()
    GROUPS.clear()


def group_of(mesh):
    """The open group of a mesh."""
    key = str(mesh)
    if key not in GROUPS:
        GROUPS[key] = DeviceGroup(mesh, memory_bytes=32 << 20, workers_per_device=1)
    return GROUPS[key]


def tree(op, parts):
    """The fixed tree over parts: neighbours in pairs, level by level, in fp32; rounded once."""
    level = [part.astype(np.float32) for part in parts]
    while len(level) > 1:
        pairs = [OPS[op](a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[2 * len(pairs) :]
    return level[0].astype(parts[0].dtype)


def bits(array):
    """Elements as bytes, to compare NaN and signs of zero too."""
    return np.ascontiguousarray(array).view(np.uint8)


class Case:
    """Tensors of a group with random values, and what is expected of them."""

    def __init__(self, group, seed):
        self.group, self.gen, self.tensors = group, np.random.default_rng(seed), []

    def tensor(self, shape, dtype):
        tensor = self.group.symm_tensor(shape, dtype)
        self.tensors.append(tensor)
        for device in range(self.group.mesh.num_devices):
            scale = 1 if dtype == "i32" else self.gen.choice([1.0, 1e4], np.shape(tensor.numpy(0)))
            values = 1000 * self.gen.standard_normal(tensor.shape) * scale
            tensor.numpy(device)[:] = values.astype(NUMPY[dtype])
        return tensor

    def values(self, tensor):
        """Copies of all devices' copies."""
        return [tensor.read(device).copy() for device in range(self.group.mesh.num_devices)]

    def members(self, device, axis):
        """The devices along an axis, and the device's place among them."""
        mesh = self.group.mesh
        axes = mesh.names if axis is None else (axis,) if isinstance(axis, str) else axis
        return mesh.group(device, *axes), mesh.coordinate(device, *axes)

    def check(self, tensor, expected):
        for device, value in enumerate(self.values(tensor)):
            np.testing.assert_array_equal(bits(value), bits(expected(device)), f"device {device}")

    def free(self):
        for tensor in self.tensors:
            tensor.free()


def all_reduce(case, count, dtype, op, axis):
    x = case.tensor(count, dtype)
    old = case.values(x)
    case.group.all_reduce(x, op, axis)
    case.check(x, lambda d: tree(op, [old[m] for m in case.members(d, axis)[0]]))


def reduce_scatter(case, count, dtype, op, axis):
    members = len(case.members(0, axis)[0])
    x, y = case.tensor((members, count), dtype), case.tensor(count, dtype)
    old = case.values(x)
    case.group.reduce_scatter_tensor(y, x, op, axis)

    def expected(device):
        group, me = case.members(device, axis)
        return tree(op, [old[m][me] for m in group])

    case.check(y, expected)
    case.check(x, old.__getitem__)


def all_gather(case, count, dtype, op, axis):
    members = len(case.members(0, axis)[0])
    x, y = case.tensor(count, dtype), case.tensor((members, count), dtype)
    old = case.values(x)
    case.group.all_gather_into_tensor(y, x, axis)
    case.check(y, lambda d: np.stack([old[m] for m in case.members(d, axis)[0]]))


def all_to_all(case, count, dtype, op, axis):
    members = len(case.members(0, axis)[0])
    x, y = case.tensor((members, count), dtype), case.tensor((members, count), dtype)
    old = case.values(x)
    case.group.all_to_all_single(y, x, axis=axis)

    def expected(device):
        group, me = case.members(device, axis)
        return np.stack([old[m][me] for m in group])

    case.check(y, expected)


def all_to_all_v(case, count, dtype, op, axis):
    members = len(case.members(0, axis)[0])
    sizes = case.gen.integers(0, max(2, count // 40), (members, members))
    x, y = case.tensor((int(sizes.sum(1).max()) + 1, 3), dtype), case.tensor((int(sizes.sum(0).max()) + 1, 3), dtype)
    old, before = case.values(x), case.values(y)
    given = {"input_split_sizes": sizes.tolist()}
    if case.gen.integers(2):
        given = {"output_split_sizes": sizes.T.tolist()}
    case.group.all_to_all_single(y, x, axis=axis, **given)
    begins = np.cumsum(sizes, 1) - sizes

    def expected(device):
        group, me = case.members(device, axis)
        got = [old[m][begins[i, me] : begins[i, me] + sizes[i, me]] for i, m in enumerate(group)]
        got = np.concatenate(got)
        return np.concatenate([got, before[device][len(got) :]])

    case.check(y, expected)


def broadcast(case, count, dtype, op, axis):
    src = int(case.gen.integers(len(case.members(0, axis)[0])))
    x = case.tensor(count, dtype)
    old = case.values(x)
    case.group.broadcast(x, src, axis)
    case.check(x, lambda d: old[case.members(d, axis)[0][src]])


def gather(case, count, dtype, op, axis):
    members = len(case.members(0, axis)[0])
    dst = int(case.gen.integers(members))
    x, y = case.tensor(count, dtype), case.tensor((members, count), dtype)
    old, before = case.values(x), case.values(y)
    case.group.gather(x, y, dst, axis)

    def expected(device):
        group, me = case.members(device, axis)
        return np.stack([old[m] for m in group]) if me == dst else before[device]

    case.check(y, expected)


def scatter(case, count, dtype, op, axis):
    members = len(case.members(0, axis)[0])
    src = int(case.gen.integers(members))
    x, y = case.tensor(count, dtype), case.tensor((members, count), dtype)
    old = case.values(y)
    case.group.scatter(x, y, src, axis)

    def expected(device):
        group, me = case.members(device, axis)
        return old[group[src]][me]

    case.check(x, expected)


def send(case, count, dtype, op, axis):
    src, dst = (int(i) for i in case.gen.integers(len(case.members(0, axis)[0]), size=2))
    x, y = case.tensor(count, dtype), case.tensor(count, dtype)
    old, before = case.values(x), case.values(y)
    if case.gen.integers(2):
        case.group.send(x, dst, src, y, axis)
    else:
        case.group.recv(y, src, dst, x, axis)

    def expected(device):
        group, me = case.members(device, axis)
        return old[group[src]] if me == dst else before[device]

    case.check(y, expected)


REDUCTIONS = (all_reduce, reduce_scatter)
COPIES = (all_gather, all_to_all, all_to_all_v, broadcast, gather, scatter, send)


@settings(max_examples=120)
@given(
    collective=st.sampled_from(REDUCTIONS + COPIES),
    mesh=st.sampled_from(MESHES),
    dtype=st.sampled_from(["f32", "bf16", "i32"]),
    op=st.sampled_from(["sum", "max", "min"]),
    # around cache lines, and around the size from which there are several tasks
    count=st.integers(1, 300) | st.sampled_from([4096, 262_143, 262_144, 300_007]),
    is_whole=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_collectives_equal_numpy(collective, mesh, dtype, op, count, is_whole, seed):
    """The same bits as the fixed tree, or as copies, for any size, on one axis or all, and nothing else."""
    if collective in REDUCTIONS and dtype == "i32":
        dtype = "f32"
    case = Case(group_of(mesh), seed)
    axis = None if is_whole else [*mesh][-1]
    try:
        collective(case, count, dtype, op, axis)
    finally:
        case.free()
