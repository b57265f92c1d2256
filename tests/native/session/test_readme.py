"""The Python blocks of README.md run as for a reader, after `make demo` has made a model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from tilewise import models
from tilewise.checkpoint import save_pretrained
from tilewise.data import train_tokenizer
from tilewise.models import llama

README = Path(__file__).parents[3] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def demo_model(tmp_path, monkeypatch):
    tokenizer = train_tokenizer(["def main():\n    import os\n"] * 8, vocab_size=288)
    config = llama.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, config, 1, 8, dtype="f32")
    with graph.instantiate() as model:
        model.initialize(seed=0)
        tensors = models.stored_tensors(config, model.parameters())
        save_pretrained(tmp_path / "demo" / "model", config.to_dict(), tensors, tokenizer)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number, demo_model, capsys):
    """A block needs only what it imports or defines, and prints what it says."""
    names: dict[str, object] = {}
    exec(compile(BLOCKS[number], f"README.md, block {number + 1}", "exec"), names)
    assert capsys.readouterr().out.strip()
    if "model" in names:
        assert np.isfinite(names["result"].loss)
        names["model"].close()


def test_there_are_blocks():
    """The page still has the blocks that these tests need."""
    assert len(BLOCKS) == 3
