"""The scheduler as a state machine: in any history, blocks are neither lost nor used twice, and all texts end."""

import pytest
from hypothesis import given, settings

from pure.serve.scheduling import MAX_CONTEXT, Arrival, Cancel, Machine, Steps, histories, limits
from tilewise.core import ConfigError, InternalError
from tilewise.models import BLOCK_SIZE
from tilewise.serve import scheduler as scheduler_module
from tilewise.serve import sequence as sequence_module
from tilewise.serve.blocks import BlockPool, block_key
from tilewise.serve.scheduler import Limits, Scheduled, Scheduler
from tilewise.serve.sequence import Sequence, Status

SMALL = Limits(4, 40, 6, 6, MAX_CONTEXT)


def _play(bounds, history):
    machine = Machine(Scheduler(bounds))
    machine.scheduler.free_tokens = bounds.num_blocks // 2
    machine.play(history)
    assert machine.scheduler.pool.num_free == bounds.num_blocks
    assert all(s.status is Status.FINISHED for s in machine.sequences)
    for sequence in machine.sequences:
        if sequence.finish_reason == "length":
            assert sequence.history.num_new == sequence.request.sampling.max_tokens
    return machine


@settings(max_examples=120)
@given(limits(), histories)
def test_every_history_ends_with_every_block_free(bounds, history):
    """`Machine` checks budget, reference counts, slots and progress after every decision."""
    _play(bounds, history)


@pytest.mark.soak
@settings(max_examples=10_000)
@given(limits(), histories)
def test_ten_thousand_histories(bounds, history):
    """The same, more of them."""
    _play(bounds, history)


BUSY = [
    *(Arrival(stream=i % 2, length=100 + 9 * i, num_new=60, n=1 + i % 2, salt=i // 2 % 2) for i in range(5)),
    Steps(9),
    Cancel(1),
    *(Arrival(stream=0, length=150, num_new=30, salt=i % 2) for i in range(3)),
]
GUESSED = [
    *(
        Arrival(stream=i, length=50, num_new=60, n=1 + i, guesses=(True, i > 0, True, False, True))
        for i in range(2)
    ),
    Steps(5),
]


def test_busy_history_preempts_and_reuses_blocks():
    """The behaviour that the faults below disturb does occur."""
    machine = _play(SMALL, [*BUSY, *GUESSED])
    assert machine.scheduler.num_preemptions > 0
    assert any(s.num_cached for s in machine.sequences)
    assert machine.num_accepted > 0
    assert _play(SMALL, BUSY).num_previews > 20


def test_right_guesses_save_calls():
    """A text whose guesses are all right takes a fifth of the calls."""
    plain, guessed = (
        _play(Limits(1, 20, 20, 4, MAX_CONTEXT), [Arrival(0, 9, 50, guesses=guesses)])
        for guesses in ((), (True,) * 4)
    )
    assert plain.sequences[0].history.ids == guessed.sequences[0].history.ids
    assert (plain.num_steps, guessed.num_steps) == (50, 10)


def _freed_early(monkeypatch):
    complete = Scheduler.complete

    def wrong(self, parts):
        complete(self, parts)
        for part in parts:
            if len(part.sequence.blocks) > 1:
                self.pool.release(part.sequence.blocks[:1])

    monkeypatch.setattr(Scheduler, "complete", wrong)


def _never_freed(monkeypatch):
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: None)


def _shares_while_written(monkeypatch):
    monkeypatch.setattr(Sequence, "first_row", property(lambda self: len(self) + BLOCK_SIZE - 1))


def _without_salt(monkeypatch):
    monkeypatch.setattr(sequence_module, "block_key", lambda scope, *rest: block_key((), *rest))


def _without_parent(monkeypatch):
    monkeypatch.setattr(sequence_module, "block_key", lambda scope, _, ids: block_key(scope, b"", ids))


def _still_found(monkeypatch):
    monkeypatch.setattr(BlockPool, "_forget", lambda self, block: None)


def _named_too_soon(monkeypatch):
    schedule = Scheduler.schedule

    def wrong(self):
        parts = schedule(self)
        for part in parts:
            for block, key in zip(part.blocks, part.sequence.keys(len(part.sequence) // BLOCK_SIZE)):
                self.pool.register(block, key)
        return parts

    monkeypatch.setattr(Scheduler, "schedule", wrong)


def _over_budget(monkeypatch):
    monkeypatch.setattr(
        scheduler_module._Step, "add", lambda self, part: self.parts.update({part.sequence: part})
    )


def _reads_at_once(monkeypatch):
    monkeypatch.setattr(scheduler_module, "_num_read", lambda part: 0)


def _youngest_first(monkeypatch):
    def preempt_oldest(self, sequence):
        preempt(self, self._running[0])

    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", preempt_oldest)


def _guesses_are_kept(monkeypatch):
    monkeypatch.setattr(Scheduled, "confirmed_end", property(lambda self: self.end))


def _guesses_without_blocks(monkeypatch):
    change = Scheduled._replace
    monkeypatch.setattr(Scheduled, "_replace", lambda self, *, blocks, **new: change(self, **new))


def _previews_arrivals_away(monkeypatch):
    def wrong(self, parts):
        waiting, self._waiting = self._waiting, []
        previewed = preview(self, parts)
        self._waiting = waiting
        return previewed

    preview = Scheduler.preview
    monkeypatch.setattr(Scheduler, "preview", wrong)


def _previews_without_blocks(monkeypatch):
    take = BlockPool.take
    monkeypatch.setattr(BlockPool, "take", lambda self, count: take(self, count) if count != 1 else [0])


FAULTS = [
    *(_previews_arrivals_away, _previews_without_blocks),
    *(_freed_early, _never_freed, _shares_while_written, _without_salt, _without_parent, _still_found),
    *(
        _named_too_soon,
        _over_budget,
        _reads_at_once,
        _youngest_first,
        _guesses_are_kept,
        _guesses_without_blocks,
    ),
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_faults_are_detected(monkeypatch, plant):
    """The twin: every one of these breaks a history."""
    plant(monkeypatch)
    history = [
        *BUSY,
        Steps(400),
        *GUESSED,
        Steps(400),
        *(Arrival(stream=s, length=count, num_new=40, n=3) for s, count in ((0, 64), (1, 128), (0, 120))),
        Steps(400),
        *(Arrival(stream=s, length=count, num_new=40) for s, count in ((0, 140), (3, 70))),
        Steps(400),
        Arrival(stream=3, length=140, num_new=9),
        Steps(400),
        Arrival(stream=2, length=140, num_new=9, salt=9),
        Steps(1),
        Cancel(25),
        Arrival(stream=2, length=140, num_new=9, salt=9),
    ]
    with pytest.raises((AssertionError, InternalError, IndexError, ValueError)):
        _play(SMALL, history)


def test_no_request_starves():
    """A request of low priority ends while others of higher priority keep arriving."""
    machine = Machine(Scheduler(Limits(2, 8, 2, 4, MAX_CONTEXT)))
    scheduler_module_steps = scheduler_module.PRIORITY_STEPS
    machine.add(Arrival(0, 20, 5, priority=1))
    waiting = machine.sequences[0]
    for _ in range(scheduler_module_steps + 200):
        while machine.scheduler.num_waiting < 3:
            machine.add(Arrival(1, 10, 3, priority=0))
        machine.step()
        if waiting.status is Status.FINISHED:
            break
    assert waiting.finish_reason == "length"


def test_priorities_go_first():
    """Of requests that arrive together, lower numbers are admitted first, and preempted last."""
    machine = Machine(Scheduler(Limits(1, 64, 1, 4, MAX_CONTEXT)))
    for priority in (1, 0, -1, 0):
        machine.add(Arrival(0, 8, 2, priority=priority))
    order = []
    while machine.scheduler.has_work:
        order += [part.sequence for part in machine.step()]
    assert list(dict.fromkeys(machine.sequences.index(s) for s in order)) == [2, 1, 3, 0]


def test_prompts_are_read_at_once_only_where_no_text_waits():
    """A prompt alone: a full step. Next to one text: what is nearly free; next to many: as many tokens as texts."""
    machine = Machine(Scheduler(Limits(8, 64, 8, 32, MAX_CONTEXT)))
    machine.scheduler.free_tokens = 5

    def chunks():
        return [count for part in machine.step() if (count := part.end - part.start) > 1]

    machine.add(Arrival(0, 100, 60))
    assert (chunks(), chunks()) == ([64], [36])
    machine.add(Arrival(1, 23, 60))
    assert [chunks() for _ in range(5)] == [[5], [5], [5], [5], [3]]
    for _ in range(5):
        machine.add(Arrival(2, 1, 60))
    machine.step()
    machine.add(Arrival(3, 20, 60))
    assert [chunks() for _ in range(3)] == [[7], [7], [6]]


def test_throughput_mode_fills_steps():
    """As offline: the rest of each step reads prompts."""
    machine = Machine(Scheduler(Limits(8, 64, 8, 32, MAX_CONTEXT, paces_prompts=False)))
    machine.add(Arrival(0, 100, 60))
    machine.step()
    machine.step()
    machine.add(Arrival(1, 100, 60))
    assert [[part.end - part.start for part in machine.step()] for _ in range(2)] == [[1, 63], [1, 37]]


def test_texts_of_one_prompt_share_its_blocks():
    """Of three and a fraction blocks, the three are shared, and the fraction is copied per text."""
    machine = Machine(Scheduler(Limits(4, 300, 4, 12, MAX_CONTEXT)))
    machine.scheduler.free_tokens = 3 * 5
    machine.add(Arrival(0, 3 * BLOCK_SIZE + 5, 9, n=4))
    machine.step()
    assert machine.scheduler.num_running == 1  # the others wait for the prompt
    machine.step()
    assert sorted(machine.scheduler.pool.ref_counts(), reverse=True) == [4, 4, 4, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert [s.num_cached for s in machine.sequences] == [0, *[3 * BLOCK_SIZE] * 3]


def test_least_recently_used_block_is_evicted_first():
    """The end of a chain is evicted before its beginning."""
    pool = BlockPool(4)
    blocks = pool.take(4)
    for block in blocks:
        pool.register(block, bytes([block]))
    pool.release(blocks[:2])
    pool.release(blocks[2:])
    blocks_of_keys = pool.find([bytes([blocks[0]]), bytes([blocks[1]])])
    pool.add_references(blocks_of_keys)
    pool.release(blocks_of_keys)
    assert pool.take(4) == [blocks[3], blocks[2], blocks[1], blocks[0]]


def test_defects_are_detected():
    """Taking more blocks than are free, and freeing a block twice, are defects."""
    pool = BlockPool(2)
    block = pool.take(1)
    pool.release(block)
    with pytest.raises(InternalError, match="only a referenced block"):
        pool.release(block)
    with pytest.raises(InternalError, match="only free blocks"):
        pool.take(3)


def test_keys_separate_fields():
    """No field can be taken for another, nor a scope's end for a parent's beginning."""
    scope = ((b"model", b"m"), (b"salt", b"s"))
    keys = [
        block_key(scope, b"", [1, 2]),
        block_key(scope, b"", [2, 1]),
        block_key(scope, b"\0" * 32, [1, 2]),
        block_key(((b"model", b"m"), (b"salt", b"t")), b"", [1, 2]),
        block_key(((b"model", b"ms"), (b"salt", b"")), b"", [1, 2]),
        block_key(((b"model", b"m"), (b"adapter", b"s")), b"", [1, 2]),
        block_key(((b"model", b"m"),), b"", [1, 2]),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "wrong", [(0, 8, 8, 4, 64), (4, 3, 8, 4, 64), (4, 8, 3, 4, 64), (4, 8, 8, 1, 65), (True, 8, 8, 4, 64)]
)
def test_impossible_limits_are_rejected(wrong):
    """Each sequence has a token and a row a step, and a full one fits the cache."""
    with pytest.raises(ConfigError, match=r"\[serve\.limits\]"):
        Limits(*wrong)
