"""`/v1/embeddings`: vectors of texts, as numbers or as base64, shortened on request.

Vectors of a decoder have length one, like OpenAI's vectors. For an encoder, the model's files
determine whether vectors are scaled to length one.
"""

from __future__ import annotations

import base64
from contextlib import aclosing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.server.endpoints.completions import prompts_of
from tilewise.server.errors import ApiError
from tilewise.server.requests.bodies import EmbeddingBody
from tilewise.server.service import Caller, Service

__all__ = ["answer_embeddings"]


async def answer_embeddings(service: Service, body: EmbeddingBody, caller: Caller) -> dict[str, Any]:
    """The vectors.

    Raises:
        ApiError, ConfigError: the request is invalid or failed.
    """
    service.check_ready()
    service.check_writes(False)
    name = service.check_model(body.model)
    width = service.files.config.hidden_size
    if body.dimensions is not None and body.dimensions > width:
        text = f"[server.request] dimensions must be at most {width}; got {body.dimensions}; lower it"
        raise ApiError(400, text, "dimensions")
    prompts: list[list[int]] = []
    for one in prompts_of(body.input):
        truncate = body.truncate_prompt_tokens
        if isinstance(one, str):
            ids = await service.encode(one, body.add_special_tokens, truncate, "input")
        else:
            ids = one
        if not ids:
            raise ApiError(
                400, "[server.request] a text must have at least one token; got none; send text", "input"
            )
        prompts.append(service.fit(ids, truncate, "input"))
    vectors: dict[int, NDArray[np.float32]] = {}
    with service.admit(len(prompts)):
        async with aclosing(service.ask(prompts, None, caller, model=name)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                vectors |= {p.sequence: p.vector for p in batch if p.vector is not None}
    scales = not service.files.is_encoder or body.dimensions is not None
    encoded = [_shortened(vectors[index], body.dimensions, scales) for index in range(len(prompts))]
    is_text = body.encoding_format == "base64"
    count = sum(map(len, prompts))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _base64(one) if is_text else one.tolist()}
            for index, one in enumerate(encoded)
        ],
        "model": name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _shortened(vector: NDArray[np.float32], width: int | None, scales: bool) -> NDArray[np.float32]:
    """The first `width` numbers of a vector, or all without a `width`. They are scaled to length
    one if `scales`.
    """
    numbers = vector[:width].astype(np.float64)
    length = float(np.linalg.norm(numbers))
    return (numbers / length if scales and length > 0 else numbers).astype(np.float32)


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
