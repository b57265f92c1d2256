"""An MLP-mixer learns to tell four patterns apart: layers that mix patches, then features, with no attention.

A model is a function of a graph. Labels name the dims that devices may share: the batch over `dp` and
`fsdp`, hidden features of the MLPs over `tp`.
"""

import numpy as np

import tilewise as tw
from tilewise import nn

BATCH, PATCHES, WIDTH, HIDDEN, CLASSES = 16, 16, 32, 64, 4
SIDE = 16  # of an image; a patch has SIDE / 4 x SIDE / 4 pixels


@tw.layer
def mixer(graph, x):
    """Mixes patches, then features, each with a residual."""
    mlp = tw.DimLabel("mlp")
    y = graph.transpose(nn.layer_norm(graph, x, "norm1", eps=1e-5))
    x = x + graph.transpose(nn.mlp(graph, y, "patches", HIDDEN, label=mlp))
    y = nn.layer_norm(graph, x, "norm2", eps=1e-5)
    return x + nn.mlp(graph, y, "features", HIDDEN, label=mlp)


def build() -> tw.ComputeGraph:
    """Patches, two mixers, the mean over patches, and a classifier."""
    graph = tw.ComputeGraph("mixer")
    images = graph.input([BATCH, 1, SIDE, SIDE], name="images", labels=[tw.BATCH, None, None, None])
    labels = graph.input([BATCH], "i32", name="labels", labels=[tw.BATCH], storage="scalars")
    x = nn.conv2d(graph, images, "patch", WIDTH, SIDE // 4, stride=SIDE // 4)
    x = graph.transpose(graph.reshape(x, (BATCH, WIDTH, PATCHES)))
    for i in range(2):
        x = mixer(graph, x, path=f"layers.{i}")
    x = graph.mean(nn.layer_norm(graph, x, "norm", eps=1e-5), 1)
    logits = nn.linear(graph, x, "head.weight", CLASSES, bias=True)
    graph.output(logits, "logits")
    loss, _ = graph.mean_cross_entropy(logits, labels)
    graph.loss(loss)
    return graph


def batch(step: int) -> dict[str, np.ndarray]:
    """Noisy stripes in four directions."""
    rng = np.random.default_rng(step)
    labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
    down, right = np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij")
    slopes = np.array([(1, 0), (0, 1), (1, 1), (1, -1)])[labels]
    phase = slopes[:, :1, None] * down + slopes[:, 1:, None] * right
    images = np.sin(phase) + 0.5 * rng.standard_normal((BATCH, SIDE, SIDE))
    return {"images": images[:, None].astype(np.float32), "labels": labels}


def main() -> None:
    """Train on one device and on four: the losses are equal to the bit."""
    losses = {}
    for name, mesh in (("one", {}), ("four", {"dp": 2, "tp": 2})):
        graph = build()
        graph.optimize(tw.optim.AdamW())
        with graph.instantiate(graph.plan(mesh)) as model:
            model.initialize(seed=0, scale=0.1)
            losses[name] = [model.step(batch(step), lr=3e-3).loss for step in range(40)]
    print(f"loss {losses['one'][0]:.3f} -> {losses['one'][-1]:.3f}")
    assert losses["one"] == losses["four"] and losses["one"][-1] < 0.5 * losses["one"][0]


if __name__ == "__main__":
    main()
