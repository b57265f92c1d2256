"""Error answers: the HTTP status, and a body in OpenAI's form, for exceptions of Tilewise and of
pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from tilewise.core import ConfigError, TilewiseError
from tilewise.core.validation import cut, shown
from tilewise.files.reading import first_fault, joined_rules
from tilewise.server.requests.bodies import BodyModel

__all__ = ["ApiError", "context_error", "engine_error", "error_body", "of_exception", "validation_error"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}
_OURS = "invalid_request_error"
_MOST_MESSAGE, _MOST_SHOWN = 2000, 60  # characters of a message, and of a value in it
_SUBJECT = re.compile("^(?:Value error, |Input |String |List |Dictionary )")
_COUNT = re.compile(" after validation, not [0-9]+")
_RULE = re.compile(r"\[\w+\.(\w+)\] (?:an? )?([\w.]*\w)(?:(?: \w+)? of (\w+))?")
"""Begins an error: the call, the first word of the rule, and the word after `of`."""
_STRUCTURES = ("structured_outputs", "response_format", "text", "tools")
"""Fields that `StructuredOutputsParams` are made of."""
_OBJECT = re.compile(r"a valid dictionary or instance of \w+|a valid dictionary")


class ApiError(Exception):
    """An error that a client receives.

    Args:
        status: HTTP status.
        message: a sentence that says what is wrong.
        param: the invalid field; None if the error is not about a field.
        code: machine-readable code, or None.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, cut(message, _MOST_MESSAGE), param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        return error_body(self.message, self.status, self.param, self.code)


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error body in OpenAI's form."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else _OURS)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def context_error(limit: int, got: str, what: str) -> ApiError:
    """The error of a prompt that does not fit the context. Clients such as LangChain and LiteLLM search the message
    for OpenAI's sentence, so the message is that sentence.

    Args:
        limit: tokens of the context.
        got: what was requested.
        what: the field that is too long.
    """
    advice = f"Please reduce the length of the {what}."
    text = f"This model's maximum context length is {limit} tokens. However, {got}. {advice}"
    return ApiError(400, text, what, "context_length_exceeded")


def of_exception(error: BaseException, fields: Collection[str] = ()) -> ApiError:
    """The error that a client receives for an exception. A defect of Tilewise is reported without
    details.

    Args:
        error: the exception.
        fields: names of the fields of the request. If an error has no `param`, the field whose name
            begins the error's rule is used.
    """
    if isinstance(error, ConfigError):
        error = ApiError(400, str(error))
    if isinstance(error, ApiError):
        if error.status == 400 and error.param is None:
            error.param = _field_of(error.message, fields)
        return error
    if isinstance(error, TilewiseError):
        return ApiError(500, str(error))
    return ApiError(500, "[server] a request failed unexpectedly; see the server's log; report it")


def _field_of(message: str, names: Collection[str]) -> str | None:
    """The field that an error is about, or an entry of the field as in `stop.1`: the one of `names`
    with which the error's rule begins. None if there is no such field.
    """
    match = _RULE.match(message)
    if match is None:
        return None
    call, *names_in_rule = match.groups()
    fields = [word for word in names_in_rule if word is not None and word.split(".")[0] in names]
    if call == "structured_outputs" or "response_format" in names_in_rule:
        fields += [name for name in _STRUCTURES if name in names]
    return fields[0] if fields else None


def engine_error(name: str, message: str) -> ApiError:
    """The error that a client receives for an error in the engine's process, which is given by the
    name of its class and its message.
    """
    if name == "ConfigError":
        return ApiError(400, message)
    if name == "PlanError":
        return ApiError(503, message)
    with_message = ("TaskFailed", "NotFinite", "ResourceError", "InternalError")
    return ApiError(
        500, message if name in with_message else "[server] the engine failed unexpectedly; see its log"
    )


def validation_error(error: ValidationError) -> ApiError:
    """The error that a client receives for an invalid body. It says the first wrong field or list
    entry, the rule and the value.
    """
    loc, problems = first_fault(error)
    place = ".".join(str(part) for part in loc if not _is_class(part)) or None
    rule = _OBJECT.sub("an object", joined_rules(problems))
    rule = _COUNT.sub("", _SUBJECT.sub("", rule, count=1))
    value = problems[0].get("input")
    if isinstance(value, str) and len(value) > _MOST_SHOWN:
        what = f"a text of {len(value):,} characters"
    elif isinstance(value, (str, bool, int, float)) or value is None:
        what = shown(value, _MOST_SHOWN)
    elif isinstance(value, list):
        what = f"a list of {len(value):,} entries" if value else "an empty list"
    else:
        what = "an object" if isinstance(value, dict) else type(value).__name__
    got = "" if problems[0]["type"] == "missing" else f"; got {what}"
    return ApiError(400, f"[server.request] {place or 'the body'}: {rule}{got}; correct it", place)


def _is_class(part: object) -> bool:
    """Whether a part of a pydantic location names a model of a union instead of a field."""
    return part in {kind.__name__ for kind in BodyModel.__subclasses__()}
