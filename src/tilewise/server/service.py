"""State that all endpoints share: the model's files, the link to the engine, limits, metrics.

A `Service` admits requests (a request that would wait too long gets status 429), converts text to
token ids, and passes on the deltas of texts while it records metrics. It runs on the event loop.
Templates and tokenizers run on other threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tilewise.core import ConfigError
from tilewise.core.validation import shown
from tilewise.generate import encode_prompt
from tilewise.serve import Delta, SamplingParams
from tilewise.server.errors import ApiError, context_error
from tilewise.server.metrics import Metrics, RequestTimes
from tilewise.server.requests.conversation import Conversation, Rendered
from tilewise.server.requests.model_files import ModelFiles
from tilewise.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tilewise.server.link.engine_client import EngineClient

__all__ = ["Caller", "Service"]

T = TypeVar("T")
_THREADS = 4
_RETRY_S = "1"
_MOST_READ, _MOST_WRITTEN = (
    1 << 20,
    1 << 22,
)  # log probabilities of prompts, and of texts, in one request


@dataclass(frozen=True)
class Caller:
    """The client of a request.

    Attributes:
        salt: salt of the client's key. It separates the client's blocks in the prefix cache from
            those of other clients.
        request_id: name of this request.
    """

    salt: str = ""
    request_id: str = ""


class Service:
    """State of the server.

    Args:
        settings: settings of the server.
        files: files of the model.
        client: link to the engine's process.
        name: name of the model, if the settings have no name.
    """

    def __init__(self, settings: ServerSettings, files: ModelFiles, client: EngineClient, name: str) -> None:
        self.settings, self.files, self.client = settings, files, client
        self.names = tuple(settings.served_model_names) or (name,)
        self.metrics = Metrics(self.names[0])
        self.started = int(time.time())
        self.is_draining = False
        self._num_admitted = 0
        self._threads = ThreadPoolExecutor(_THREADS, "tilewise-prompts")

    @property
    def max_context(self) -> int:
        """Largest number of tokens of prompt and text together."""
        return int(self.client.facts["max_context"])

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_ready(self) -> None:
        """Reject requests before the model is loaded, and while the server shuts down.

        Raises:
            ApiError: 503.
        """
        if self.client.cause is not None:
            raise self.client.cause
        if self.is_draining:
            raise ApiError(503, "[server] the server is shutting down; got a new request; send it later")
        if not self.client.ready.is_set():
            text = "[server] the model is still being loaded; got a request; try again soon"
            raise ApiError(503, text, headers={"Retry-After": _RETRY_S})

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, which requests name as their model. A name of the model itself stands
        for the model.
        """
        return tuple(name for name in self.client.facts.get("adapters", ()) if name not in self.names)

    def check_model(self, name: str | None) -> str:
        """Check the model name of a request, and return the name for the answer.

        Raises:
            ApiError: the name is unknown (404).
        """
        names = (*self.names, *self.adapters)
        if name is None or name in names:
            return self.names[0] if name is None else name
        text = f"[server] model must be one of {', '.join(names)}; got {shown(name, 100)}; see /v1/models"
        raise ApiError(404, text, "model", "model_not_found")

    def check_writes(self, writes: bool = True) -> None:
        """Reject requests for text to a pooling model, and requests for embeddings to a generating
        model.

        Raises:
            ApiError: 400.
        """
        if writes and self.files.makes_vectors:
            raise ApiError(
                400, "[server] this model computes embeddings; got a request for text; see /v1/embeddings"
            )
        if not writes and not self.files.makes_vectors:
            text = "[server] this model generates text; got a request for embeddings; serve it with --runner pooling"
            raise ApiError(400, text)

    @contextmanager
    def admit(self, num_texts: int) -> Iterator[None]:
        """Count the texts of a request while it is answered.

        Raises:
            ApiError: too many texts wait already (429).
        """
        room = int(self.client.facts["max_num_seqs"]) + self.settings.max_num_waiting
        if self._num_admitted and self._num_admitted + num_texts > room:
            text = f"[server] at most {room} texts can be requested at a time; got {num_texts} more; try again soon"
            raise ApiError(429, text, code="rate_limit_exceeded", headers={"Retry-After": _RETRY_S})
        self._num_admitted += num_texts
        try:
            yield
        finally:
            self._num_admitted -= num_texts

    async def encode(
        self,
        text: str,
        add_special_tokens: bool | None = None,
        truncate: int | None = None,
        what: str = "prompt",
    ) -> list[int]:
        """Token ids of a text. If a very long text will be truncated, only its end is encoded.

        Args:
            text: the text.
            add_special_tokens: whether the tokenizer adds its special tokens; None counts as true.
            truncate: number of last tokens to keep; None for all.
            what: name of the request's field, for errors.

        Raises:
            ConfigError: the tokenizer cannot encode the text.
            ApiError: the text is longer than any text that fits the context (400).
        """
        most = self.files.longest_token * self.max_context
        if len(text) > most and truncate is None:
            raise context_error(self.max_context, f"you requested {len(text):,} characters", what)
        text = text[-2 * most :]  # longer than any tokens that remain
        adds = True if add_special_tokens is None else add_special_tokens
        return await self.run_in_thread(
            lambda: encode_prompt(self.files.tokenizer, text, add_special_tokens=adds),
        )

    async def run_in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function on another thread than the event loop's, and return its result.

        Args:
            function: a slow function.
            *arguments: its arguments.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def render(self, conversation: Conversation) -> Rendered:
        """The prompt of a conversation.

        Raises:
            ConfigError: there is no template, or it rejects the conversation.
            ApiError: the request has its own chat template, which the server does not allow (400).
        """
        if conversation.template is not None and not self.settings.trust_request_chat_template:
            text = "[server] chat_template needs --trust-request-chat-template; got a server without it; remove it"
            raise ApiError(400, text, "chat_template")
        return await self.run_in_thread(self.files.renderer.render, conversation)

    def fit(
        self, ids: list[int], truncate: int | None, what: str, max_tokens: int | None = None
    ) -> list[int]:
        """Check that a prompt fits the context, and truncate its beginning on request.

        Args:
            ids: token ids of the prompt.
            truncate: number of last tokens to keep. -1 keeps as many as leave room for the new
                tokens. None keeps all.
            what: name of the request's field, for errors.
            max_tokens: number of requested new tokens; None for any number.

        Raises:
            ApiError: the prompt is too long, or has an id that the model does not have (400).
        """
        return self.files.fit(ids, truncate, self.max_context, max_tokens, what)

    def check_params(self, params: SamplingParams, logprobs: str = "logprobs") -> SamplingParams:
        """Reject requests for too many log probabilities.

        Args:
            params: settings of the texts.
            logprobs: name of the request's field that asks for log probabilities of the text.

        Raises:
            ConfigError: the request asks for more log probabilities than the server reports.
        """
        values = {logprobs: params.logprobs, "prompt_logprobs": params.prompt_logprobs}
        for name, value in values.items():
            if value is not None and not 0 <= value <= self.settings.max_logprobs:
                raise ConfigError(
                    f"[server.request] {name} must lie in [0, {self.settings.max_logprobs}]; got {value}; lower it"
                )
        return params

    async def ask(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None,
        caller: Caller,
        cache_salt: str | None = None,
        priority: int | None = None,
        *,
        model: str | None = None,
    ) -> AsyncIterator[list[Delta]]:
        """Submit prompts to the engine, and yield lists of the deltas that have arrived. If `model` is
        the name of an adapter, it is used.

        Raises:
            ApiError: the request asks for too many log probabilities, or the engine rejects the
                request, fails, or takes too long.
        """
        if params is not None:
            self._check_figures([len(ids) for ids in prompts], params)
        salt = caller.salt if cache_salt is None else f"{caller.salt}/{cache_salt}"
        loop = asyncio.get_running_loop()
        times = RequestTimes(time.monotonic())
        num_each = 1 if params is None else params.n
        texts = [(place, choice) for place in range(len(prompts)) for choice in range(num_each)]
        num_tokens: dict[tuple[int, int], int | None] = dict.fromkeys(texts)
        lora = model if model in self.adapters else ""
        with self.client.ask(prompts, params, salt, priority or 0, lora or "") as stream:
            most = self.settings.request_timeout_s
            text = f"[server] an answer must be complete within {most:g} s; it was not; request less"
            late = loop.call_later(most, stream.add, ApiError(504, text))
            reason = "abort"
            try:
                while deltas := await stream.next():
                    self._count(deltas, prompts, times, num_tokens)
                    yield deltas
                reason = "done"
                self.metrics.finish_request(time.monotonic() - times.begun)
            except ApiError:
                reason = "error"
                raise
            finally:
                late.cancel()
                for count in num_tokens.values():
                    self.metrics.finish_text(count or 0, reason)

    def _check_figures(self, lengths: Sequence[int], params: SamplingParams) -> None:
        """Reject requests whose log probabilities would take too much memory or time."""
        read = written = 0
        if params.prompt_logprobs is not None:
            read = sum(lengths) * (params.prompt_logprobs + 1)
        if params.logprobs is not None:
            rooms = [self.max_context - length for length in lengths]
            most = [room if params.max_tokens is None else min(room, params.max_tokens) for room in rooms]
            written = sum(most) * params.n * (params.logprobs + 1)
        if read > _MOST_READ or written > _MOST_WRITTEN:
            text = "[server.request] a request can have at most {:,} log probabilities of prompts and {:,} of texts"
            limit = text.format(_MOST_READ, _MOST_WRITTEN)
            raise ApiError(
                400, f"{limit}; got {read:,} and {written:,}; request fewer, or set max_tokens", "logprobs"
            )

    def _count(
        self,
        deltas: Sequence[Delta],
        prompts: Sequence[Sequence[int]],
        times: RequestTimes,
        num_tokens: dict[tuple[int, int], int | None],
    ) -> None:
        """Record metrics of deltas. `num_tokens` has the number of tokens of each unfinished text,
        or None before its first token.
        """
        now = time.monotonic()
        for delta in deltas:
            text = (delta.sequence, delta.choice)
            count = num_tokens[text]
            if count is None and delta.choice == 0:
                self.metrics.read_prompt(len(prompts[delta.sequence]), delta.num_cached_tokens)
            num_tokens[text] = count = (count or 0) + (delta.token is not None)
            if delta.token is not None:
                self.metrics.wrote_token(times, text, now, delta.begun_s)
            if delta.finish_reason is not None:
                del num_tokens[text]
                self.metrics.finish_text(count, delta.finish_reason, times, text)
