"""Answers that are errors: OpenAI's body with the right status, from our own errors and from pydantic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tilewise.core import ConfigError, TilewiseError
from tilewise.core.border import shown

__all__ = ["ApiError", "engine_error", "error_body", "of_exception", "validation_error"]

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
_MOST_MESSAGE = 2000


class ApiError(Exception):
    """An error that a client is told.

    Args:
        status: of HTTP.
        message: a sentence.
        param: the field that is wrong, where one is.
        code: a word for programs, where there is one.
        headers: of the answer besides the usual ones.
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
        self.status, self.message, self.param, self.code = status, message[:_MOST_MESSAGE], param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI words it."""
        return error_body(self.message, self.status, self.param, self.code)


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """A body that says what is wrong."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else _OURS)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def of_exception(error: BaseException) -> ApiError:
    """What a client is told of an error of ours; of one that is a defect, only that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        return ApiError(400, str(error))
    if isinstance(error, TilewiseError):
        return ApiError(500, str(error))
    return ApiError(500, "[server] a request must not fail so; the log says more; report it")


def engine_error(name: str, message: str) -> ApiError:
    """What a client is told of an error in the engine's process, by the name of its class."""
    if name == "ConfigError":
        return ApiError(400, message)
    if name == "PlanError":
        return ApiError(503, message)
    known = ("TaskFailed", "NotFinite", "ResourceError", "InternalError")
    return ApiError(
        500, message if name in known else "[server] the engine must not fail so; its log says more"
    )


def validation_error(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"] if not _is_variant(part)) or None
    rule = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    given = first.get("input")
    what = (
        shown(given, 60) if isinstance(given, (bool, int, float)) or given is None else type(given).__name__
    )
    got = "" if first["type"] == "missing" else f"; got {what}"
    return ApiError(400, f"[server.request] {place or 'the body'}: {rule}{got}; correct it", place)


def _is_variant(part: object) -> bool:
    """Whether a part of a place names one of several types, and no field."""
    return isinstance(part, str) and (not part.isidentifier() or part in ("str", "int", "list", "dict"))
