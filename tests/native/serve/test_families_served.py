"""Greedy text of every family through the engine equals transformers."""

import pytest
import torch

from native.models.families import CASES, ids_of
from tilewise import LLM, SamplingParams
from tilewise.data import train_tokenizer
from tilewise.models import BLOCK_SIZE

EVERYDAY = ("llama", "gemma2", "phi3-longrope")


def _theirs(model, ids, count):
    """Greedy tokens, as long as the top logit leads clearly."""
    out = list(ids)
    with torch.no_grad():
        for _ in range(count):
            top = torch.topk(model(torch.tensor([out])).logits[0, -1], 2)
            if float(top.values[0] - top.values[1]) < 1e-3:
                break
            out.append(int(top.indices[0]))
    return out[len(ids) :]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=() if c.name in EVERYDAY else pytest.mark.slow) for c in CASES],
)
def test_greedy_text_is_that_of_transformers(case, tmp_path):
    """Prompts with a common beginning, in small chunks, and again from the cache, in fp32."""
    model = case.model(vocab_size=300)
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    train_tokenizer(["ab" * 20], vocab_size=290).save(str(tmp_path / "tokenizer.json"))
    common = ids_of(BLOCK_SIZE + 3)
    prompts = [[*common, *ids_of(count, seed=count)] for count in (1, 20, 50)]
    # `longrope` chooses by the context limit, which transformers takes from the text: both lie beyond the border
    limit = 160
    with LLM(tmp_path, dtype="f32", max_num_seqs=3, max_num_batched_tokens=24, max_model_len=limit) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
        again = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    assert [o.outputs for o in again] == [o.outputs for o in outputs]
    assert all(o.num_cached_tokens >= BLOCK_SIZE for o in again)
    compared = 0
    for ids, output in zip(prompts, outputs):
        expected = _theirs(model, ids, 24)
        assert output.outputs[0].token_ids[: len(expected)] == expected
        compared += len(expected)
    assert compared > 40
