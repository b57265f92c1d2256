"""Parts of bodies that answers have in common: choices, figures of tokens, usage; for the server and for files.

Pure functions of what the engine told, under OpenAI's names and vLLM's.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from tilewise.serve import Piece
from tilewise.serve.logprobs import TokenLogprobs
from tilewise.server.requests.reading import Part

__all__ = [
    "Text",
    "call_id",
    "chat_choice",
    "chat_figures",
    "completion_choice",
    "completion_figures",
    "message_of",
    "new_id",
    "prompt_figures",
    "usage_of",
]


def new_id(kind: str) -> str:
    """A name for something that is told, for example `chatcmpl-...`."""
    return f"{kind}-{secrets.token_hex(16)}"


def call_id() -> str:
    """A name for a call of a tool."""
    return f"call_{secrets.token_hex(12)}"


class Text:
    """One text as it comes: what has come since the last chunk, and counts of all of it."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.figures: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.num_tokens = 0
        self.num_characters = 0

    def add(self, piece: Piece) -> None:
        """A piece of it came."""
        self.text += piece.text
        if piece.token is not None:
            self.num_tokens += 1
            self.tokens.append(piece.token)
            if piece.logprobs is not None:
                self.figures.append(piece.logprobs)
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    def is_due(self, interval: int) -> bool:
        """Whether a chunk should be made of it now."""
        is_first = self.num_tokens == len(self.tokens)
        return (
            self.finish_reason is not None or (is_first and bool(self.tokens)) or len(self.tokens) >= interval
        )

    def take(self) -> tuple[str, list[int], list[TokenLogprobs]]:
        """What has come since the last call."""
        found = self.text, self.tokens, self.figures
        self.num_characters += len(self.text)
        self.text, self.tokens, self.figures = "", [], []
        return found


def usage_of(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """Tokens that were read and written.

    Args:
        prompt_tokens: that were read.
        completion_tokens: that were written.
        cached_tokens: of those that were read, found in the cache.
        reasoning_tokens: of those that were written, thoughts; None where these are not told apart.
    """
    found = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is None:
        return found
    return {**found, "completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}


def message_of(parts: Iterable[Part]) -> dict[str, Any]:
    """The message of a whole text."""
    content, thought = "", ""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.kind == "content":
            content += part.text
        elif part.kind == "reasoning":
            thought += part.text
        elif part.kind == "call":
            function = {"name": part.name, "arguments": part.text}
            calls.append({"id": call_id(), "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += part.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["content"] = content.strip() or None
        message["tool_calls"] = calls
    if thought:
        message["reasoning_content"] = thought.rstrip("\n")
    return message


def chat_choice(
    index: int,
    message: dict[str, Any],
    figures: dict[str, Any] | None,
    finish_reason: str | None,
    stop_reason: str | int | None,
) -> dict[str, Any]:
    """A choice of a chat completion."""
    return {
        "index": index,
        "message": message,
        "logprobs": figures,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def chat_figures(
    tokens: Sequence[int], figures: Sequence[TokenLogprobs], top: int, as_ids: bool = False
) -> dict[str, Any]:
    """Log probabilities as chat completions tell them.

    Args:
        tokens: that came.
        figures: of each.
        top: likeliest ones to be told.
        as_ids: texts of tokens are `token_id:7`.
    """
    return {"content": [_chat_entry(t, found, top, as_ids) for t, found in zip(tokens, figures)]}


def _chat_entry(token: int, found: TokenLogprobs, top: int, as_ids: bool) -> dict[str, Any]:
    def entry(id_: int) -> dict[str, Any]:
        text = found[id_].decoded_token or ""
        shown = f"token_id:{id_}" if as_ids else text
        return {"token": shown, "logprob": found[id_].logprob, "bytes": list(text.encode())}

    likeliest = sorted((id_ for id_ in found if found[id_].rank <= top), key=lambda id_: found[id_].rank)
    return {**entry(token), "top_logprobs": [entry(id_) for id_ in likeliest]}


def completion_choice(
    index: int,
    text: str,
    figures: dict[str, Any] | None,
    finish_reason: str | None,
    stop_reason: str | int | None,
) -> dict[str, Any]:
    """A choice of a completion."""
    return {
        "index": index,
        "text": text,
        "logprobs": figures,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def completion_figures(
    tokens: Sequence[int],
    figures: Sequence[TokenLogprobs | None],
    texts: Sequence[str | None],
    offset: int,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Log probabilities as completions tell them, of a prompt's tokens as well; its first has none.

    Args:
        tokens: of the text.
        figures: of each.
        texts: of those tokens that have no figures.
        offset: characters before the first.
        as_ids: texts of tokens are `token_id:7`.
    """
    shown: list[str] = []
    offsets: list[int] = []
    for token, found, other in zip(tokens, figures, texts):
        text = (other if found is None else found[token].decoded_token) or ""
        offsets.append(offset)
        offset += len(text)
        shown.append(f"token_id:{token}" if as_ids else text)
    return {
        "tokens": shown,
        "token_logprobs": [None if f is None else f[token].logprob for token, f in zip(tokens, figures)],
        "top_logprobs": [None if found is None else _by_text(found, as_ids) for found in figures],
        "text_offset": offsets,
    }


def prompt_figures(figures: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """Log probabilities of a prompt, as vLLM tells them: by id."""
    return [
        None
        if found is None
        else {
            str(id_): {"logprob": figure.logprob, "rank": figure.rank, "decoded_token": figure.decoded_token}
            for id_, figure in found.items()
        }
        for found in figures
    ]


def _by_text(found: TokenLogprobs, as_ids: bool) -> dict[str, float]:
    """By text; of tokens with the same text the first, which is the one that came or the likelier one."""
    told: dict[str, float] = {}
    for id_, figure in found.items():
        text = f"token_id:{id_}" if as_ids or figure.decoded_token is None else figure.decoded_token
        told.setdefault(text, figure.logprob)
    return told
