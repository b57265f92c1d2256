"""The paths of the server and their endpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tilewise.server.endpoints.chat import answer_chat, stream_chat
from tilewise.server.endpoints.completions import answer_completion, stream_completion
from tilewise.server.endpoints.embeddings import answer_embeddings
from tilewise.server.endpoints.responses import answer_response, stream_response
from tilewise.server.endpoints.tokens import detokenize, tokenize
from tilewise.server.errors import ApiError, error_body
from tilewise.server.guard import Guard
from tilewise.server.http import Endpoint, Page
from tilewise.server.openapi import description
from tilewise.server.pages import assets
from tilewise.server.requests.bodies import (
    BodyModel,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ResponseBody,
    TokenizeBody,
)
from tilewise.server.service import Service

__all__ = ["make_app"]

_JSON = "application/json"


@dataclass(frozen=True)
class _Post:
    """A path that accepts a POST with a body."""

    path: str
    model: type[BodyModel]
    answer: Any
    stream: Any = None
    ends_with_done: bool = True


_POSTS = (
    _Post("/v1/chat/completions", ChatBody, answer_chat, stream_chat),
    _Post("/v1/completions", CompletionBody, answer_completion, stream_completion),
    _Post("/v1/embeddings", EmbeddingBody, answer_embeddings),
    _Post("/v1/responses", ResponseBody, answer_response, stream_response, False),
    _Post("/tokenize", TokenizeBody, tokenize),
    _Post("/detokenize", DetokenizeBody, detokenize),
)


class _Pages:
    """The answers to GET requests.

    Args:
        service: the server's state.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._description = json.dumps(description({post.path: post.model for post in _POSTS})).encode()

    async def health(self, _: Mapping[str, str]) -> tuple[int, str, bytes]:
        self._service.check_ready()
        return _json({"status": "ok"})

    async def version(self, _: Mapping[str, str]) -> tuple[int, str, bytes]:
        return _json({"version": version("tilewise")})

    async def models(self, _: Mapping[str, str]) -> tuple[int, str, bytes]:
        self._service.check_ready()
        names = (*self._service.names, *self._service.adapters)
        return _json({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, parameters: Mapping[str, str]) -> tuple[int, str, bytes]:
        self._service.check_ready()
        return _json(self._model(self._service.check_model(parameters["model"])))

    async def metrics(self, _: Mapping[str, str]) -> tuple[int, str, bytes]:
        service = self._service
        stats = await service.client.stats() if service.client.ready.is_set() else None
        return 200, "text/plain; version=0.0.4; charset=utf-8", service.metrics.text(stats).encode()

    async def status(self, _: Mapping[str, str]) -> tuple[int, str, bytes]:
        self._service.check_ready()
        stats = await self._service.client.stats()
        rates = self._service.metrics.rates.last(time.monotonic())
        return _json({"steps": [] if stats is None else stats.steps, "rates": rates})

    async def openapi(self, _: Mapping[str, str]) -> tuple[int, str, bytes]:
        return 200, _JSON, self._description

    def _model(self, name: str) -> dict[str, Any]:
        is_adapter = name in self._service.adapters
        return {
            "id": name,
            "object": "model",
            "created": self._service.started,
            "owned_by": "tilewise",
            "root": name if is_adapter else self._service.names[0],
            "parent": self._service.names[0] if is_adapter else None,
            "max_model_len": self._service.max_context,
        }


def _json(value: Any) -> tuple[int, str, bytes]:
    return 200, _JSON, json.dumps(value).encode()


def make_app(service: Service) -> ASGIApp:
    """The application.

    Args:
        service: the server's state.
    """
    pages = _Pages(service)
    gets = {
        "/health": pages.health,
        "/version": pages.version,
        "/metrics": pages.metrics,
        "/status.json": pages.status,
        "/openapi.json": pages.openapi,
        "/v1/models": pages.models,
        "/v1/models/{model:path}": pages.model,
    }
    routes = [
        Route(path, _Named(path, Page(answer)), methods=["GET", "HEAD"]) for path, answer in gets.items()
    ]
    for path, asset in assets().items():
        routes.append(Route(path, _Named(path, asset), methods=["GET", "HEAD"]))
    for post in _POSTS:
        endpoint = Endpoint(service, post.model, post.answer, post.stream, post.ends_with_done)
        routes.append(Route(post.path, _Named(post.path, endpoint), methods=["POST"]))
    middleware = [Middleware(Guard, service=service)]
    if service.settings.allowed_origins:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(service.settings.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # clients of OpenAI's API send further headers
                expose_headers=["x-request-id", "retry-after"],
            ),
        )
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})


class _Named:
    """An endpoint that records its path, for metrics and the log.

    Args:
        path: path of the endpoint.
        app: the endpoint.
    """

    def __init__(self, path: str, app: ASGIApp) -> None:
        self._path, self._app = path, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["route"] = self._path
        await self._app(scope, receive, send)


async def _http_error(_: Request, error: Exception) -> Response:
    """The answer for an unknown path or method."""
    assert isinstance(error, HTTPException)
    api_error = ApiError(error.status_code, f"[server] {error.detail}; see /openapi.json")
    headers = dict(error.headers or {})
    body = error_body(api_error.message, api_error.status)
    return Response(json.dumps(body), api_error.status, headers=headers, media_type=_JSON)
