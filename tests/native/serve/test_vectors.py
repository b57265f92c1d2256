"""`LLM.encode`: vectors of prompts from a decoder, equal to transformers, with the same bits in any batch."""

import numpy as np
import pytest
import torch

from native.models.families import CASES, ids_of
from native.serve.serving_models import save_model
from tilewise import LLM, SamplingParams
from tilewise.core import CheckpointError, ConfigError
from tilewise.data import train_tokenizer

NAMES = ("llama", "gemma2", "gpt2")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["ab" * 20], vocab_size=290)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=lambda case: case.name)
def test_vectors_equal_transformers(case, tmp_path, tokenizer):
    """The head's input at the last token, in fp32: from files with a tied head, and from a base
    class whose files (e5-mistral) have no head and no prefix.
    """
    model = case.model(vocab_size=300)
    is_base = case.name in ("llama", "gpt2")
    (model.base_model if is_base else model).save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompts = [ids_of(count, seed=count) for count in (3, 70, 20)]
    with LLM(tmp_path, dtype="f32", runner="pooling", max_num_batched_tokens=16) as llm:
        outputs = llm.encode(prompts)
    for ids, output in zip(prompts, outputs):
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
        assert np.abs(output.outputs.data - hidden).max() <= 1e-4 * np.abs(hidden).max()
        assert output.prompt_token_ids == ids and output.finished
    if is_base and case.family != "gpt2":  # which ties its head
        with pytest.raises(
            CheckpointError, match=r"must have a head; got no 'lm_head.weight'.*--runner pooling"
        ):
            LLM(tmp_path)


def test_vectors_do_not_depend_on_the_batch(tmp_path):
    """Alone, together, over two devices, in chunks, with cached blocks; another prompt has another vector."""
    directory = save_model(tmp_path / "model")
    prompts = [np.random.default_rng(i).integers(1, 250, n).tolist() for i, n in enumerate((150, 64, 7))]
    with LLM(directory, dtype="bf16", runner="pooling") as llm:
        alone = [llm.encode([prompt])[0] for prompt in prompts]
        again = llm.encode(prompts)
    with LLM(
        directory, dtype="bf16", runner="pooling", tensor_parallel_size=2, max_num_batched_tokens=64
    ) as llm:
        wide = llm.encode(prompts)
    for one, *others in zip(alone, again, wide):
        for other in others:
            assert np.array_equal(one.outputs.data.view(np.int32), other.outputs.data.view(np.int32))
    assert [output.num_cached_tokens for output in again] == [128, 0, 0]
    assert len({output.outputs.data.tobytes() for output in alone}) == 3


def test_a_model_generates_or_encodes(tmp_path):
    """The other use is rejected with the required `runner`."""
    directory = save_model(tmp_path / "model")
    with LLM(directory) as llm, pytest.raises(ConfigError, match="runner='pooling'"):
        llm.encode("x")
    with LLM(directory, runner="pooling") as llm, pytest.raises(ConfigError, match="runner='generate'"):
        llm.generate("x", SamplingParams())


def test_a_prompt_may_fill_the_context(tmp_path):
    """No token is generated after it; one token more is rejected."""
    directory = save_model(tmp_path / "model")
    ids = np.random.default_rng(3).integers(1, 250, 70).tolist()
    with LLM(directory, dtype="f32", runner="pooling") as llm:
        expected = llm.encode([ids])[0].outputs.data
    with LLM(directory, dtype="f32", runner="pooling", max_model_len=70) as llm:
        assert np.array_equal(llm.encode([ids])[0].outputs.data, expected)
        with pytest.raises(ConfigError, match="must fit the context of 70 tokens; got 71"):
            llm.encode([[*ids, 1]])
