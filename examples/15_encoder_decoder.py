"""An encoder-decoder with cross-attention learns to reverse sequences.

The decoder attends to earlier target tokens, and to all source tokens. Devices share the batch over `dp` and
`fsdp`, heads and hidden features over `tp`.
"""

import numpy as np

import tilewise as tw
from tilewise import nn

BATCH, SOURCE, TARGET, WIDTH, HEADS, VOCAB = 16, 6, 7, 32, 4, 12


def feed_forward(graph, x):
    """An MLP after a norm, with a residual."""
    y = nn.layer_norm(graph, x, "norm_mlp", eps=1e-5)
    return x + nn.mlp(graph, y, "mlp", 4 * WIDTH, label=tw.DimLabel("mlp"))


@tw.layer
def encoder(graph, x):
    """Attention of the source to itself."""
    y = nn.layer_norm(graph, x, "norm", eps=1e-5)
    return feed_forward(graph, x + nn.multi_head_attention(graph, y, "attention", HEADS))


@tw.layer
def decoder(graph, x, context):
    """Causal attention of the target to itself, then attention to the source."""
    y = nn.layer_norm(graph, x, "norm", eps=1e-5)
    x = x + nn.multi_head_attention(graph, y, "attention", HEADS, causal=True)
    y = nn.layer_norm(graph, x, "norm_cross", eps=1e-5)
    x = x + nn.multi_head_attention(graph, y, "cross", HEADS, context=context)
    return feed_forward(graph, x)


def build() -> tw.ComputeGraph:
    """Both stacks, with one table of tokens and one of positions each."""
    graph, rows = tw.ComputeGraph("seq2seq"), {"labels": [tw.BATCH, None], "storage": "scalars"}
    labels = graph.input([BATCH, TARGET], "i32", name="labels", **rows)
    features = []
    for name, size in (("source", SOURCE), ("target", TARGET)):
        ids = graph.input([BATCH, size], "i32", name=name, **rows)
        tokens = nn.embedding(graph, ids, f"{name}.tokens", VOCAB, WIDTH)
        features.append(tokens + graph.parameter([size, WIDTH], name=f"{name}.positions"))
    x, y = features
    for i in range(2):
        x = encoder(graph, x, path=f"encoder.{i}")
    for i in range(2):
        y = decoder(graph, y, x, path=f"decoder.{i}")
    logits = nn.linear(graph, nn.layer_norm(graph, y, "norm", eps=1e-5), "head.weight", VOCAB)
    graph.loss(graph.mean_cross_entropy(logits, labels)[0])
    return graph


def batch(step: int) -> dict[str, np.ndarray]:
    """Random sequences, and their reversals with a start token and an end token."""
    source = np.random.default_rng(step).integers(2, VOCAB, (BATCH, SOURCE)).astype(np.int32)
    edge = np.zeros((BATCH, 1), np.int32)
    reverse = source[:, ::-1]
    labels = np.hstack([reverse, edge + 1])
    return {"source": source, "target": np.hstack([edge, reverse]), "labels": labels}


def main() -> None:
    """Train with parameters sharded over two devices."""
    graph = build()
    graph.optimize(tw.optim.AdamW())
    graph.set_distribution(tw.DistributionStrategy.fsdp(2))
    with graph.instantiate() as model:
        model.initialize(seed=0, scale=0.15)
        losses = [model.step(batch(step), lr=3e-3).loss for step in range(150)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < 0.5 * losses[0]


if __name__ == "__main__":
    main()
