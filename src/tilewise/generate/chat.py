"""Conversations as the text that a model was taught to continue: chat templates of its directory.

A template is a small program from outside. It runs in jinja2's sandbox in a process of its own, with limits of time,
memory and output, and gets plain JSON values only; whatever it does, the end is a text or one error. Rendered as
transformers' `apply_chat_template` renders.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

from tilewise.checkpoint import load_tokenizer_config
from tilewise.core import Border, ConfigError
from tilewise.core.border import shown
from tilewise.generate import template_child

__all__ = ["ChatTemplate"]

_DEADLINE_S = 10.0
_MEMORY_BYTES = 1 << 30
_MOST_BYTES = template_child.MOST_OUTPUT * 12 + 4096  # of JSON: an escaped character takes twelve at most
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names that templates and programs have for it
_border = Border("generate")
Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """The templates of a model directory.

    Args:
        directory: with chat_template.jinja, or a tokenizer_config.json that holds a template or several by name.
        template: text of one that is used instead of those.

    Raises:
        ConfigError: there is none.
        CheckpointError: the files cannot be read.
    """

    def __init__(self, directory: str | Path, template: str | None = None) -> None:
        config = load_tokenizer_config(directory)
        self._place = str(directory)
        self._templates = dict(config.chat_templates) if template is None else {"default": template}
        self._special_tokens = dict(config.special_tokens)
        if not self._templates:
            raise ConfigError(
                "[generate.chat] a conversation needs chat_template.jinja, or chat_template in tokenizer_config.json; "
                f"got neither in {self._place!r}; write without --chat, or give a model that was taught to converse"
            )

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        name: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; it holds the tokens that begin it, so it is encoded without any added.

        Args:
            messages: dictionaries with `role` and mostly `content`, oldest first.
            tools: JSON schemas of functions that the model may call.
            documents: what the model may cite, with `title` and `text`.
            add_generation_prompt: end with what introduces the model's answer.
            name: of a template; None: `tool_use` where there are tools and such a template, else `default`.
            variables: whatever else a template understands.

        Raises:
            ConfigError: an argument is not plain JSON, there is no such template, or it fails, refuses the
                conversation, does not end or takes too much memory.
        """
        given = {
            "messages": [_with_reasoning(m) for m in _dictionaries("messages", messages)],
            "tools": None if tools is None else _dictionaries("tools", tools),
            "documents": None if documents is None else _dictionaries("documents", documents),
            "add_generation_prompt": _border.truth("chat", "add_generation_prompt", add_generation_prompt),
        }
        more = _border.json("chat", "variables", {} if variables is None else variables)
        chosen = self._choose(name, bool(tools))
        result = _run(self._templates[chosen], {**given, **self._special_tokens, **more})
        if "problem" in result:
            problem = " ".join(str(result["problem"]).split())[:400]
            raise ConfigError(
                f"[generate.chat] the chat template must make a text of the conversation; got {chosen!r} of "
                f"{self._place!r}: {problem}; change the conversation, or the template"
            )
        return str(result["text"])

    def _choose(self, name: str | None, has_tools: bool) -> str:
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if not isinstance(name, str) or name not in self._templates:
            _border.refuse(
                "chat",
                f"a template must be one of {', '.join(map(shown, self._templates))}",
                shown(name),
                "choose one of them",
            )
        return name


def _dictionaries(name: str, values: Any) -> list[dict[str, Any]]:
    """A list of dictionaries that JSON can hold, copied."""
    found = _border.sequence("chat", name, values, "dictionaries")
    return [dict(_border.json("chat", f"each of {name}", value)) for value in found]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """What a model thought, under the names that templates read."""
    thought = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _run(template: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """What the child says of a template; its death is a problem of the template."""
    limits = {"memory_bytes": _MEMORY_BYTES, "cpu_s": int(_DEADLINE_S) + 1}
    payload = json.dumps({"template": template, "variables": variables, "limits": limits}).encode()
    child = subprocess.Popen(
        [sys.executable, "-I", template_child.__file__, *_places_of_jinja()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,  # Ctrl-C is for the parent
    )
    timer = Timer(_DEADLINE_S, child.kill)
    timer.start()
    try:
        answer = _converse(child, payload)
        is_late = timer.finished.is_set()
    finally:
        timer.cancel()
        child.kill()
        child.wait()
    if is_late:
        return {"problem": f"it does not end within {_DEADLINE_S:g} s"}
    try:
        result = json.loads(answer)
    except ValueError:
        return {"problem": "it ends the process that renders it, or takes too much memory"}
    is_answer = isinstance(result, dict) and len(result) == 1 and isinstance(result.get("text", ""), str)
    return result if is_answer else {"problem": "it makes the process that renders it say something else"}


def _converse(child: subprocess.Popen[bytes], payload: bytes) -> bytes:
    """All that the child answers, as far as an answer can be long."""
    assert child.stdin is not None and child.stdout is not None
    with child.stdout:
        try:
            with child.stdin:
                child.stdin.write(payload)
        except BrokenPipeError:  # it is dead already
            pass
        return child.stdout.read(_MOST_BYTES)


def _places_of_jinja() -> list[str]:
    """Where the child finds jinja2, in whatever way this process has found it."""
    import jinja2
    import markupsafe

    return list(dict.fromkeys(str(Path(str(m.__file__)).parents[1]) for m in (jinja2, markupsafe)))
