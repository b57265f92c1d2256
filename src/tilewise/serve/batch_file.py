"""A file of requests in OpenAI's format for batches, answered as a list: a line of JSON in, a line out.

Each line has `custom_id`, `method`, `url` and a `body` as `/v1/chat/completions` and `/v1/completions` take them. What
is wrong with a line is said in its own answer; the others are answered. Fields that change what is written and that
this engine does not have are refused; those that only describe the caller are passed over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from tilewise.core import Border, ConfigError
from tilewise.core.border import shown
from tilewise.serve.collector import Collector
from tilewise.serve.llm import LLM
from tilewise.serve.logprobs import TokenLogprobs
from tilewise.serve.outputs import CompletionOutput, Piece, RequestOutput, RequestOutputKind
from tilewise.serve.request import Request
from tilewise.serve.sampling_params import SamplingParams
from tilewise.serve.structured import StructuredOutputsParams

__all__ = ["answer_lines"]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_SAME = (
    *(
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
    ),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens", "min_tokens", "bad_words"),
    *("skip_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "prompt_logprobs"),
)
_PASSED_OVER = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_OURS = {
    CHAT: (
        "messages",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "tools",
        "cache_salt",
        "response_format",
        "structured_outputs",
    ),
    COMPLETION: ("prompt", "logprobs", "logit_bias", "cache_salt", "response_format", "structured_outputs"),
}
_border = Border("serve")


@dataclass(frozen=True)
class _Asked:
    """A line that can be answered."""

    line: Mapping[str, Any]
    request: Request
    collector: Collector


def answer_lines(llm: LLM, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Answers in the lines' order, once all are there; all requests are asked at once.

    Args:
        llm: answers.
        lines: of the file; empty ones are passed over.
    """
    prepared = [_prepare(llm, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    queue: SimpleQueue[tuple[int, Piece | BaseException]] = SimpleQueue()
    answers: dict[int, dict[str, Any]] = {}
    for index, each in enumerate(prepared):
        if isinstance(each, _Asked):
            llm.engine.submit([each.request], partial(_put, queue, index))
        else:
            answers[index] = each
    while len(answers) < len(prepared):
        index, event = queue.get()
        asked = prepared[index]
        assert isinstance(asked, _Asked)
        if isinstance(event, BaseException):
            answers[index] = _answer(asked.line, 500, _error(str(event), "server_error", 500))
        elif (output := asked.collector.add(event)) is not None:
            answers[index] = _answer(asked.line, 200, _body(asked.line, output))
    yield from (answers[index] for index in range(len(prepared)))


def _put(
    queue: SimpleQueue[tuple[int, Piece | BaseException]], index: int, event: Piece | BaseException
) -> None:
    queue.put((index, event))


def _prepare(llm: LLM, number: int, text: str) -> _Asked | dict[str, Any]:
    """A line as a request, or the answer that says what is wrong with it."""
    line: Mapping[str, Any] = {}
    try:
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            _border.refuse("batch", f"line {number} must be JSON", str(error), "correct it")
        line = _border.mapping("batch", f"line {number}", given, "a request")
        _border.text("batch", "custom_id", line.get("custom_id"))
        _border.choice("batch", "method", line.get("method"), ("POST",))
        url = _border.choice("batch", "url", line.get("url"), (CHAT, COMPLETION))
        body = _border.mapping("batch", "body", line.get("body"), "fields")
        for name in body:
            if body[name] is not None:
                _border.choice("batch", "a field of body", name, (*_SAME, *_OURS[url], *_PASSED_OVER))
        body = {name: value for name, value in body.items() if value is not None}
        params = _params(url, body)
        (request,) = llm.engine.requests([_prompt(llm, url, body)], params)
        return _Asked(line, request, Collector(request, None, RequestOutputKind.FINAL_ONLY))
    except ConfigError as error:
        return _answer(line, 400, _error(str(error), "invalid_request_error", 400))


def _prompt(llm: LLM, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
    if url == CHAT:
        return {**llm.render(body.get("messages", ()), tools=body.get("tools")), **salt}
    prompt = body.get("prompt")
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, **salt}


def _params(url: str, body: Mapping[str, Any]) -> SamplingParams:
    """The settings of a body; what it does not say is OpenAI's default."""
    found = {name: body[name] for name in _SAME if name in body}
    if url == CHAT:
        found["max_tokens"] = body.get("max_completion_tokens", body.get("max_tokens"))
        if _border.truth("batch", "logprobs", body.get("logprobs", False)):
            found["logprobs"] = body.get("top_logprobs", 0)
        elif "top_logprobs" in body:
            _border.refuse("batch", "top_logprobs needs logprobs", "it alone", "add logprobs: true")
    elif "logprobs" in body:
        found["logprobs"] = body["logprobs"]
    if "logit_bias" in body:
        given = _border.mapping("batch", "logit_bias", body["logit_bias"], "numbers")
        bad = [key for key in given if not (key.isascii() and key.isdigit() and len(key) <= 10)]
        if bad:
            _border.refuse("batch", "keys of logit_bias must be ids", shown(bad[0]), "correct it")
        found["logit_bias"] = {int(key): value for key, value in given.items()}
    return SamplingParams(**found, structured_outputs=_structured_outputs(body))


def _structured_outputs(body: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """What the text follows: OpenAI's `response_format`, or vLLM's `structured_outputs`."""
    if "response_format" not in body:
        given = body.get("structured_outputs")
        return None if given is None else StructuredOutputsParams.of(given)
    if "structured_outputs" in body:
        _border.refuse("batch", "one of response_format and structured_outputs", "both", "leave one out")
    given = _border.mapping("batch", "response_format", body["response_format"], "fields")
    kind = _border.choice(
        "batch", "type of response_format", given.get("type"), ("text", "json_object", "json_schema")
    )
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    schema = _border.mapping("batch", "json_schema", given.get("json_schema"), "fields").get("schema")
    return StructuredOutputsParams(json=_border.mapping("batch", "schema", schema, "a JSON schema"))


def _answer(line: Mapping[str, Any], status: int, body: dict[str, Any]) -> dict[str, Any]:
    """A line of the file of answers."""
    custom_id = line.get("custom_id")
    name = custom_id if isinstance(custom_id, str) else None
    return {
        "id": f"batch-{name}",
        "custom_id": name,
        "response": {"status_code": status, "request_id": f"batch-{name}", "body": body},
        "error": body["error"] if status >= 400 else None,
    }


def _error(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _body(line: Mapping[str, Any], output: RequestOutput) -> dict[str, Any]:
    """A response as the endpoint gives it."""
    is_chat = line["url"] == CHAT
    num_prompt, num_new = len(output.prompt_token_ids), sum(len(o.token_ids) for o in output.outputs)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": line["body"].get("model", ""),
        "choices": [(_chat_choice if is_chat else _text_choice)(choice) for choice in output.outputs],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = [None if f is None else _figures(f) for f in output.prompt_logprobs]
    return body


def _chat_choice(choice: CompletionOutput) -> dict[str, Any]:
    figures = None
    if choice.logprobs is not None:
        figures = {"content": [_chat_logprobs(t, f) for t, f in zip(choice.token_ids, choice.logprobs)]}
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text},
        "logprobs": figures,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def _chat_logprobs(token: int, figures: TokenLogprobs) -> dict[str, Any]:
    def entry(id_: int) -> dict[str, Any]:
        text = figures[id_].decoded_token or ""
        return {"token": text, "logprob": figures[id_].logprob, "bytes": list(text.encode())}

    others = sorted(figures, key=lambda id_: figures[id_].rank)
    return {**entry(token), "top_logprobs": [entry(id_) for id_ in others]}


def _text_choice(choice: CompletionOutput) -> dict[str, Any]:
    figures = None
    if choice.logprobs is not None:
        rows = list(zip(choice.token_ids, choice.logprobs))
        figures = {
            "tokens": [found[token].decoded_token for token, found in rows],
            "token_logprobs": [found[token].logprob for token, found in rows],
            "top_logprobs": [_figures(found) for _, found in rows],
        }
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": figures,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def _figures(found: TokenLogprobs) -> dict[str, float]:
    return {figure.decoded_token or str(id_): figure.logprob for id_, figure in found.items()}
