"""Parts that all kinds of answers have: choices, log probabilities, usage. The server and batch
files use them.

The functions are pure functions of what the engine returned. Fields have the names of OpenAI and
vLLM.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tilewise.generate import TokenBytes
from tilewise.serve import Delta
from tilewise.serve.logprobs import TokenLogprobs
from tilewise.server.requests.reading import Part

__all__ = [
    "ChunkBuffer",
    "ChunkContent",
    "call_id",
    "chat_choice",
    "chat_logprobs",
    "completion_choice",
    "completion_logprobs",
    "message_of",
    "new_id",
    "prompt_logprobs_of",
    "usage_of",
]


_LETTERS = string.ascii_letters + string.digits


def new_id(kind: str) -> str:
    """A name for an answer, for example `chatcmpl-...`."""
    return f"{kind}-{secrets.token_hex(16)}"


def call_id(part: Part, is_short: bool) -> str:
    """The id of a tool call: the one that the model wrote, or else a random one.

    Args:
        part: the part that begins the call.
        is_short: whether the id has nine letters and digits, as Mistral's templates require.
    """
    if part.id:
        return part.id
    if is_short:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class ChunkContent(NamedTuple):
    """Content of the next chunk of a text.

    Attributes:
        text: complete characters.
        tokens: token ids.
        logprobs: log probabilities at each token, if requested; otherwise empty.
        offsets: number of characters of the whole text before each token, if log probabilities were
            requested; otherwise empty.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    offsets: list[int]


class ChunkBuffer:
    """Collects the deltas of a text until a chunk is due, and counts its tokens and characters."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.offsets: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.num_tokens = 0
        self.num_characters = 0

    def add(self, delta: Delta) -> None:
        """Add a delta."""
        self.text += delta.text
        if delta.token is not None:
            self.num_tokens += 1
            self.tokens.append(delta.token)
            if delta.logprobs is not None:
                self.logprobs.append(delta.logprobs)
                self.offsets.append(delta.text_offset)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def is_due(self, interval: int) -> bool:
        """Whether a chunk should be sent now."""
        is_first = self.num_tokens == len(self.tokens)
        return (
            self.finish_reason is not None or (is_first and bool(self.tokens)) or len(self.tokens) >= interval
        )

    def take(self) -> ChunkContent:
        """The content since the last call. When the text has ended, no offset is beyond its end, because a stop string
        may have cut off the text of its last tokens."""
        self.num_characters += len(self.text)
        end = max(self.offsets, default=0) if self.finish_reason is None else self.num_characters
        offsets = [min(offset, end) for offset in self.offsets]
        content = ChunkContent(self.text, self.tokens, self.logprobs, offsets)
        self.text, self.tokens, self.logprobs, self.offsets = "", [], [], []
        return content


def usage_of(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """The usage of an answer.

    Args:
        prompt_tokens: tokens of the prompts.
        completion_tokens: new tokens.
        cached_tokens: tokens of the prompts that were found in the prefix cache.
        reasoning_tokens: number of reasoning tokens among the new tokens; None if reasoning is not
            separated.
    """
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is None:
        return usage
    return {**usage, "completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}


def message_of(parts: Iterable[Part], has_short_ids: bool) -> dict[str, Any]:
    """The message of a finished text."""
    content, thought = "", ""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.kind == "content":
            content += part.text
        elif part.kind == "reasoning":
            thought += part.text
        elif part.kind == "call":
            function = {"name": part.name, "arguments": part.text}
            calls.append({"id": call_id(part, has_short_ids), "type": "function", "function": function})
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
    logprobs: dict[str, Any] | None,
    finish_reason: str | None,
    stop_reason: str | int | None,
) -> dict[str, Any]:
    """A choice of a chat completion."""
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def chat_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    top: int,
    token_bytes: TokenBytes,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Log probabilities in the form of chat completions.

    Args:
        tokens: ids of a text.
        logprobs: log probabilities at each of these tokens.
        top: number of most likely tokens to list at each token.
        token_bytes: bytes of the tokenizer's tokens.
        as_ids: whether tokens are named by their ids, such as `token_id:7`.
    """

    def entry(id_: int, row: TokenLogprobs) -> dict[str, Any]:
        content = token_bytes[id_]
        return {"token": _name(id_, content, as_ids), "logprob": row[id_].logprob, "bytes": list(content)}

    content = []
    for token, row in zip(tokens, logprobs):
        likeliest = sorted((id_ for id_ in row if row[id_].rank <= top), key=lambda id_: row[id_].rank)
        content.append({**entry(token, row), "top_logprobs": [entry(id_, row) for id_ in likeliest]})
    return {"content": content}


def _name(token: int, content: bytes, as_ids: bool) -> str:
    """A token as text; bytes that are only a part of a character in OpenAI's form, `bytes:\\xf0`."""
    if as_ids:
        return f"token_id:{token}"
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def completion_choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None,
    finish_reason: str | None,
    stop_reason: str | int | None,
) -> dict[str, Any]:
    """A choice of a completion."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def completion_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    token_bytes: TokenBytes,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Log probabilities in the form of completions. They may include tokens of the prompt, whose
    first token has no log probability.

    Args:
        tokens: ids of the text.
        logprobs: log probabilities at each of these tokens.
        offsets: number of characters of the text before each token.
        token_bytes: bytes of the tokenizer's tokens.
        as_ids: whether tokens are named by their ids, such as `token_id:7`.
    """
    return {
        "tokens": [_name(token, token_bytes[token], as_ids) for token in tokens],
        "token_logprobs": [None if f is None else f[token].logprob for token, f in zip(tokens, logprobs)],
        "top_logprobs": [None if f is None else _by_name(f, token_bytes, as_ids) for f in logprobs],
        "text_offset": list(offsets),
    }


def prompt_logprobs_of(logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """Log probabilities of a prompt by token id, as vLLM reports them."""
    return [
        None
        if row is None
        else {
            str(id_): {
                "logprob": logprob.logprob,
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for id_, logprob in row.items()
        }
        for row in logprobs
    ]


def _by_name(row: TokenLogprobs, token_bytes: TokenBytes, as_ids: bool) -> dict[str, float]:
    """Log probabilities by the tokens' names. If several tokens have the same text, only one is
    named by it: the token of the generated text if it is among them, otherwise the most likely one.
    The others are named by their ids, such as `token_id:7`, so that each has its entry.
    """
    named: dict[str, float] = {}
    for id_, logprob in row.items():
        name = _name(id_, token_bytes[id_], as_ids)
        named[f"token_id:{id_}" if name in named else name] = logprob.logprob
    return named
