"""The names of Phi-3's parameters in files: queries, keys and values are one tensor, gate and up
projection another.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.checkpoint import StoredTensor
from tilewise.models.decoder.architecture import Decoder
from tilewise.models.decoder.weights import stored_by_name

__all__ = ["stored_fused"]

_FUSED = {
    "self_attn.q_proj.weight": "self_attn.qkv_proj.weight",
    "self_attn.k_proj.weight": "self_attn.qkv_proj.weight",
    "self_attn.v_proj.weight": "self_attn.qkv_proj.weight",
    "mlp.gate_proj.weight": "mlp.gate_up_proj.weight",
    "mlp.up_proj.weight": "mlp.gate_up_proj.weight",
}


def stored_fused(decoder: Decoder) -> Iterator[StoredTensor]:
    """Tensors with several parameters, stacked by rows in the order of the forward pass."""
    together: dict[str, tuple[tuple[str, int], ...]] = {}
    for tensor in stored_by_name(decoder):
        name = tensor.name
        for part, fused in _FUSED.items():
            if name.endswith(f".{part}"):
                name = name.removesuffix(part) + fused
        together[name] = (*together.get(name, ()), *tensor.parameters)
    for name, parameters in together.items():
        yield StoredTensor(name, parameters)
