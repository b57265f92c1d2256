"""The OpenAPI description of the server, made from the models that validate bodies."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from tilewise.server.requests.bodies import BodyModel

__all__ = ["description"]

_ERRORS = {
    "400": "The request is invalid.",
    "401": "The API key is missing or wrong.",
    "403": "The Host header is not a name of this server.",
    "404": "The model does not exist.",
    "405": "The path does not have this method.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many texts are waiting; try again later.",
    "500": "The engine has failed.",
    "503": "The model is being loaded, or the server is shutting down.",
    "504": "The answer takes too long.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_GETS = {
    "/health": ("Whether the server answers", "application/json"),
    "/version": ("The version of Tilewise", "application/json"),
    "/metrics": ("Figures for Prometheus", "text/plain"),
    "/status.json": (
        "Times of the last steps, tokens generated in each of the last seconds",
        "application/json",
    ),
    "/openapi.json": ("This description", "application/json"),
    "/v1/models": ("The model's names", "application/json"),
    "/v1/models/{model}": ("A model by its name", "application/json"),
}


def description(bodies: Mapping[str, type[BodyModel]]) -> dict[str, Any]:
    """The whole description.

    Args:
        bodies: by path, the pydantic model of its body.
    """
    _, schemas = models_json_schema(
        [(model, "validation") for model in bodies.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for path, (summary, kind) in _GETS.items():
        operation: dict[str, Any] = {"summary": summary, "responses": _responses({kind: {}})}
        if "{" in path:
            place = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [place]
        paths[path] = {"get": operation}
    for path, model in bodies.items():
        answers: dict[str, Any] = {_JSON: {"schema": {"type": "object"}}}
        if "stream" in model.model_fields:
            answers["text/event-stream"] = {}
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        body = {"required": True, "content": {_JSON: {"schema": schema}}}
        summary = (model.__doc__ or path).strip().splitlines()[0]
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": _responses(answers)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tilewise", "version": version("tilewise")},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


_JSON = "application/json"


def _responses(answers: dict[str, Any]) -> dict[str, Any]:
    error = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "The answer.", "content": answers},
        **{status: {"description": text, "content": error} for status, text in _ERRORS.items()},
    }
