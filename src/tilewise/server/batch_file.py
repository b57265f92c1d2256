"""Answers files of requests in OpenAI's batch format: one line of JSON per request and per answer.

Each line has `custom_id`, `method`, `url` and `body`. The body is that of a request to
`/v1/chat/completions` or `/v1/completions`, and the code of these endpoints answers it. An invalid
line gets an error as its answer, and the other lines are answered. Unknown fields are errors (over
HTTP they are not), because a long batch should not run with a misspelled setting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from pydantic import ValidationError

from tilewise.core import ConfigError, Validator
from tilewise.core.progress import Progress
from tilewise.generate import encode_prompt
from tilewise.serve import Delta, Engine
from tilewise.serve.request import Request
from tilewise.server.endpoints.chat import open_run, plan, take, whole_chat
from tilewise.server.endpoints.completions import CompletionRun, prompts_of, whole_completion
from tilewise.server.errors import ApiError, of_exception, validation_error
from tilewise.server.requests.bodies import BodyModel, ChatBody, CompletionBody, SamplingBody
from tilewise.server.requests.model_files import ModelFiles
from tilewise.server.requests.params import sampling_params

__all__ = ["answer_lines"]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_validate = Validator("server")


@dataclass
class _Line:
    """A valid line of the file."""

    line: Mapping[str, Any]
    requests: Sequence[Request]
    take: Callable[[Delta], object]
    whole: Callable[[], dict[str, Any]]
    num_unfinished: int


def answer_lines(
    engine: Engine, files: ModelFiles, lines: Iterable[str], progress: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """Submit all lines at once. Returns the answers in the order of the lines when all are
    finished.

    Args:
        engine: the engine.
        files: files of the engine's model.
        lines: lines of the file. Empty lines are skipped.
        progress: shows progress.
    """
    prepared = [_prepare(engine, files, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    queue: SimpleQueue[tuple[int, Delta | BaseException]] = SimpleQueue()
    answers: dict[int, dict[str, Any]] = {}
    for index, each in enumerate(prepared):
        if isinstance(each, _Line):
            engine.submit(each.requests, partial(_put, queue, index))
        else:
            answers[index] = each
    with (progress or Progress()).phase("requests", len(prepared)) as phase:
        answered = phase.counter()
        while len(answers) < len(prepared):
            answered.count = len(answers)
            index, event = queue.get()
            one = prepared[index]
            assert isinstance(one, _Line)
            if index in answers:  # another prompt of the line failed
                continue
            if isinstance(event, BaseException):
                error = of_exception(event)
                answers[index] = _answer(one.line, error.status, error.body)
                continue
            one.take(event)
            one.num_unfinished -= event.finish_reason is not None
            if not one.num_unfinished:
                answers[index] = _answer(one.line, 200, one.whole())
    yield from (answers[index] for index in range(len(prepared)))


def _put(
    queue: SimpleQueue[tuple[int, Delta | BaseException]], index: int, event: Delta | BaseException
) -> None:
    queue.put((index, event))


def _prepare(engine: Engine, files: ModelFiles, number: int, text: str) -> _Line | dict[str, Any]:
    """A line as requests for the engine, or its error answer."""
    line: Mapping[str, Any] = {}
    body: Mapping[str, Any] = {}
    try:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            _validate.invalid("batch", f"line {number} must be JSON", str(error), "correct it")
        line = _validate.mapping("batch", f"line {number}", content, "a request")
        _validate.text("batch", "custom_id", line.get("custom_id"))
        _validate.choice("batch", "method", line.get("method"), ("POST",))
        url = _validate.choice("batch", "url", line.get("url"), (CHAT, COMPLETION))
        body = _validate.mapping("batch", "body", line.get("body"), "fields")
        return (_prepare_chat if url == CHAT else _prepare_completion)(engine, files, line, body)
    except (ConfigError, ApiError) as error:
        refusal = of_exception(error, body)
        return _answer(line, refusal.status, refusal.body)


def _prepare_chat(
    engine: Engine, files: ModelFiles, line: Mapping[str, Any], fields: Mapping[str, Any]
) -> _Line:
    body = _checked(ChatBody, fields)
    conversation, params, output_format = plan(files, body)
    if conversation.template is not None:
        _validate.invalid("batch", "chat_template is not supported in a batch file", "one", "remove it")
    rendered = files.renderer.render(conversation)
    ids = _fit(engine, files, rendered.ids, body, params.max_tokens, "messages")
    run = open_run(files.token_bytes, body.model or "", rendered, ids, params, output_format)
    requests = engine.requests([_prompt(engine, run.ids, body)], params, body.priority or 0)
    return _Line(line, requests, partial(take, run), partial(whole_chat, run, body), params.n)


def _prepare_completion(
    engine: Engine, files: ModelFiles, line: Mapping[str, Any], fields: Mapping[str, Any]
) -> _Line:
    body = _checked(CompletionBody, fields)
    params = sampling_params(body, files.defaults)
    run = CompletionRun(files, body, body.model or "", params)
    for one in prompts_of(body.prompt):
        adds = body.add_special_tokens is not False
        ids = encode_prompt(files.tokenizer, one, add_special_tokens=adds) if isinstance(one, str) else one
        max_tokens = params.max_tokens if run.writes else 0
        run.add_prompt(one, _fit(engine, files, ids, body, max_tokens, "prompt"))
    prompts = [_prompt(engine, prompt.ids, body) for prompt in run.prompts]
    requests = engine.requests(prompts, params, body.priority or 0)
    num_texts = len(prompts) * params.n
    return _Line(line, requests, run.add, partial(whole_completion, run), num_texts)


def _checked(model: Any, fields: Mapping[str, Any]) -> Any:
    """Validate a body, and reject unknown fields."""
    try:
        body: BodyModel = model.model_validate(dict(fields))
    except ValidationError as error:
        raise validation_error(error) from None
    for name in body.unknown:
        _validate.choice("batch", "a field of body", name, sorted(model.model_fields))
    if getattr(body, "stream", None):
        _validate.invalid("batch", "stream is not supported in a batch file", "stream", "remove it")
    return body


def _fit(
    engine: Engine,
    files: ModelFiles,
    ids: list[int],
    body: SamplingBody,
    max_tokens: int | None,
    what: str,
) -> list[int]:
    max_context = engine.model.limits.max_context
    return files.fit(ids, body.truncate_prompt_tokens, max_context, max_tokens, what)


def _prompt(engine: Engine, ids: list[int], body: ChatBody | CompletionBody) -> dict[str, Any]:
    """A prompt, with the adapter that the body names as its model, if it names one."""
    lora = body.model if body.model in engine.model.adapters else ""
    return {"prompt_token_ids": ids, "cache_salt": body.cache_salt or "", "lora": lora}


def _answer(line: Mapping[str, Any], status: int, body: dict[str, Any]) -> dict[str, Any]:
    """A line of the output file."""
    custom_id = line.get("custom_id")
    name = custom_id if isinstance(custom_id, str) else None
    return {
        "id": f"batch-{name}",
        "custom_id": name,
        "response": {"status_code": status, "request_id": f"batch-{name}", "body": body},
        "error": body["error"] if status >= 400 else None,
    }
