"""Memory of states is had from the system beforehand, and nothing that lies in it changes."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

import tilewise as tw
from tilewise.session import populate


def resident_bytes(memory: np.ndarray) -> int:
    """Of a range of memory, by whole pages."""
    first = memory.ctypes.data & -mmap.PAGESIZE
    pages = -(-(memory.ctypes.data + len(memory) - first) // mmap.PAGESIZE)
    is_there = (ctypes.c_ubyte * pages)()
    assert (
        ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), is_there)
        == 0
    )
    return sum(page & 1 for page in is_there) * mmap.PAGESIZE


@pytest.fixture
def cached():
    """Two devices that share the heads of a cache of 32 MB."""
    g = tw.ComputeGraph("cached")
    heads = tw.DimLabel("heads", 64)
    x = g.input([2, 128], name="x", labels=[None, heads])
    of_token = [g.input([2], "i32", name=n, storage="scalars") for n in ("slots", "positions", "sequence")]
    table = g.input([1, 1], "i32", name="table")
    cache = g.state([65536, 128], name="cache", labels=[None, heads])
    written = g.kv_write(cache, x, of_token[0], head_dim=64)
    g.output(g.paged_attention(x, written, written, *of_token[1:], table, head_dim=64), "attended")
    with g.instantiate(g.plan({"tp": 2}, workers_per_device=1)) as model:
        yield model


def test_states_are_there_before_they_are_written(cached, monkeypatch):
    """All pages of every device's share; without the thread, those that a run has written."""
    x = np.arange(256, dtype=np.float32).reshape(2, 128)
    none = np.zeros(2, np.int32)
    slots = np.array([0, 65535], np.int32)
    cached.forward(x=x, slots=slots, positions=none, sequence=none, table=none[:1, None])
    parts = [part for state in cached._tensors.states() for part in state]
    assert [len(part) for part in parts] == [16 << 20] * 2
    assert all(resident_bytes(part) < len(part) for part in parts)
    threads = []
    begin = populate.populate_beside
    monkeypatch.setattr("tilewise.session.instance.populate_beside", lambda m: threads.append(begin(m)))
    cached.populate_states()
    threads[0].join()
    assert all(resident_bytes(part) >= len(part) for part in parts)
    written = cached.get_tensor("cache")  # a device has one head, whose rows are the block's
    np.testing.assert_array_equal(written[[0, -1]], x)
    assert np.count_nonzero(written) == np.count_nonzero(x)


def test_the_thread_outlives_the_model(cached, monkeypatch):
    """A model that is closed meanwhile takes no memory from under it."""
    threads, begin = [], populate.populate_beside
    monkeypatch.setattr("tilewise.session.instance.populate_beside", lambda m: threads.append(begin(m)))
    cached.populate_states()
    cached.close()
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_a_system_without_threads_is_no_error(cached, monkeypatch):
    """The memory comes as it is written, then."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(populate.threading.Thread, "start", refuse)
    assert populate.populate_beside([np.zeros(1, np.uint8)]) is None
    cached.populate_states()
