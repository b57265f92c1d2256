"""`tilewise chat`: a conversation with a running server, line by line.

Answers go to standard output as they are generated, everything else to standard error. If an answer
fails, the error is printed, the user's message is removed from the conversation, and the
conversation continues.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.options import Options, Values
from tilewise.cli.serve import read_keys
from tilewise.cli.terminal import write_to
from tilewise.settings import SamplingSettings

if TYPE_CHECKING:
    from tilewise.server.load import Target

__all__ = ["chat"]

_SETTINGS = ("max_tokens", "temperature", "top_p", "seed")


def chat(
    message: Annotated[
        str | None,
        typer.Argument(help="First message; more are read from standard input.", show_default=False),
    ] = None,
    base_url: Annotated[
        str, typer.Option("--base-url", "--url", metavar="URL", help="Address of the server.")
    ] = ("http://127.0.0.1:8000"),
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the model on the server; default: its first one."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file whose first line is an API key of the server.")
    ] = None,
    system_prompt: Annotated[
        str | None,
        typer.Option("--system-prompt", "--system", help="The system message."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", "-q", help="Answer one message and exit.")] = False,
    *,
    sampling: Annotated[
        Values, Options(SamplingSettings, only=_SETTINGS, panel="Answers", decided_by="server")
    ],
) -> None:
    """Converse with a running server.

    A line is a message; /reset starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer. Settings
    without an option have the server's defaults. `tilewise generate --chat MODEL` needs no server.

    Example: `tilewise chat --url http://127.0.0.1:8000 --system "Be brief."`
    """
    from tilewise.cli.converse import lines
    from tilewise.server.load import Target, require_answer

    if quick and message is None:
        raise typer.BadParameter("--quick needs MESSAGE")
    key = read_keys(api_key_file)[:1]
    target = Target(base_url.rstrip("/"), {"authorization": f"Bearer {key[0]}"} if key else {})
    name = asyncio.run(require_answer(target, model))
    settings = {"model": name, **sampling}
    beginning = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    if sys.stdin.isatty() and not quick:
        _say(
            f"{name}: one message per line; /reset starts again, /exit or Ctrl-D ends, Ctrl-C stops an answer"
        )
    talk, has_failed = list(beginning), False
    for line in (message,) if quick else lines(message):
        if line == "/exit":
            break
        if line == "/reset":
            talk = list(beginning)
            _say("new conversation")
        elif line and line.strip():
            has_failed = not _answer(target, settings, talk, line)
    if has_failed:
        raise typer.Exit(1)


def _say(text: str) -> None:
    """Print a line on standard error. Control characters that come from the server are escaped."""
    write_to(sys.stderr, f"{text}\n")


def _text(value: object) -> str:
    """The text of a field of an answer; empty if the field is not text."""
    return value if isinstance(value, str) else ""


def _answer(target: Target, settings: dict[str, Any], talk: list[dict[str, Any]], line: str) -> bool:
    """Answer a message, and add message and answer to the conversation. Returns False if this
    failed.
    """
    from tilewise.server.load import BadAnswer

    messages = [*talk, {"role": "user", "content": line}]
    try:
        answer = asyncio.run(_write(target, {**settings, "messages": messages}))
    except (OSError, BadAnswer) as error:
        return _fail(str(error))
    except (TypeError, ValueError, AttributeError) as error:
        return _fail(f"an event has an unexpected form: {error!r}")
    talk[:] = [*messages, {"role": "assistant", "content": answer}]
    return True


def _fail(reason: str) -> bool:
    """Print the reason for a missing answer. Returns False."""
    sys.stdout.write("\n")
    sys.stdout.flush()
    _say(f"no answer: {reason} (/reset starts a new conversation)")
    return False


async def _write(target: Target, body: dict[str, Any]) -> str:
    """Print an answer as it arrives. Returns the answer, or the part of it that arrived before
    Ctrl-C.
    """
    from tilewise.cli.converse import stoppable

    answer, times, num_tokens, has_thoughts = "", [time.perf_counter()], 0, False
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with stoppable() as stopped:
        async with aclosing(target.events("/v1/chat/completions", request)) as events:  # type: ignore[type-var]
            async for event in events:
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    thought = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
                    text = _text(delta.get("content"))
                    if thought or text:
                        times.append(time.perf_counter())
                    write_to(sys.stderr, thought)
                    if text and has_thoughts:
                        sys.stderr.write("\n")
                    has_thoughts = bool(thought) or (has_thoughts and not text)
                    answer += text
                    write_to(sys.stdout, text)
                if stopped.is_set():
                    _say(" (stopped)")
                    break
    sys.stdout.write("\n")
    sys.stdout.flush()
    if len(times) > 2 and sys.stderr.isatty():
        count = max(num_tokens, len(times) - 1)
        rate = (count - 1) / (times[-1] - times[1])
        _say(f"({times[1] - times[0]:.2f} s to the first of {count} tokens, then {rate:.1f} a second)")
    return answer
