"""Converts the messages of a body to the token ids of a prompt.

Text parts of a message are joined, and tools are passed to the model's chat template in the form
that it expects. Images, audio and files are rejected: nothing is fetched or decoded. The template
runs in a child process that can be killed (`generate.chat`). This module only prepares the
template's input.

Earlier answers are accepted as clients send them back. An empty list of calls counts as no calls.
Null content next to calls stays null if the template can show it. Arguments that `max_tokens` cut
off stay text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from tilewise.core import ConfigError, Validator, get_logger
from tilewise.core.validation import shown
from tilewise.generate import ChatTemplate, encode_prompt
from tilewise.server.requests.bodies import ChatBody, MessageModel, TokenizeBody, ToolModel
from tilewise.server.requests.call_readers import SHORT_ID

__all__ = ["Conversation", "Rendered", "Renderer", "text_of"]

_TEXTS = ("text", "input_text", "output_text")
_UNKNOWN_TOOLS = (
    "the chat template does not show tools to the model; choose a template that does (--chat-template)"
)
_validate = Validator("server")


@dataclass(frozen=True)
class Conversation:
    """Input of a chat template.

    Attributes:
        messages: messages as dictionaries, with text as content.
        tools: JSON schemas of functions.
        add_generation_prompt: whether the prompt ends with the tokens that introduce an answer.
        continue_final_message: whether the prompt ends within the last message, which the model continues.
        variables: further variables of the template.
        template: text of a template to use; None for the model's template.
        add_special_tokens: whether the tokenizer adds its special tokens, in addition to those in
            the template's text.
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
        """The conversation of a body.

        Raises:
            ConfigError: a message has other parts than text, or an invalid call.
        """
        goes_on = bool(body.continue_final_message)
        adds = body.add_generation_prompt
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
            [_message(message, f"messages.{n}") for n, message in enumerate(body.messages or ())],
            tools,
            not goes_on if adds is None else adds,
            goes_on,
            variables,
            body.chat_template,
            bool(body.add_special_tokens),
        )


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt.

    Attributes:
        text: text of the prompt.
        ids: token ids of the prompt.
        warnings: warnings for the client, one sentence each.
    """

    text: str
    ids: list[int]
    warnings: tuple[str, ...] = ()


class Renderer:
    """Applies a model's chat template. Thread-safe.

    Args:
        model: directory of the model.
        tokenizer: tokenizer of the model.
        template: text of a template to use instead of the model's.
        has_short_ids: whether the template requires ids of calls with nine letters and digits, as Mistral's do. Other
            ids, which a client may have from another server, are replaced.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any,
        template: str | None = None,
        has_short_ids: bool = False,
    ) -> None:
        self._model, self._tokenizer, self._template_text = model, tokenizer, template
        self._has_short_ids = has_short_ids
        self._template: ChatTemplate | None = None
        self._shows_tools = False  # whether the model's own template shows tools, once known
        self._has_warned = False

    def prepare(self) -> ChatTemplate:
        """Load the model's template, and start a process that can render it.

        Raises:
            ConfigError: there is no template.
        """
        if self._template is None:
            template = ChatTemplate(self._model, self._template_text)
            template.start()
            self._template = template
        return self._template

    def render(self, conversation: Conversation) -> Rendered:
        """The prompt of a conversation.

        Args:
            conversation: input of the template.

        Raises:
            ConfigError: there is no template, or it rejects the conversation.
        """
        template_text = conversation.template
        template = self.prepare() if template_text is None else ChatTemplate(self._model, template_text)
        if self._has_short_ids:
            conversation = replace(
                conversation, messages=[_with_short_ids(message) for message in conversation.messages]
            )
        text = _text_of(template, conversation)
        warnings = () if self._knows_tools(template, conversation, text) else (_UNKNOWN_TOOLS,)
        if warnings and not self._has_warned:
            self._has_warned = True
            get_logger("server").warning("%s", *warnings)
        # by default the template's text contains the special tokens
        adds = conversation.add_special_tokens
        return Rendered(text, encode_prompt(self._tokenizer, text, add_special_tokens=adds), warnings)

    def _knows_tools(self, template: ChatTemplate, conversation: Conversation, text: str) -> bool:
        """Whether the tools of a conversation, if there are any, have changed its text."""
        if not conversation.tools or (self._shows_tools and conversation.template is None):
            return True
        try:
            is_shown = text != _text_of(template, replace(conversation, tools=None))
        except ConfigError:  # the template requires tools
            is_shown = True
        self._shows_tools = self._shows_tools or (is_shown and conversation.template is None)
        return is_shown


def _text_of(template: ChatTemplate, conversation: Conversation) -> str:
    """The text of a conversation.

    Null content, as clients send it back next to calls, is passed to the template as null. If the
    template fails on it or prints `None`, it gets an empty text instead. A message without content
    cannot be continued.
    """
    nulls = [message["content"] is None for message in conversation.messages]
    if not any(nulls) or (conversation.continue_final_message and nulls[-1]):
        return _rendered(template, conversation)
    filled = [{**message, "content": message["content"] or ""} for message in conversation.messages]
    try:
        text = _rendered(template, conversation)
    except ConfigError:
        return _rendered(template, replace(conversation, messages=filled))
    if "None" not in text:
        return text
    try:
        other = _rendered(template, replace(conversation, messages=filled))
    except ConfigError:
        return text
    return other if other == text.replace("None", "") else text


def _rendered(template: ChatTemplate, conversation: Conversation) -> str:
    return template.render(
        conversation.messages,
        tools=conversation.tools,
        documents=conversation.variables.get("documents"),
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables={name: value for name, value in conversation.variables.items() if name != "documents"},
    )


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in which ids of calls are replaced by ids of nine letters and digits. Equal ids get
    equal replacements.
    """

    def short(id_: Any) -> Any:
        if not isinstance(id_, str) or SHORT_ID.fullmatch(id_):
            return id_
        return hashlib.sha256(id_.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    result = dict(message)
    if "tool_call_id" in result:
        result["tool_call_id"] = short(result["tool_call_id"])
    if "tool_calls" in result:
        result["tool_calls"] = [
            {**call, "id": short(call["id"])} if "id" in call else call for call in result["tool_calls"]
        ]
    return result


def _tool(tool: ToolModel) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


def _message(message: MessageModel, place: str) -> dict[str, Any]:
    """A message in the form that templates expect. Errors name its place in the body."""
    result: dict[str, Any] = {**message.model_dump(exclude_none=True)}
    if result["role"] == "developer":
        result["role"] = "system"
    result.pop("tool_calls", None)
    result["content"] = text_of(message.content, f"{place}.content")
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        result["tool_calls"] = [_call(call, f"{place}.tool_calls.{n}") for n, call in calls]
        if message.content is None:
            result["content"] = None
    return result


def text_of(content: str | Sequence[Mapping[str, Any]] | None, place: str) -> str:
    """The text of a message: its content, or the texts of its parts.

    Args:
        content: content of the message.
        place: its place in the body, for errors.

    Raises:
        ConfigError: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, f"{place}.{n}") for n, part in enumerate(content))


def _part(part: Mapping[str, Any], place: str) -> str:
    kind = part.get("type")
    name = "refusal" if kind == "refusal" else "text"
    if kind != "refusal" and kind not in _TEXTS:
        rule, advice = (
            f"{place}.type must be text; images, audio and files are not supported",
            "remove other parts",
        )
        _validate.invalid("request", rule, shown(kind, 40), advice)
    return _validate.instance("request", f"{place}.{name}", part.get(name), str, "pass text")


def _call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A call that the model has made, in the form that templates expect: its arguments are a
    dictionary. Arguments that are not a JSON object, for example because `max_tokens` cut them off,
    stay text.
    """
    kind = call.get("type", "function")
    if kind != "function":
        rule = f"{place}.type must be 'function'"
        _validate.invalid("request", rule, shown(kind, 40), "remove calls of other types")
    function = _validate.mapping("request", f"{place}.function", call.get("function"), "fields")
    name = _validate.text("request", f"{place}.function.name", function.get("name"))
    written = function.get("arguments")
    if written is not None and not isinstance(written, (str, dict)):
        rule, advice = f"{place}.function.arguments must be JSON text or an object", "correct them"
        _validate.invalid("request", rule, shown(written), advice)
    arguments = written or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            parsed = None if arguments.strip() else {}
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "type": "function", "function": {**function, "name": name, "arguments": arguments}}


def _refuse_constant(name: str) -> NoReturn:
    """Reject NaN and infinities, which are not JSON."""
    raise ValueError(name)
