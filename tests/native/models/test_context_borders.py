"""RoPE whose frequencies change beyond a length: the context limit determines them, on both sides
of that length.
"""

from __future__ import annotations

import numpy as np
import pytest

import tilewise as tw
from native.models.families import LONGROPE, Case, ids_of, our_logits, their_logits
from tilewise import models
from tilewise.cli.main import _run
from tilewise.data import train_tokenizer
from tilewise.generate import Sampling
from tilewise.serve import Engine

BORDER = 24
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
CASES = {
    "dynamic": Case("dynamic", "llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER}),
    "dynamic with an original length": Case(
        "dynamic-original",
        "llama",
        {
            "rope_parameters": {**DYNAMIC, "original_max_position_embeddings": BORDER // 2},
            "max_position_embeddings": BORDER,
        },
    ),
    "longrope": Case(
        "longrope",
        "phi3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": BORDER,
        },
    ),
    "longrope of a Llama": Case(
        "longrope-llama",
        "llama",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": BORDER, "factor": 4.0}},
    ),
}


@pytest.mark.parametrize("count", [BORDER, BORDER + 1, BORDER + 16])
@pytest.mark.parametrize("name", CASES)
def test_single_forwards_on_both_sides_of_the_border(name, count, tmp_path):
    """With the text's length as the limit, results equal a single forward of transformers."""
    model = CASES[name].model()
    model.save_pretrained(tmp_path)
    ids = ids_of(count)
    theirs = their_logits(model, ids)
    assert np.abs(our_logits(tmp_path, ids) - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("name", CASES)
def test_the_limit_determines_the_frequencies(name, tmp_path):
    """A text that grows beyond the original length has the limit's frequencies from its first token on."""
    _save(CASES[name], tmp_path)
    texts = {}
    for limit in (BORDER, BORDER + 16):
        with Engine(
            tmp_path, dtype="f32", max_num_seqs=1, max_model_len=limit, max_num_batched_tokens=5
        ) as engine:
            deltas = engine.stream(["def f(x):"], Sampling(max_tokens=10))
            texts[limit] = [delta.token for delta in deltas]
            logits = np.array(engine.model.instance.get_tensor("logits")[0])
        expected = _last_logits(tmp_path, engine.model.tokenizer, texts[limit], limit)
        assert np.array_equal(logits, expected)
    assert texts[BORDER] != texts[BORDER + 16]


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_longer_text_begins_like_a_shorter_one(name, tmp_path, capsys):
    """Neither --max-tokens nor the cache's size changes a token, on either side of the original length."""
    _save(CASES[name], tmp_path)
    longer = ["--max-model-len", str(BORDER + 16)]
    texts = {}
    for limit in ([], longer) if "dynamic" not in name else (longer,):
        for count in (5, 25):
            text = _written(capsys, tmp_path, "--max-tokens", count, *limit)
            texts.setdefault(tuple(limit), []).append(text)
    for short, long in texts.values():
        assert long.startswith(short) and len(long) > len(short)
    texts = set()
    for size in (BORDER - 4, BORDER + 16):
        with Engine(tmp_path, dtype="f32", max_model_len=BORDER + 16, max_context=size) as engine:
            deltas = engine.stream(["def f(x):"], Sampling(max_tokens=5))
            texts.add(tuple(delta.token for delta in deltas))
    assert len(texts) == 1


def test_the_default_limit_is_the_models_own(tmp_path, capsys):
    """`dynamic` scales only on request; the limit bounds prompt and text together."""
    _save(CASES["dynamic"], tmp_path)
    config = models.open(tmp_path)
    assert (models.default_context(config), models.max_context(config)) == (BORDER, 2 * BORDER)
    text = _written(capsys, tmp_path, "--max-tokens", 10)
    assert text == _written(capsys, tmp_path, "--max-tokens", 10, "--max-model-len", BORDER)
    assert text != _written(capsys, tmp_path, "--max-tokens", 10, "--max-model-len", 2 * BORDER)
    for more, words in (
        (["--max-tokens", BORDER], f"context of {BORDER} tokens"),
        (["--max-tokens", BORDER, "--max-model-len", BORDER + 1], f"context of {BORDER + 1} tokens"),
        (["--max-model-len", 2 * BORDER + 1], f"must be at most the model's {2 * BORDER}"),
    ):
        assert _run(["generate", str(tmp_path), "def f(x):", *map(str, more)]) == 2
        assert words in capsys.readouterr().err


def _save(case, directory):
    """A model with a tokenizer."""
    case.model(vocab_size=300).save_pretrained(directory)
    train_tokenizer(["def f(x):\n    return x\n" * 9], vocab_size=300).save(str(directory / "tokenizer.json"))


def _written(capsys, directory, *options):
    """The command line's text."""
    args = [str(directory), "def f(x):", "--dtype", "f32", "--ignore-eos", *map(str, options)]
    code = _run(["generate", *args])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out.removesuffix("\n")


def _last_logits(directory, tokenizer, tokens, limit):
    """The last logits of the whole text in one call, under the same limit."""
    config = models.open(directory)
    ids = [*tokenizer.encode("def f(x):").ids, *tokens[:-1]]
    graph = tw.ComputeGraph("whole")
    models.build_decoding_graph(graph, config, len(ids), 1, 1, "f32", context=limit)
    with graph.instantiate() as model:
        model.load_parameters(models.open_weights(directory, config))
        places = np.arange(len(ids), dtype=np.int32)
        model.forward(
            tokens=np.array(ids, np.int32),
            positions=places,
            slots=places,
            sequence=np.zeros(len(ids), np.int32),
            block_table=np.zeros((1, 1), np.int32),
            rows=np.array([len(ids) - 1], np.int32),
        )
        return np.array(model.get_tensor("logits")[0])
