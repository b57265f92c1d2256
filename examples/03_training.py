"""Training: a small Llama learns to count, on one device and on two, with equal losses to the bit.

The strategy is the only thing that differs between the two runs. Losses are compared with `==`, not with a
tolerance: the arithmetic is fixed by the graph, and a strategy only places it.
"""

import numpy as np

import tilewise as tw
from tilewise import models
from tilewise.models import llama

BATCH, CONTEXT, STEPS = 8, 32, 30
CONFIG = llama.LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
)


def batch(step: int) -> dict[str, np.ndarray]:
    """Sequences that count up from a random start, and the next tokens."""
    starts = np.random.default_rng(step).integers(0, CONFIG.vocab_size, (BATCH, 1))
    ids = (starts + np.arange(CONTEXT + 1)) % CONFIG.vocab_size
    return {"tokens": ids[:, :-1].astype(np.int32), "labels": ids[:, 1:].astype(np.int32)}


def train(strategy: tw.DistributionStrategy) -> list[float]:
    """The losses of all steps under a strategy."""
    graph = tw.ComputeGraph("llama")
    models.build_training_graph(graph, CONFIG, BATCH, CONTEXT, dtype="f32")
    graph.optimize(tw.optim.AdamW())
    graph.set_distribution(strategy)
    model = graph.instantiate(graph.plan(batch_splits=8))
    model.initialize(seed=0)
    losses = [model.step(batch(step), lr=3e-3).loss for step in range(STEPS)]
    model.close()
    return losses


def main() -> None:
    """Train twice, compare."""
    one = train(tw.DistributionStrategy.single())
    two = train(tw.DistributionStrategy.ddp(2))
    print(f"loss {one[0]:.4f} -> {one[-1]:.4f} in {STEPS} steps")
    print("one device and two devices, losses equal to the bit:", one == two)
    assert one == two


if __name__ == "__main__":
    main()
