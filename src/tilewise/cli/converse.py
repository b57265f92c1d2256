"""`tilewise generate --chat`: a conversation in which each line of standard input is a message.

Each answer is generated from the whole conversation, rendered with the model's chat template.
Answers go to standard output, everything else to standard error. If a message cannot be answered,
the error is printed, the message is removed from the conversation, and the conversation continues.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tilewise.checkpoint import check_token_ids
from tilewise.cli.terminal import write_to
from tilewise.cli.write import Request, context_limit, make_engine, prompt_of, say_settings
from tilewise.core import ConfigError
from tilewise.generate import ChatTemplate, Sampling, check_prompt, combine_settings, encode_prompt
from tilewise.serve import Engine

__all__ = ["converse", "lines", "stoppable"]

_DEFAULT_CONTEXT = 4096
Message = dict[str, Any]


def converse(request: Request, first: str | None, system: str | None) -> None:
    """Answer messages until the input ends.

    Args:
        request: the command line.
        first: a message to answer before reading others.
        system: the system message.

    Raises:
        ConfigError, CheckpointError, LayoutError: the model cannot be used, there is no chat
            template, or the template fails. Raised before any work.
    """
    from tilewise import models
    from tilewise.checkpoint import load_generation_config, load_tokenizer

    model = models.open(request.model_dir, ignore=request.engine.ignore_config_fields)
    limit = context_limit(model, request)
    limit = limit if request.engine.max_model_len is not None else min(limit, _DEFAULT_CONTEXT)
    template = ChatTemplate(request.model_dir)
    beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    text = template.render([*beginning, {"role": "user", "content": first or "Hello"}])
    tokenizer = load_tokenizer(request.model_dir, model.vocab_size)
    ids = encode_prompt(tokenizer, text, add_special_tokens=False)
    check_token_ids(tokenizer, ids, model.vocab_size, "the first message")
    num_tokens = len(ids)
    check_prompt(num_tokens, limit)
    file = (
        load_generation_config(request.model_dir, model.vocab_size)
        if request.engine.generation_config
        else {}
    )
    _, from_file = combine_settings(file, request.overrides, num_tokens)
    with make_engine(request, limit, 1) as engine:
        say_settings(request, from_file)
        if sys.stdin.isatty():
            request.say(
                "one message per line; /reset starts again, /exit or Ctrl-D ends, Ctrl-C stops an answer"
            )
        talk = list(beginning)
        for line in lines(first):
            if line == "/exit":
                return
            if line == "/reset":
                talk = list(beginning)
                request.say("new conversation")
            elif line.strip():
                _answer(request, engine, template, file, talk, line)


def lines(first: str | None) -> Iterator[str]:
    """Messages, line by line.

    Args:
        first: the first message, from the command line.
    """
    if first is not None:
        yield first
    if sys.stdin.isatty() and sys.stdout.isatty():
        import readline  # noqa: F401  # enables line editing

        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:  # drop the line, or stop an answer that has just ended
                print()
    for line in iter(sys.stdin.readline, ""):
        yield line.rstrip("\r\n")


def _answer(
    request: Request,
    engine: Engine,
    template: ChatTemplate,
    file: Mapping[str, Any],
    talk: list[Message],
    line: str,
) -> None:
    """Answer a message, and add message and answer to the conversation."""
    messages = [*talk, {"role": "user", "content": line}]
    try:
        text = template.render(messages)
        ids = encode_prompt(engine.model.tokenizer, text, add_special_tokens=False)
        check_token_ids(engine.model.tokenizer, ids, engine.model.config.vocab_size, "the conversation")
        sampling = _sampling(request, file, len(ids), engine.model.limits.max_context)
    except ConfigError as error:
        request.say(f"{' '.join(str(error).split())} (/reset starts a new conversation)")
        return
    answer = ""
    with stoppable() as stopped:
        for delta in engine.stream([prompt_of(engine, ids)], sampling):
            answer += delta.text
            write_to(sys.stdout, delta.text)
            if stopped.is_set():
                request.say(" (stopped)")
                break
    sys.stdout.write("\n")
    sys.stdout.flush()
    talk[:] = [*messages, {"role": "assistant", "content": answer}]


def _sampling(request: Request, file: Mapping[str, Any], num_tokens: int, limit: int) -> Sampling:
    """Sampling settings for an answer, within the remaining context.

    Raises:
        ConfigError: no context is left, or less than `--max-tokens` requests.
    """
    check_prompt(num_tokens, limit)
    sampling, from_file = combine_settings(file, request.overrides, num_tokens)
    room = limit - num_tokens
    most = sampling.max_tokens if "max_tokens" in {*request.overrides, *from_file} else room
    if max(request.overrides.get("max_tokens", 0), sampling.min_tokens) > room:
        raise ConfigError(
            f"[cli.generate] the conversation and --max-tokens must fit the context of {limit} tokens; got "
            f"{num_tokens} tokens so far; lower --max-tokens or start a new conversation"
        )
    return replace(sampling, max_tokens=min(most, room))


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """A `with` block in which Ctrl-C sets an event instead of ending the program. A second Ctrl-C
    ends the program.
    """
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(number: int, frame: object) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
