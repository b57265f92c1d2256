"""References of kernels of tensors with any number of dims, of arithmetic and of dropout (see
reference.py). Operands are arrays `[items, ...]`, in their logical shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ARITHMETIC", "DIMS", "philox"]

F64 = NDArray[np.float64]
Array = NDArray[Any]


def _f64(x: Array) -> F64:
    return np.asarray(x).astype(np.float64)


def maximum_backward(dy: Array, a: Array, b: Array) -> F64:
    """da of `maximum(a, b)`; equal elements get half."""
    return np.asarray(_f64(dy) * (0.5 * (_f64(a) == _f64(b)) + (_f64(a) > _f64(b))))


def select(mask: Array, a: Array | None, b: Array | None) -> F64:
    """a where the mask is not 0, b elsewhere; an absent operand is 0."""
    zero = np.zeros(mask.shape)
    return np.where(_f64(mask) != 0, zero if a is None else _f64(a), zero if b is None else _f64(b))


def bce_with_logits(x: Array, target: Array) -> F64:
    """Binary cross-entropy of logits."""
    return np.asarray(np.logaddexp(0, _f64(x)) - _f64(x) * _f64(target))


def bce_with_logits_backward(dy: Array, x: Array, target: Array) -> F64:
    """dx of it."""
    return np.asarray(_f64(dy) * (1 / (1 + np.exp(-_f64(x))) - _f64(target)))


def log_softmax(x: Array) -> F64:
    """The logarithm of softmax over the last dim."""
    shifted = _f64(x) - _f64(x).max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def log_softmax_backward(dy: Array, y: Array) -> F64:
    """dx of it."""
    return np.asarray(_f64(dy) - np.exp(_f64(y)) * _f64(dy).sum(-1, keepdims=True))


ARITHMETIC: dict[str, Any] = {
    "subtract": lambda a, b: _f64(a) - _f64(b),
    "divide": lambda a, b: _f64(a) / _f64(b),
    "shift": lambda x, value: _f64(x) + value,
    "maximum": lambda a, b: np.maximum(_f64(a), _f64(b)),
    "minimum": lambda a, b: np.minimum(_f64(a), _f64(b)),
    "maximum_backward": maximum_backward,
    "greater": lambda a, b: (_f64(a) > _f64(b)).astype(np.float64),
    "equal": lambda a, b: (_f64(a) == _f64(b)).astype(np.float64),
    "equal_to": lambda x, value: (x == value).astype(np.float64),
    "select": select,
    "sigmoid": lambda x: 1 / (1 + np.exp(-_f64(x))),
    "sigmoid_backward": lambda dy, y: _f64(dy) * _f64(y) * (1 - _f64(y)),
    "sqrt": lambda x: np.sqrt(_f64(x)),
    "power": lambda x, exponent: _f64(x) ** exponent,
    "abs": lambda x: np.abs(_f64(x)),
    "abs_backward": lambda dy, x: _f64(dy) * np.sign(_f64(x)),
    "bce_with_logits": bce_with_logits,
    "bce_with_logits_backward": bce_with_logits_backward,
    "log_softmax": log_softmax,
    "log_softmax_backward": log_softmax_backward,
}


def gather_elements(x: Array, index: Array, dim: int) -> Array:
    """Elements of x along a dim. An index of one dim chooses slices."""
    return np.take(x, index, dim) if index.ndim == 1 < x.ndim else np.take_along_axis(x, index, dim)


def scatter_add(x: Array | None, src: Array, index: Array, dim: int, shape: Sequence[int]) -> F64:
    """x, or zeros, with the elements of `src` added at their indices along a dim."""
    out = np.zeros(shape) if x is None else _f64(x).copy()
    places: list[Array] = list(np.indices(src.shape))
    places[dim] = (
        index.reshape([-1 if d == dim else 1 for d in range(src.ndim)]) if index.ndim == 1 else index
    )
    np.add.at(out, tuple(np.broadcast_to(p, src.shape) for p in places), _f64(src))
    return out


def unfold(
    x: Array, window: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Array:
    """The windows of images `[items, channels, height, width]`, a row each."""
    padded = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, window)]
    views = np.lib.stride_tricks.sliding_window_view(padded, reach, (2, 3))
    views = views[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
    items, _, down, right = views.shape[:4]
    return np.asarray(views.transpose(0, 2, 3, 1, 4, 5).reshape(items, down * right, -1))


def fold(windows: Array, image: Sequence[int], **how: Any) -> F64:
    """The gradient of `unfold`, from its matrix."""
    size = int(np.prod(image))
    unit = np.eye(size).reshape(size, *image)
    matrix = unfold(unit, **how).reshape(size, -1)
    return np.asarray(_f64(windows).reshape(len(windows), -1) @ matrix.T).reshape(len(windows), *image)


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10: four random words."""
    words, (a, b) = [*map(int, counter)], map(int, key)
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [(second >> 32) ^ words[1] ^ a, second, (first >> 32) ^ words[3] ^ b, first]
        words = [word & 0xFFFFFFFF for word in words]
        a, b = (a + 0x9E3779B9) & 0xFFFFFFFF, (b + 0xBB67AE85) & 0xFFFFFFFF
    return words


def dropout(x: Array, keys: Array, p: float) -> F64:
    """x / (1 - p), or 0 where a random word lies below p. A row of `keys` belongs to an item."""
    out = _f64(x) / (1 - p)
    for item, (number, a, b, step) in zip(range(len(out)), keys.astype(np.int64)):
        if step < 0:
            out[item] = x[item]
            continue
        flat = out[item].reshape(-1)
        words = [
            philox([j, 0, number, step], [a & 0xFFFFFFFF, b & 0xFFFFFFFF]) for j in range(-(-flat.size // 4))
        ]
        flat[np.array(words).reshape(-1)[: flat.size] < int(p * 2.0**32)] = 0
    return out


DIMS: dict[str, Any] = {
    "rearrange": lambda x, order: np.transpose(x, order),
    "concat": lambda x, dim: np.concatenate(x, dim),
    "reduce_sum": lambda x, dims, factor: _f64(x).sum(dims) * factor,
    "reduce_max": lambda x, dims: _f64(x).max(dims),
    "repeat_row": lambda x, rows: np.repeat(x, rows, 0),
    "gather_elements": gather_elements,
    "scatter_add": scatter_add,
    "one_hot": lambda ids, classes, first: np.arange(classes) == ids.reshape(-1, 1) - first,
    "unfold": unfold,
    "fold": fold,
    "batched_gemm": lambda a, b: _f64(a) @ _f64(b),
    "dropout": dropout,
    "unpack": lambda x: x,
}
