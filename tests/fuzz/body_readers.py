"""The reader of HTTP request bodies, up to the engine's input.

Part of the table in readers.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from tilewise.core import ConfigError
from tilewise.server.endpoints.responses import chat_body
from tilewise.server.errors import ApiError, validation_error
from tilewise.server.http import parse_body
from tilewise.server.requests.bodies import ChatBody, CompletionBody, ResponseBody
from tilewise.server.requests.conversation import Conversation
from tilewise.server.requests.params import sampling_params


def read_body(folder: Path, data: bytes) -> None:
    """A body becomes settings and a conversation or prompts, or is rejected with a client-error status."""
    try:
        parsed = parse_body(data)
        if "input" in parsed:
            body = chat_body(ResponseBody.model_validate(parsed))
        else:
            body = (ChatBody if "messages" in parsed else CompletionBody).model_validate(parsed)
        params = sampling_params(body, {})
        assert params.n <= 128
        if isinstance(body, ChatBody):
            json.dumps(Conversation.of(body).messages)
    except ValidationError as error:
        raise ConfigError(" ".join(validation_error(error).message.split())) from None
    except ApiError as error:
        assert 400 <= error.status < 500
        raise ConfigError(" ".join(error.message.split())) from None


def valid_bodies() -> list[bytes]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    chat = {
        "model": "m",
        "messages": talk,
        "tools": [tool],
        "response_format": form,
        "logit_bias": {"1": 2.0},
    }
    text = {
        "prompt": ["a", "b"],
        "n": 2,
        "stop": ["x"],
        "logprobs": 1,
        "echo": True,
        "structured_outputs": None,
    }
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "b"},
    ]
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    answer = {
        "input": items,
        "tools": tools,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
    }
    ids = {"prompt": [[1, 2], [3]], "max_tokens": 0, "temperature": 0, "stop_token_ids": [1], "stream": True}
    return [json.dumps(body).encode() for body in (chat, text, answer, ids)]
