"""`tilewise generate`: text to standard output as it comes, figures to standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tilewise.cli.refuse import before_work
from tilewise.core import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tilewise.generate import Generator, Sampling

__all__ = ["Writing", "stream", "write_text"]


@dataclass
class Writing:
    """What writing one text took.

    Attributes:
        tokens: ids in order, an end token included.
        text: of them.
        first_s: seconds until the first token (reading the prompt).
        rest_s: seconds for all tokens after it.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first_s: float = 0.0
    rest_s: float = 0.0
    finish_reason: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token."""
        return (len(self.tokens) - 1) / self.rest_s if self.rest_s > 0 else 0.0


def stream(generator: Generator, prompt: str, sampling: Sampling, file: TextIO | None) -> Writing:
    """Continue one prompt; pieces go to `file` (None: nowhere) as they come."""
    writing = Writing()
    started = time.perf_counter()
    for piece in generator.generate([prompt], sampling):
        elapsed = time.perf_counter() - started
        if writing.tokens:
            writing.rest_s = elapsed - writing.first_s
        else:
            writing.first_s = elapsed
        writing.tokens.append(piece.token)
        writing.text += piece.text
        writing.finish_reason = piece.finish_reason
        if file is not None and piece.text:
            file.write(piece.text)
            file.flush()
    return writing


def write_text(
    model_dir: Path,
    prompt: str,
    sampling: Sampling,
    max_tokens: int | None,
    *,
    tp: int,
    dtype: str,
    console: Console,
) -> None:
    """Continue `prompt` on standard output; say on `console` how long it took and how much memory it needed.

    Args:
        max_tokens: to write at most; None: as `sampling` says, or fewer where the context has no room for so many.

    Raises:
        ConfigError, CheckpointError, LayoutError: before any work.
    """
    from tilewise import models
    from tilewise.checkpoint import load_tokenizer
    from tilewise.generate import Generator, check_prompt, encode_prompt

    started = time.perf_counter()
    model = models.open(model_dir)
    limit = models.max_context(model)
    # an empty prompt begins with one token of the generator's own
    num_tokens = max(1, len(encode_prompt(load_tokenizer(model_dir, model.vocab_size), prompt)))
    check_prompt(num_tokens, limit)
    room = limit - num_tokens
    if max_tokens is not None and max_tokens > room:
        raise ConfigError(
            f"[cli.generate] prompt and --max-tokens must fit the model's context of {limit} "
            f"tokens; got {num_tokens} and {max_tokens}; ask for at most {room}"
        )
    sampling = replace(sampling, max_tokens=min(max_tokens or sampling.max_tokens, room))
    # a cache for this text, not for the longest that the model could hold
    max_context = num_tokens + sampling.max_tokens
    with before_work():
        generator = Generator(model_dir, tp=tp, dtype=dtype, max_context=max_context)
    with generator:
        loaded_s = time.perf_counter() - started
        writing = stream(generator, prompt, sampling, sys.stdout)
        sys.stdout.write("\n")
        for line in _figures(generator, writing, loaded_s):
            console.print(line, highlight=False, markup=False)


def _figures(generator: Generator, writing: Writing, loaded_s: float) -> Iterator[str]:
    yield (
        f"loaded in {loaded_s:.2f} s; first token after {writing.first_s * 1e3:.0f} ms; "
        f"{len(writing.tokens)} tokens"
        f" at {writing.tokens_per_s:.1f} tokens/s; ended by {writing.finish_reason}"
    )
    for device, usage in enumerate(generator.instance.memory_usage()):
        yield f"device {device}: {usage['total'] / 2**20:.1f} MiB"
