"""Renders conversations as the prompts that a model was trained on: chat templates of its directory.

A template is a small program from outside. It runs in jinja2's sandbox in a process of its own (`template_process`) and
gets plain JSON values only; whatever it does, the end is a text or one error. Rendered as transformers'
`apply_chat_template` renders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.checkpoint import load_tokenizer_config
from tilewise.core import ConfigError, Validator
from tilewise.core.validation import cut, shown
from tilewise.generate.template_process import TemplateProcesses

__all__ = ["ChatTemplate", "RenderedChat"]

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the field in templates and clients
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_validate = Validator("generate")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation.

    Attributes:
        text: the conversation with its special tokens.
        spans: first and last (exclusive) character of each `{% generation %}` block, in order.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """The templates of a model directory.

    Args:
        directory: with chat_template.jinja, or a tokenizer_config.json that holds a template or several by name.
        template: text of a template to use instead.

    Raises:
        ConfigError: there is no template.
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
                f"got neither in {self._place!r}; continue prompts instead (`tilewise generate` without --chat, "
                "/v1/completions), or choose a chat model"
            )

    def start(self) -> None:
        """Start the template process, so that the first conversation does not wait for it."""
        self._processes.start()

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        name: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as text. The text contains the special tokens, so encode it without adding any.

        Args:
            messages: dictionaries with `role` and mostly `content`, oldest first.
            tools: JSON schemas of functions that the model may call.
            documents: texts that the model may cite, with `title` and `text`.
            add_generation_prompt: end with the tokens that introduce the model's answer.
            continue_final_message: end within the last message, which the model continues.
            name: of a template; None: `tool_use` where there are tools and such a template, else `default`.
            variables: further variables of the template.

        Raises:
            ConfigError: an argument is not plain JSON, there is no such template, or it fails, rejects the
                conversation, does not end or takes too much memory; or it does not show the message to continue.
        """
        shown_messages = [_with_reasoning(m) for m in _dictionaries("messages", messages)]
        final = ""
        if continue_final_message:
            final = _mark_end(shown_messages, add_generation_prompt)
        arguments = {
            "messages": shown_messages,
            "tools": None if tools is None else _dictionaries("tools", tools),
            "documents": None if documents is None else _dictionaries("documents", documents),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        more = _validate.json("chat", "variables", {} if variables is None else variables)
        chosen = self._choose(name, bool(tools))
        result = self._processes.render(
            self._templates[chosen], {**arguments, **self._special_tokens, **more}
        )
        text = self._rendered(result, chosen).text
        return _cut_at_mark(text, final) if continue_final_message else text

    def has_generation(self, *, tools: bool = False) -> bool:
        """Whether the template marks the model's turns with `{% generation %}`.

        Args:
            tools: whether the conversations have tools.
        """
        return _GENERATION.search(self._templates[self._choose(None, tools)]) is not None

    def render_all(
        self,
        conversations: Sequence[Messages],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[RenderedChat | ConfigError]:
        """Render many conversations with the same tools, as training does.

        Args:
            conversations: of each, the messages as in `render`.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with the tokens that introduce the model's answer.

        Returns:
            In the same order, each conversation's text with its `{% generation %}` blocks. If the template does not
            render a conversation, its entry is the error, which is not raised.

        Raises:
            ConfigError: an argument is not plain JSON, or there is no template.
        """
        shared = {
            "tools": None if tools is None else _dictionaries("tools", tools),
            "documents": None,
            "add_generation_prompt": bool(add_generation_prompt),
            **self._special_tokens,
        }
        variables = [
            {"messages": [_with_reasoning(m) for m in _dictionaries("messages", messages)], **shared}
            for messages in conversations
        ]
        chosen = self._choose(None, bool(tools))
        rendered: list[RenderedChat | ConfigError] = []
        for result in self._processes.render_all(self._templates[chosen], variables) if variables else ():
            try:
                rendered.append(self._rendered(result, chosen))
            except ConfigError as error:
                rendered.append(error)
        return rendered

    def _rendered(self, result: Mapping[str, Any], chosen: str) -> RenderedChat:
        """The result of a template process.

        Raises:
            ConfigError: it is a problem.
        """
        if "problem" in result:
            problem = cut(" ".join(str(result["problem"]).split()), 400)
            raise ConfigError(
                f"[generate.chat] the chat template must render the conversation; got {chosen!r} of "
                f"{self._place!r}: {problem}; change the conversation, or the template"
            )
        return RenderedChat(str(result["text"]), tuple((begin, end) for begin, end in result["spans"]))

    def _choose(self, name: str | None, has_tools: bool) -> str:
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if not isinstance(name, str) or name not in self._templates:
            _validate.invalid(
                "chat",
                f"a template must be one of {', '.join(map(shown, self._templates))}",
                shown(name),
                "choose one of them",
            )
        return name


def _dictionaries(name: str, values: Any) -> list[dict[str, Any]]:
    """A copy of a list of dictionaries, checked to be JSON."""
    dictionaries = _validate.sequence("chat", name, values, "dictionaries")
    return [dict(_validate.json("chat", f"each of {name}", value)) for value in dictionaries]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message's reasoning, under the names that templates read."""
    thought = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _mark_end(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    """Append a marker to the last message's text, as transformers does; returns the text without it."""
    if add_generation_prompt:
        rule = "continue_final_message excludes add_generation_prompt"
        _validate.invalid("chat", rule, "both", "leave one of them out")
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        rule = "continue_final_message needs a last message with text"
        _validate.invalid("chat", rule, shown(content, 40), "give it content, or leave the option out")
    messages[-1]["content"] = content + _END_MARK
    return content


def _cut_at_mark(text: str, final: str) -> str:
    """A rendered conversation, cut at the end of its last message."""
    place = text.rfind(_END_MARK.strip())
    if place < 0 or final.strip() not in text:
        rule = "continue_final_message needs a last message that the template shows"
        _validate.invalid("chat", rule, shown(final, 40), "leave the option out")
    # A missing space after the marker means that the template strips messages.
    return text[:place] if text.startswith(_END_MARK, place) else text[:place].rstrip()
