"""`Engine`: a model or several copies of it, and callers who ask at once, from threads and event loops.

What a request writes depends on the model, its prompt and its settings alone: not on what else is asked, in what order,
how steps cut it, whether blocks of it were found in the cache, or the number of devices. Refuses requests at the
border, before they reach the thread.
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
from tilewise.core import Border, PlanError
from tilewise.core.border import shown
from tilewise.core.limits import available_memory
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
"""A text, token ids, or a dictionary with `prompt` or `prompt_token_ids`, and perhaps `cache_salt`."""
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")
_FOR_VECTORS = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
_LARGEST_ID = (1 << 31) - 1
_border = Border("serve")


class Engine:
    """Writes with a model for many callers at once. Use with `with`, or call `close`.

    Args:
        model_dir: a Hugging Face directory (config.json, weights, tokenizer files).
        on_progress: called with the bytes of weights read so far and in all.
        **settings: fields of `EngineSettings` by name.

    Raises:
        ConfigError, CheckpointError: the directory is not a model we can run, or a setting has no such value.
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
            _border.choice("engine", "a setting", name, [*EngineSettings.__dataclass_fields__])
        made = EngineSettings(**settings)
        self._replicas: list[Replica] = []
        try:
            for left in range(made.data_parallel_size, 0, -1):
                available = available_memory() - sum(r.model.cache_bytes for r in self._replicas)
                self._replicas.append(Replica(ServedModel(model_dir, made, on_progress, available // left)))
        except BaseException:
            for replica in self._replicas:
                replica.close()
            raise
        self.model = self._replicas[0].model
        self._queues = tuple(replica.commands for replica in self._replicas)
        self._grammars = Grammars(self.model.tokenizer, self.model.end_ids)
        self._numbers = itertools.count()
        self._name = f"request-{secrets.token_hex(8)}"  # no caller has chosen such a name
        self._process = os.getpid()
        self._is_closed = False
        self._door = threading.Lock()  # nothing is submitted behind the command that ends a thread

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests with an error, stop the devices and free their memory, when the step at hand is done."""
        if os.getpid() != self._process:  # in a forked child, which has none of the threads
            for replica in self._replicas:
                replica.free()
            return
        with self._door:
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
        """Continue a prompt; `async for` gives an output with every step that adds to it. Closing the iterator, or
        cancelling the task that reads it, ends the request.

        Args:
            prompt: to continue.
            sampling_params: how.
            request_id: a name for it, unique among requests at a time; None: the engine's own.
            priority: lower goes first.

        Raises:
            ConfigError: a prompt or setting that is none, or too long a prompt; at once.
            TaskFailed, NotFinite: the request's step failed; others go on.
            PlanError: the engine is closed, or another process's.
        """
        _border.instance(
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
            except RuntimeError:  # the loop is closed, and its iterators were not
                _abort(queues, [name])

        self.submit([request], notify)
        is_over = False
        try:
            while not is_over:
                event = await queue.get()
                if isinstance(event, BaseException):
                    is_over = True
                    raise event
                output = processor.add(event)
                is_over = processor.is_finished
                if output is not None:
                    yield output
        finally:
            if not is_over:
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
            prompts: to continue.
            sampling: how, for all prompts or one for each.
            priority: lower goes first; for all prompts or one for each.

        Raises:
            ConfigError: a prompt or setting that is none, or too long a prompt; at once.
            TaskFailed, NotFinite: the step of a request failed; the others of this call end with it.
            PlanError: the engine is closed, or another process's.
        """
        return self.deltas(self.requests(prompts, sampling, priority))

    def requests(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sampling | Sequence[SamplingParams | Sampling],
        priority: int | Sequence[int] = 0,
    ) -> list[Request]:
        """Requests as the engine's thread takes them, with everything checked.

        Args:
            prompts: to continue.
            sampling: how, for all prompts or one for each.
            priority: for all prompts or one for each.

        Raises:
            ConfigError: a prompt or setting that is none, or too long a prompt.
        """
        texts = _border.sequence("engine", "prompts", prompts, "texts")
        kinds = (SamplingParams, Sampling)
        ways = _one_each("sampling", sampling, isinstance(sampling, kinds), len(texts))
        ranks = _one_each("priority", priority, not isinstance(priority, Sequence), len(texts))
        for way in ways:
            if not isinstance(way, kinds):
                rule = "sampling must be SamplingParams or Sampling"
                _border.refuse("engine", rule, shown(way), "pass SamplingParams(...)")
        return [
            self._request(text, way, index=index, priority=rank)
            for index, (text, way, rank) in enumerate(zip(texts, ways, ranks))
        ]

    def pooling_requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        """Requests for the prompts' vectors, with everything checked.

        Args:
            prompts: to turn into vectors.

        Raises:
            ConfigError: a prompt that is none or too long, or an engine that writes.
        """
        texts = _border.sequence("engine", "prompts", prompts, "texts")
        return [
            replace(self._request(text, _FOR_VECTORS, index=index), is_pooled=True)
            for index, text in enumerate(texts)
        ]

    def submit(self, requests: Sequence[Request], notify: Callable[[Delta | BaseException], None]) -> None:
        """Hand requests to the engine's thread, which reports their deltas and errors.

        Args:
            requests: as `requests` made them.
            notify: called with each delta or error, on the engine's thread; must not block.

        Raises:
            PlanError: the engine is closed, or another process's.
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
        """End a request; its texts get the reason `abort`. Nothing happens to one that has ended.

        Args:
            request_id: of the request.
        """
        _abort(self._queues, [_border.text("engine", "request_id", request_id)])

    def memory_usage(self) -> list[dict[str, int]]:
        """Bytes allocated per device, as `GraphInstance.memory_usage` says them.

        Raises:
            PlanError: the engine is closed, or another process's.
        """
        found: list[dict[str, int]] = []
        for replica in self._replicas:
            instance = replica.model.instance
            found += self._between_steps(lambda _, own=instance: own.memory_usage(), replica)  # type: ignore[misc]
        return found

    def stats(self) -> EngineStats:
        """How much there is to do now. Read while the threads go on, so that it waits for nothing."""
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
        """What a function of the core returns, called on its thread; waits for the step at hand."""
        answer: Future[T] = Future()

        def call(core: EngineCore) -> None:
            try:
                answer.set_result(function(core))
            except Exception as error:
                answer.set_exception(error)

        wanted = self._replicas[0] if replica is None else replica
        self._put([Call(call) if one is wanted else None for one in self._replicas])
        return answer.result()

    def _put(self, commands: Sequence[Command | None]) -> None:
        """A command, or none, for each copy of the model."""
        if os.getpid() != self._process:
            raise _foreign()
        with self._door:
            if self._is_closed:
                raise PlanError("[serve.engine] the engine must be open; got a closed one; make another")
            for queue, command in zip(self._queues, commands):
                if command is not None:
                    queue.put(command)

    def deltas(self, requests: Sequence[Request]) -> Iterator[Delta]:
        """Submit requests, and yield their deltas until all texts have ended. Closing the iterator ends the requests.

        Args:
            requests: as `requests` made them.

        Raises:
            TaskFailed, NotFinite: the step of a request failed; the others end with it.
            PlanError: the engine is closed, or another process's.
        """
        return self._events(
            requests, lambda delta: delta, sum(request.sampling.n for request in requests), _ends
        )

    def outputs(
        self, requests: Sequence[Request], processors: Sequence[OutputProcessor]
    ) -> Iterator[RequestOutput]:
        """Ask, and yield what processors hand out until all requests have ended. Pieces are put together on the
        engine's thread: its caller's wakes for outputs alone, so that it takes no time from devices before. Closing or
        dropping the iterator ends the requests.

        Args:
            requests: as `requests` made them.
            processors: of each.

        Raises:
            TaskFailed, NotFinite: the step of a request failed; the others end with it.
            PlanError: the engine is closed, or another process's.
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
        """Ask, and yield what is taken of each delta, if anything, until so many ends have come."""
        queue: SimpleQueue[T | BaseException] = SimpleQueue()

        def notify(event: Delta | BaseException) -> None:
            try:
                taken = event if isinstance(event, BaseException) else take(event)
            except Exception as error:  # else a line of the log, and its caller would wait for ever
                taken = error
            if taken is not None:
                queue.put(taken)

        self.submit(requests, notify)
        try:
            while num_ends:
                if os.getpid() != self._process:
                    raise _foreign()
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
        way: SamplingParams | Sampling,
        *,
        request_id: str | None = None,
        index: int = 0,
        priority: int = 0,
    ) -> Request:
        """A checked request."""
        wanted = "pooling" if way is _FOR_VECTORS else "generate"
        if self.model.settings.runner != wanted:
            rule, got = f"this call needs an engine made with runner={wanted!r}", self.model.settings.runner
            _border.refuse("engine", rule, repr(got), "make another for it")
        name = f"{self._name}-{next(self._numbers)}" if request_id is None else request_id
        _border.text("engine", "request_id", name)
        _border.integer("engine", "priority", priority, -PRIORITIES, PRIORITIES)
        ids, salt = self._ids(prompt)
        limit = self.model.limits.max_context
        if wanted == "generate":
            check_prompt(len(ids), limit)
        elif len(ids) > limit:
            rule = f"a prompt must fit the context of {limit} tokens"
            _border.refuse("engine", rule, str(len(ids)), "shorten it")
        grammar = None
        if isinstance(way, SamplingParams):
            sampling, options = way.sampling(limit - len(ids)), way.output_options()
            if way.structured_outputs is not None:
                grammar = self._grammars.prepare(way.structured_outputs)
        else:
            sampling, options = way, OutputOptions()
        bad = (*sampling.bad_words_ids, *(word_ids(self.model.tokenizer, sampling.bad_words)))
        self._check_ids(sampling, bad)
        if not self.model.settings.enable_prefix_caching:  # its own texts still share its prompt
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
                (b"adapter", b""),
                (b"salt", salt.encode("utf-8", "surrogatepass")),
            ),
            limit,
            index=index,
            grammar=grammar,
            is_named=request_id is not None,
        )

    def _ids(self, prompt: Prompt) -> tuple[list[int], str]:
        """A prompt's tokens and its salt."""
        prompt, salt = prompt_form(prompt)
        if isinstance(prompt, str):
            ids = encode_prompt(self.model.tokenizer, prompt)
        else:
            given = _border.sequence("engine", "a prompt", prompt, "ids, or a text")
            ids = [_border.integer("engine", "an id of a prompt", id_, 0, _LARGEST_ID) for id_ in given]
        check_token_ids(self.model.tokenizer, ids, self.model.config.vocab_size, "a prompt")
        beginning = self.model.config.bos_token_id
        return ids or [0 if beginning is None else beginning], salt

    def _check_ids(self, sampling: Sampling, bad_words: Sequence[Sequence[int]]) -> None:
        """Settings name tokens that the model has."""
        named = {
            "logit_bias": [id_ for id_, _ in sampling.logit_bias],
            "allowed_token_ids": sampling.allowed_token_ids,
            "stop_token_ids": sampling.stop_token_ids,
            "bad_words": [id_ for word in bad_words for id_ in word],
        }
        for name, ids in named.items():
            check_token_ids(self.model.tokenizer, ids, self.model.config.vocab_size, name)


def _ends(delta: Delta) -> bool:
    """Whether it is its text's last."""
    return delta.finish_reason is not None


def prompt_form(prompt: Prompt) -> tuple[str | Sequence[int], str]:
    """A prompt as text or ids, and its salt.

    Args:
        prompt: in any form.

    Raises:
        ConfigError: a dictionary that is no prompt.
    """
    if not isinstance(prompt, Mapping):
        return prompt, ""
    for name in prompt:
        _border.choice("engine", "a field of a prompt", name, _PROMPT_FIELDS)
    salt = prompt.get("cache_salt", "")
    _border.instance("engine", "cache_salt", salt, str, "pass text")
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        rule = "a prompt has either prompt or prompt_token_ids"
        _border.refuse("engine", rule, shown(dict(prompt)), "give one of them")
    if "prompt" in prompt:
        return _border.instance("engine", "prompt", prompt["prompt"], str, "pass text"), salt
    return _border.sequence("engine", "prompt_token_ids", prompt["prompt_token_ids"], "ids"), salt


def _one_each(name: str, value: Any, is_one: bool, count: int) -> Sequence[Any]:
    """A value for every prompt."""
    if is_one:
        return [value] * count
    values = _border.sequence("engine", name, value, "values, one per prompt")
    if len(values) != count:
        _border.refuse(
            "engine", f"{name} is one for all or one per prompt", f"{len(values)} for {count}", "correct it"
        )
    return values


def _abort(queues: Iterable[SimpleQueue[Command]], request_ids: Sequence[str]) -> None:
    """End requests, whichever copy of the model has them."""
    for queue in queues:
        queue.put(Abort(request_ids))


def _foreign() -> PlanError:
    return PlanError(
        "[serve.engine] an engine belongs to the process that made it; got a call in a forked one; make one there"
    )
