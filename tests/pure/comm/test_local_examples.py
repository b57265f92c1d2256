"""Programs on `comm.local`: an all-gather that no traced program can be, ranks, tiles, arrays, ends."""

import numpy as np
import pytest

import tilewise as tw
from tilewise import comm

SCHEDULES = (None, *range(12))


def pull(shard, whole, arrived):
    """Each device says that its rows are ready, and gets those of the others, in the order in which they come."""
    n, rows = comm.num_ranks(), shard.shape[0]
    for peer in comm.tiles(n, first=comm.rank()):
        comm.notify(arrived[comm.rank()], peer)
    done = []
    while len(done) < n:
        peer, token = comm.wait_any(arrived, 1, skip=done)
        done.append(peer)
        comm.get(whole.tile(peer, rows=rows), comm.consume_token(comm.symm_at(shard, peer), token))
    return whole.numpy().copy()


@pytest.mark.parametrize("count", [2, 4])
def test_all_gather_in_the_order_of_arrival(count):
    """Tutorial 02, by gets; the other programs of the tutorials run traced too
    (tests/native/tiles/test_triton_examples.py).
    """
    for delays in SCHEDULES[:8]:
        devices = comm.local(count, delays=delays)
        shard, whole = devices.symm_tensor((2, 3)), devices.symm_tensor((2 * count, 3))
        for device in range(count):
            shard.numpy(device)[:] = np.arange(6).reshape(2, 3) + 10 * device
        expected = np.concatenate([shard.numpy(device) for device in range(count)])
        for result in devices.run(pull, shard, whole, devices.signals(count)):
            assert np.array_equal(result, expected)


def test_ranks_on_axes():
    """A device's position among all devices, and on each axis of a mesh."""
    devices = tw.comm.local({"dp": 2, "tp": 3})
    places = devices.run(lambda: (comm.rank(), comm.rank("dp"), comm.rank("tp"), comm.num_ranks("tp")))
    assert places == [(n, n // 3, n % 3, 3) for n in range(6)]
    assert devices.run(comm.num_ranks) == [6] * 6


def test_tiles_begin_where_they_should():
    """A loop over tiles is rotated by `first`, modulo their number."""
    devices = comm.local(1)
    for first in (-1, 0, 3, 9):
        (order,) = devices.run(lambda first=first: list(comm.tiles(4, first=first)))
        assert order == [(first + n) % 4 for n in range(4)]
    assert devices.run(lambda: list(comm.tiles(0, first=3))) == [[]]


def test_arrays_are_views():
    """Reading and writing through NumPy and DLPack needs no copy, in rows and in peers' copies."""
    devices = comm.local(2)
    x = devices.symm_tensor((4, 2), "f32")
    np.from_dlpack(x.numpy(1))[1, 1] = 5
    x[1:3].numpy(0)[:] = 7

    def program():
        return comm.symm_at(x, 1).tile(1, rows=1).numpy()[0, 1], x.numpy()[1, 0], x[1:3].shape, x.dtype

    assert devices.run(program) == [(5, 7, (2, 2), "f32"), (5, 0, (2, 2), "f32")]


@pytest.mark.parametrize("delays", SCHEDULES)
def test_all_has_arrived_at_the_end(delays):
    """When `run` returns, everything that was sent is visible. Signals count modulo 2^64."""
    devices = comm.local(2, delays=delays)
    x, ready = devices.symm_tensor((2, 1)), devices.signals(1)[0]

    def program():
        peer = comm.symm_at(x, 1 - comm.rank())
        comm.put_signal(peer, np.full((2, 1), 1 + comm.rank(), np.float32), ready, (1 << 64) - 1)
        comm.notify(ready, 1 - comm.rank(), 3)

    devices.run(program)
    assert [x.numpy(device).tolist() for device in range(2)] == [[[2], [2]], [[1], [1]]]
    assert [ready.value(device) for device in range(2)] == [2, 2]
