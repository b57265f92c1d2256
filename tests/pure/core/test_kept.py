"""What workers keep: each object is sent once, is the same there, and is given back."""

import gc
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # also for workers, which get this path
import kept_things as things

from tilewise.core import kept
from tilewise.core.workers import WorkerPool


@pytest.fixture
def pool():
    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture
def sent(monkeypatch):
    """Bytes of each message."""
    found, dumps = [], kept.Far.dumps

    def count(self, content):
        body = dumps(self, content)
        found.append(len(body))
        return body

    monkeypatch.setattr(kept.Far, "dumps", count)
    return found


def apart(pool, function, calls, about=None):
    """Results of the other process alone: this one takes part only when all is taken."""
    with pool.begin(function, calls, about=about) as shared:
        while len(shared._results) < len(calls) and not shared._failures:
            time.sleep(0.001)
        return shared.finish()


def test_what_was_sent_is_not_sent_again(pool, sent):
    """The second message has numbers; the content is the same there."""
    big = [things.Thing(bytes([n]) * 10_000) for n in range(4)]
    expected = [things.look(thing) for thing in big]
    for _ in range(2):
        assert apart(pool, things.look, [(thing,) for thing in big]) == expected
    half = len(sent) // 2
    assert sum(sent[:half]) > 40_000 > 10 * sum(sent[half:])
    assert apart(pool, things.is_here, [()]) == [4]


def test_what_a_worker_made_is_not_sent_back(pool, sent):
    """The object here is another one, of the same content."""
    made = apart(pool, things.make, [(n,) for n in range(4)])
    assert [thing.data[0] for thing in made] == [0, 1, 2, 3]
    assert apart(pool, things.look, [(thing,) for thing in made]) == [things.look(thing) for thing in made]
    assert sum(sent) < 4000


def test_a_planted_fault_is_found(pool, monkeypatch):
    """The twin: numbers that are exchanged give other results."""
    big = [things.Thing(bytes([n]) * 100) for n in range(4)]
    expected = apart(pool, things.look, [(thing,) for thing in big])
    far = pool._links[0].far
    first, second = (far._known[id(thing)] for thing in big[:2])
    far._known[id(big[0])], far._known[id(big[1])] = (first[0], second[1]), (second[0], first[1])
    assert apart(pool, things.look, [(thing,) for thing in big]) != expected


@pytest.mark.slow
def test_what_dies_here_is_given_back_there(pool):
    """With the next message; and all of it by `forget`, what lives here too."""
    big = [things.Thing(bytes([n]) * 100) for n in range(4)]
    apart(pool, things.look, [(thing,) for thing in big])
    made = apart(pool, things.make, [(9,), (8,)])
    assert apart(pool, things.is_here, [()]) == [6]
    del big[1:], made
    gc.collect()
    assert apart(pool, things.is_here, [()]) == [1] and len(pool._links[0].far._known) == 1
    pool.forget()
    assert apart(pool, things.is_here, [()]) == [0]
    assert apart(pool, things.look, [(big[0],)]) == [things.look(big[0])]


def test_another_object_at_the_same_address_is_sent(pool):
    """An id says nothing of an object that is dead."""
    for n in range(50):
        thing = things.Thing(bytes([n]))
        assert apart(pool, things.look, [(thing,)]) == [things.look(thing)]
        del thing
    assert apart(pool, things.is_here, [()]) == [0]


def test_a_worker_takes_first_what_it_keeps(pool):
    """This process is given the others, as long as there are any."""
    big = [things.Thing(bytes([n])) for n in range(32)]
    apart(pool, things.look, [(thing,) for thing in big[16:]])
    with pool.begin(things.look_from, [(thing,) for thing in big], about=big) as shared:
        turns = shared._turns
        assert {*turns._lists[None]} <= {*range(16)} and {*turns._lists[0]} <= {*range(16, 32)}
        found = shared.finish()
    assert [data for data, _ in found] == [things.look(thing) for thing in big]


def test_a_new_worker_is_sent_everything(pool):
    """What a dead one kept is gone with it."""
    big = [things.Thing(bytes([n]) * 100) for n in range(3)]
    apart(pool, things.look, [(thing,) for thing in big])
    before = pool._links[0].process.pid
    with pytest.raises(ValueError, match="no such"):
        apart(pool, things.invalid, [(big[0],)])
    assert apart(pool, things.look, [(thing,) for thing in big]) == [things.look(thing) for thing in big]
    assert pool._links[0].process.pid not in (before, os.getpid())
