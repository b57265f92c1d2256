"""Adapters compared with PEFT: losses of training from the same values, and adapters in both directions."""

import numpy as np
import pytest

import tilewise as tw
from tilewise import models
from tilewise.checkpoint.adapters import save_adapter

BATCH, SEQ, STEPS, LR = 4, 16, 20, 1e-3
LLAMA = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
CASES = {
    "all products": ("llama", {**LLAMA, "tie_word_embeddings": True}, {"target_modules": "all-linear"}),
    "whole modules": (
        "llama",
        {**LLAMA, "tie_word_embeddings": False},
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "ranks and scales": (
        "llama",
        {**LLAMA, "tie_word_embeddings": True},
        {
            "target_modules": r".*layers\.[02]\.(self_attn|mlp)\.(q_proj|down_proj)",
            "rank_pattern": {"layers.0.self_attn.q_proj": 3},
            "alpha_pattern": {"down_proj": 5},
            "use_rslora": True,
        },
    ),
    "fused projections": (
        "gpt2",
        GPT2,
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_and_files_equal_pefts(case, tmp_path):
    """Losses of 20 steps within 1e-4 in fp32; PEFT opens the adapter with equal logits, and the other way."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    kind, sizes, settings = CASES[case]
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    base.save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **settings))
    theirs.save_pretrained(tmp_path / "first")

    config = models.open(tmp_path / "base")
    adapter = models.load_adapter(tmp_path / "first", config)
    graph = tw.ComputeGraph(kind, adapters=adapter.layout.adapters)
    models.build_training_graph(graph, config, BATCH, SEQ, dtype="f32")
    adapter.layout.freeze_base(graph)
    ours = tw.optim.AdamW(weight_decay=0.0, max_grad_norm=0.0)
    graph.optimize(ours)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, LR, (ours.beta1, ours.beta2), ours.eps, weight_decay=0.0)

    def logits_of(model, tokens):
        return model(input_ids=torch.tensor(tokens.astype(np.int64))).logits

    def loss_of(model, batch):
        rows = logits_of(model, batch["tokens"]).reshape(BATCH * SEQ, -1)
        labels = torch.tensor(batch["labels"].astype(np.int64)).reshape(-1)
        return torch.nn.functional.cross_entropy(rows, labels)

    with graph.instantiate(graph.plan()) as model:
        weights = models.open_weights(tmp_path / "base", config)
        model.load_parameters({**weights, **adapter.weights})
        for batch in batches(STEPS):
            loss = loss_of(theirs, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert abs(model.step(batch, LR).loss - float(loss.detach())) < 1e-4
        files, stored = (
            adapter.layout.files(str(tmp_path / "base")),
            adapter.layout.stored(model.parameters()),
        )
        save_adapter(tmp_path / "ours", files, stored)
    theirs.save_pretrained(tmp_path / "theirs")

    (batch,) = batches(1, seed=9)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    opened = peft.PeftModel.from_pretrained(fresh, tmp_path / "ours").eval()
    expected = logits_of(opened, batch["tokens"]).detach().numpy()
    assert np.abs(our_logits(config, weights, tmp_path / "ours", batch["tokens"]) - expected).max() < 1e-4
    expected = logits_of(theirs.eval(), batch["tokens"]).detach().numpy()
    assert np.abs(our_logits(config, weights, tmp_path / "theirs", batch["tokens"]) - expected).max() < 1e-4


def batches(count, seed=1):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tokens = rng.integers(0, 256, (BATCH, SEQ + 1)).astype(np.int32)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def our_logits(config, weights, directory, tokens):
    """The logits `[B, S, V]` of a model with the adapter in a directory, from its decoding graph."""
    adapter = models.load_adapter(directory, config)
    graph = tw.ComputeGraph("decoding", adapters=adapter.layout.adapters)
    models.build_decoding_graph(graph, config, BATCH * SEQ, BATCH, BATCH, "f32", max_rows=BATCH * SEQ)
    positions = np.tile(np.arange(SEQ, dtype=np.int32), BATCH)
    sequence = np.repeat(np.arange(BATCH, dtype=np.int32), SEQ)
    with graph.instantiate(graph.plan()) as model:
        model.load_parameters({**weights, **adapter.weights})
        model.forward(
            tokens=tokens.reshape(-1),
            positions=positions,
            slots=sequence * models.BLOCK_SIZE + positions,
            sequence=sequence,
            rows=np.arange(BATCH * SEQ, dtype=np.int32),
            block_table=np.pad(
                np.arange(BATCH, dtype=np.int32)[:, None],
                ((0, 0), (0, graph.find("block_table").shape[1] - 1)),
            ),
        )
        return model.get_tensor("logits").reshape(BATCH, SEQ, -1)
