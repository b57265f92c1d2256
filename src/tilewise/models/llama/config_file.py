"""What Tilewise reads of a Llama's config.json: fields and their types, nothing coerced.

Owns the types only; `config.py` says which values a Llama that we compute may have. A text is no number, a fraction is
no size, `"false"` is no flag. Unknown keys are allowed: a Hugging Face file holds many that decide nothing here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["ConfigFile"]


class ConfigFile(BaseModel):
    """config.json; a missing key and null are the same."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    architectures: list[str] | None = None
    model_type: str | None = None
    hidden_act: str | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    quantization_config: dict[str, Any] | None = None
