"""`tilewise chat`: a conversation over HTTP equals one through the engine."""

import io
import json
import os
import signal
import sys
from contextlib import aclosing

import pytest

from native.server.served import usual_server
from tilewise.cli.main import _run
from tilewise.server.load import Target

SAMPLING = {"seed": 3, "max_tokens": 8, "temperature": 0.9}


@pytest.fixture
def talk(monkeypatch, capsys):
    """Both output streams for typed lines."""

    def run(*options, typed="", code=0):
        server = usual_server()
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        args = [
            part for name, value in SAMPLING.items() for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        assert _run(["chat", "--url", server.url, *args, *options]) == code
        return capsys.readouterr()

    return run


def answer(*messages):
    """The server's own answer to a conversation."""
    roles = ("user", "assistant") * len(messages)
    reported = [{"role": role, "content": text} for role, text in zip(roles, messages)]
    body = {"model": "small", "messages": reported, **SAMPLING}
    return json.loads(json.dumps(usual_server().ask("/v1/chat/completions", body)[1]))["choices"][0][
        "message"
    ]["content"]


def test_answers_depend_on_the_conversation(talk):
    """Each answers all messages before it; /reset starts again, /exit ends."""
    first = answer("one")
    second = answer("one", first, "two")
    output = talk("one", typed="two\n/reset\none\n/exit\nnever\n")
    assert output.out == f"{first}\n{second}\n{first}\n"
    assert "new conversation" in output.err
    assert talk("--quick", "one").out == f"{first}\n"


def test_a_failed_message_is_reported_and_removed(talk):
    """A too long message gives one line, and the next is answered; as the last message, it sets the exit code."""
    first = answer("one")
    output = talk(typed=f"{'word ' * 400}\none\n")
    assert output.out.strip() == first.strip() and "no answer: status 400" in output.err
    assert "no answer" in talk("--quick", "word " * 400, code=1).err
    assert "choose from small" in talk("--model", "another", "hello", code=2).err
    assert "--quick needs MESSAGE" in talk("--quick", code=2).err


def test_unexpected_events_are_errors(talk, monkeypatch):
    """One line for each, and the next message is answered; the address may end in /v1."""
    strange = iter([{"choices": [7]}, {"choices": [{"delta": "x"}]}, {"usage": 7}, {"choices": 7}])
    events = Target.events

    async def changed(self, path, body):
        if (event := next(strange, None)) is not None:
            yield event
        else:
            async with aclosing(events(self, path, body)) as received:
                async for event in received:
                    yield event

    monkeypatch.setattr(Target, "events", changed)
    output = talk("--url", f"{usual_server().url}/v1/", typed="one\n" * 5)
    assert output.err.count("no answer: an event has an unexpected form") == 4
    assert output.out.strip() == answer("one").strip()


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_stops_an_answer(talk, monkeypatch):
    """The received part stays in the conversation, its blocks are freed, and the next message is answered."""
    events, number = Target.events, 0

    async def interrupted(self, path, body):
        nonlocal number
        async with aclosing(events(self, path, body)) as received:
            async for event in received:
                number += 1
                if number == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                yield event

    monkeypatch.setattr(Target, "events", interrupted)
    output = talk("on and on", typed="and now?\n/exit\n")
    assert output.err.count("(stopped)") == 1
    first, second = output.out.removesuffix("\n").split("\n", 1)
    assert second == answer("on and on", first, "and now?") and answer("on and on").startswith(first)
    usual_server().wait_idle()


def test_control_characters_are_escaped_on_a_terminal(talk, monkeypatch):
    """In texts, reasoning and errors; fields that are not text are ignored."""
    evil = "\x1b]52;c;cm0=\x07"

    async def events(self, path, body):
        for delta in ({"content": 7}, {"reasoning_content": evil + "?"}, {"content": evil + "!"}):
            yield {"choices": [{"delta": delta}]}

    monkeypatch.setattr(Target, "events", events)
    for is_terminal in (False, True):
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        output = talk("--quick", "hello")
        assert ("\x1b" in output.out, "\x1b" in output.err) == (not is_terminal, not is_terminal)
    assert output.out == "\\x1b]52;c;cm0=\\x07!\n" and "\\x1b]52;c;cm0=\\x07?" in output.err
