"""Writing with a model directory: the text depends on model, prompt and sampling only."""

import numpy as np
import pytest

from tilewise.checkpoint import save_pretrained
from tilewise.core import ConfigError, LayoutError
from tilewise.data import train_tokenizer
from tilewise.generate import Generator, Sampling
from tilewise.models.llama import LlamaConfig
from tilewise.models.llama.weights import file_name, parameter_shapes

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
        2,
        max_position_embeddings=192,
        eos_token_ids=(0,),
        **settings,
    )
    rng = np.random.default_rng(1)
    tensors = [(file_name(n), rng.normal(0, 0.3, s).astype(np.float32)) for n, s in parameter_shapes(config)]
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


def test_chunks_of_the_prompt_change_nothing(model_dir):
    """A prompt read in chunks of 7 tokens continues as one that was read whole."""
    assert _tokens(model_dir, PROMPTS, max_tokens_per_call=7) == _tokens(model_dir, PROMPTS)


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
        assert pieces[-1].finish_reason in ("length", "stop") and len(pieces) <= 64 - length


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
        with pytest.raises(ConfigError, match="max_sequences"):
            list(generator.generate(PROMPTS, SAMPLING))
        with pytest.raises(ConfigError, match="must leave room"):
            list(generator.generate(["x = 1\n" * 500], SAMPLING))
    with pytest.raises(LayoutError):
        Generator(model_dir, tp=3)
    with pytest.raises(ConfigError, match="dtype must be one of auto, bf16"):
        Generator(model_dir, dtype="i32")
    with pytest.raises(ConfigError, match="at least 1"):
        Generator(model_dir, max_context=0)
