"""Mistakes in programs on `comm.local` are reported: invalid arguments, waits that cannot end, failures."""

import _thread
import re
import threading

import numpy as np
import pytest

import tilewise as tw
from tilewise import comm
from tilewise.core.errors import CommError, CommTimeout, LayoutError, PlanError, ShapeError, TaskFailed


def on_two(program, **options):
    """Run a program of two devices with a tensor `x` and signals `ready`."""
    devices = comm.local(2, **options)
    return devices.run(program, devices.symm_tensor((4, 2), name="x"), devices.signals(3, name="ready"))


def in_turn(first, second):
    """A program in which device 1 begins after device 0 has ended its part."""

    def program(x, ready):
        if comm.rank() == 0:
            first(x, ready)
        comm.barrier()
        if comm.rank() == 1:
            second(x, ready)

    return program


CHECKS = {
    "semantic of wait": (
        PlanError,
        'wait] semantic must be "acquire"',
        lambda x, r: comm.wait(r[0], semantic="release"),
    ),
    "semantic of wait_any": (
        PlanError,
        "wait_any] semantic",
        lambda x, r: comm.wait_any(r, semantic="release"),
    ),
    "semantic of notify": (
        PlanError,
        'notify] semantic must be "release"',
        lambda x, r: comm.notify(r[0], 0, semantic="acquire"),
    ),
    "scope": (PlanError, "scope must be one of gpu, sys", lambda x, r: comm.wait(r[0], scope="cta")),
    "comparison": (PlanError, "cmp must be one of eq, ne", lambda x, r: comm.wait(r[0], cmp="==")),
    "operator": (PlanError, "op must be one of set, add", lambda x, r: comm.notify(r[0], 0, op="max")),
    "peer": (PlanError, r"a device must lie in \[0, 1\]; got 2", lambda x, r: comm.notify(r[0], 2)),
    "peer of a tensor": (PlanError, r"symm_at\] .* got -1", lambda x, r: comm.symm_at(x, -1)),
    "axis": (PlanError, "an axis must be one of devices; got 'tp'", lambda x, r: comm.rank("tp")),
    "value": (PlanError, "value of a signal must lie in", lambda x, r: comm.notify(r[0], 0, -1)),
    "values": (PlanError, "one value per signal; got 2 for 3", lambda x, r: comm.wait(r, [0, 0])),
    "no signal": (PlanError, "a signal must be a LocalSignal", lambda x, r: comm.wait([x])),
    "no signals": (PlanError, "signals must be a sequence of signals", lambda x, r: comm.wait(x)),
    "all skipped": (PlanError, "a signal must remain", lambda x, r: comm.wait_any(r, skip=range(3))),
    "post with gpu": (
        PlanError,
        'post with scope "gpu" its own signals only',
        lambda x, r: comm.notify(r[0], 1 - comm.rank(), scope="gpu"),
    ),
    "wait with gpu for a peer": (
        PlanError,
        'scope "gpu" must be for a signal that only its own device posts, here ready.0.; got a wait of device 1 and '
        "a post by device 0",
        in_turn(lambda x, r: comm.notify(r[0], 1), lambda x, r: comm.wait(r[0], scope="gpu")),
    ),
    "post of what waits with gpu": (
        PlanError,
        r'\[comm.notify\] a wait with scope "gpu"',
        in_turn(
            lambda x, r: (comm.notify(r[0], 0), comm.wait(r[0], scope="gpu")),
            lambda x, r: comm.notify(r[0], 0),
        ),
    ),
    "two operators": (
        PlanError,
        r"signal ready\[1\] of device 0 must be used with one operator; got set after add",
        in_turn(lambda x, r: comm.notify(r[1], 0), lambda x, r: comm.notify(r[1], 0, op="set")),
    ),
    "compare_swap and set": (
        PlanError,
        "got compare_swap after set",
        in_turn(lambda x, r: comm.notify(r[1], 0, op="set"), lambda x, r: comm.compare_swap(r[1], 0, 0, 1)),
    ),
    "shape": (
        ShapeError,
        r"\[comm.put\] dst and src .* got \[4, 2\] .* and \[2, 2\]",
        lambda x, r: comm.put(x, x[1:3]),
    ),
    "dtype": (ShapeError, "same shape and dtype", lambda x, r: comm.put(x, np.zeros((4, 2)))),
    "no tensor": (PlanError, "dst must be a LocalTensor", lambda x, r: comm.put(np.zeros(2), x)),
    "put from a peer": (
        PlanError,
        "src must be a tensor of the calling device",
        lambda x, r: comm.put(x, comm.symm_at(x, 1 - comm.rank())),
    ),
    "get to a peer": (
        PlanError,
        "dst must be a tensor of the calling device",
        lambda x, r: comm.get(comm.symm_at(x, 1 - comm.rank()), x),
    ),
    "rows": (
        ShapeError,
        r"rows of 'x' must lie in 0 to 4; got \[3:5\]",
        lambda x, r: x[3:5],
    ),
    "index": (ShapeError, r"an index of 'x' must be rows; got 1", lambda x, r: x[1]),
    "token": (PlanError, "the result of a wait", lambda x, r: comm.consume_token(x, 1)),
    "tensor of others": (
        PlanError,
        "a tensor of the same devices",
        lambda x, r: comm.put(comm.local(2).symm_tensor((4, 2)), x),
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_invalid_calls_are_refused(name):
    """Each documented rule has an error that names it, and the device that broke it."""
    error, message, program = CHECKS[name]
    devices = comm.local(2)
    x, ready = devices.symm_tensor((4, 2), name="x"), devices.signals(3, name="ready")
    with pytest.raises(error, match=message) as raised:
        devices.run(program, x, ready)
    assert re.search(r"\(device [01] of 2\)$", str(raised.value))


def test_a_token_of_another_device_is_refused():
    """A token proves only that its own device has waited."""
    tokens = {}

    def program(x, ready):
        comm.notify(ready[0], comm.rank())
        tokens[comm.rank()] = comm.wait(ready[0])
        comm.barrier()
        comm.consume_token(x, tokens[0])

    with pytest.raises(PlanError, match=r"got one of device 0.*\(device 1 of 2\)"):
        on_two(program)


def test_primitives_need_a_program():
    """Outside of a program each primitive says where it may be called, and a tensor asks for the device."""
    devices = comm.local(2)
    x, ready = devices.symm_tensor((4, 2)), devices.signals(1)
    calls = [
        lambda: comm.rank(),
        lambda: comm.wait(ready[0]),
        lambda: comm.put(x, x),
        lambda: comm.barrier(),
        lambda: comm.tiles(2),
    ]
    for call in calls:
        with pytest.raises(PlanError, match=r"must be called by a program.*tw.comm.local\(n\).run"):
            call()
    for call in (x.numpy, ready[0].value):
        with pytest.raises(PlanError, match="a device must be chosen"):
            call()
    assert x.numpy(1).shape == (4, 2) and ready[0].value(1) == 0


@pytest.mark.parametrize("delays", [None, 3])
def test_a_deadlock_names_what_each_device_waits_for(delays):
    """Waits that no device can end are reported at once, with line, signal, expected and seen value."""

    def program(x, ready):
        if comm.rank() == 0:
            comm.notify(ready[1], 1, 2)
            comm.wait(ready[0], 3)
        else:
            comm.wait(ready[1:3], [2, 1])

    with pytest.raises(CommError, match="deadlock") as raised:
        on_two(program, delays=delays)
    text = str(raised.value)
    assert re.search(
        r"device 0 waits in wait at test_local_errors.py:\d+ \(ready\[0\] >= 3, and it is 0\)", text
    )
    assert re.search(r"device 1 waits in wait_all at .*py:\d+ \(ready\[2\] >= 1, and it is 0\)", text)
    with pytest.raises(CommError, match=r"device 0 has ended; device 1 waits in barrier .*1 of 2 devices"):
        on_two(lambda x, ready: comm.rank() and comm.barrier(), delays=delays)


def test_a_late_signal_is_reported_with_what_the_others_do():
    """A timeout names signal, expected and seen value, and each other device's last primitive."""
    ended = threading.Event()

    def program(x, ready):
        if comm.rank() == 0:
            comm.quiet()
            ended.wait(30)
        else:
            try:
                comm.wait(ready[2], 7, cmp="eq", timeout=0.02)
            finally:
                ended.set()

    with pytest.raises(
        CommTimeout, match=r"within 0.02 s; got ready\[2\] == 7, and it is 0 at .*py:\d+, while"
    ) as raised:
        on_two(program)
    assert re.search(r"device 0 computes( after quiet at .*py:\d+)?;.*\(device 1 of 2\)", str(raised.value))


@pytest.mark.parametrize("delays", [None, 1])
def test_a_failure_releases_the_other_devices(delays):
    """The first error is raised with its device; devices that wait stop, even if they catch errors."""
    survived = []

    def program(x, ready):
        if comm.rank() == 1:
            raise KeyError("mine")
        try:
            comm.wait(ready[0])
        except Exception:
            survived.append(comm.rank())
        survived.append(comm.rank())

    with pytest.raises(TaskFailed, match=r"KeyError\('mine'\) on device 1 of 2") as raised:
        on_two(program, delays=delays)
    assert raised.value.device == 1 and isinstance(raised.value.__cause__, KeyError) and not survived


@pytest.mark.parametrize("delays", [None, 1])
def test_an_interrupt_ends_all_devices(delays):
    """Ctrl-C reaches the caller of `run`, after the devices have stopped."""
    threads = threading.active_count()

    def program(x, ready):
        if comm.rank() == 0:
            _thread.interrupt_main()
        while True:
            comm.quiet()

    with pytest.raises(KeyboardInterrupt):
        on_two(program, delays=delays)
    assert threading.active_count() == threads


def test_devices_run_one_program_at_a_time():
    """A program cannot start another one on its devices."""
    devices = comm.local(2)
    with pytest.raises(PlanError, match="one program at a time"):
        devices.run(lambda: devices.run(print))


def test_devices_run_again_after_a_failure():
    """A failed run does not keep the devices."""
    devices = comm.local(2)
    with pytest.raises(TaskFailed):
        devices.run(lambda: 1 / comm.rank())
    assert devices.run(comm.rank) == [0, 1]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            lambda d: d.symm_tensor((2 + comm.rank(), 2)),
            r"number 1; got symm_tensor\(\[\d, 2\], 'f32'\) on device \d at",
        ),
        (lambda d: d.symm_tensor((2, 2), ["f32", "i32"][comm.rank()]), "the same order"),
        (lambda d: d.symm_tensor((2, 2)) if comm.rank() else d.signals(4), r"got .*signals\(4\)"),
        (
            lambda d: d.signals(4) if comm.rank() else None,
            r"signals\(4\) on device 1 at .*, and not on device 0",
        ),
    ],
)
def test_allocations_in_programs_must_agree(program, message):
    """The n-th allocation is the same on all devices; both calls are named."""
    devices = comm.local(2)
    with pytest.raises(ShapeError, match=message):
        devices.run(program, devices)


def test_allocations_in_programs_are_symmetric():
    """What a program allocates exists on all devices, for peers too."""
    devices = comm.local(3)

    def program():
        x, ready = devices.symm_tensor((1, 1)), devices.signals(1)[0]
        peer = (comm.rank() + 1) % 3
        comm.put_signal(comm.symm_at(x, peer), np.full((1, 1), comm.rank(), np.float32), ready)
        return int(comm.consume_token(x, comm.wait(ready)).numpy()[0, 0])

    assert devices.run(program) == [2, 0, 1]


def test_invalid_devices_are_refused():
    """Numbers, axes, delays and shapes."""
    for call in (lambda: comm.local(0), lambda: comm.local(2, delays=-1), lambda: comm.local(2, timeout_s=0)):
        with pytest.raises(PlanError):
            call()
    with pytest.raises(LayoutError):
        comm.local({"tp": 0})
    for shape, dtype in (((), "f32"), ((-1,), "f32"), ((2,), "f8")):
        with pytest.raises(ShapeError):
            tw.comm.local(2).symm_tensor(shape, dtype)
    with pytest.raises(PlanError):
        comm.local(2).signals(0)
