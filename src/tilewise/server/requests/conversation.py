"""From messages in a body to the ids of a prompt: text parts joined, tools as templates know them.

Refuses images, audio and files: nothing is ever fetched or decoded. The template runs in a child process that can be
killed (`generate.chat`); this module only says what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.core import Border
from tilewise.core.border import shown
from tilewise.generate import ChatTemplate, encode_prompt
from tilewise.server.requests.bodies import ChatBody, MessageModel, TokenizeBody, ToolModel

__all__ = ["Conversation", "Rendered", "Renderer", "text_of"]

_TEXTS = ("text", "input_text", "output_text")
_border = Border("server")


@dataclass(frozen=True)
class Conversation:
    """What a template is given.

    Attributes:
        messages: plain ones, with text for content.
        tools: JSON schemas of functions.
        add_generation_prompt: end with what introduces the model's answer.
        continue_final_message: end within the last message, which the model goes on with.
        variables: whatever else the template understands.
        template: text of another one.
        add_special_tokens: the tokenizer's own come besides those in the template's text.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    add_special_tokens: bool = False

    @classmethod
    def of(cls, body: ChatBody | TokenizeBody) -> Conversation:
        """That of a body.

        Raises:
            ConfigError: a message that has other parts than text, or two fields that contradict each other.
        """
        goes_on = bool(body.continue_final_message)
        adds = body.add_generation_prompt
        if goes_on and adds:
            rule = "continue_final_message leaves no room for add_generation_prompt"
            _border.refuse("request", rule, "both", "leave one of them out")
        tools: list[dict[str, Any]] | None = None
        variables = dict(body.chat_template_kwargs or {})
        if not (isinstance(body, ChatBody) and body.tool_choice == "none"):
            tools = [_tool(tool) for tool in body.tools or ()] or None
        if isinstance(body, ChatBody):
            if body.reasoning_effort is not None:
                variables.setdefault("reasoning_effort", body.reasoning_effort)
            if body.documents is not None:
                variables["documents"] = body.documents
        return cls(
            [_message(message) for message in body.messages or ()],
            tools,
            not goes_on if adds is None else adds,
            goes_on,
            variables,
            body.chat_template,
            bool(body.add_special_tokens),
        )


@dataclass(frozen=True)
class Rendered:
    """A prompt as a template wrote it.

    Attributes:
        text: that the template made.
        ids: of it.
    """

    text: str
    ids: list[int]


class Renderer:
    """Applies a model's template. Any thread; each call starts and ends a child process.

    Args:
        model: a directory.
        tokenizer: of it.
        template: text of one that is used instead of the model's.
    """

    def __init__(self, model: str | Path, tokenizer: Any, template: str | None = None) -> None:
        self._model, self._tokenizer, self._given = model, tokenizer, template
        self._template: ChatTemplate | None = None

    def prepare(self) -> ChatTemplate:
        """The model's template, with a process that can render it.

        Raises:
            ConfigError: there is none.
        """
        if self._template is None:
            template = ChatTemplate(self._model, self._given)
            template.start()
            self._template = template
        return self._template

    def render(self, wanted: Conversation) -> Rendered:
        """The prompt of a conversation.

        Args:
            wanted: what the template is given.

        Raises:
            ConfigError: there is no template, or it refuses the conversation.
        """
        own = wanted.template
        template = self.prepare() if own is None else ChatTemplate(self._model, own)
        documents = wanted.variables.get("documents")
        text = template.render(
            wanted.messages,
            tools=wanted.tools,
            documents=documents,
            add_generation_prompt=wanted.add_generation_prompt,
            variables={name: value for name, value in wanted.variables.items() if name != "documents"},
        )
        if wanted.continue_final_message:
            text = _cut_behind(text, wanted.messages[-1] if wanted.messages else {})
        # a template's text holds the tokens that begin it
        adds = wanted.add_special_tokens
        return Rendered(text, encode_prompt(self._tokenizer, text, add_special_tokens=adds))


def _cut_behind(text: str, message: Mapping[str, Any]) -> str:
    """A rendered conversation up to the end of its last message."""
    final = str(message.get("content") or "").strip()
    place = text.rfind(final)
    if not final or place < 0:
        rule = "continue_final_message needs a last message that the template shows"
        _border.refuse("request", rule, shown(final, 40), "leave it out")
    return text[: place + len(final)]


def _tool(tool: ToolModel) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


def _message(message: MessageModel) -> dict[str, Any]:
    """A message as templates know them."""
    found: dict[str, Any] = {**message.model_dump(exclude_none=True)}
    if found["role"] == "developer":
        found["role"] = "system"
    found["content"] = text_of(message.content)
    if message.tool_calls is not None:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
        if message.content is None:
            found["content"] = ""
    return found


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message: its own, or that of its parts.

    Raises:
        ConfigError: a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part) for part in content)


def _part(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind == "refusal":
        return _border.instance("request", "a refusal", part.get("refusal"), str, "pass text")
    if kind not in _TEXTS:
        rule, advice = "messages hold text alone, and nothing is fetched", "leave other parts out"
        _border.refuse("request", rule, f"a part of type {shown(kind, 40)}", advice)
    return _border.instance("request", "text of a part", part.get("text"), str, "pass text")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call that the model has made, its arguments as templates want them: a dictionary."""
    function = _border.mapping("request", "function of a tool call", call.get("function"), "fields")
    name = _border.text("request", "name of a tool call", function.get("name"))
    given = function.get("arguments")
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError) as error:
            _border.refuse("request", "arguments of a tool call must be JSON", str(error), "correct them")
    if given is not None and not isinstance(given, dict):
        _border.refuse("request", "arguments of a tool call must be an object", shown(given), "correct them")
    return {**call, "type": "function", "function": {**function, "name": name, "arguments": given or {}}}
