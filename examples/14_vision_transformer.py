"""A vision transformer on synthetic images: patches, a class token, positions, and attention in both directions.

The model is made of small classes (`tilewise.nn`), which are called with a tensor. Devices share the batch
over `dp` and `fsdp`, and heads over `tp`.
"""

import numpy as np

import tilewise as tw
from tilewise import nn

BATCH, SIDE, PATCH, WIDTH, HEADS, CLASSES = 16, 12, 4, 32, 4, 3
PATCHES = (SIDE // PATCH) ** 2


@tw.layer
def block(graph, x):
    """Attention and an MLP, each after a norm and with a residual; dropout in training."""
    drop = nn.Dropout(0.1)
    x = x + drop(nn.MultiHeadAttention("attention", HEADS)(nn.LayerNorm("norm1")(x)))
    mlp = tw.DimLabel("mlp")
    body = nn.Sequential(
        nn.LayerNorm("norm2"),
        nn.Linear("fc1", 4 * WIDTH, out_label=mlp),
        nn.gelu,
        nn.Linear("fc2", WIDTH, in_label=mlp),
        drop,
    )
    return x + body(x)


def build() -> tw.ComputeGraph:
    """The class token's features after two blocks, and a classifier with smoothed labels."""
    graph = tw.ComputeGraph("vit")
    images = graph.input([BATCH, 3, SIDE, SIDE], name="images", labels=[tw.BATCH, None, None, None])
    labels = graph.input([BATCH], "i32", name="labels", labels=[tw.BATCH], storage="scalars")
    x = nn.Conv2d("patch", WIDTH, PATCH, stride=PATCH)(images)
    x = graph.transpose(graph.reshape(x, (BATCH, WIDTH, PATCHES)))
    token = graph.expand_as(graph.parameter([1, WIDTH], name="class_token"), x[:, :1])
    x = graph.concat([token, x], 1) + graph.parameter([PATCHES + 1, WIDTH], name="positions")
    for i in range(2):
        x = block(graph, x, path=f"layers.{i}")
    logits = nn.Linear("head", CLASSES)(nn.LayerNorm("norm")(x)[:, 0])
    graph.output(logits, "logits")
    loss, _ = graph.mean_cross_entropy(logits, labels, label_smoothing=0.1)
    graph.loss(loss)
    return graph


def batch(step: int) -> dict[str, np.ndarray]:
    """Images with a bright square; the label is its color."""
    rng = np.random.default_rng(step)
    labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
    images = 0.3 * rng.standard_normal((BATCH, 3, SIDE, SIDE))
    for image, label in zip(images, labels):
        down, right = rng.integers(0, SIDE - 5, 2)
        image[label, down : down + 5, right : right + 5] += 1.0
    return {"images": images.astype(np.float32), "labels": labels}


def main() -> None:
    """Train with heads over two devices."""
    graph = build()
    graph.optimize(tw.optim.AdamW())
    with graph.instantiate(graph.plan({"tp": 2})) as model:
        model.initialize(seed=0, scale=0.1)
        losses = [model.step(batch(step), lr=2e-3).loss for step in range(60)]
        test = batch(1000)
        model.forward(**test)  # evaluation: nothing is dropped
        share = (model.get_tensor("logits").argmax(-1) == test["labels"]).mean()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {share:.0%} of new images are recognized")
    assert share > 0.8


if __name__ == "__main__":
    main()
