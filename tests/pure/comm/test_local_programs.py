"""Programs on `comm.local` give what a sequential model gives, on every schedule; programs that lack a
wait, fence or quiet do not.
"""

from operator import eq, ge, gt, le, lt, ne

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import comm
from tilewise.core.errors import CommError

COMPARE = {"eq": eq, "ne": ne, "gt": gt, "ge": ge, "lt": lt, "le": le}
SEEDS = range(60)
NUM_ROWS = 4


@st.composite
def exchanges(draw):
    """Number of devices, and rounds. In a round each device sends rows to devices and rows of its
    choice; no row gets two.
    """
    count = draw(st.integers(1, 4))
    places = [(device, row) for device in range(count) for row in range(NUM_ROWS)]
    rounds = []
    for _ in range(draw(st.integers(1, 3))):
        targets = draw(st.lists(st.sampled_from(places), unique=True, max_size=6))
        rounds.append(
            [
                (draw(st.integers(0, count - 1)), draw(st.integers(0, NUM_ROWS - 1)), *target)
                for target in targets
            ]
        )
    return count, rounds


def exchange(x, received, rounds, how):
    """Send the rows of each round, wait for those that arrive, and copy them to where the next round sends from."""
    ways = {
        "fence": lambda: (comm.fence(),),
        "quiet": lambda: (comm.quiet(),),
        "neither": lambda: (),
    }
    me, expected = comm.rank(), 0
    for sends in rounds:
        for source, row, target, place in sends:
            if source == me and how == "put_signal":
                dst = comm.symm_at(x[1], target).tile(place, rows=1)
                comm.put_signal(dst, x[0].tile(row, rows=1), received[0])
            elif source == me:
                comm.put(comm.symm_at(x[1], target)[place : place + 1], x[0][row : row + 1])
                ways[how]()
                comm.notify(received[0], target)
        expected += sum(target == me for _, _, target, _ in sends)
        token = comm.wait(received[0], expected)
        arrived = comm.consume_token(x[1], token)
        landed = arrived.numpy().copy()
        comm.barrier()  # all devices have received this round
        x[0].numpy()[:] += landed
        comm.barrier()
    return x[0].numpy().tolist()


def run_exchange(count, rounds, how, delays):
    """The rows of every device at the end."""
    devices = comm.local(count, delays=delays)
    x, received = [devices.symm_tensor((NUM_ROWS, 2)) for _ in range(2)], devices.signals(1)
    for device in range(count):
        x[0].numpy(device)[:] = np.arange(NUM_ROWS * 2).reshape(NUM_ROWS, 2) + 100 * device
    return devices.run(exchange, x, received, rounds, how)


def expected_exchange(count, rounds):
    """The same, computed one after the other."""
    own = np.arange(count)[:, None, None] * 100 + np.arange(NUM_ROWS * 2).reshape(1, NUM_ROWS, 2)
    landed = np.zeros_like(own)
    for sends in rounds:
        for source, row, target, place in sends:
            landed[target, place] = own[source, row]
        own = own + landed
    return own.tolist()


@settings(max_examples=40)
@given(
    exchanges(), st.sampled_from(["fence", "quiet", "put_signal"]), st.none() | st.integers(0, (1 << 64) - 1)
)
def test_exchanges_equal_the_sequential_model(drawn, how, delays):
    """Puts, signals and waits between rounds give the same rows on free threads and on every drawn schedule."""
    assert run_exchange(*drawn, how, delays) == expected_exchange(*drawn)


def test_the_model_finds_a_missing_fence():
    """The same program without a fence fails on some schedules."""
    count, rounds = 2, [[(0, 1, 1, 0)], [(1, 0, 0, 3), (0, 2, 1, 1)]]
    results = [
        run_exchange(count, rounds, "neither", seed) == expected_exchange(count, rounds) for seed in SEEDS
    ]
    assert not all(results)


@given(
    st.sampled_from(sorted(COMPARE)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
)
def test_waits_return_exactly_what_has_been_reached(cmp, pairs):
    """All comparisons of `wait`, `wait_any` and `wait_some`; what cannot be reached is a deadlock."""
    values, expected = zip(*pairs)
    reached = [n for n, pair in enumerate(pairs) if COMPARE[cmp](*pair)]

    def program(signals):
        for signal, value in zip(signals, values):
            comm.notify(signal, 0, value, op="set")
        if reached:
            index, _ = comm.wait_any(signals, list(expected), cmp=cmp)
            assert index in reached
            assert comm.wait_some(signals, list(expected), cmp=cmp)[0] == reached
            rest = comm.wait_some(signals, list(expected), cmp=cmp, skip=reached[1:])[0]
            assert rest == reached[:1]
            comm.wait(signals[reached[0]], expected[reached[0]], cmp=cmp)
        comm.wait_all(signals, list(expected), cmp=cmp)

    devices = comm.local(1)
    if len(reached) == len(pairs):
        devices.run(program, devices.signals(len(pairs)))
    else:
        with pytest.raises(CommError, match="deadlock"):
            devices.run(program, devices.signals(len(pairs)))


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(1, 4), st.none() | st.integers(0, 1 << 32))
def test_fetch_add_gives_each_value_once(count, times, delays):
    """Devices that draw numbers from one signal get all of them, each once, in rising order."""
    devices = comm.local(count, delays=delays)
    drawn = devices.run(
        lambda ticket: [comm.fetch_add(ticket, 0, 2) for _ in range(times)], devices.signals(1)[0]
    )
    assert sorted(number for numbers in drawn for number in numbers) == list(range(0, 2 * count * times, 2))
    assert all(numbers == sorted(numbers) for numbers in drawn)


def add_one(lock, total, is_locked):
    """Read a number of device 0, and write it back plus one; a lock excludes other devices."""
    while is_locked and comm.compare_swap(lock, 0, 0, 1 + comm.rank()) != 0:
        pass
    shared = comm.symm_at(total, 0)
    own = total.tile(1, rows=1)
    comm.get(own, shared.tile(0, rows=1))
    own.numpy()[:] += 1
    comm.put(shared.tile(0, rows=1), own)
    comm.quiet()
    if is_locked:
        assert comm.compare_swap(lock, 0, 1 + comm.rank(), 0) == 1 + comm.rank()


def total_of(is_locked, seed):
    """The sum of three devices that each add one."""
    devices = comm.local(3, delays=seed)
    lock, total = devices.signals(1)[0], devices.symm_tensor((2, 1), "i32")
    devices.run(add_one, lock, total, is_locked)
    return int(total.numpy(0)[0, 0])


def test_compare_swap_makes_a_lock():
    """A lock from `compare_swap` protects an addition that otherwise loses some on some schedules."""
    assert all(total_of(True, seed) == 3 for seed in (None, *range(15)))
    assert any(total_of(False, seed) < 3 for seed in SEEDS)


def send(x, y, ready, order):
    """Device 0 sends two rows and a signal to device 1, which reads the rows."""
    if comm.rank() == 0:
        peer = comm.symm_at(y, 1)
        comm.put(peer[0:2], x[0:2])
        if order == "put_signal":
            comm.put_signal(peer[2:4], x[2:4], ready)
        else:
            {"fence": comm.fence, "quiet": comm.quiet}.get(order, int)()
            comm.notify(ready, 1)
        return True
    if order != "no wait":
        y = comm.consume_token(y, comm.wait(ready, 1))
    return (y.numpy()[{"put_signal": slice(2, 4)}.get(order, slice(2))] == 1).all()


def send_by_a_third(x, y, ready, order):
    """Device 0 sends to device 2, then tells device 1, which tells device 2."""
    if comm.rank() == 0:
        comm.put(comm.symm_at(y, 2), x)
        {"fence": comm.fence, "quiet": comm.quiet}.get(order, int)()
        comm.notify(ready, 1)
    elif comm.rank() == 1:
        comm.wait(ready, 1)
        comm.notify(ready, 2)
    else:
        return (comm.consume_token(y, comm.wait(ready, 1)).numpy() == 1).all()
    return True


def send_twice(x, y, ready, order):
    """Device 0 sends 1, then 2, into the same rows. Device 1 reads both, and acknowledges the first in between."""
    if comm.rank() == 0:
        for value in (1, 2):
            x.numpy()[:] = value
            if value == 2 and order == "acknowledged":
                comm.wait(ready, 1)
            comm.put_signal(comm.symm_at(y, 1), x, ready)
        return True
    seen = []
    for value in (1, 2):
        y = comm.consume_token(y, comm.wait(ready, value))
        seen.append(y.numpy()[0, 0])
        comm.notify(ready, 0)
    return seen == [1, 2]


def earlier_put(x, y, ready, order):
    """A signal announces its own put only, not an earlier one, unless a fence orders them."""
    if comm.rank() == 0:
        comm.put(comm.symm_at(y, 1)[0:2], x[0:2])
        if order == "fence":
            comm.fence()
        comm.put_signal(comm.symm_at(y, 1)[2:4], x[2:4], ready)
        return True
    return (comm.consume_token(y, comm.wait(ready, 1)).numpy() == 1).all()


def atomics(x, y, ready, order):
    """Device 0 sends rows, and then changes a signal atomically."""
    if comm.rank() == 0:
        comm.put(comm.symm_at(y, 1), x)
        if order != "neither":
            comm.fence()
        if order == "fence, swap":
            comm.compare_swap(ready, 1, 0, 1)
        else:
            comm.fetch_add(ready, 1)
        return True
    return (comm.consume_token(y, comm.wait(ready, 1)).numpy() == 1).all()


def meet(x, y, ready, order):
    """Each device sends to the other, and reads after a barrier, which completes what was sent."""
    me = comm.rank()
    comm.put(comm.symm_at(y, 1 - me), x)
    if order == "barrier":
        comm.barrier()
    else:
        comm.notify(ready, 1 - me)
        comm.wait(ready)
    return (y.numpy() == 1).all()


def is_right(program, order, seed):
    """Whether no device saw anything else than what was sent."""
    devices = comm.local(3 if program is send_by_a_third else 2, delays=seed)
    x, y = devices.symm_tensor((4, 2)), devices.symm_tensor((4, 2))
    for device in range(devices.num_devices):
        x.numpy(device)[:] = 1
    return all(devices.run(program, x, y, devices.signals(1)[0], order))


@pytest.mark.parametrize(
    ("program", "right", "wrong"),
    [
        (send, ("fence", "quiet", "put_signal"), ("neither", "no wait")),
        (send_by_a_third, ("quiet",), ("fence", "neither")),
        (send_twice, ("acknowledged",), ("not acknowledged",)),
        (earlier_put, ("fence",), ("neither",)),
        (atomics, ("fence, add", "fence, swap"), ("neither",)),
        (meet, ("barrier",), ("signal",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_delays_find_what_does_not_order(program, right, wrong):
    """What OpenSHMEM orders is right on all schedules; what it does not order is wrong on some."""
    for order in right:
        assert all(is_right(program, order, seed) for seed in SEEDS), order
    for order in wrong:
        assert not all(is_right(program, order, seed) for seed in SEEDS), order


def test_a_seed_repeats_its_run():
    """The order of steps follows from the seed; other seeds have other orders."""

    def steps(seed):
        order = []
        devices = comm.local(3, delays=seed)
        ready = devices.signals(3)

        def program():
            for n in range(3):
                order.append(comm.rank())
                comm.notify(ready[n], (comm.rank() + 1) % 3)
                comm.wait(ready[n])

        devices.run(program)
        return order

    orders = [steps(seed) for seed in range(8)]
    assert orders == [steps(seed) for seed in range(8)]
    assert len({*map(tuple, orders)}) > 4
