"""Several copies of a model in one engine: the same texts, shared work, and contained errors."""

import asyncio
import time

import pytest

from native.serve.serving_models import TEXTS
from support.faults import inject
from tilewise.core import CheckpointError, ConfigError, PlanError, TaskFailed
from tilewise.core.limits import num_cores
from tilewise.serve import LLM, Engine, SamplingParams
from tilewise.serve import engine as engine_module
from tilewise.serve.model import ServedModel

WAY = SamplingParams(max_tokens=10, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(model_dir):
    with Engine(model_dir, dtype="f32", data_parallel_size=2) as made:
        yield made


def counted(engine, monkeypatch):
    """Number of requests of each copy."""
    counts = [0] * len(engine._replicas)
    for place, replica in enumerate(engine._replicas):
        add = replica._core.add

        def counting(request, place=place, add=add):
            counts[place] += 1
            add(request)

        monkeypatch.setattr(replica._core, "add", counting)
    return counts


def test_copies_share_work_with_the_same_texts(model_dir, pair, monkeypatch):
    """Of twelve requests each copy gets six."""
    with LLM(model_dir, dtype="f32") as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(TEXTS * 4, WAY)]
    counts = counted(pair, monkeypatch)
    texts = [[] for _ in expected]
    for delta in pair.stream(TEXTS * 4, WAY):
        texts[delta.sequence].append(delta.token)
    assert texts == expected and counts == [6, 6]


def test_a_request_goes_to_the_copy_with_less_work(pair, monkeypatch):
    """While one copy generates a long text, the other gets new requests; afterwards both are idle."""
    while any(replica.load for replica in pair._replicas):
        time.sleep(0.001)
    counts = counted(pair, monkeypatch)
    long = pair.stream(TEXTS[:1], SamplingParams(max_tokens=150, ignore_eos=True))
    next(long)
    busy = counts.index(1)
    list(pair.stream(TEXTS[:1], WAY))
    assert counts[busy] == 1 and sum(counts) == 2
    long.close()
    while any(replica.load for replica in pair._replicas):
        time.sleep(0.001)


def test_a_duplicate_name_is_rejected(pair):
    """Named requests go to the same copy, which detects the duplicate."""

    async def ask(number):
        return [output async for output in pair.generate("import", WAY, f"mine {number % 4}")]

    async def ask_at_once():
        return await asyncio.gather(*(ask(number) for number in range(8)), return_exceptions=True)

    results = asyncio.run(ask_at_once())
    errors = [str(one) for one in results if isinstance(one, ConfigError)]
    assert len(errors) == 4 and all("must be unique among live requests" in error for error in errors)
    assert sum(isinstance(one, list) for one in results) == 4


def test_abort_finds_the_copy(pair):
    """By name only; afterwards the name can be used again."""

    async def ask(name):
        outputs = pair.generate("import", SamplingParams(max_tokens=200, ignore_eos=True), name)
        reasons = []
        async for output in outputs:
            pair.abort(name)
            reasons.append(output.outputs[0].finish_reason)
        return reasons[-1]

    pair.abort("one that there is not")
    assert [asyncio.run(ask(name)) for name in "aabc"] == ["abort"] * 4


def test_a_kernel_that_fails_in_one_copy(model_dir):
    """Its requests get the error; those of the other copy and later ones continue."""
    with Engine(model_dir, dtype="f32", data_parallel_size=2) as engine:
        inject(engine._replicas[1].model.instance, "throw", 0, "attention_paged", 0)
        reported = []
        engine.submit(engine.requests(TEXTS[:2], WAY), reported.append)
        while any(replica.load for replica in engine._replicas):
            time.sleep(0.001)
        (error,) = [one for one in reported if isinstance(one, BaseException)]
        assert isinstance(error, TaskFailed)
        assert [one.finish_reason for one in reported if not isinstance(one, BaseException)][-1] == "length"
        assert len(list(engine.stream(TEXTS * 2, WAY))) == 60


def test_copies_share_the_cores(pair):
    """By default a copy's device gets its share of them; memory is reported for each copy's device."""
    workers = [replica.model.instance.plan.settings.workers_per_device for replica in pair._replicas]
    assert workers == [max(1, num_cores() // 2)] * 2
    usage = pair.memory_usage()
    assert len(usage) == 2 and usage[0] == usage[1]


def test_a_copy_that_cannot_be_made_leaves_none(model_dir, monkeypatch, thread_count):
    """The first copy is closed again, and the error is that of the second."""
    before, made = thread_count(), []

    def second_fails(*args):
        if made:
            raise CheckpointError("[test] no more")
        made.append(ServedModel(*args))
        return made[0]

    monkeypatch.setattr(engine_module, "ServedModel", second_fails)
    with pytest.raises(CheckpointError, match="no more"):
        Engine(model_dir, dtype="f32", data_parallel_size=2)
    assert thread_count(before) <= before


def test_closing_closes_all_copies(model_dir):
    """No copy accepts a request afterwards."""
    engine = Engine(model_dir, dtype="f32", data_parallel_size=3)
    engine.close()
    for _ in range(4):
        with pytest.raises(PlanError, match="must be open"):
            list(engine.stream(TEXTS[:1], WAY))
