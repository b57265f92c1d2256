"""The engine with its thread: callers that come, leave and fail, without leftovers."""

import asyncio
import atexit
import gc
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest

from native.serve.serving_models import TEXTS, save_model
from pure.hostile import accepted
from support.faults import inject
from tilewise.checkpoint import open_weights, write_weights
from tilewise.core import (
    CheckpointError,
    ConfigError,
    LayoutError,
    PlanError,
    ResourceError,
    TaskFailed,
    TilewiseError,
)
from tilewise.generate import Sampling
from tilewise.serve import Engine, RequestOutputKind, SamplingParams
from tilewise.serve import core as core_module
from tilewise.settings import EngineSettings, settings_of

WAY = SamplingParams(max_tokens=12, temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def engine(model_dir):
    with Engine(model_dir, max_num_seqs=4) as made:
        yield made


@pytest.fixture(scope="module")
def alone(engine):
    """The tokens of each text generated alone."""
    return [[delta.token for delta in engine.stream([text], WAY)] for text in TEXTS]


def _core(engine, function):
    """The result of a function of the core, called between two steps."""
    return engine._between_steps(function)


def _is_idle(engine):
    """Whether no request is open and every block is free."""
    return _core(
        engine,
        lambda core: (
            not core.has_work
            and core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
            and not core._states
            and not core._sequences
        ),
    )


async def _read(outputs, most=None):
    deltas = []
    async for output in outputs:
        deltas.append(output)
        if most is not None and len(deltas) == most:
            break
    return deltas


def test_callers_of_one_event_loop(engine, alone):
    """Outputs grow token by token for many concurrent callers, each equal to the text alone."""

    async def ask():
        return await asyncio.gather(*(_read(engine.generate(text, WAY)) for text in TEXTS * 3))

    for number, outputs in enumerate(asyncio.run(ask())):
        tokens = alone[number % 3]
        assert [o.outputs[0].token_ids for o in outputs] == [tokens[: i + 1] for i in range(len(tokens))]
        assert [o.finished for o in outputs] == [False] * (len(tokens) - 1) + [True]
        assert outputs[-1].prompt == TEXTS[number % 3] and outputs[-1].outputs[0].finish_reason == "length"
    assert _is_idle(engine)


def test_kinds_of_output(engine, alone):
    """Joined deltas, and the final output alone, equal the last cumulative one."""
    kinds = {
        kind: asyncio.run(_read(engine.generate(TEXTS[0], replace(WAY, output_kind=kind))))
        for kind in RequestOutputKind
    }
    last = kinds[RequestOutputKind.CUMULATIVE][-1]
    (final,) = kinds[RequestOutputKind.FINAL_ONLY]
    assert final.outputs == last.outputs and final.finished
    deltas = [output.outputs[0] for output in kinds[RequestOutputKind.DELTA]]
    assert [token for delta in deltas for token in delta.token_ids] == last.outputs[0].token_ids == alone[0]
    assert "".join(delta.text for delta in deltas) == last.outputs[0].text


def test_closing_an_iterator_ends_its_request(engine):
    """By break, by cancelling the task, by dropping it: blocks are freed, and others continue."""
    long = SamplingParams(max_tokens=200, temperature=1.0, seed=1, ignore_eos=True)

    async def ask():
        outputs = engine.generate("import", long)
        assert len(await _read(outputs, 3)) == 3
        await outputs.aclose()
        task = asyncio.create_task(_read(engine.generate("import", long)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in engine.generate("import", long):
            break

    asyncio.run(ask())
    deltas = engine.stream(["import"], long)
    next(deltas)
    del deltas
    gc.collect()
    assert _is_idle(engine)


def test_callers_names_do_not_collide_with_generated_ones(engine):
    """Names like the engine's next ones neither reject nor end another request."""
    (other,) = engine.requests(["import"], WAY)
    number = int(other.request_id.rsplit("-", 1)[1])
    names = [f"request-{number + more}" for more in range(1, 9)]

    async def ask():
        long = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
        named = [asyncio.create_task(_read(engine.generate("import", long, one))) for one in names]
        await asyncio.sleep(0)
        await asyncio.gather(*(_read(engine.generate("import", WAY)) for _ in names))
        return [outputs[-1].outputs[0].finish_reason for outputs in await asyncio.gather(*named)]

    assert asyncio.run(ask()) == ["length"] * len(names)


def test_concurrent_threads(engine, alone):
    """Six threads with more requests than run at a time: each gets the text of a single request."""
    with ThreadPoolExecutor(6) as pool:
        jobs = [
            pool.submit(lambda text: [p.token for p in engine.stream([text], WAY)], TEXTS[i % 3])
            for i in range(18)
        ]
        assert [job.result() for job in jobs] == [alone[i % 3] for i in range(18)]


def test_a_failing_kernel_fails_only_its_requests(model_dir, alone):
    """Requests of the step get the error; waiting and later ones get their text."""
    with Engine(model_dir, max_num_seqs=2) as engine:
        label = "attention_paged"
        inject(engine.model.instance, "throw", 0, label, 0)
        deltas = engine.stream(TEXTS[:2], WAY)
        with pytest.raises(TaskFailed, match=label):
            list(deltas)
        assert [p.token for p in engine.stream(TEXTS[:1], WAY)] == alone[0]

        async def ask():
            gone = [asyncio.create_task(_read(engine.generate(t, WAY))) for t in TEXTS[:2]]
            await asyncio.sleep(0)
            _core(engine, lambda core: inject(engine.model.instance, "throw", 0, label, 0))
            later = asyncio.create_task(_read(engine.generate(TEXTS[2], WAY)))
            return await asyncio.gather(*gone, later, return_exceptions=True)

        *gone, later = asyncio.run(ask())
        assert any(isinstance(result, TaskFailed) for result in gone) or isinstance(later, TaskFailed)
        for result, tokens in zip((*gone, later), alone):
            assert isinstance(result, TaskFailed) or result[-1].outputs[0].token_ids == tokens
        assert [p.token for p in engine.stream(TEXTS[2:], WAY)] == alone[2]
        assert _is_idle(engine)


def test_an_internal_error_does_not_hang_callers(model_dir, monkeypatch):
    """An unexpected error of a step is reported to all, and the engine continues."""
    with Engine(model_dir) as engine:
        expected = [p.token for p in engine.stream(TEXTS[:1], WAY)]
        with monkeypatch.context() as patched:
            patched.setattr("tilewise.serve.runner.call_inputs", lambda *args: 1 / 0)
            with pytest.raises(TilewiseError, match="report it"):
                list(engine.stream(TEXTS[:1], WAY))
        assert [p.token for p in engine.stream(TEXTS[:1], WAY)] == expected


def test_an_internal_error_in_adding_a_request_does_not_hang_callers(model_dir, alone, monkeypatch):
    """It is reported to that request only; the others continue."""

    def wrong(sequence, *others):
        return 1 / 0 if sequence.request.index == 1 else make(sequence, *others)

    make = core_module.GenerationState
    with Engine(model_dir) as engine:
        monkeypatch.setattr(core_module, "GenerationState", wrong)
        reported = SimpleQueue()
        engine.submit(engine.requests(TEXTS, WAY), reported.put)
        events = [reported.get(timeout=20) for _ in range(1 + len(alone[0]) + len(alone[2]))]
        (error,) = [event for event in events if isinstance(event, BaseException)]
        assert "report it" in str(error)
        deltas = [event for event in events if event is not error]
        for index in (0, 2):
            assert [delta.token for delta in deltas if delta.sequence == index] == alone[index]
        assert _is_idle(engine)


def test_a_failing_callback_does_not_affect_others(engine, alone, caplog):
    """Its error is logged, also if its request is rejected because the name exists; the thread continues."""
    first, failing = engine.requests(TEXTS[:1] * 2, WAY)
    reported = SimpleQueue()
    engine.submit([first], reported.put)
    for request in (first, failing):
        engine.submit([request], lambda event: 1 / 0)
    events = [reported.get(timeout=20) for _ in alone[0]]
    assert [getattr(event, "token", event) for event in events] == alone[0]
    assert _is_idle(engine)
    assert "ZeroDivisionError" in caplog.text and failing.request_id in caplog.text


def _storm(engine, count, seed):
    """Requests started and dropped at random by several threads."""

    def one(number):
        chance = random.Random(f"{seed} {number}")
        ids = [chance.randrange(1, 250) for _ in range(chance.choice((1, 30, 100)))]
        way = SamplingParams(max_tokens=chance.randrange(1, 12), seed=number, n=chance.choice((1, 1, 3)))
        deltas = engine.stream([ids], way)
        for _ in range(chance.randrange(0, 8)):
            if next(deltas, None) is None:
                break
        deltas.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(count)))
    assert _is_idle(engine)


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _weather(model_dir, thread_count, count):
    with Engine(model_dir, max_num_seqs=4) as engine:
        _storm(engine, 100, 0)
        threads, memory = thread_count(), _resident_bytes()
        _storm(engine, count, 1)
        assert thread_count(threads) <= threads
        assert _resident_bytes() - memory < 24 << 20


def test_a_thousand_requests_leave_no_leftovers(model_dir, thread_count):
    """Started and cancelled at random: blocks, threads and memory are as before."""
    _weather(model_dir, thread_count, 1_000)


@pytest.mark.soak
def test_ten_thousand_requests_leave_no_leftovers(model_dir, thread_count):
    """The same, ten times as many."""
    _weather(model_dir, thread_count, 10_000)


def test_closing_reports_to_callers(model_dir):
    """Open requests end with an error, further ones are rejected; closing twice is allowed."""
    engine = Engine(model_dir)
    deltas = engine.stream(TEXTS[:1], SamplingParams(max_tokens=150, ignore_eos=True))
    next(deltas)
    engine.close()
    engine.close()
    with pytest.raises(PlanError, match="engine must be open"):
        list(deltas)
    with pytest.raises(PlanError, match="engine must be open"):
        next(engine.stream(TEXTS[:1], WAY))


def test_an_interrupted_close_can_be_repeated(model_dir, monkeypatch):
    """After Ctrl-C during `close`, a second `close` waits for the step that still uses the devices."""
    engine = Engine(model_dir)
    core, begun, released = engine._replicas[0]._core, threading.Event(), threading.Event()
    step = core.step

    def blocked_step(notify):
        begun.set()
        assert released.wait(60)
        step(notify)

    monkeypatch.setattr(core, "step", blocked_step)
    deltas = engine.stream(TEXTS[:1], WAY)
    asking = threading.Thread(target=lambda: next(deltas, None), daemon=True)
    asking.start()
    assert begun.wait(60)
    interrupt = partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.05, interrupt).start()
        engine.close()
    assert not engine.model.instance._alone.is_closed
    threading.Timer(0.3, released.set).start()
    engine.close()
    assert released.is_set() and engine.model.instance._alone.is_closed


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError("can't start new thread"), ResourceError), (MemoryError(), MemoryError)],
)
def test_without_a_thread_nothing_remains(model_dir, thread_count, monkeypatch, error, raised):
    """If the system provides no thread, the model is closed, and the program's end waits for nothing."""
    gc.collect()
    threads, start = thread_count(), threading.Thread.start
    left = []
    monkeypatch.setattr(atexit, "unregister", lambda function: left.append(function))

    def invalid(thread):
        if thread.name == "tilewise-engine":
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", invalid)
    with pytest.raises(raised):
        Engine(model_dir)
    monkeypatch.undo()
    assert left and thread_count(threads) <= threads
    for end in left:
        end()  # which raised once: a thread that never began cannot be joined
        atexit.unregister(end)


def test_a_dropped_engine_ends_its_thread(model_dir, thread_count):
    """Even without `close`."""
    gc.collect()
    threads = thread_count()
    Engine(model_dir)
    gc.collect()
    assert thread_count(threads) <= threads


def test_a_forked_child_is_rejected_at_once(model_dir):
    """Nothing waits for threads that a child lacks, and the parent continues."""
    with Engine(model_dir) as engine:
        begun = engine.stream(TEXTS[:1], WAY)
        next(begun)
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            refused = 0
            for deltas in (begun, engine.stream(TEXTS[:1], WAY)):
                try:
                    next(deltas)
                except PlanError:
                    refused += 1
            engine.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert len(list(begun)) > 0


def test_a_closed_event_loop_hangs_nothing(engine, alone):
    """The request of a closed loop ends, others continue."""
    loop = asyncio.new_event_loop()
    outputs = engine.generate("import", SamplingParams(max_tokens=200, ignore_eos=True))
    loop.run_until_complete(outputs.__anext__())
    loop.close()
    assert [p.token for p in engine.stream(TEXTS[:1], WAY)] == alone[0]
    deadline = time.monotonic() + 20
    while not _is_idle(engine) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _is_idle(engine)
    asyncio.run(outputs.aclose())


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("x = 1\n" * 500, "must leave room"),
        (b"x", "a prompt must be a sequence of ids or text"),
        ([1, -1], "an id of a prompt must lie in"),
        ([1, 10**6], "token ids of a prompt must lie below .*; got 1000000;"),
        ("\ud800", "must be UTF-8 text"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "either prompt or prompt_token_ids"),
        ({"text": "x"}, "a field of a prompt must be one of"),
        ({"prompt": "x", "cache_salt": 3}, "cache_salt must be a str"),
    ],
)
def test_invalid_prompts_are_rejected_at_once(engine, prompt, words):
    """Before anything is submitted."""
    with pytest.raises(ConfigError, match=words):
        engine.generate(prompt, WAY)
    with pytest.raises(ConfigError, match=words):
        engine.stream([prompt], WAY)


def test_invalid_settings_are_rejected_at_once(engine):
    """Settings of the wrong kind or number, invalid priorities and ids."""
    for call, words in (
        (lambda: engine.stream("text", WAY), "prompts must be a sequence"),
        (lambda: engine.stream(["x"], None), "sampling must be a sequence"),
        (lambda: engine.stream(["x"], [WAY, WAY]), "one for all prompts or one per prompt"),
        (lambda: engine.stream(["x"], ["hot"]), "SamplingParams or Sampling"),
        (lambda: engine.stream(["x"], WAY, priority=1 << 40), "priority must lie in"),
        (lambda: engine.generate("x", Sampling()), "sampling_params must be a SamplingParams"),
        (lambda: engine.generate("x", WAY, ""), "request_id must be printable text"),
        (
            lambda: engine.stream(["x"], SamplingParams(allowed_token_ids=[10**6])),
            "token ids of allowed_token_ids must lie below",
        ),
        (lambda: engine.stream(["x"], SamplingParams(logit_bias={10**6: 1.0})), "token ids of logit_bias"),
        (lambda: engine.stream(["x"], SamplingParams(stop_token_ids=[10**6])), "token ids of stop_token_ids"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def test_settings_of_wrong_kinds_are_rejected():
    """Every setting of an engine, before a model is loaded; None is the default of some."""
    defaults = {name: one.default for name, one in settings_of(EngineSettings).items()}
    del defaults["ignore_config_fields"]  # names that are compared only
    valid = {"lora_modules": {"()", "[]"}}
    valid |= {name: {str(value)} for name, value in defaults.items() if value is None or value is True}
    assert accepted(EngineSettings, defaults) == valid


def test_impossible_engines_are_rejected(model_dir):
    """A width that does not divide the heads, an unsupported dtype, a cache for no sequence, an unknown name."""
    with pytest.raises(LayoutError, match=r"got 3 parts .* choose 1, 2, 4, 8"):
        Engine(model_dir, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="dtype must be one of auto, bf16"):
        Engine(model_dir, dtype="i32")
    with pytest.raises(ConfigError, match="must hold one sequence of full length"):
        Engine(model_dir, kv_cache_memory_bytes=1 << 10)
    with pytest.raises(TilewiseError, match="on_progress"):
        Engine(model_dir, on_progress=3)
    with pytest.raises(ConfigError, match="a setting must be one of tensor_parallel_size"):
        Engine(model_dir, gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match="max_context"):
        Engine(model_dir, max_context=65, max_model_len=64)


def test_progress_is_reported(model_dir):
    """At the end, the bytes of all weights."""
    reported = []
    with Engine(model_dir, on_progress=lambda *figures: reported.append(figures)) as engine:
        assert reported[-1][0] == reported[-1][1] > 0 and engine.model.stored_dtypes == {"float32"}
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)


def test_weights_that_are_not_finite_are_rejected(tmp_path, thread_count):
    """A NaN in one tensor is reported with its name; no thread remains."""
    directory = save_model(tmp_path / "damaged")
    Engine(directory).close()  # the first in a process may start threads of libraries
    weights = {name: np.array(value) for name, value in open_weights(directory).items()}
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    write_weights(directory, weights.items())
    threads = thread_count()
    with pytest.raises(CheckpointError, match=r"finite.*layers.1.mlp.up_proj.weight"):
        Engine(directory)
    assert thread_count(threads) <= threads


def test_stats_have_the_last_steps(model_dir):
    """Their tokens are those of prompt and text, in order and without gaps."""
    with Engine(model_dir, max_num_seqs=1) as engine:
        deltas = list(engine.stream([[5, 6, 7, 8]], SamplingParams(max_tokens=7, ignore_eos=True)))
        steps = engine.stats().steps
    assert len(deltas) == 7 == len(steps) == sum(step.num_written for step in steps)
    assert [step.num_read for step in steps] == [3, *[0] * 6]
    assert all(step.seconds > 0 for step in steps)
    assert all(a.begin_s + a.seconds <= b.begin_s for a, b in pairwise(steps))
