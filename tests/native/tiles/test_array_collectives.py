"""Collectives on symmetric tensors, compared with NumPy."""

import asyncio
import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import comm
from tilewise.core.errors import LayoutError, PlanError, ShapeError, TaskFailed
from tilewise.core.mesh import DeviceMesh
from tilewise.distributed import ProcessGroup
from tilewise.ir.validate.program import validate_acknowledgements
from tilewise.plan.collectives.arrays import FlatArray, array_program
from tilewise.session.assemble import native_program
from tilewise.tiles import DeviceGroup, tile_program
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
    x, y = (
        case.tensor((int(sizes.sum(1).max()) + 1, 3), dtype),
        case.tensor((int(sizes.sum(0).max()) + 1, 3), dtype),
    )
    old, before = case.values(x), case.values(y)
    splits = {"input_split_sizes": sizes.tolist()}
    if case.gen.integers(2):
        splits = {"output_split_sizes": sizes.T.tolist()}
    case.group.all_to_all_single(y, x, axis=axis, **splits)
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


@settings(max_examples=80)
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


def test_the_oracle_is_a_tree_of_pairs():
    """Four devices add neighbours first; another order gives other bits, so that the property test can fail."""
    group = group_of({"tp": 4})
    parts = [np.array([v], np.float32) for v in (1.0, 1e8, -1e8, 1.0)]
    x = group.symm_tensor(1)
    for device, part in enumerate(parts):
        x.numpy(device)[:] = part
    group.all_reduce(x)
    assert x.read(3) == (parts[0] + parts[1]) + (parts[2] + parts[3]) == tree("sum", parts)
    assert tree("sum", parts) != tree("sum", [parts[0], parts[3], parts[1], parts[2]])
    x.free()


@settings(max_examples=20)
@given(count=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_fewer_devices_give_the_same_bits(count, seed):
    """Four devices sum as two do that each have added two neighbouring parts, because these are nodes of the tree."""
    gen = np.random.default_rng(seed)
    parts = [(gen.standard_normal(count) * gen.choice([1, 1e5], count)).astype(np.float32) for _ in range(4)]
    pairs = [parts[0] + parts[1], parts[2] + parts[3]]
    sums = []
    for contributions in (parts, pairs):
        x = group_of({"tp": len(contributions)}).symm_tensor(count)
        for device, part in enumerate(contributions):
            x.write(part, device)
        x.group.all_reduce(x)
        sums.append(bits(x.read(0)))
        x.free()
    np.testing.assert_array_equal(*sums)


def test_all_reduce_of_brief_4():
    """Brief 004's third test: the sum of [1, 2, 3, 4] over a mesh with tp=2 is twice the partial value."""
    with DeviceGroup({"tp": 2}, memory_bytes=1 << 20) as group:
        partial = group.symm_tensor(4)
        partial.write(np.array([1.0, 2.0, 3.0, 4.0]))
        group.all_reduce(partial, "sum", axis="tp")
        for device in range(2):
            assert partial.numpy(device).tolist() == [2.0, 4.0, 6.0, 8.0]


# ---- programs ---------------------------------------------------------------------------------------------

KINDS = {
    "all_reduce": (400_000, 400_000, ()),
    "all_gather_batch": (1000, 3000, ((0, 1000), (1000, 2000), (2000, 3000))),
    "reduce_scatter_rows": (3000, 1000, ((0, 1000), (1000, 2000), (2000, 3000))),
}


def program_of(kind, is_whole, dtype="f32"):
    """A program of one exchange between three devices."""
    source, target, parts = KINDS[kind]
    first = FlatArray(source, dtype, 0)
    second = first if kind == "all_reduce" else FlatArray(target, dtype, 1 << 23)
    combine = "" if kind == "all_gather_batch" else "sum"
    return array_program(
        DeviceMesh({"tp": 3}),
        kind,
        kind,
        ("tp",),
        first,
        second,
        combine=combine,
        parts=parts,
        is_whole_program=is_whole,
    )


def with_instructions(program, change):
    """The program with other instructions."""
    (of,) = program.classes
    (template,) = of.templates
    template = replace(template, instructions=tuple(map(change, template.instructions)))
    return replace(program, classes=(replace(of, templates=(template,)),))


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_programs_have_no_race(kind, is_whole):
    """Signals order all uses of a byte, and the form for the planner acknowledges every read of a peer's tile."""
    program = program_of(kind, is_whole)
    assert find_race(native_program(program, ()), program, "run") is None
    if not is_whole:
        validate_acknowledgements(program)


def test_planted_faults_of_an_all_reduce_are_found():
    """A program without a post blocks, and one without a wait has a race; both are refused."""
    program = program_of("all_reduce", True)
    native_program(program, ())
    with pytest.raises(PlanError, match="all_gather"):
        native_program(with_instructions(program, lambda i: replace(i, notifies=i.notifies[1:])), ())
    silent = with_instructions(program, lambda i: replace(i, notifies=(), waits=()))
    assert find_race(native_program(silent, ()), silent, "run") is not None


def test_members_in_another_order_give_other_bits():
    """Planted: a device that combines the members in another order."""

    def swap(instruction):
        operands = instruction.operands
        if "tree_add" not in instruction.kernel:
            return instruction
        x = [n for n, o in enumerate(operands) if o.group >= 0]
        swapped = [*operands]
        swapped[x[0]], swapped[x[2]] = operands[x[2]], operands[x[0]]
        return replace(instruction, operands=tuple(swapped))

    with DeviceGroup({"tp": 3}, memory_bytes=8 << 20) as group:
        gen, x = np.random.default_rng(0), group.symm_tensor(400_000)
        values = [gen.standard_normal(400_000).astype(np.float32) for _ in range(3)]
        program = program_of("all_reduce", True)
        for planted in (program, with_instructions(program, swap)):
            for device in range(3):
                x.write(values[device], device)
            group.run_program(native_program(planted, ()), planted)
            is_equal = (x.read(0) == tree("sum", values)).all()
            assert is_equal == (planted is program)


# ---- handles ----------------------------------------------------------------------------------------------


def test_programs_run_in_the_order_of_their_calls():
    """Started and blocking calls take effect in order, also between threads that wait for one another."""
    group = group_of({"tp": 2})
    x = group.symm_tensor(1000)
    x.write(np.ones(1000))
    handles = [group.all_reduce(x, async_op=True) for _ in range(20)]
    group.all_reduce(x)
    assert all(handle.is_complete() for handle in handles)
    assert (x.numpy(0) == 2.0**21).all()
    assert handles[3].result() is x and handles[3].exception() is None
    x.free()


def test_handles_notify_and_can_be_awaited():
    """A callback runs at the end, or at once if the program has ended; `await` gives the tensor."""
    group = group_of({"tp": 2})
    x = group.symm_tensor(1000)
    ended = threading.Event()
    handle = group.broadcast(x, src=1, async_op=True)
    handle.notify(ended.set)
    assert ended.wait(30)
    calls = []
    handle.notify(lambda: calls.append(1))
    assert calls == [1]

    async def wait():
        return await asyncio.gather(*(group.all_reduce(x, async_op=True) for _ in range(3)))

    assert asyncio.run(wait()) == [x, x, x]
    x.free()


def test_tile_programs_can_be_started():
    """A traced program that was started runs before a collective that is called after it."""

    @tile_program
    def double(x):
        comm.kernel("add", out=x[:], a=x[:], b=x[:])

    group = group_of({"tp": 2})
    x = group.symm_tensor((4, 16))
    x.write(np.ones((4, 16)))
    handle = double.start(x)
    group.all_reduce(x)
    assert handle.is_complete() and handle.result() is None
    assert (x.numpy(0) == 4).all()
    x.free()


def test_a_failed_program_fails_its_handle_only():
    """The error reaches the thread that waits for this program; the next program runs."""
    with DeviceGroup({"tp": 2}, memory_bytes=1 << 20) as group:
        x = group.symm_tensor(64)
        group._executor.inject("throw", 1, "all_reduce/reduce_scatter", 0)
        failed = group.all_reduce(x, async_op=True)
        with pytest.raises(TaskFailed):
            failed.wait()
        assert isinstance(failed.exception(), TaskFailed)
        x.write(np.ones(64))
        group.all_reduce(x, async_op=True).wait()
        assert (x.numpy(1) == 2).all()


def test_close_waits_for_started_programs():
    """Programs that were started run before the group closes; later calls are refused."""
    group = DeviceGroup({"tp": 2}, memory_bytes=1 << 20)
    x = group.symm_tensor(64)
    x.write(np.ones(64))
    last = [group.all_reduce(x, async_op=True) for _ in range(5)][-1]
    array = x.numpy(0)
    group.close()
    assert last.is_complete() and (array == 32).all()
    with pytest.raises(PlanError, match="must be open"):
        group.all_reduce(x)
    with pytest.raises(PlanError, match="must be open"):
        group.all_reduce(x, async_op=True)


# ---- errors -----------------------------------------------------------------------------------------------


def test_invalid_calls_are_refused_before_they_run():
    """Each rule, with the call's name."""
    group, other = group_of({"tp": 2}), group_of({"tp": 3})
    x, y, ids = group.symm_tensor((4, 3)), group.symm_tensor((5, 3)), group.symm_tensor(4, "i32")
    packed, foreign = group.symm_tensor((4, 3), packed=True), other.symm_tensor((4, 3))
    wrong = [
        (PlanError, "all_reduce", lambda: group.all_reduce(foreign)),
        (PlanError, "all_reduce", lambda: group.all_reduce(packed)),
        (PlanError, "all_reduce", lambda: group.all_reduce(x, "mean")),
        (PlanError, "all_reduce", lambda: group.all_reduce(x, None)),
        (ShapeError, "all_reduce", lambda: group.all_reduce(ids)),
        (LayoutError, "all_reduce", lambda: group.all_reduce(x, axis="dp")),
        (ShapeError, "all_gather_into_tensor", lambda: group.all_gather_into_tensor(x, y)),
        (ShapeError, "reduce_scatter_tensor", lambda: group.reduce_scatter_tensor(x, y)),
        (PlanError, "broadcast", lambda: group.broadcast(x, 2)),
        (PlanError, "gather", lambda: group.gather(x, x)),
        (ShapeError, "scatter", lambda: group.scatter(ids, x)),
        (ShapeError, "send", lambda: group.send(x, 1, 0, y)),
        (ShapeError, "all_to_all_single", lambda: group.all_to_all_single(y, x)),
        (ShapeError, "all_to_all_single", lambda: group.all_to_all_single(y, x, None, [1, 2, 1])),
        (ShapeError, "all_to_all_single", lambda: group.all_to_all_single(y, x, None, [2, 3])),
        (ShapeError, "all_to_all_single", lambda: group.all_to_all_single(y, x, [1, 1], [[1, 2], [1, 1]])),
    ]
    for error, name, call in wrong:
        with pytest.raises(error, match=rf"\[tiles\.{name}\] .*; got "):
            call()
    for tensor in (x, y, ids, packed, foreign):
        tensor.free()


# ---- processes --------------------------------------------------------------------------------------------


def test_processes_give_the_same_bits(monkeypatch):
    """Devices of two processes compute what NumPy does; workers keep fewer programs than there are."""
    monkeypatch.setattr("tilewise.tiles.group._MOST_SENT", 3)
    with (
        ProcessGroup(2),
        DeviceGroup({"dp": 2, "tp": 2}, memory_bytes=16 << 20, workers_per_device=1) as group,
    ):
        for turn in range(2):
            for number, collective in enumerate(REDUCTIONS + COPIES):
                case = Case(group, number)
                collective(case, (300, 300_007)[turn], "bf16", "sum", "tp")
                case.free()
        x, y = group.symm_tensor(64), group.symm_tensor(64)
        y.write(np.ones(64))
        for _ in range(3):  # programs that the workers have take turns
            group.all_reduce(y)
            group.all_reduce(x)
        assert (y.read(3) == 64).all() and not x.read(3).any()
