"""References of activations and gates, elementwise (see reference.py)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ACTIVATIONS"]

F64 = NDArray[np.float64]
Array = NDArray[Any]


def _f64(x: Array) -> F64:
    return np.asarray(x).astype(np.float64)


def _sigmoid(x: F64) -> F64:
    return np.asarray(1 / (1 + np.exp(-x)))


def relu(x: Array) -> F64:
    """x where it is above 0."""
    return np.maximum(_f64(x), 0.0)


def relu_backward(dy: Array, x: Array) -> F64:
    """dx of relu."""
    return np.where(_f64(x) > 0, _f64(dy), 0.0)


def gelu(x: Array) -> F64:
    """x times the standard normal distribution function of x."""
    return _f64(x) * _normal_share(_f64(x))


def gelu_backward(dy: Array, x: Array) -> F64:
    """dx of gelu."""
    v = _f64(x)
    return np.asarray(_f64(dy) * (_normal_share(v) + v * np.exp(-(v**2) / 2) / np.sqrt(2 * np.pi)))


def _normal_share(x: F64) -> F64:
    return np.asarray(np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)), otypes=[np.float64])(x))


def gelu_tanh(x: Array) -> F64:
    """x times (1 + tanh u) / 2."""
    return np.asarray(_f64(x) * (1 + np.tanh(_gelu_argument(_f64(x)))) / 2)


def gelu_tanh_backward(dy: Array, x: Array) -> F64:
    """dx of gelu_tanh."""
    v = _f64(x)
    t, slope = np.tanh(_gelu_argument(v)), np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * v**2)
    return np.asarray(_f64(dy) * ((1 + t) / 2 + v * (1 - t**2) * slope / 2))


def _gelu_argument(x: F64) -> F64:
    return np.asarray(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def gelu_tanh_gate(g: Array, u: Array) -> F64:
    """gelu_tanh(g) * u."""
    return gelu_tanh(g) * _f64(u)


def gelu_tanh_gate_backward(dh: Array, g: Array, u: Array) -> tuple[F64, F64]:
    """dg and du of gelu_tanh(g) * u."""
    return gelu_tanh_backward(_f64(dh) * _f64(u), g), _f64(dh) * gelu_tanh(g)


def tanh_backward(dy: Array, y: Array) -> F64:
    """dx from the result."""
    return _f64(dy) * (1 - _f64(y) ** 2)


def softcap(x: Array, cap: float) -> F64:
    """cap * tanh(x / cap)."""
    return cap * np.asarray(np.tanh(_f64(x) / cap))


def softcap_backward(dy: Array, x: Array, cap: float) -> F64:
    """dx of softcap."""
    return np.asarray(_f64(dy) * (1 - np.tanh(_f64(x) / cap) ** 2))


def silu(x: Array) -> F64:
    """x sigmoid(x)."""
    return _f64(x) * _sigmoid(_f64(x))


def silu_backward(dy: Array, x: Array) -> F64:
    """dy times the slope of silu."""
    s = _sigmoid(_f64(x))
    return _f64(dy) * s * (1 + _f64(x) * (1 - s))


def silu_gate(g: Array, u: Array) -> F64:
    """silu(g) u."""
    return silu(g) * _f64(u)


def silu_gate_backward(dh: Array, g: Array, u: Array) -> tuple[F64, F64]:
    """dg and du."""
    return silu_backward(_f64(dh) * _f64(u), g), _f64(dh) * silu(g)


ACTIVATIONS: dict[str, Any] = {
    "relu": relu,
    "relu_backward": relu_backward,
    "gelu": gelu,
    "gelu_backward": gelu_backward,
    "gelu_tanh": gelu_tanh,
    "gelu_tanh_backward": gelu_tanh_backward,
    "gelu_tanh_gate": gelu_tanh_gate,
    "gelu_tanh_gate_backward": gelu_tanh_gate_backward,
    "silu": silu,
    "silu_backward": silu_backward,
    "silu_gate": silu_gate,
    "silu_gate_backward": silu_gate_backward,
    "softcap": softcap,
    "softcap_backward": softcap_backward,
    "tanh": lambda x: np.tanh(_f64(x)),
    "tanh_backward": tanh_backward,
}
"""By kernel name without the dtype suffix."""
