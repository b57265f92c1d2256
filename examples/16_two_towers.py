"""Two towers learn to match pairs, as CLIP matches images and texts: each element of the batch is compared with all
others.

`gather_batch` brings the rows of all devices to every device, so the loss is the same on any mesh. It needs
all rows at once: a step has one microbatch.
"""

import numpy as np

import tilewise as tw
from tilewise import nn

BATCH, PIXELS, WORDS, VOCAB, WIDTH = 16, 20, 6, 30, 24
ROWS = [tw.BATCH, None]


def tower(graph, x, name):
    """Features of unit length."""
    x = nn.mlp(graph, x, name, 2 * WIDTH, out_features=WIDTH, label=tw.DimLabel("mlp"))
    return x / graph.sqrt(graph.sum(x * x, -1, keepdim=True) + 1e-6)


def build() -> tw.ComputeGraph:
    """Cross-entropy of the similarities of all pairs, in both directions."""
    graph = tw.ComputeGraph("towers")
    pixels = graph.input([BATCH, PIXELS], name="pixels", labels=ROWS)
    words = graph.input([BATCH, WORDS], "i32", name="words", labels=ROWS, storage="scalars")
    own = graph.input([BATCH], "i32", name="own", labels=[tw.BATCH], storage="scalars")
    tokens = nn.embedding(graph, words, "words.table", VOCAB, WIDTH)
    image, text = tower(graph, pixels, "image"), tower(graph, graph.mean(tokens, 1), "text")
    sharpness = graph.exp(graph.parameter([1], name="log_sharpness"))
    inv_count = graph.constant(np.full(1, 1 / BATCH, np.float32), name="inv_count", storage="vector")
    losses = []
    for a, b in ((image, text), (text, image)):
        scores = graph.matmul(a, graph.gather_batch(b), trans_b=True) * sharpness
        losses.append(graph.cross_entropy(scores, own, inv_count)[0])
    graph.loss((losses[0] + losses[1]) / 2)
    return graph


def batch(step: int) -> dict[str, np.ndarray]:
    """Pairs with a common cause: pixels are a projection of the words' counts."""
    words = np.random.default_rng(step).integers(0, VOCAB, (BATCH, WORDS)).astype(np.int32)
    counts = np.eye(VOCAB)[words].sum(1)
    projection = np.random.default_rng(0).standard_normal((VOCAB, PIXELS))
    pixels = (counts @ projection / 3).astype(np.float32)
    return {"pixels": pixels, "words": words, "own": np.arange(BATCH, dtype=np.int32)}


def main() -> None:
    """Train with the batch over two devices."""
    graph = build()
    graph.optimize(tw.optim.AdamW())
    graph.set_distribution(tw.DistributionStrategy.ddp(2))
    with graph.instantiate() as model:
        model.initialize(seed=0, scale=0.2)
        losses = [model.step(batch(step), lr=5e-3).loss for step in range(200)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < 0.5 * losses[0]


if __name__ == "__main__":
    main()
