"""`/tokenize` and `/detokenize`: a prompt or a conversation as ids, and ids as text."""

from __future__ import annotations

from typing import Any

from tilewise.server.errors import ApiError
from tilewise.server.requests.bodies import DetokenizeBody, TokenizeBody
from tilewise.server.requests.conversation import Conversation
from tilewise.server.service import Caller, Service

__all__ = ["detokenize", "tokenize"]


async def tokenize(service: Service, body: TokenizeBody, _: Caller) -> dict[str, Any]:
    """Token ids of a prompt or a conversation, as the generating endpoints read it.

    Raises:
        ApiError, ConfigError: the request is invalid.
    """
    service.check_ready()
    service.check_model(body.model)
    if (body.prompt is None) == (not body.messages):
        raise ApiError(
            400,
            "[server.request] exactly one of prompt and messages must be set; got both or neither; correct it",
        )
    if body.prompt is not None:
        ids = await service.encode(body.prompt, body.add_special_tokens)
    else:
        ids = (await service.render(Conversation.of(body))).ids
    text = service.files.token_bytes.text
    texts = (
        await service.run_in_thread(lambda: [text(id_) for id_ in ids]) if body.return_token_strs else None
    )
    return {"count": len(ids), "max_model_len": service.max_context, "tokens": ids, "token_strs": texts}


async def detokenize(service: Service, body: DetokenizeBody, _: Caller) -> dict[str, Any]:
    """The text of token ids.

    Raises:
        ApiError: an id is invalid.
    """
    service.check_ready()
    service.check_model(body.model)
    size = max(service.files.config.vocab_size, service.files.tokenizer.get_vocab_size())
    if body.tokens and max(body.tokens) >= size:
        text = f"[server.request] ids must be below {size}; got {max(body.tokens)}; correct it"
        raise ApiError(400, text, "tokens")
    return {"prompt": await service.run_in_thread(service.files.decode, body.tokens)}
