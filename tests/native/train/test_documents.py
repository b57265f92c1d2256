"""Packed examples do not see each other: each has the losses that it has alone, to the bit."""

import numpy as np
import pytest

import tilewise as tw
from tilewise import models
from tilewise.data import IGNORED, Batches, ExampleList, PackedExamples, PaddedExamples

CONTEXT = 256
LENGTHS = [100, 64, 30, 128, 65, 20, 7]
CONFIGS = {
    "llama": {"head_dim": 8, "num_key_value_heads": 2},
    "gemma2": {"head_dim": 8, "sliding_window": 48, "query_pre_attn_scalar": 8},
    "gpt2": {},
}


def losses(family, batches, width, dtype, change=lambda batch: batch):
    """The loss of every counted label, in the order of the examples' tokens."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    config = models.config_from_dict(
        {
            "model_type": family,
            "vocab_size": 500,
            "max_position_embeddings": CONTEXT,
            **sizes,
            **CONFIGS[family],
        }
        if family != "gpt2"
        else {"model_type": family, "vocab_size": 500, **sizes}
    )
    graph = tw.ComputeGraph(family)
    models.build_training_graph(
        graph, config, batches.batch, width, dtype, has_documents=batches.has_documents
    )
    batch = change(batches.at(0))
    with graph.instantiate(graph.plan(batch_splits=1)) as model:
        model.initialize(3, 0.1)
        model.forward(**batch)
        rows = np.array(model.get_tensor("loss_rows"))
    counted = batch["labels"] != IGNORED
    return dict(zip(batch["labels"][counted].tolist(), rows[counted].tolist()))


@pytest.mark.parametrize("family,dtype", [("llama", "bf16"), ("gemma2", "f32"), ("gpt2", "f32")])
def test_packed_examples_have_the_losses_of_padded_ones(family, dtype):
    """Examples begin at multiples of 64, the KV block; a wrong beginning shows."""
    collected, first = ExampleList(CONTEXT, "drop"), 0
    for length in LENGTHS:  # all tokens differ
        ids = np.arange(first, first + length, dtype=np.int32)
        collected.add(ids, ids)
        first += length
    own = collected.finish()
    alone = Batches([PaddedExamples(own)], len(own), width=CONTEXT)
    packed = PackedExamples(own, CONTEXT, 64)
    together = Batches([packed], len(packed), width=CONTEXT, has_documents=True)
    assert len(packed) < len(own)
    expected = losses(family, alone, CONTEXT, dtype)
    assert losses(family, together, CONTEXT, dtype) == expected and len(expected) == sum(LENGTHS) - len(
        LENGTHS
    )

    def wrong(batch):
        return {**batch, "first": np.maximum(batch["first"] - 64, 0)}

    assert losses(family, together, CONTEXT, dtype, wrong) != expected
