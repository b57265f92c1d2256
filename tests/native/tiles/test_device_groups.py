"""Devices without a model: symmetric memory, its limits, and arrays of other libraries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise import comm


@pytest.fixture
def group():
    """Two devices with 64 KiB each."""
    with tw.DeviceGroup({"tp": 2}, memory_bytes=1 << 16, num_signals=8) as opened:
        yield opened


def test_arrays_share_the_devices_memory(group):
    """NumPy and DLPack, without copies; bf16 as bits; packed weights by copies."""
    torch = pytest.importorskip("torch")
    x, w = group.symm_tensor((4, 4)), group.symm_tensor((40, 6), packed=True)
    x.write(torch.arange(16.0).reshape(4, 4), 1)
    shared = torch.from_dlpack(x.numpy(1))
    shared[0, 0] = 42
    assert x.read(1)[0, 0] == 42 and x.read(0)[0, 0] == 0
    b = group.symm_tensor((4, 4), "bf16")
    with pytest.raises(tw.TilewiseError, match="16-bit integers"):
        b.write(torch.ones(4, 4, dtype=torch.bfloat16))
    b.write(torch.full((4, 4), 1.5, dtype=torch.bfloat16).view(torch.int16))
    assert torch.from_dlpack(b.numpy(0).view(np.int16)).view(torch.bfloat16)[3, 3] == 1.5
    values = np.random.default_rng(0).standard_normal((40, 6), np.float32)
    w.write(values)
    np.testing.assert_array_equal(w.read(1), values)
    with pytest.raises(tw.TilewiseError, match="only plain tensors"):
        w.numpy(0)
    with pytest.raises(tw.TilewiseError, match="the tensor's shape"):
        w.write(values[:8])


@given(st.lists(st.one_of(st.integers(1, 9000), st.integers(-8, -1)), min_size=1, max_size=30))
def test_allocations_do_not_overlap(sizes):
    """Positive numbers allocate so many elements, negative ones free one of the last tensors."""
    with tw.DeviceGroup({"tp": 2}, memory_bytes=1 << 16) as group:
        live, number = [], 0
        for size in sizes:
            if size < 0:
                if len(live) >= -size:
                    live.pop(size)[0].free()
                continue
            try:
                tensor = group.symm_tensor((size,))
            except tw.TilewiseError as error:
                assert "must have room" in str(error)
                continue
            assert not tensor.read(1).any()
            number += 1
            tensor.write(np.full(size, number, np.float32))
            live.append((tensor, number))
        for tensor, value in live:
            assert (tensor.read(0) == value).all() and (tensor.read(1) == value).all()
        total = sum(-(-t.num_bytes // 128) * 128 for t, _ in live)
        for tensor, _ in live:
            tensor.free()
        assert total <= 1 << 16 and group.symm_tensor((1 << 14,)).num_bytes == 1 << 16


def test_limits_are_named(group):
    """Each limit of a group has an error that says what to change."""
    x = group.symm_tensor((4, 4))
    for call, message in (
        (lambda: group.symm_tensor((1 << 20,)), "larger memory_bytes"),
        (lambda: group.symm_tensor((4, 0)), "positive integers"),
        (lambda: group.symm_tensor((4, 4, 4), packed=True), "must be 2-D"),
        (lambda: group.signals(9), "larger num_signals"),
        (lambda: x.numpy(2), "device"),
        (lambda: tw.DeviceGroup({"tp": 2}, memory_bytes=0), "memory_bytes"),
    ):
        with pytest.raises(tw.TilewiseError, match=message):
            call()
    program = tw.tile_program(lambda x: comm.barrier())
    program(x)
    group.close()
    for call in (lambda: program(x), lambda: x.read(0), lambda: group.signals(1)):
        with pytest.raises(tw.TilewiseError, match="must be open"):
            call()


def test_arguments_of_programs(group):
    """Tensors of one group, and hashable constants; the trace is cached by their forms."""
    traces = []

    @tw.tile_program
    def scaled(x, y, factor):
        traces.append(factor)
        comm.kernel("scale", out=y, x=x, factor=factor)

    x, y, z = (group.symm_tensor((4, 4)) for _ in range(3))
    x.write(np.ones((4, 4)))
    scaled(x, y, 2.0)
    scaled(y, z, 2.0)
    scaled(x, x, 3.0)
    assert traces == [2.0, 3.0]
    assert (z.read(0) == 4).all() and (x.read(1) == 3).all()
    with pytest.raises(tw.TilewiseError, match="must be hashable"):
        scaled(x, y, [2.0])
    with (
        tw.DeviceGroup({"tp": 2}, memory_bytes=1 << 16) as other,
        pytest.raises(tw.TilewiseError, match="of one group"),
    ):
        scaled(x, other.symm_tensor((4, 4)), 2.0)
    assert len(scaled.trace(x, y, 2.0).digest()) == 64
