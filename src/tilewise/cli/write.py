"""`tilewise generate` without --chat: writes text to standard output as it is generated, and times
and memory to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tilewise.cli.before_work import before_work
from tilewise.cli.structure import check_structure
from tilewise.cli.terminal import write_to
from tilewise.core import ConfigError
from tilewise.core.sizes import format_bytes
from tilewise.files.reading import Unreadable, decode_text, read_whole

if TYPE_CHECKING:
    from rich.console import Console

    from tilewise.generate import Sampling
    from tilewise.models import ModelConfig
    from tilewise.serve import Engine, SamplingParams, StructuredOutputsParams
    from tilewise.serve.engine import Prompt
    from tilewise.settings import EngineSettings

__all__ = [
    "Request",
    "Writing",
    "context_limit",
    "make_engine",
    "prompt_of",
    "read_prompt",
    "say_settings",
    "stream",
    "write_text",
]

_MOST_PROMPT_BYTES = 64 << 20


@dataclass
class Writing:
    """One generated text and its times.

    Attributes:
        tokens: token ids, including an end token.
        text: the text.
        first_s: seconds until the first token.
        rest_s: seconds for all tokens after it.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first_s: float = 0.0
    rest_s: float = 0.0
    finish_reason: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first token."""
        return (len(self.tokens) - 1) / self.rest_s if self.rest_s > 0 else 0.0


@dataclass(frozen=True)
class Request:
    """The command line of `generate`, without the prompt.

    Attributes:
        model_dir: directory of the model.
        overrides: fields of `Sampling` that the command line sets, by name.
        engine: settings of the engine, without sizes that depend on the prompt.
        console: for messages that are not generated text.
        structure: the structure that each text must follow; None if texts may be any text.
    """

    model_dir: Path
    overrides: Mapping[str, Any]
    engine: EngineSettings
    console: Console
    structure: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        from tilewise.generate import combine_settings

        combine_settings(
            {}, {**self.overrides, "n": 1}, 1
        )  # rejects values out of range before any file is read

    def say(self, text: str) -> None:
        """Print a line on the console."""
        self.console.print(text, highlight=False, markup=False)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt of a command line: an argument, standard input for `-`, or the content of a file.

    Raises:
        ConfigError: the prompt is not UTF-8 text, cannot be read, or is too large.
    """
    if prompt is not None and prompt != "-":
        return prompt
    try:
        if file is not None:
            return decode_text(read_whole(file, _MOST_PROMPT_BYTES))
        content = sys.stdin.buffer.read(_MOST_PROMPT_BYTES + 1)
        if len(content) > _MOST_PROMPT_BYTES:
            raise Unreadable(f"it is larger than {format_bytes(_MOST_PROMPT_BYTES)}")
        return decode_text(content)
    except Unreadable as error:
        place = "standard input" if file is None else repr(str(file))
        raise ConfigError(
            f"[cli.generate] a prompt must be UTF-8 text; got {place}: {error}; correct it"
        ) from None


def prompt_of(engine: Engine, prompt: str | Sequence[int]) -> Prompt:
    """A prompt, as text or token ids, for the engine's adapter, if it has one."""
    name = next(iter(engine.model.adapters), None)
    field = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return prompt if name is None else {field: prompt, "lora": name}


def stream(engine: Engine, prompt: str, sampling: Sampling, file: TextIO | None) -> Writing:
    """Continue one prompt once. New text is written to `file` as it arrives, or nowhere without
    a file.
    """
    return _stream_all(engine, prompt, sampling, file)[0]


def _stream_all(
    engine: Engine, prompt: str, sampling: Sampling | SamplingParams, file: TextIO | None
) -> list[Writing]:
    """Continue a prompt. Its texts are shown one after another, each while it is generated."""
    writings = [Writing() for _ in range(sampling.n)]
    shown = _InOrder(sampling.n, file)
    started = time.perf_counter()
    for delta in engine.stream([prompt_of(engine, prompt)], sampling):
        writing, elapsed = writings[delta.choice], time.perf_counter() - started
        if writing.tokens:
            writing.rest_s = elapsed - writing.first_s
        else:
            writing.first_s = elapsed
        writing.tokens += [] if delta.token is None else [delta.token]
        writing.text += delta.text
        writing.finish_reason = delta.finish_reason
        shown.add(delta.choice, delta.text, delta.finish_reason is not None)
    return writings


class _InOrder:
    """Shows texts that are generated at the same time one after another. If there are several, each
    has a heading.
    """

    def __init__(self, count: int, file: TextIO | None) -> None:
        self._file = file
        self._count = count
        self._pending = [""] * count
        self._is_done = [False] * count
        self._now = 0
        if count > 1:
            self._show(f"--- 1 of {count} ---\n")

    def add(self, choice: int, text: str, is_done: bool) -> None:
        """Add new text of one of the texts."""
        self._pending[choice] += text
        self._is_done[choice] = is_done
        while self._now < self._count:
            self._show(self._pending[self._now])
            self._pending[self._now] = ""
            if not self._is_done[self._now]:
                return
            self._now += 1
            if self._now < self._count:
                self._show(f"\n--- {self._now + 1} of {self._count} ---\n")

    def _show(self, text: str) -> None:
        if self._file is not None and text:
            write_to(self._file, text)


def write_text(request: Request, prompt: str) -> None:
    """Continue `prompt` on standard output; print times and memory on the console.

    Raises:
        ConfigError, CheckpointError, LayoutError: the model or a setting is invalid. Raised before
            any work.
    """
    from tilewise import models
    from tilewise.checkpoint import check_token_ids, load_generation_config, load_tokenizer
    from tilewise.generate import check_prompt, combine_settings, encode_prompt
    from tilewise.serve import SamplingParams

    started = time.perf_counter()
    model = models.open(request.model_dir, ignore=request.engine.ignore_config_fields)
    limit = context_limit(model, request)
    # the engine adds one token to an empty prompt
    tokenizer = load_tokenizer(request.model_dir, model.vocab_size)
    ids = encode_prompt(tokenizer, prompt)
    check_token_ids(tokenizer, ids, model.vocab_size, "the prompt")
    num_tokens = max(1, len(ids))
    check_prompt(num_tokens, limit)
    room = limit - num_tokens
    for name in ("max_tokens", "min_tokens"):
        value = request.overrides.get(name)
        if value is not None and value > room:
            raise ConfigError(
                f"[cli.generate] prompt and --{name.replace('_', '-')} must fit the model's context of {limit} "
                f"tokens; got {num_tokens} and {value}; choose at most {room}"
            )
    file = (
        load_generation_config(request.model_dir, model.vocab_size)
        if request.engine.generation_config
        else {}
    )
    sampling, from_file = combine_settings(file, request.overrides, num_tokens)
    sampling = replace(
        sampling, max_tokens=min(sampling.max_tokens, room), min_tokens=min(sampling.min_tokens, room)
    )
    params = SamplingParams.of(sampling, structured_outputs=request.structure)
    check_structure(request.structure, tokenizer, file, model)
    # size the cache for this request only
    engine = make_engine(request, num_tokens + sampling.max_tokens, sampling.n)
    with engine:
        say_settings(request, from_file)
        loaded_s = time.perf_counter() - started
        writings = _stream_all(engine, prompt, params, sys.stdout)
        sys.stdout.write("\n")
        for line in _figures(engine, writings, loaded_s):
            request.say(line)


def context_limit(model: ModelConfig, request: Request) -> int:
    """The maximum number of tokens of prompt and text.

    Raises:
        ConfigError: --max-model-len is larger than the model's limit.
    """
    from tilewise import models

    longest, limit = models.max_context(model), request.engine.max_model_len
    if limit is not None and limit > longest:
        raise ConfigError(
            f"[cli.generate] --max-model-len must be at most the model's {longest}; got {limit}; lower it"
        )
    return limit or models.default_context(model)


def make_engine(request: Request, max_context: int, num_texts: int) -> Engine:
    """Load the model with a progress bar, and print notes on its weights."""
    from tilewise.serve import Engine

    with before_work(), _progress(request.console) as on_progress:
        sizes = {"max_num_seqs": num_texts, "max_context": max_context}
        engine = Engine(request.model_dir, on_progress=on_progress, **{**vars(request.engine), **sizes})
    if request.engine.load_format == "dummy":
        request.say("the weights are random (--load-format dummy): the text is meaningless")
    if "float16" in engine.model.stored_dtypes:
        request.say(f"the weights are stored as float16 and run as {engine.model.dtype}")
    return engine


def say_settings(request: Request, from_file: Mapping[str, Any]) -> None:
    """Print the settings that come from generation_config.json."""
    if from_file:
        settings = ", ".join(f"{name}={value!r}" for name, value in from_file.items())
        request.say(f"from generation_config.json: {settings}")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], object] | None]:
    """A progress bar if the console is a terminal."""
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _figures(engine: Engine, writings: list[Writing], loaded_s: float) -> Iterator[str]:
    first_s = min(writing.first_s for writing in writings)
    num_tokens = sum(len(writing.tokens) for writing in writings)
    speed = sum(writing.tokens_per_s for writing in writings)
    reasons = " and ".join(sorted({str(writing.finish_reason) for writing in writings}))
    yield (
        f"loaded in {loaded_s:.2f} s; first token after {first_s * 1e3:.0f} ms; {num_tokens} tokens"
        f" at {speed:.1f} tokens/s; ended by {reasons}"
    )
    for device, usage in enumerate(engine.memory_usage()):
        yield f"device {device}: {format_bytes(usage['total'])}"
