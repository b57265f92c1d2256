"""The documented programs of Triton-distributed, written with the primitives, give their results on
`comm.local`: the queue of tutorial 01, all-gather of tutorial 02, and reduce-scatter of tutorial 05.
"""

import numpy as np
import pytest

import tilewise as tw
from tilewise import comm

SCHEDULES = (None, *range(12))


def produce_and_consume(data, queue, output, full, free):
    """Every device sends its tiles through a short queue to the next device (tutorial 01).

    A slot of the queue is written only when its previous tile has been read: `full` and `free`
    count up, so a signal never has to be reset.
    """
    me, n = comm.rank(), comm.num_ranks()
    after, before = (me + 1) % n, (me - 1) % n
    slots = len(full)
    for i in comm.tiles(data.shape[0]):
        slot, lap = i % slots, i // slots
        comm.wait(free[slot], lap)
        comm.put_signal(comm.symm_at(queue, after).tile(slot, rows=1), data.tile(i, rows=1), full[slot])
        token = comm.wait(full[slot], lap + 1)
        arrived = comm.consume_token(queue.tile(slot, rows=1), token)
        comm.put(output.tile(i, rows=1), arrived)
        comm.quiet()
        comm.notify(free[slot], before)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_queue_with_flow_control_moves_all_tiles(count):
    """Tutorial 01: a queue of three slots carries eight tiles around the ring."""
    for delays in SCHEDULES:
        devices = comm.local(count, delays=delays)
        data, output = devices.symm_tensor((8, 4)), devices.symm_tensor((8, 4))
        for device in range(count):
            data.numpy(device)[:] = np.arange(32).reshape(8, 4) + 100 * device
        queue, full, free = devices.symm_tensor((3, 4)), devices.signals(3), devices.signals(3)
        devices.run(produce_and_consume, data, queue, output, full, free)
        for device in range(count):
            assert np.array_equal(output.numpy((device + 1) % count), data.numpy(device))


def push(shard, whole, arrived):
    """Each device puts its rows to all devices, itself first."""
    me, n = comm.rank(), comm.num_ranks()
    rows = shard.shape[0]
    for peer in comm.tiles(n, first=me):
        comm.put_signal(comm.symm_at(whole, peer).tile(me, rows=rows), shard, arrived[me])
    return comm.consume_token(whole, comm.wait(arrived, 1)).numpy().copy()


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


def around(shard, whole, arrived):
    """Each device passes on what it has got last, along a ring. Each part has its own signal, because
    two puts of one device may arrive in any order.
    """
    me, n = comm.rank(), comm.num_ranks()
    rows = shard.shape[0]
    comm.put(whole.tile(me, rows=rows), shard)
    comm.quiet()
    for step in comm.tiles(n - 1):
        sent, received = (me - step) % n, (me - step - 1) % n
        comm.put_signal(
            comm.symm_at(whole, (me + 1) % n).tile(sent, rows=rows),
            whole.tile(sent, rows=rows),
            arrived[sent],
        )
        whole = comm.consume_token(whole, comm.wait(arrived[received]))
    return whole.numpy().copy()


@pytest.mark.parametrize("gather", [push, pull, around])
@pytest.mark.parametrize("count", [2, 4])
def test_all_gather(gather, count):
    """Tutorial 02: by puts, by gets in the order of arrival, and around a ring."""
    for delays in SCHEDULES[:8]:
        devices = comm.local(count, delays=delays)
        shard, whole = devices.symm_tensor((2, 3)), devices.symm_tensor((2 * count, 3))
        for device in range(count):
            shard.numpy(device)[:] = np.arange(6).reshape(2, 3) + 10 * device
        expected = np.concatenate([shard.numpy(device) for device in range(count)])
        for result in devices.run(gather, shard, whole, devices.signals(count)):
            assert np.array_equal(result, expected)


def reduce_scatter(x, parts, out, arrived):
    """Each device puts its part of every sum to the sum's owner, which adds them in order of the devices."""
    me, n = comm.rank(), comm.num_ranks()
    rows = out.shape[0]
    for owner in comm.tiles(n, first=me + 1):
        comm.put_signal(comm.symm_at(parts, owner).tile(me, rows=rows), x.tile(owner, rows=rows), arrived[me])
    for device in comm.tiles(n):
        part = comm.consume_token(parts.tile(device, rows=rows), comm.wait(arrived[device]))
        out.numpy()[:] += part.numpy()


def test_reduce_scatter():
    """Tutorial 05: the same sums as NumPy's, in the same order, to the bit."""
    for delays in SCHEDULES[:8]:
        devices = comm.local(3, delays=delays)
        x, parts, out = (devices.symm_tensor((rows, 2)) for rows in (6, 6, 2))
        for device in range(3):
            x.numpy(device)[:] = np.random.default_rng(device).standard_normal((6, 2))
        devices.run(reduce_scatter, x, parts, out, devices.signals(3))
        total = (x.numpy(0) + x.numpy(1)) + x.numpy(2)
        assert all(np.array_equal(out.numpy(d), total[2 * d : 2 * d + 2]) for d in range(3))


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
