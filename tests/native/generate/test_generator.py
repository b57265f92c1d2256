"""Writing with a model directory: the text depends on model, prompt and sampling only."""

import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pure.hostile import HOSTILE
from tilewise import models
from tilewise.checkpoint import open_weights, save_pretrained, write_weights
from tilewise.core import (
    CheckpointError,
    ConfigError,
    LayoutError,
    PlanError,
    ResourceError,
    TilewiseError,
)
from tilewise.data import train_tokenizer
from tilewise.generate import BlockTable, Generator, Sampling
from tilewise.generate import generator as generator_module
from tilewise.generate.generator import _Call
from tilewise.models.llama import LlamaConfig

PROMPTS = ["def f(x):\n    return", "class Stack:\n    pass\n" * 8, "import"]
SAMPLING = Sampling(max_tokens=20, temperature=0.9, top_p=0.95, seed=3)


def _save(directory, **settings):
    tokenizer = train_tokenizer(PROMPTS * 5, vocab_size=320)
    config = LlamaConfig(
        tokenizer.get_vocab_size(),
        64,
        96,
        2,
        4,
        num_key_value_heads=2,
        max_position_embeddings=192,
        eos_token_ids=(0,),
        **settings,
    )
    rng = np.random.default_rng(1)
    shapes = models.parameter_shapes(config)
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes}
    tensors = models.stored_tensors(config, weights)
    save_pretrained(directory, config.to_dict(), tensors, tokenizer)
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return _save(tmp_path_factory.mktemp("model") / "llama")


def _tokens(model_dir, prompts, sampling=SAMPLING, **settings):
    """Token ids per prompt."""
    written = [[] for _ in prompts]
    with Generator(model_dir, max_sequences=len(prompts), **settings) as generator:
        for piece in generator.generate(prompts, sampling):
            written[piece.sequence].append(piece.token)
    return written


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_two_devices_write_what_one_writes(model_dir, dtype):
    """Tensor parallelism changes no token."""
    assert _tokens(model_dir, PROMPTS, dtype=dtype, tp=2) == _tokens(model_dir, PROMPTS, dtype=dtype)


def test_prompts_write_alone_what_they_write_together(model_dir):
    """A batch changes no token of its members."""
    together = _tokens(model_dir, PROMPTS, Sampling(max_tokens=20))
    assert together == [_tokens(model_dir, [prompt], Sampling(max_tokens=20))[0] for prompt in PROMPTS]


def test_sampled_text_does_not_depend_on_the_place_in_a_batch(model_dir):
    """Each prompt draws as it does alone: from its own seed and positions, wherever it stands."""
    ways = [SAMPLING, Sampling(max_tokens=20, temperature=1.2, seed=9), SAMPLING]
    alone = [_tokens(model_dir, [prompt], way)[0] for prompt, way in zip(PROMPTS, ways)]
    assert _tokens(model_dir, PROMPTS, ways) == alone
    assert _tokens(model_dir, PROMPTS[::-1], ways[::-1]) == alone[::-1]
    assert _tokens(model_dir, [PROMPTS[0]] * 2, SAMPLING) == [alone[0]] * 2


def test_iterators_share_the_cache_and_nothing_else(model_dir):
    """Two texts written in turns, a third begun and dropped between them: each as if it were alone."""
    alone = [_tokens(model_dir, [prompt])[0] for prompt in PROMPTS]
    with Generator(model_dir, max_sequences=3) as generator:
        first, second = (generator.generate([prompt], SAMPLING) for prompt in PROMPTS[:2])
        dropped = generator.generate([PROMPTS[2]], SAMPLING)
        next(dropped)
        written = [[], []]
        for pieces in zip(first, second):
            for text, piece in zip(written, pieces):
                text.append(piece.token)
            if len(written[0]) == 5:
                del dropped
        for text, rest in zip(written, (first, second)):
            text += [piece.token for piece in rest]
        assert written == alone[:2]
        assert generator._num_live == 0 and len(generator._blocks._free) == generator._num_blocks


def test_threads_take_turns(model_dir):
    """Four threads write with one generator at once, each what it writes alone."""
    alone = [_tokens(model_dir, [prompt])[0] for prompt in PROMPTS]
    with Generator(model_dir, max_sequences=4) as generator, ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(lambda p: [x.token for x in generator.generate([p], SAMPLING)], PROMPTS[i % 3])
            for i in range(12)
        ]
        assert [job.result() for job in jobs] == [alone[i % 3] for i in range(12)]


def test_no_more_than_the_cache_holds(model_dir):
    """A further text is refused while the places are taken, and written once one is free."""
    with Generator(model_dir) as generator:
        first = generator.generate(PROMPTS[:1], SAMPLING)
        next(first)
        with pytest.raises(ResourceError, match="1 beside 1 of other iterators"):
            next(generator.generate(PROMPTS[:1], SAMPLING))
        first.close()
        written = [piece.token for piece in generator.generate(PROMPTS[:1], SAMPLING)]
    assert [written] == _tokens(model_dir, PROMPTS[:1])


def test_a_forked_child_is_refused_at_once(model_dir):
    """Also when a thread that the child lacks was writing: nothing waits for it, and the parent goes on."""
    with Generator(model_dir, max_sequences=2) as generator:
        begun = generator.generate(PROMPTS[:1], SAMPLING)
        next(begun)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(generator._lock.acquire).result()  # as that thread would hold it
            child = os.fork()
            if child == 0:
                signal.alarm(5)
                refused = 0
                for pieces in (begun, generator.generate(PROMPTS[:1], SAMPLING)):
                    try:
                        next(pieces)
                    except PlanError:
                        refused += 1
                generator.close()
                os._exit(refused)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            thread.submit(generator._lock.release).result()
        assert code == 2
        assert len(list(begun)) > 0


def test_closing_waits_for_the_call_at_hand(model_dir):
    """A call of another thread ends as it would have; the next one is told that the model is closed."""
    generator = Generator(model_dir)
    pieces = generator.generate(PROMPTS[:1], SAMPLING)
    next(pieces)
    with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(1) as closer:
        writer.submit(generator._lock.acquire).result()  # as a call holds it
        closing = closer.submit(generator.close)
        time.sleep(0.02)
        is_waiting = not closing.done()
        writer.submit(generator._lock.release).result()
        closing.result()
    assert is_waiting
    with pytest.raises(PlanError, match="open"):
        next(pieces)


def test_text_that_ends_within_a_character_shows_it(tmp_path, monkeypatch):
    """The bytes of a character that never became whole come with the last piece, as U+FFFD."""
    _save(tmp_path / "m")
    with Generator(tmp_path / "m") as generator:
        first = generator.tokenizer.encode("🚀").ids[0]  # one byte of four
        monkeypatch.setattr("tilewise.generate.generator.pick_token", lambda *given: first)
        last = list(generator.generate(["a"], Sampling(max_tokens=1)))[-1]
        assert (last.text, last.finish_reason) == ("\ufffd", "length")


@pytest.mark.parametrize(
    "name",
    [
        *("tp", "dtype", "max_sequences", "max_model_len", "max_context", "max_tokens_per_call"),
        *("generation_config", "load_format"),
    ],
)
def test_settings_are_refused_in_their_own_words(model_dir, name):
    """Every setting of a generator, before a model is loaded; only contexts may be None, for the model's
    own."""
    taken = set()
    for label, value in HOSTILE.items():
        try:
            Generator(model_dir, **{name: value}).close()
        except TilewiseError:
            continue
        taken.add(label)
    others = {
        "max_model_len": {"None"},
        "max_context": {"None"},
        "generation_config": {"True"},
    }
    assert taken == others.get(name, set())


def test_progress_is_told(model_dir):
    """The bytes of all weights, in the end."""
    told = []
    with Generator(model_dir, on_progress=lambda *figures: told.append(figures)) as generator:
        assert told[-1][0] == told[-1][1] > 0 and generator.stored_dtypes == {"float32"}
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_small_integers_of_numpy_are_integers(model_dir):
    """Products of them do not wrap."""
    with Generator(model_dir, max_sequences=np.uint8(200), max_context=np.int16(192)) as generator:
        assert generator._num_blocks == 600


def test_weights_that_are_no_numbers_are_not_loaded(tmp_path, thread_count):
    """A NaN in one tensor of a model directory is refused by the tensor's name; no thread is left behind."""
    directory = _save(tmp_path / "damaged")
    Generator(directory).close()  # the first in a process may start threads of libraries
    weights = {name: np.array(value) for name, value in open_weights(directory).items()}
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    write_weights(directory, weights.items())
    threads = thread_count()
    with pytest.raises(CheckpointError, match=r"finite.*layers.1.mlp.up_proj.weight"):
        Generator(directory)
    assert thread_count(threads) == threads


def test_chunks_of_the_prompt_change_nothing(model_dir):
    """A prompt read in chunks of 7 tokens continues as one that was read whole."""
    assert _tokens(model_dir, PROMPTS, max_tokens_per_call=7) == _tokens(model_dir, PROMPTS)


@pytest.mark.parametrize("fault", ["page", "position", "draw"])
def test_planted_faults_change_the_text(model_dir, monkeypatch, fault):
    """The comparisons above can fail: with a page of the cache that two texts share, positions that begin anew with
    every chunk, or draws that hang on the place in a batch, texts are others than alone."""
    alone = [_tokens(model_dir, [prompt])[0] for prompt in PROMPTS]
    assert _tokens(model_dir, PROMPTS, max_tokens_per_call=7) == alone
    if fault == "page":
        grow = BlockTable.grow
        monkeypatch.setattr(BlockTable, "grow", lambda table, _, size: grow(table, 0, size))
    elif fault == "position":
        add = _Call.add
        monkeypatch.setattr(_Call, "add", lambda call, ids, first, blocks: add(call, ids, 0, blocks))
    else:
        draw, count = generator_module.pick_token, itertools.count()
        monkeypatch.setattr(
            generator_module,
            "pick_token",
            lambda row, way, history, ends, _: draw(row, way, history, ends, next(count) % 3),
        )
    assert _tokens(model_dir, PROMPTS, max_tokens_per_call=7) != alone


def test_the_same_seed_writes_the_same(model_dir):
    """Seeds decide what is drawn."""
    assert _tokens(model_dir, PROMPTS[:1]) == _tokens(model_dir, PROMPTS[:1])
    other = Sampling(max_tokens=20, temperature=0.9, top_p=0.95, seed=4)
    assert _tokens(model_dir, PROMPTS[:1], other) != _tokens(model_dir, PROMPTS[:1])


def test_writing_ends_at_the_limits(model_dir):
    """max_tokens and the context end a text with the reason `length`."""
    with Generator(model_dir, dtype="f32", max_context=64) as generator:
        pieces = list(generator.generate(PROMPTS[:1], Sampling(max_tokens=5)))
        assert [p.finish_reason for p in pieces] == [None] * 4 + ["length"]
        length = len(generator.tokenizer.encode(PROMPTS[0]).ids)
        pieces = list(generator.generate(PROMPTS[:1], Sampling(max_tokens=500)))
        assert pieces[-1].finish_reason == "length" and len(pieces) == 64 - length


def test_writing_ends_at_every_end_token(model_dir, tmp_path):
    """Any of several end tokens ends a text with the reason `stop`, and is not shown."""
    first, second = _tokens(model_dir, PROMPTS[:1], Sampling(max_tokens=2))[0]
    for end in (first, second):
        directory = _save(tmp_path / f"end-{end}")
        (directory / "generation_config.json").write_text(f'{{"eos_token_id": [1, {end}]}}')
        with Generator(directory) as generator:
            last = list(generator.generate(PROMPTS[:1], Sampling(max_tokens=2)))[-1]
        assert last.token == end and last.text == "" and last.finish_reason == "stop"


def test_generator_is_reusable(model_dir):
    """A second text is not touched by what the first left in the cache."""
    with Generator(model_dir) as generator:
        texts = [
            [p.token for p in generator.generate([prompt], SAMPLING)] for prompt in (PROMPTS[1], PROMPTS[0])
        ]
    assert texts[1] == _tokens(model_dir, PROMPTS[:1])[0]


def test_impossible_requests_are_refused(model_dir):
    """Too many prompts, too long a prompt and an impossible width are clear errors."""
    with Generator(model_dir) as generator:
        with pytest.raises(ConfigError, match="max_sequences=1 texts"):
            generator.generate(PROMPTS[:2], SAMPLING)
        with pytest.raises(ConfigError, match="must leave room"):
            generator.generate(["x = 1\n" * 500], SAMPLING)
        for prompts, sampling, words in (
            ("text", SAMPLING, "prompts must be a sequence"),
            ([b"x"], SAMPLING, "a prompt must be a sequence of ids, or a text"),
            ([None], SAMPLING, "a prompt must be a sequence"),
            ([[1, 10**6]], SAMPLING, "an id of a prompt must lie in"),
            (["x"], None, "sampling must be a sequence"),
            (["x"], [SAMPLING, SAMPLING], "one for all or one per prompt"),
            (["x"], ["hot"], "sampling must be a Sampling"),
        ):
            with pytest.raises(ConfigError, match=words):
                generator.generate(prompts, sampling)
    with pytest.raises(LayoutError, match=r"got 3 parts .* choose 1, 2, 4, 8"):
        Generator(model_dir, tp=3)
    with pytest.raises(ConfigError, match="dtype must be one of auto, bf16"):
        Generator(model_dir, dtype="i32")
    for wrong in (
        {"max_context": 0},
        {"max_context": 193},
        {"max_model_len": 193},
        {"max_context": 65, "max_model_len": 64},
        {"tp": "2"},
        {"max_sequences": True},
        {"max_tokens_per_call": 2.5},
        {"on_progress": 3},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Generator(model_dir, **wrong)
