"""`Schedule`: the threads of one run of `comm.local`: who may continue, who waits for what, and which
puts and signals are still under way.

All state is protected by one lock. A thread holds it inside `step`, never while it runs user code.

Without a seed, the threads run freely, and everything that they send arrives at once. With a seed,
one thread runs at a time, and each primitive may pass the turn to another thread. What a device
sends is kept, and delivered later in any order that OpenSHMEM permits. The seed alone decides all of
this, so a run can be repeated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Condition

from tilewise.core.errors import CommError, CommTimeout

__all__ = ["Released", "Schedule"]

_OWN_FILES = (str(Path(__file__).parent), contextmanager.__code__.co_filename)  # not the user's
_EAGERNESS = (0.02, 0.3, 0.9)  # how likely a delivery is at each turn; a run draws one


class Released(BaseException):
    """Ends the thread of a device after another device has failed. Not an `Exception`, so that
    programs do not catch it by mistake.
    """


@dataclass(eq=False)
class _Delivery:
    """Something that a device has sent.

    Attributes:
        target: the device where it arrives.
        fences: how often the sender had called `fence` before.
        land: makes it visible.
        after: deliveries that must arrive before: the data that a signal announces.
    """

    target: int
    fences: int
    land: Callable[[], None]
    after: Sequence[_Delivery] = ()


@dataclass(eq=False)
class _Thread:
    """The thread of one device.

    Attributes:
        primitive: the last primitive that it has called; empty before the first.
        line: file and line of that call.
        is_ready: whether it may continue, while it waits; None while it does not wait.
        seen: describes what it waits for and what it sees now, while it waits.
        fences: how often it has called `fence`.
        sent: what it has sent and what has not arrived, oldest first.
    """

    primitive: str = ""
    line: str = ""
    is_live: bool = True
    is_ready: Callable[[], bool] | None = None
    seen: Callable[[], str] = str
    fences: int = 0
    sent: list[_Delivery] = field(default_factory=list)

    @property
    def can_continue(self) -> bool:
        return self.is_live and (self.is_ready is None or self.is_ready())

    @property
    def state(self) -> str:
        """What the device does, in words."""
        if not self.is_live:
            return "has ended"
        if self.is_ready:
            return f"waits in {self.primitive} at {self.line} ({self.seen()})"
        return f"computes after {self.primitive} at {self.line}" if self.primitive else "computes"


class Schedule:
    """Threads of one run.

    Args:
        num_devices: the number of devices; each has one thread.
        seed: decides turns and delays; None if threads run freely and everything arrives at once.

    Attributes:
        error: the first failure, with the number of the device that failed; -1 for all devices, or for the caller
            of `run`.
    """

    def __init__(self, num_devices: int, seed: int | None) -> None:
        self.error: tuple[int, BaseException] | None = None
        self._changed = Condition()
        self._threads = [_Thread() for _ in range(num_devices)]
        self._random = None if seed is None else Random(seed)
        self._turn = -1
        if self._random:
            self._eagerness = self._random.choice(_EAGERNESS)
            self._turn = self._random.randrange(num_devices)

    def begin(self, device: int) -> None:
        """Called first by the thread of each device."""
        with self._changed:
            self._await_turn(device)

    def end(self, device: int) -> None:
        """Called last by the thread of each device."""
        with self._changed:
            self._threads[device].is_live = False
            self._pass_turn()
            self._changed.notify_all()

    def stop(self, device: int, error: BaseException) -> None:
        """Record a failure, and release all threads. Later failures are ignored."""
        with self._changed:
            self._stop(device, error)

    @contextmanager
    def step(self, device: int, primitive: str) -> Iterator[None]:
        """Hold the lock for one primitive of a device. Other threads may run first.

        Raises:
            Released: another device has failed.
        """
        with self._changed:
            thread = self._threads[device]
            thread.primitive, thread.line = primitive, _line_of_user()
            if self._random:
                self._pass_turn()
                self._await_turn(device)
            self._raise_if_stopped()
            yield
            self._changed.notify_all()

    def line(self, device: int) -> str:
        """Inside `step`: file and line of the user's call."""
        return self._threads[device].line

    def wait(
        self, device: int, is_ready: Callable[[], bool], seen: Callable[[], str], timeout_s: float
    ) -> None:
        """Inside `step`: give up the lock until a condition holds.

        Args:
            device: number of the device that waits.
            is_ready: the condition.
            seen: describes the condition and the state on which it depends.
            timeout_s: how long the condition may take.

        Raises:
            Released: another device has failed, or no device can continue.
            CommTimeout: the condition did not hold in time.
        """
        thread, deadline = self._threads[device], time.monotonic() + timeout_s
        thread.is_ready, thread.seen = is_ready, seen
        try:
            self._pass_turn()
            while not (is_ready() and self._has_turn(device)):
                self._raise_if_stopped()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise CommTimeout(
                        f"[comm.{thread.primitive}] a wait must end within {timeout_s:g} s; got {seen()} at "
                        f"{thread.line}, while {self._others(device)}; let another device post it in time, or pass a "
                        "longer timeout"
                    )
                self._changed.wait(left_s)
        finally:
            thread.is_ready = None

    def send(
        self,
        device: int,
        target: int,
        pieces: Sequence[Callable[[], None]],
        last: Callable[[], None] | None = None,
    ) -> None:
        """Inside `step`: send to a device.

        Args:
            device: the sender.
            target: the receiver.
            pieces: each makes a part visible at the receiver; parts may arrive in any order.
            last: makes visible what must arrive after all parts.
        """
        thread = self._threads[device]
        data = [_Delivery(target, thread.fences, piece) for piece in pieces]
        thread.sent += data
        if last is not None:
            thread.sent.append(_Delivery(target, thread.fences, last, data))
        if not self._random:
            self._deliver_all(thread)

    def fence(self, device: int) -> None:
        """Inside `step`: what the device sends from now on arrives after what it has sent before, at each target."""
        self._threads[device].fences += 1

    def complete(self, device: int) -> None:
        """Inside `step`: deliver all that the device has sent."""
        self._deliver_all(self._threads[device])

    def complete_fenced(self, device: int, target: int) -> None:
        """Inside `step`: deliver all that the device has sent to the target before its last fence."""
        thread = self._threads[device]
        before = [d for d in thread.sent if d.target == target and d.fences < thread.fences]
        while before:
            self._deliver(thread, next(d for d in before if self._may_land(thread, d)))
            before = [d for d in before if d in thread.sent]

    def finish(self) -> None:
        """After the end of all threads: deliver what is still under way."""
        with self._changed:
            for thread in self._threads:
                self._deliver_all(thread)

    def _deliver_all(self, thread: _Thread) -> None:
        while thread.sent:
            landable = self._landable(thread)
            self._deliver(thread, self._random.choice(landable) if self._random else landable[0])

    @staticmethod
    def _deliver(thread: _Thread, delivery: _Delivery) -> None:
        thread.sent.remove(delivery)
        delivery.land()

    def _landable(self, thread: _Thread) -> list[_Delivery]:
        return [d for d in thread.sent if self._may_land(thread, d)]

    @staticmethod
    def _may_land(thread: _Thread, delivery: _Delivery) -> bool:
        """Whether no fence and no signal orders something else before."""
        return not any(
            other in delivery.after or (other.target == delivery.target and other.fences < delivery.fences)
            for other in thread.sent
        )

    def _pass_turn(self) -> None:
        """Choose the thread that runs next. If no thread can continue, and nothing is under way that
        may change this, stop the run.
        """
        if self._random:
            while self._random.random() < self._eagerness and self._deliver_any(self._random):
                pass
        while not (able := [n for n, thread in enumerate(self._threads) if thread.can_continue]):
            if not (self._random and self._deliver_any(self._random)):
                break
        waiting = [n for n, thread in enumerate(self._threads) if thread.is_live]
        if able and self._random:
            self._turn = self._random.choice(able)
        if waiting and not able and self.error is None:
            what = "; ".join(f"device {n} {self._threads[n].state}" for n in range(len(self._threads)))
            self._stop(
                -1,
                CommError(
                    "[comm.local] a device must be able to continue (deadlock); got only devices that wait: "
                    f"{what}; post what one of them waits for"
                ),
            )
        self._changed.notify_all()

    def _deliver_any(self, random: Random) -> bool:
        """Deliver one thing; False if nothing is under way."""
        under_way = [(thread, d) for thread in self._threads for d in self._landable(thread)]
        if under_way:
            self._deliver(*random.choice(under_way))
        return bool(under_way)

    def _has_turn(self, device: int) -> bool:
        return self._random is None or self._turn == device

    def _await_turn(self, device: int) -> None:
        while not self._has_turn(device):
            self._raise_if_stopped()
            self._changed.wait()
        self._raise_if_stopped()

    def _stop(self, device: int, error: BaseException) -> None:
        if self.error is None:
            self.error = (device, error)
        self._changed.notify_all()

    def _raise_if_stopped(self) -> None:
        if self.error is not None:
            raise Released

    def _others(self, device: int) -> str:
        others = [f"device {n} {t.state}" for n, t in enumerate(self._threads) if n != device]
        return "; ".join(others) or "there is no other device"


def _line_of_user() -> str:
    """File and line of the user's call that the current thread carries out."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
