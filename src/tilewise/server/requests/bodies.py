"""Bodies of requests, with OpenAI's and vLLM's names. There is one pydantic model per endpoint.
/openapi.json is made from these models.

Fields that are settings of sampling are made from the declarations in `tilewise.settings`. Unknown
fields are stored in `model_extra`, so that the log can name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from tilewise.serve import SamplingParams
from tilewise.settings import Setting, json_type, settings_of

__all__ = [
    "BodyModel",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "EmbeddingBody",
    "MessageModel",
    "ResponseBody",
    "SamplingBody",
    "StreamOptions",
    "TokenizeBody",
    "ToolModel",
]

MOST_TEXTS, MOST_STOPS, MOST_PROMPTS, MOST_TOOLS = 128, 64, 2048, 128
_MOST = 1 << 31
_MOST_BIASES = 1 << 16
_Id = Annotated[int, Field(ge=0, lt=_MOST)]
# fail_fast: an error for each of millions of entries would delay all other clients
_Ids = Annotated[list[_Id], Field(fail_fast=True)]
_Dicts = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
_Items = Annotated[_Dicts, Field(min_length=1, max_length=8192)]
_Stop = Annotated[str, Field(max_length=1024)]
_Stops = Annotated[list[_Stop], Field(max_length=MOST_STOPS, fail_fast=True)]
_Several = Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)
_Prompts = Annotated[list[str], _Several] | Annotated[list[_Ids], _Several]


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for as many as fit the context")
    return value


_Count = Annotated[int, Field(ge=-1, lt=_MOST), AfterValidator(_not_zero)]
_Ignored = Field(default=None, description="Accepted and ignored.")


class BodyModel(BaseModel):
    """A body or a part of a body."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True, protected_namespaces=())

    @property
    def unknown(self) -> list[str]:
        """Names of unknown fields."""
        return sorted(self.model_extra or {})


class StreamOptions(BodyModel):
    """Reports of a stream in addition to text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _settings_model(name: str, is_shown: Callable[[Setting], bool]) -> Any:
    """A model with a field for each setting of sampling that `is_shown` accepts."""
    fields: dict[str, Any] = {
        one.name: (Optional[_http_type(one)], None)  # noqa: UP045
        for one in settings_of(SamplingParams).values()
        if is_shown(one)
    }
    return create_model(name, __base__=BodyModel, **fields)


def _http_type(one: Setting) -> Any:
    """The type of a setting in a body."""
    if one.name == "n":
        return json_type(one, le=MOST_TEXTS)
    if one.kind in (int, float, bool):
        return json_type(one)
    about = Field(description=one.help)
    if one.name == "logit_bias":  # keys of JSON objects are strings
        return Annotated[dict[str, float], Field(max_length=_MOST_BIASES), about]
    if one.item_kind is int:
        return Annotated[_Ids, about]
    takes_one = str in get_args(one.kind)  # a text or a list of texts
    return Annotated[_Stop | _Stops, about] if takes_one else Annotated[_Stops, about]


_CompletionSettings = _settings_model("CompletionSettings", lambda one: one.in_body)
_ResponseSettings = _settings_model("ResponseSettings", lambda one: one.in_response_body)


class SamplingBody(_CompletionSettings):  # type: ignore[misc, valid-type]
    """Fields that requests for text share. Settings of sampling derive from `SamplingParams`."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = _Ignored
    metadata: dict[str, Any] | None = _Ignored
    service_tier: str | None = _Ignored
    safety_identifier: str | None = _Ignored
    prompt_cache_key: str | None = _Ignored
    # vLLM's
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: _Count | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 20), le=1 << 20)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


class CompletionBody(SamplingBody):
    """Body of `/v1/completions`."""

    prompt: str | _Ids | _Prompts
    max_tokens: Annotated[int, Field(ge=-1, lt=_MOST, description="-1: no limit.")] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: int | None = None
    suffix: str | None = None


class FunctionModel(BodyModel):
    """A function that a model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolModel(BodyModel):
    """A tool that a model may call: a function."""

    type: Literal["function"]
    function: FunctionModel


class NamedFunction(BodyModel):
    """The name of a function."""

    name: str


class ToolChoice(BodyModel):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class MessageModel(BodyModel):
    """A message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | _Dicts | None = None
    name: str | None = None
    tool_calls: _Dicts | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatBody(SamplingBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[MessageModel], Field(min_length=1, max_length=8192, fail_fast=True)]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Annotated[list[ToolModel], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    store: bool | None = _Ignored
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: _Dicts | None = None
    include_reasoning: bool | None = None


class EmbeddingBody(BodyModel):
    """Body of `/v1/embeddings`."""

    input: str | _Ids | _Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=_MOST)] | None = None
    user: str | None = _Ignored
    truncate_prompt_tokens: _Count | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(BodyModel):
    """Body of `/tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[MessageModel], Field(max_length=8192, fail_fast=True)] | None = None
    tools: Annotated[list[ToolModel], Field(max_length=MOST_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BodyModel):
    """Body of `/detokenize`."""

    tokens: Annotated[_Ids, Field(max_length=1 << 20)]
    model: str | None = None


class ReasoningOptions(BodyModel):
    """Options of reasoning."""

    effort: str | None = None
    summary: str | None = _Ignored


class TextOptions(BodyModel):
    """Format of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = _Ignored


class ResponseBody(_ResponseSettings):  # type: ignore[misc, valid-type]
    """Body of `/v1/responses`, without state: every request contains its whole conversation."""

    input: str | _Items
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    stream: bool | None = None
    tools: Annotated[_Dicts, Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    store: bool | None = Field(default=None, description="Accepted and ignored: nothing is stored.")
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = _Ignored
    metadata: dict[str, Any] | None = _Ignored
    service_tier: str | None = _Ignored
    safety_identifier: str | None = _Ignored
    prompt_cache_key: str | None = _Ignored
    # vLLM's
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 20), le=1 << 20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
