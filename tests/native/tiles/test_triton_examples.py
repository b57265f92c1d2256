"""The documented programs of Triton-distributed, written with the primitives: the queue of tutorial
01, all-gather of tutorial 02, reduce-scatter of tutorial 05. Each is traced and natively run, and
called eagerly in many orders.
"""

import numpy as np
import pytest

import tilewise as tw
from tilewise import comm

SCHEDULES = (None, *range(8))


def produce_and_consume(data, queue, output, full, free):
    """Every device sends its tiles through a short queue to the next device (tutorial 01).

    A slot of the queue is written only when its previous tile has been read: `full` and `free`
    count up, so a signal never has to be reset.
    """
    me, n = comm.rank(), comm.num_ranks()
    after, before = (me + 1) % n, (me - 1) % n
    slots = len(full)
    for i in range(data.shape[0]):
        slot, lap = i % slots, i // slots
        there = comm.symm_at(queue, after)
        if lap > 0:
            there = comm.consume_token(there, comm.wait(free[slot], lap))
        comm.put_signal(there.tile(slot, rows=1), data.tile(i, rows=1), full[slot])
        arrived = comm.consume_token(queue, comm.wait(full[slot], lap + 1))
        comm.kernel("copy", out=output.tile(i, rows=1), x=arrived.tile(slot, rows=1))
        comm.notify(free[slot], before)
    for slot in range(slots):
        comm.wait(free[slot], -(-(data.shape[0] - slot) // slots))


def push(shard, whole, arrived):
    """Each device puts its rows to all devices, itself first."""
    me, n = comm.rank(), comm.num_ranks()
    rows = shard.shape[0]
    for peer in comm.tiles(n, first=me):
        comm.put_signal(comm.symm_at(whole, peer).tile(me, rows=rows), shard, arrived[me])
    comm.wait(arrived, 1)


def around(shard, whole, arrived):
    """Each device passes on what it has got last, along a ring. Each part has its own signal, because
    two puts of one device may arrive in any order.
    """
    me, n = comm.rank(), comm.num_ranks()
    rows = shard.shape[0]
    comm.get(whole.tile(me, rows=rows), shard)
    for step in range(n - 1):
        sent, received = (me - step) % n, (me - step - 1) % n
        tile = whole.tile(sent, rows=rows)
        comm.put_signal(comm.symm_at(tile, (me + 1) % n), tile, arrived[sent])
        whole = comm.consume_token(whole, comm.wait(arrived[received]))


def reduce_scatter(x, parts, out, arrived):
    """Each device puts its part of every sum to the sum's owner, which adds them as a tree in order of
    the devices.
    """
    me, n = comm.rank(), comm.num_ranks()
    rows = out.shape[0]
    for owner in comm.tiles(n, first=me + 1):
        comm.put_signal(comm.symm_at(parts, owner).tile(me, rows=rows), x.tile(owner, rows=rows), arrived[me])
    parts = comm.consume_token(parts, comm.wait(arrived, 1))
    comm.kernel("tree_add", out=out, x=[parts.tile(device, rows=rows) for device in range(n)])


def results(program, count, rows, num_signals):
    """The last tensor on every device: traced, twice; and eagerly, in every order."""
    rng = np.random.default_rng(count)
    first = rng.standard_normal((count, rows[0], 4)).astype(np.float32)
    with tw.DeviceGroup({"tp": count}, memory_bytes=1 << 16, num_signals=32) as group:
        tensors = [group.symm_tensor((n, 4)) for n in rows]
        signals = [group.signals(n) for n in num_signals]
        for device in range(count):
            tensors[0].write(first[device], device)
        traced = tw.tile_program(program)
        for _ in range(2):
            tensors[-1].write(np.zeros(tensors[-1].shape))
            traced(*tensors, *signals)
            yield first, np.stack([tensors[-1].read(device) for device in range(count)])
    for delays in SCHEDULES:
        group = comm.local(count, delays=delays)
        copies = [group.symm_tensor((n, 4)) for n in rows]
        for device in range(count):
            copies[0].numpy(device)[:] = first[device]
        group.run(program, *copies, *(group.signals(n) for n in num_signals))
        yield first, np.stack([copies[-1].numpy(device) for device in range(count)])


@pytest.mark.parametrize("count", [2, 3])
def test_a_queue_with_flow_control_moves_all_tiles(count):
    """Tutorial 01: a queue of three slots carries eight tiles around the ring."""
    for first, output in results(produce_and_consume, count, (8, 3, 8), (3, 3)):
        np.testing.assert_array_equal(np.roll(output, -1, axis=0), first)


@pytest.mark.parametrize("gather", [push, around])
@pytest.mark.parametrize("count", [2, 4])
def test_all_gather(gather, count):
    """Tutorial 02: by puts to all, and around a ring."""
    for first, whole in results(gather, count, (2, 2 * count), (count,)):
        np.testing.assert_array_equal(whole, np.tile(first.reshape(2 * count, 4), (count, 1, 1)))


def test_reduce_scatter():
    """Tutorial 05: the same sums as NumPy's, in the same order, to the bit."""
    for first, out in results(reduce_scatter, 3, (6, 6, 2), (3,)):
        total = (first[0] + first[1]) + first[2]
        np.testing.assert_array_equal(out, total.reshape(3, 2, 4))
