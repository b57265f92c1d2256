"""From a body to `SamplingParams`: OpenAI's defaults, what generation_config.json says, response formats.

One way for the server and for files of requests. Refuses two fields that contradict each other; ranges are checked by
`SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewise.core import Border
from tilewise.core.border import shown
from tilewise.serve import SamplingParams, StructuredOutputsParams
from tilewise.server.requests.bodies import ChatBody, CompletionBody, SamplingBody
from tilewise.settings import settings_of

__all__ = ["MOST_DEPTH", "sampling_params", "structured_outputs"]

MOST_DEPTH = 64
"""Of JSON in a body."""
_border = Border("server")


def sampling_params(
    body: SamplingBody, defaults: Mapping[str, Any], structure: StructuredOutputsParams | None = None
) -> SamplingParams:
    """The settings of a body.

    Args:
        body: of either endpoint.
        defaults: values where the body gives none, from `serve.sampling_params.default_settings`.
        structure: what its texts follow, where something else than the body says it.

    Raises:
        ConfigError: a value outside its range, or two that contradict each other.
    """
    if body.stream_options is not None and not body.stream:
        _border.refuse("request", "stream_options needs stream", "it alone", "add stream: true")
    if body.prompt_logprobs is not None and body.stream:
        rule, advice = "a stream has no prompt_logprobs", "leave one of them out"
        _border.refuse("request", rule, "both", advice)
    names = [
        name for name, one in settings_of(SamplingParams).items() if one.in_body and name != "logit_bias"
    ]
    found = {
        name: getattr(body, name) for name in (*names, "prompt_logprobs") if getattr(body, name) is not None
    }
    most = body.max_tokens if isinstance(body, CompletionBody) else None
    if isinstance(body, ChatBody):
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if body.logprobs:
            found["logprobs"] = body.top_logprobs or 0
        elif body.top_logprobs:
            _border.refuse("request", "top_logprobs needs logprobs", "it alone", "add logprobs: true")
        found["max_tokens"] = None
    elif isinstance(body, CompletionBody):
        if body.logprobs is not None:
            found["logprobs"] = body.logprobs
            if body.echo:
                found["prompt_logprobs"] = body.logprobs
        if body.best_of is not None and body.best_of != (body.n or 1):
            _border.refuse("request", "best_of must be n", shown(body.best_of), "leave it out")
        if body.suffix:
            _border.refuse("request", "a text is written behind its prompt", "a suffix", "leave it out")
    found = {**found, **defaults, **{name: value for name, value in found.items() if value is not None}}
    if most is not None:
        found["max_tokens"] = 1 if most == 0 else most  # without new tokens, one is computed and not shown
    if body.logit_bias is not None:
        bad = [key for key in body.logit_bias if not (key.isascii() and key.isdigit() and len(key) <= 10)]
        if bad:
            _border.refuse("request", "keys of logit_bias must be ids", shown(bad[0]), "correct it")
        found["logit_bias"] = {int(key): value for key, value in body.logit_bias.items()}
    wanted = structured_outputs(body.response_format, body.structured_outputs)
    if structure is not None and wanted is not None:
        rule = "a call that must come leaves nothing to response_format"
        _border.refuse("request", rule, "both", "leave one of them out")
    return SamplingParams(**found, structured_outputs=structure or wanted)


def structured_outputs(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """What a text follows: OpenAI's `response_format`, or vLLM's `structured_outputs`.

    Args:
        response_format: with `type`, and a schema in `json_schema` or, with `json_object`, in `schema`.
        structured: fields of `StructuredOutputsParams`.

    Raises:
        ConfigError: both, or one that is no such thing.
    """
    if response_format is None:
        return None if structured is None else StructuredOutputsParams.of(structured)
    if structured is not None:
        _border.refuse("request", "one of response_format and structured_outputs", "both", "leave one out")
    kinds = ("text", "json_object", "json_schema")
    kind = _border.choice("request", "type of response_format", response_format.get("type"), kinds)
    if kind == "text":
        return None
    schema = response_format.get("schema")  # llama.cpp and others take one with json_object
    if schema is None and (kind == "json_schema" or response_format.get("json_schema") is not None):
        given = _border.mapping("request", "json_schema", response_format.get("json_schema"), "fields")
        schema = _border.mapping("request", "schema", given.get("schema"), "a JSON schema")
    if schema is None:
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=_border.mapping("request", "schema", schema, "a JSON schema"))
