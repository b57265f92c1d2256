"""Reading and writing a region of a buffer from Python involves only its own writers and failures."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.core.errors import TaskFailed
from tilewise.runtime import Input, Output


def fail(_):
    raise RuntimeError("planted")


def test_failures_are_per_region(runtime):
    """A failure on one region survives a write of another; a write of the same region ends it."""
    x = np.zeros(8, np.float32)
    with runtime.registered(x) as (buffer,):
        runtime.submit(fail, [Output(buffer[0:4])])
        runtime.write(buffer[4:8])[...] = 2
        high = runtime.read(buffer[4:8])
        assert high.tolist() == [2] * 4 and not high.flags.writeable
        for bad in (buffer, buffer[0:4], buffer[3:5]):
            with pytest.raises(TaskFailed, match="planted"):
                runtime.read(bad)
        runtime.write(buffer[0:4])[...] = 1
        assert runtime.read(buffer).tolist() == [1] * 4 + [2] * 4


def test_a_read_waits_only_for_writers_of_its_region(runtime):
    """Tasks on other regions may wait for an event meanwhile."""
    x, y = np.zeros(8, np.float32), np.ones(4, np.float32)
    event = runtime.event()
    with runtime.registered(x, y) as (bx, by):
        runtime.submit("copy", [Output(bx[0:4]), Input(by)], scalars=[16], wait_for=[(event, 1)])
        runtime.submit("copy", [Output(bx[4:8]), Input(by)], scalars=[16])
        assert runtime.read(bx[4:8]).tolist() == [1] * 4
        with pytest.raises(TimeoutError):
            runtime.read(bx[0:4], timeout=0.01)
        event.post()
        assert runtime.read(bx).tolist() == [1] * 8
