"""The models of the examples in PyTorch, as functions of the same parameters by name."""

from __future__ import annotations

import torch

functional = torch.nn.functional


def linear(p, name, x):
    return functional.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def norm(p, name, x):
    return functional.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)


def mlp(p, name, x):
    return linear(p, f"{name}.fc2", functional.gelu(linear(p, f"{name}.fc1", x)))


def attention(p, name, x, heads, context=None, causal=False):
    source = x if context is None else context
    split = [
        linear(p, f"{name}.{n}", y).unflatten(-1, (heads, -1)).transpose(1, 2)
        for n, y in (("q", x), ("k", source), ("v", source))
    ]
    out = functional.scaled_dot_product_attention(*split, is_causal=causal)
    return linear(p, f"{name}.out", out.transpose(1, 2).flatten(-2))


def patches(p, images, size):
    weight = p["patch.weight"].unflatten(1, (images.shape[1], size, size))
    return functional.conv2d(images, weight, p["patch.bias"], stride=size).flatten(2).mT


def mixer(p, data):
    x = patches(p, data["images"], 4)
    for i in range(2):
        y = norm(p, f"layers.{i}.norm1", x).mT
        x = x + mlp(p, f"layers.{i}.patches", y).mT
        x = x + mlp(p, f"layers.{i}.features", norm(p, f"layers.{i}.norm2", x))
    return functional.cross_entropy(linear(p, "head", norm(p, "norm", x).mean(1)), data["labels"])


def vision_transformer(p, data):
    x = patches(p, data["images"], 4)
    x = torch.cat([p["class_token"].expand(len(x), 1, -1), x], 1) + p["positions"]
    for i in range(2):
        x = x + attention(p, f"layers.{i}.attention", norm(p, f"layers.{i}.norm1", x), 4)
        h = functional.gelu(linear(p, f"layers.{i}.fc1", norm(p, f"layers.{i}.norm2", x)))
        x = x + linear(p, f"layers.{i}.fc2", h)
    logits = linear(p, "head", norm(p, "norm", x)[:, 0])
    return functional.cross_entropy(logits, data["labels"], label_smoothing=0.1)


def encoder_decoder(p, data):
    def feed_forward(path, x):
        return x + mlp(p, f"{path}.mlp", norm(p, f"{path}.norm_mlp", x))

    x, y = (
        functional.embedding(data[name], p[f"{name}.tokens"]) + p[f"{name}.positions"]
        for name in ("source", "target")
    )
    for i in range(2):
        path = f"encoder.{i}"
        x = feed_forward(path, x + attention(p, f"{path}.attention", norm(p, f"{path}.norm", x), 4))
    for i in range(2):
        path = f"decoder.{i}"
        y = y + attention(p, f"{path}.attention", norm(p, f"{path}.norm", y), 4, causal=True)
        y = y + attention(p, f"{path}.cross", norm(p, f"{path}.norm_cross", y), 4, context=x)
        y = feed_forward(path, y)
    logits = linear(p, "head", norm(p, "norm", y))
    return functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())


def two_towers(p, data):
    def tower(name, x):
        x = mlp(p, name, x)
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    tokens = functional.embedding(data["words"], p["words.table"])
    image, text = tower("image", data["pixels"]), tower("text", tokens.mean(1))
    scores = image @ text.T * p["log_sharpness"].exp()
    return (
        functional.cross_entropy(scores, data["own"]) + functional.cross_entropy(scores.T, data["own"])
    ) / 2


EXAMPLES = {
    "13_mlp_mixer": mixer,
    "14_vision_transformer": vision_transformer,
    "15_encoder_decoder": encoder_decoder,
    "16_two_towers": two_towers,
}
