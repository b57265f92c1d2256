"""Files of a model that the HTTP process reads: tokenizer, chat template, default settings, formats of its family.

Nothing in this module needs weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from tilewise import models
from tilewise.checkpoint import (
    check_token_ids,
    load_generation_config,
    load_tokenizer,
    load_tokenizer_config,
)
from tilewise.core import ConfigError
from tilewise.generate import TokenBytes, served_settings
from tilewise.server.errors import ApiError, context_error
from tilewise.server.requests.conversation import Renderer
from tilewise.server.settings import ServerSettings

__all__ = ["ModelFiles"]

_TOOLS = {
    "qwen2": "hermes",
    "qwen3": "hermes",
    "smollm3": "hermes",
    "llama": "llama3_json",
    "mistral": "mistral",
    "phi3": "phi4_mini_json",
    "gemma3_text": "pythonic",
}
"""Format of tool calls, by model family."""


class ModelFiles:
    """Files of a model that the HTTP process reads.

    Args:
        model: directory of the model.
        settings: settings of the server.
        engine: fields of `EngineSettings` by name.

    Raises:
        ConfigError, CheckpointError: the directory is not a supported model.
    """

    def __init__(self, model: str, settings: ServerSettings, engine: dict[str, Any]) -> None:
        self.config = models.open(model, ignore=engine.get("ignore_config_fields", ()))
        self.is_encoder = models.is_encoder(self.config)
        self.makes_vectors = engine.get("runner") == "pooling" or self.is_encoder
        self.tokenizer = load_tokenizer(model, self.config.vocab_size)
        self.token_bytes = TokenBytes(self.tokenizer)
        self.longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        uses_file = engine.get("generation_config", True) and not self.makes_vectors
        file = load_generation_config(model, self.config.vocab_size) if uses_file else {}
        self.defaults = served_settings(file)
        self.tools = _chosen(settings.tool_call_parser, _TOOLS.get(self.config.model_type))
        self.has_short_ids = self.tools == "mistral"
        self.renderer = Renderer(model, self.tokenizer, settings.chat_template, self.has_short_ids)
        templates = settings.chat_template or "\n".join(load_tokenizer_config(model).chat_templates.values())
        self.thinks = (
            _chosen(settings.reasoning_parser, "qwen3" if "<think>" in templates else None) is not None
        )

    def fit(
        self, ids: list[int], truncate: int | None, max_context: int, max_tokens: int | None, what: str
    ) -> list[int]:
        """Check that a prompt fits the context, and truncate its beginning on request.

        Args:
            ids: token ids of the prompt.
            truncate: number of last tokens to keep. -1 keeps as many as leave room for the new
                tokens, as in vLLM. None keeps all.
            max_context: largest number of tokens of prompt and text together.
            max_tokens: number of requested new tokens; None for any number. For 0, the prompt may
                fill the context.
            what: name of the request's field, for errors.

        Raises:
            ApiError: the prompt is too long, or has an id that the model does not have (400).
        """
        least = 0 if self.makes_vectors or max_tokens == 0 else 1
        if truncate == -1:
            truncate = max(1, max_context - max(least, max_tokens or 0))
        ids = ids if truncate is None else ids[-truncate:]
        if len(ids) + least > max_context:
            got = f"you requested {len(ids) + least} tokens ({len(ids)} in the {what}, {least} in the completion)"
            raise context_error(max_context, got, what)
        try:
            check_token_ids(self.tokenizer, ids, self.config.vocab_size, what)
        except ConfigError as error:
            raise ApiError(400, str(error), what) from None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, including special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def num_added_tokens(self, text: str, ids: Sequence[int]) -> int:
        """The number of special tokens that the tokenizer has put before a text: token ids begin
        with them, but the text does not.
        """
        added = self.tokenizer.get_added_tokens_decoder()
        special = takewhile(lambda token: token is not None and token.special, map(added.get, ids))
        contents = [token.content for token in special if token is not None]
        return next(n for n in range(len(contents) + 1) if text.startswith("".join(contents[n:])))


def _chosen(name: str | None, default: str | None) -> str | None:
    return default if name is None else None if name == "none" else name
