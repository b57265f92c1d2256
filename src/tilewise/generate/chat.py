"""Conversations as the text that a model was taught to continue: chat templates of its directory.

A template is a small program from outside. It runs in jinja2's sandbox in a process of its own (`template_process`) and
gets plain JSON values only; whatever it does, the end is a text or one error. Rendered as transformers'
`apply_chat_template` renders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise.checkpoint import load_tokenizer_config
from tilewise.core import Border, ConfigError
from tilewise.core.border import shown
from tilewise.generate.template_process import TemplateProcesses

__all__ = ["ChatTemplate"]

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
        self._processes = TemplateProcesses()
        if not self._templates:
            raise ConfigError(
                "[generate.chat] a conversation needs chat_template.jinja, or chat_template in tokenizer_config.json; "
                f"got neither in {self._place!r}; write without --chat, or give a model that was taught to converse"
            )

    def start(self) -> None:
        """Start a process that renders, so that the first conversation need not wait for it."""
        self._processes.start()

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
        result = self._processes.render(self._templates[chosen], {**given, **self._special_tokens, **more})
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
