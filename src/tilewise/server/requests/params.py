"""Converts a body to `SamplingParams`. This applies OpenAI's defaults and those of
generation_config.json, and converts response formats.

The server and batch files use this code. It rejects fields that contradict each other.
`SamplingParams` checks ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewise.core import Validator
from tilewise.core.validation import shown
from tilewise.serve import SamplingParams, StructuredOutputsParams
from tilewise.server.requests.bodies import ChatBody, CompletionBody, SamplingBody
from tilewise.settings import settings_of

__all__ = ["MOST_DEPTH", "sampling_params", "structured_outputs"]

MOST_DEPTH = 64
"""Deepest nesting of JSON in a body."""
_validate = Validator("server")


def sampling_params(
    body: SamplingBody, defaults: Mapping[str, Any], structure: StructuredOutputsParams | None = None
) -> SamplingParams:
    """The settings of a body.

    Args:
        body: body of a request for text.
        defaults: values for fields that the body does not set, from `generate.served_settings`.
        structure: the grammar of the texts, if tool calls determine it; otherwise None.

    Raises:
        ConfigError: a value is outside its range, or two values contradict each other.
    """
    if body.stream_options is not None and not body.stream:
        _validate.invalid("request", "stream_options needs stream", "no stream", "add stream: true")
    if body.prompt_logprobs is not None and body.stream:
        rule, advice = "prompt_logprobs cannot be streamed", "remove one of them"
        _validate.invalid("request", rule, "stream: true", advice)
    names = [
        name for name, one in settings_of(SamplingParams).items() if one.in_body and name != "logit_bias"
    ]
    values = {
        name: getattr(body, name) for name in (*names, "prompt_logprobs") if getattr(body, name) is not None
    }
    max_tokens = body.max_tokens if isinstance(body, CompletionBody) else None
    if isinstance(body, ChatBody):
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if body.logprobs:
            values["logprobs"] = body.top_logprobs or 0
        elif body.top_logprobs:
            _validate.invalid("request", "top_logprobs needs logprobs", "no logprobs", "add logprobs: true")
        values["max_tokens"] = None
    elif isinstance(body, CompletionBody):
        if body.logprobs is not None:
            values["logprobs"] = body.logprobs
            if body.echo:
                values["prompt_logprobs"] = body.logprobs
        if body.best_of is not None and body.best_of != (body.n or 1):
            _validate.invalid("request", "best_of must equal n", shown(body.best_of), "remove it")
        if body.suffix:
            rule = "suffix is not supported, because text is only added at the end of the prompt"
            _validate.invalid("request", rule, shown(body.suffix, 40), "remove it")
    values = {**values, **defaults, **{name: value for name, value in values.items() if value is not None}}
    if max_tokens is not None:
        values["max_tokens"] = max_tokens or 1  # for 0 new tokens, one is computed and not returned
    if body.logit_bias is not None:
        bad = [key for key in body.logit_bias if not (key.isascii() and key.isdigit() and len(key) <= 10)]
        if bad:
            _validate.invalid("request", "keys of logit_bias must be ids", shown(bad[0]), "correct it")
        values["logit_bias"] = {int(key): value for key, value in body.logit_bias.items()}
    requested = structured_outputs(body.response_format, body.structured_outputs)
    if structure is not None and requested is not None:
        name = "structured_outputs" if body.response_format is None else "response_format"
        rule = f"{name} must not be set if tool_choice requires a call"
        _validate.invalid("request", rule, "both", "remove one of them")
    return SamplingParams(**values, structured_outputs=structure or requested)


def structured_outputs(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """The grammar of a text, from OpenAI's `response_format` or vLLM's `structured_outputs`.

    Args:
        response_format: an object with the field `type`, and with a schema in the field
            `json_schema` (or in `schema` if the type is `json_object`).
        structured: fields of `StructuredOutputsParams`.

    Raises:
        ConfigError: both are set, or the one that is set is invalid.
    """
    if response_format is None:
        return None if structured is None else StructuredOutputsParams.of(structured)
    if structured is not None:
        _validate.invalid(
            "request", "only one of response_format and structured_outputs can be set", "both", "remove one"
        )
    kinds = ("text", "json_object", "json_schema")
    kind = _validate.choice("request", "type of response_format", response_format.get("type"), kinds)
    if kind == "text":
        return None
    name_of_schema = "schema of response_format"
    schema = response_format.get("schema")  # llama.cpp and others accept a schema with json_object
    if schema is None and (kind == "json_schema" or response_format.get("json_schema") is not None):
        form = response_format.get("json_schema")
        named_schema = _validate.mapping("request", "json_schema of response_format", form, "fields")
        schema = _validate.mapping("request", name_of_schema, named_schema.get("schema"), "a JSON schema")
    if schema is None:
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=_validate.mapping("request", name_of_schema, schema, "a JSON schema"))
