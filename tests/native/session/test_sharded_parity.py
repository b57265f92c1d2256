"""Twenty steps with sharded state equal PyTorch's FSDP2 (`fully_shard`) on two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from tilewise import models
from tilewise.models import llama
from tilewise.strategy import DistributionStrategy

STEPS, BATCH, SEQ = 20, 8, 24
SIZES = {
    "vocab_size": 330,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
PEER = """
import json, sys
import numpy as np, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

folder, rank, sizes = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
weights, data = np.load(f"{folder}/weights.npz"), np.load(f"{folder}/data.npz")
model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="eager")).float()
model.load_state_dict({k: torch.tensor(v) for k, v in weights.items()}, strict=True)
mesh = init_device_mesh("cpu", (2,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
decayed = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim == 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
losses = []
for tokens, labels in zip(data["tokens"], data["labels"]):
    half = slice(rank * len(tokens) // 2, (rank + 1) * len(tokens) // 2)
    logits = model(torch.tensor(tokens[half]).long()).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels[half]).long().flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach() / 2)
    losses.append(mean.item())
if rank == 0:
    print(json.dumps(losses))
dist.destroy_process_group()
"""


def of_fsdp2(folder: Path) -> list[float]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PEER, str(folder), str(rank), json.dumps(SIZES)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, _ = processes[0].communicate(timeout=180)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_twenty_steps_follow_fsdp2(tmp_path):
    """Losses within 1e-4, with the same clipping and decay; every label counts."""
    model = llama.LlamaConfig(**SIZES)
    generator = np.random.default_rng(5)
    text = generator.integers(0, model.vocab_size, (4, BATCH, SEQ + 1)).astype(np.int32)
    text = np.concatenate([text] * (STEPS // 4))  # five times the same, so that there is something to learn
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, model, BATCH, SEQ, "f32")
    graph.optimize(tw.optim.AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0))
    graph.set_distribution(DistributionStrategy.fsdp(2))
    with graph.instantiate() as ours:
        ours.initialize(3, scale=0.1)
        names = {n if n.startswith("lm_head") else f"model.{n}": n for n in ours.parameter_names()}
        np.savez(tmp_path / "weights.npz", **{k: ours.get_tensor(n) for k, n in names.items()})
        np.savez(tmp_path / "data.npz", tokens=text[:, :, :-1], labels=text[:, :, 1:])
        losses = [ours.step({"tokens": t[:, :-1], "labels": t[:, 1:]}, 1e-3).loss for t in text]
    expected = of_fsdp2(tmp_path)
    assert len(expected) == STEPS and losses[0] - losses[-1] > 0.1
    assert np.abs(np.array(losses) - expected).max() < 1e-4
