"""Checkpoints of every model family load on any other mesh, and the run continues to the bit."""

import pytest

from native.train.small_run import is_same, make_config, run, silent, weights
from tilewise.checkpoint import latest_checkpoint, open_checkpoint
from tilewise.train import TrainConfig, Trainer, make_plan, prepare_data

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "qwen3": {**SIZES, **HEADS, "head_dim": 10, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "bert": {**SIZES, "num_attention_heads": 4},
    "gemma2": {**SIZES, **HEADS, "head_dim": 10, "sliding_window": 6},
    "phi3": {**SIZES, **HEADS},
    "mistral": {**SIZES, **HEADS, "sliding_window": 7},
}
DP, TP, BOTH = {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}


def _config(texts, out, family, mesh):
    config = make_config(texts, out, mesh, steps=4)
    model = {"model_type": family, **FAMILIES[family]}
    return TrainConfig.model_validate({**config.model_dump(exclude={"model"}), "model": model})


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("qwen3", DP, TP),
        ("gpt2", TP, None),
        ("bert", None, DP),
        pytest.param("gemma2", BOTH, DP, marks=pytest.mark.slow),
        pytest.param("phi3", None, BOTH, marks=pytest.mark.slow),
        pytest.param("mistral", TP, BOTH, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value or "one device"),
)
def test_a_checkpoint_of_any_family_resumes_on_any_mesh(texts, tmp_path, family, before, after):
    """Parameters and optimizer states after a stop on one mesh, and after four steps on a third,
    equal an uninterrupted run.
    """
    run(_config(texts, tmp_path / "whole", family, None))
    config = _config(texts, tmp_path / "parts", family, before)
    with Trainer(config, prepare_data(config, silent()), *make_plan(config)) as trainer:
        trainer.run(0, lambda number, result: number < 1)
        trainer.save(tmp_path / "parts" / "checkpoints", 2)
    run(_config(texts, tmp_path / "parts", family, after), resume=True)
    assert is_same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    states = [
        dict(open_checkpoint(latest_checkpoint(tmp_path / place / "checkpoints")).tensors)
        for place in ("parts", "whole")
    ]
    assert is_same(*states) and any(name.startswith("optimizer.") for name in states[0])
