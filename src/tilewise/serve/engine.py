"""`Engine`: one or several copies of a model that serve concurrent requests from threads and event loops.

The output of a request depends only on the model, its prompt and its settings: not on other requests, their order, how
steps split its tokens, prefix-cache hits, or the number of devices. Requests are checked on the caller's thread, before
they reach the engine's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar
from zlib import crc32

from tilewise.checkpoint import check_token_ids
from tilewise.core import PlanError, Validator
from tilewise.core.limits import available_memory
from tilewise.core.open_objects import note_open
from tilewise.core.validation import shown
from tilewise.generate import Sampling, check_prompt, encode_prompt, word_ids
from tilewise.serve.core import EngineCore
from tilewise.serve.loop import Abort, Add, Call, Command
from tilewise.serve.model import ServedModel
from tilewise.serve.output_processor import OutputProcessor
from tilewise.serve.outputs import Delta, EngineStats, RequestOutput
from tilewise.serve.replica import Replica
from tilewise.serve.request import PRIORITIES, Request
from tilewise.serve.sampling_params import SamplingParams
from tilewise.serve.structured import Grammars
from tilewise.settings import EngineSettings, OutputOptions

__all__ = ["Engine", "Prompt", "prompt_form"]

T = TypeVar("T")
Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dictionary with `prompt` or `prompt_token_ids`, and optionally `cache_salt` and `lora`, the
name of an adapter."""
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt", "lora")
_FOR_VECTORS = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
_LARGEST_ID = (1 << 31) - 1
_validate = Validator("serve")


class Engine:
    """Generates text for many callers at once. Thread-safe. Use with `with`, or call `close`.

    Args:
        model_dir: Hugging Face directory (config.json, weights, tokenizer files).
        on_progress: called with the number of bytes of weights read so far, and the number of all
            bytes.
        **settings: fields of `EngineSettings` by name.

    Raises:
        ConfigError, CheckpointError: the directory is not a supported model, or a setting is invalid.
        LayoutError: the model cannot be cut over so many devices.
        ResourceError: not enough memory.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        on_progress: Callable[[int, int], object] | None = None,
        **settings: Any,
    ) -> None:
        for name in settings:
            _validate.choice("engine", "a setting", name, [*EngineSettings.__dataclass_fields__])
        made = EngineSettings(**settings)
        self._replicas: list[Replica] = []
        try:
            for num_left in range(made.data_parallel_size, 0, -1):
                available = available_memory() - sum(r.model.cache_bytes for r in self._replicas)
                self._replicas.append(
                    Replica(ServedModel(model_dir, made, on_progress, available // num_left))
                )
        except BaseException:
            for replica in self._replicas:
                replica.close()
            raise
        self.model = self._replicas[0].model
        self._queues = tuple(replica.commands for replica in self._replicas)
        self._grammars = Grammars(self.model.tokenizer, self.model.end_ids)
        self._numbers = itertools.count()
        self._name = f"request-{secrets.token_hex(8)}"  # unlikely to be a name that a caller chooses
        self._process = os.getpid()
        self._is_closed = False
        self._submit_lock = threading.Lock()  # locked while submitting, so that no command follows `Close`
        note_open(self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """After the current step, end all requests with an error, stop the devices and free their memory."""
        if os.getpid() != self._process:  # a forked child does not have the threads
            for replica in self._replicas:
                replica.free()
            return
        with self._submit_lock:
            self._is_closed = True
        for replica in self._replicas:
            replica.close()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; `async for` yields an output for every step that adds to it. Closing the iterator, or
        cancelling the task that reads it, ends the request.

        Args:
            prompt: prompt to continue.
            sampling_params: settings.
            request_id: name of the request, unique among live requests; if None, the engine chooses
                a name.
            priority: lower runs first.

        Raises:
            ConfigError: the prompt or a setting is invalid, or the prompt is too long; raised by this call.
            TaskFailed, NotFinite: the request's step failed; other requests continue.
            PlanError: the engine is closed, or belongs to another process.
        """
        _validate.instance(
            "engine", "sampling_params", sampling_params, SamplingParams, "pass SamplingParams(...)"
        )
        request = self._request(prompt, sampling_params, request_id=request_id, priority=priority)
        return self._outputs(request, OutputProcessor(request, prompt, sampling_params.output_kind))

    async def _outputs(self, request: Request, processor: OutputProcessor) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        queues, name = self._queues, request.request_id

        def notify(event: Delta | BaseException) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, event)
            except RuntimeError:  # the event loop was closed before the iterator
                _abort(queues, [name])

        self.submit([request], notify)
        has_ended = False
        try:
            while not has_ended:
                event = await queue.get()
                if isinstance(event, BaseException):
                    has_ended = True
                    raise event
                output = processor.add(event)
                has_ended = processor.is_finished
                if output is not None:
                    yield output
        finally:
            if not has_ended:
                _abort(queues, [name])

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sampling | Sequence[SamplingParams | Sampling],
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[Delta]:
        """Continue every prompt, without an event loop; yields a delta per new token, interleaved over the texts.
        Closing or dropping the iterator ends its requests.

        Args:
            prompts: prompts to continue.
            sampling: settings for all prompts, or one for each.
            priority: lower runs first; for all prompts, or one for each.

        Raises:
            ConfigError: a prompt or setting is invalid, or a prompt is too long; raised by this call.
            TaskFailed, NotFinite: the step of a request failed; the other requests of this call end, too.
            PlanError: the engine is closed, or belongs to another process.
        """
        return self.deltas(self.requests(prompts, sampling, priority))

    def requests(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sampling | Sequence[SamplingParams | Sampling],
        priority: int | Sequence[int] = 0,
    ) -> list[Request]:
        """Check prompts and settings, and make requests of them for `submit`, `deltas` or `outputs`.

        Args:
            prompts: prompts to continue.
            sampling: settings for all prompts, or one for each.
            priority: lower runs first; for all prompts, or one for each.

        Raises:
            ConfigError: a prompt or setting is invalid, or a prompt is too long.
        """
        texts = _validate.sequence("engine", "prompts", prompts, "texts")
        kinds = (SamplingParams, Sampling)
        settings = _one_per_prompt("sampling", sampling, isinstance(sampling, kinds), len(texts))
        priorities = _one_per_prompt("priority", priority, not isinstance(priority, Sequence), len(texts))
        for one in settings:
            if not isinstance(one, kinds):
                rule = "sampling must be SamplingParams or Sampling"
                _validate.invalid("engine", rule, shown(one), "pass SamplingParams(...)")
        return [
            self._request(text, one, index=index, priority=level)
            for index, (text, one, level) in enumerate(zip(texts, settings, priorities))
        ]

    def pooling_requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        """Check prompts, and make requests for their vectors.

        Args:
            prompts: prompts.

        Raises:
            ConfigError: a prompt is invalid or too long, or the engine was made with another `runner`.
        """
        texts = _validate.sequence("engine", "prompts", prompts, "texts")
        return [
            replace(self._request(text, _FOR_VECTORS, index=index), is_pooled=True)
            for index, text in enumerate(texts)
        ]

    def submit(self, requests: Sequence[Request], notify: Callable[[Delta | BaseException], None]) -> None:
        """Hand requests to the engine's thread, which reports their deltas and errors.

        Args:
            requests: from `requests`.
            notify: called with each delta or error, on the engine's thread; must not block.

        Raises:
            PlanError: the engine is closed, or belongs to another process.
        """
        loads = [replica.load for replica in self._replicas]
        shares: list[list[Request]] = [[] for _ in loads]
        for request in requests:
            place = loads.index(min(loads))
            if request.is_named:  # always the same copy, so that it can detect a name that is used twice
                place = crc32(request.request_id.encode("utf-8", "surrogatepass")) % len(loads)
            shares[place].append(request)
            loads[place] += 1
        self._put([Add(tuple(share), notify) if share else None for share in shares])

    def abort(self, request_id: str) -> None:
        """End a request; its texts get the reason `abort`. No effect on one that has ended.

        Args:
            request_id: name of the request.
        """
        _abort(self._queues, [_validate.text("engine", "request_id", request_id)])

    def memory_usage(self) -> list[dict[str, int]]:
        """Bytes allocated per device, as `GraphInstance.memory_usage` reports them.

        Raises:
            PlanError: the engine is closed, or belongs to another process.
        """
        usage: list[dict[str, int]] = []
        for replica in self._replicas:
            instance = replica.model.instance
            usage += self._between_steps(lambda _, own=instance: own.memory_usage(), replica)  # type: ignore[misc]
        return usage

    def stats(self) -> EngineStats:
        """The current load. Does not wait for the engine's threads."""
        schedulers = [replica.scheduler for replica in self._replicas]
        return EngineStats(
            num_running=sum(s.num_running for s in schedulers),
            num_waiting=sum(s.num_waiting for s in schedulers)
            + sum(replica.commands.qsize() for replica in self._replicas),
            num_blocks=sum(s.pool.num_blocks for s in schedulers),
            num_free_blocks=sum(s.pool.num_free for s in schedulers),
            num_preemptions=sum(s.num_preemptions for s in schedulers),
            num_steps=sum(s.num_steps for s in schedulers),
            steps=tuple(sorted(step for replica in self._replicas for step in replica.steps)),
        )

    def _between_steps(self, function: Callable[[EngineCore], T], replica: Replica | None = None) -> T:
        """Call a function of the core on the engine's thread after the current step, and return its result."""
        answer: Future[T] = Future()

        def call(core: EngineCore) -> None:
            try:
                answer.set_result(function(core))
            except Exception as error:
                answer.set_exception(error)

        target = self._replicas[0] if replica is None else replica
        self._put([Call(call) if one is target else None for one in self._replicas])
        return answer.result()

    def _put(self, commands: Sequence[Command | None]) -> None:
        """Queue one command, or None, for each copy of the model."""
        if os.getpid() != self._process:
            raise _wrong_process()
        with self._submit_lock:
            if self._is_closed:
                raise PlanError("[serve.engine] the engine must be open; got a closed one; create another")
            for queue, command in zip(self._queues, commands):
                if command is not None:
                    queue.put(command)

    def deltas(self, requests: Sequence[Request]) -> Iterator[Delta]:
        """Submit requests, and yield their deltas until all texts have ended. Closing the iterator ends the requests.

        Args:
            requests: from `requests`.

        Raises:
            TaskFailed, NotFinite: the step of a request failed; the other requests end, too.
            PlanError: the engine is closed, or belongs to another process.
        """
        return self._events(
            requests, lambda delta: delta, sum(request.sampling.n for request in requests), _ends
        )

    def outputs(
        self, requests: Sequence[Request], processors: Sequence[OutputProcessor]
    ) -> Iterator[RequestOutput]:
        """Submit requests, and yield the outputs of their processors until all have ended.

        Args:
            requests: from `requests`.
            processors: one for each request.

        Raises:
            TaskFailed, NotFinite: the step of a request failed; the other requests end, too.
            PlanError: the engine is closed, or belongs to another process.
        """

        def take(delta: Delta) -> RequestOutput | None:
            return processors[delta.sequence].add(delta)

        return self._events(requests, take, len(requests), lambda output: output.finished)

    def _events(
        self,
        requests: Sequence[Request],
        take: Callable[[Delta], T | None],
        num_ends: int,
        is_end: Callable[[T], bool],
    ) -> Iterator[T]:
        """Submit requests, and yield what `take` returns for their deltas, until `is_end` was true
        for `num_ends` of these values.
        """
        queue: SimpleQueue[T | BaseException] = SimpleQueue()

        def notify(event: Delta | BaseException) -> None:
            try:
                result = event if isinstance(event, BaseException) else take(event)
            except Exception as error:  # otherwise the caller would wait forever
                result = error
            if result is not None:
                queue.put(result)

        self.submit(requests, notify)
        try:
            while num_ends:
                if os.getpid() != self._process:
                    raise _wrong_process()
                event = queue.get()
                if isinstance(event, BaseException):
                    raise event
                num_ends -= is_end(event)
                yield event
        finally:
            if num_ends and os.getpid() == self._process:
                _abort(self._queues, [request.request_id for request in requests])

    def _request(
        self,
        prompt: Prompt,
        settings: SamplingParams | Sampling,
        *,
        request_id: str | None = None,
        index: int = 0,
        priority: int = 0,
    ) -> Request:
        """Check a prompt and its settings, and make a request."""
        runner = "pooling" if settings is _FOR_VECTORS else "generate"
        if self.model.settings.runner != runner:
            rule, got = f"this call needs an engine with runner={runner!r}", self.model.settings.runner
            _validate.invalid("engine", rule, repr(got), "create another engine for it")
        name = f"{self._name}-{next(self._numbers)}" if request_id is None else request_id
        _validate.text("engine", "request_id", name)
        _validate.integer("engine", "priority", priority, -PRIORITIES, PRIORITIES)
        ids, salt = self._ids(prompt)
        adapter = prompt.get("lora", "") if isinstance(prompt, Mapping) else ""
        if adapter != "":
            _validate.choice("engine", "lora", adapter, [*self.model.adapters])
        limit = self.model.limits.max_context
        if settings.max_tokens != 1:
            check_prompt(len(ids), limit)
        elif len(ids) > limit:
            # pooling generates no token, so the prompt may fill the context
            rule = f"a prompt must fit the context of {limit} tokens"
            _validate.invalid("engine", rule, str(len(ids)), "shorten it")
        grammar = None
        if isinstance(settings, SamplingParams):
            sampling, options = settings.sampling(limit - len(ids)), settings.output_options()
            if settings.structured_outputs is not None:
                grammar = self._grammars.prepare(settings.structured_outputs)
        else:
            sampling, options = settings, OutputOptions()
        words = (*sampling.bad_words_ids, *(word_ids(self.model.tokenizer, sampling.bad_words)))
        # the model cannot generate a word with a token that it does not have
        bad = tuple(word for word in words if max(word) < self.model.config.vocab_size)
        self._check_ids(sampling)
        if not self.model.settings.enable_prefix_caching:  # only the texts of this request share blocks
            salt = f"only {name} {next(self._numbers)}"
        return Request(
            name,
            tuple(ids),
            replace(sampling, bad_words_ids=bad),
            options,
            self.model.end_ids,
            priority,
            (
                (b"model", self.model.name),
                (b"adapter", adapter.encode("utf-8", "surrogatepass")),
                (b"salt", salt.encode("utf-8", "surrogatepass")),
            ),
            limit,
            index=index,
            grammar=grammar,
            is_named=request_id is not None,
            adapter=self.model.adapters.get(adapter, 0),
        )

    def _ids(self, prompt: Prompt) -> tuple[list[int], str]:
        """The prompt's token ids and its salt."""
        prompt, salt = prompt_form(prompt)
        if isinstance(prompt, str):
            ids = encode_prompt(self.model.tokenizer, prompt)
        else:
            sequence = _validate.sequence("engine", "a prompt", prompt, "ids or text")
            ids = [_validate.integer("engine", "an id of a prompt", id_, 0, _LARGEST_ID) for id_ in sequence]
        check_token_ids(self.model.tokenizer, ids, self.model.config.vocab_size, "a prompt")
        beginning = self.model.config.bos_token_id
        return ids or [0 if beginning is None else beginning], salt

    def _check_ids(self, sampling: Sampling) -> None:
        """Check that settings name only tokens that the model has."""
        named = {
            "logit_bias": [id_ for id_, _ in sampling.logit_bias],
            "allowed_token_ids": sampling.allowed_token_ids,
            "stop_token_ids": sampling.stop_token_ids,
        }
        for name, ids in named.items():
            check_token_ids(self.model.tokenizer, ids, self.model.config.vocab_size, name)


def _ends(delta: Delta) -> bool:
    """Whether a delta is the last of its text."""
    return delta.finish_reason is not None


def prompt_form(prompt: Prompt) -> tuple[str | Sequence[int], str]:
    """A prompt as text or token ids, and its salt.

    Args:
        prompt: the prompt in any form.

    Raises:
        ConfigError: a dictionary with unknown or missing fields.
    """
    if not isinstance(prompt, Mapping):
        return prompt, ""
    for name in prompt:
        _validate.choice("engine", "a field of a prompt", name, _PROMPT_FIELDS)
    salt = prompt.get("cache_salt", "")
    _validate.instance("engine", "cache_salt", salt, str, "pass text")
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        rule = "a prompt must have either prompt or prompt_token_ids"
        _validate.invalid("engine", rule, shown(dict(prompt)), "give one of them")
    if "prompt" in prompt:
        return _validate.instance("engine", "prompt", prompt["prompt"], str, "pass text"), salt
    return _validate.sequence("engine", "prompt_token_ids", prompt["prompt_token_ids"], "ids"), salt


def _one_per_prompt(name: str, value: Any, is_one: bool, count: int) -> Sequence[Any]:
    """One value for every prompt: a single value is repeated."""
    if is_one:
        return [value] * count
    values = _validate.sequence("engine", name, value, "values, one per prompt")
    if len(values) != count:
        _validate.invalid(
            "engine",
            f"{name} must be one for all prompts or one per prompt",
            f"{len(values)} for {count}",
            "correct it",
        )
    return values


def _abort(queues: Iterable[SimpleQueue[Command]], request_ids: Sequence[str]) -> None:
    """End requests, on all copies of the model."""
    for queue in queues:
        queue.put(Abort(request_ids))


def _wrong_process() -> PlanError:
    return PlanError(
        "[serve.engine] an engine belongs to the process that made it; got a call in a forked process; create one there"
    )
