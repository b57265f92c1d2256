"""The `openai` client in typical use: plain and streaming, sync and async, helpers, errors and retries."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from native.server.served import TALK, usual_server

TOOL = {
    "type": "function",
    "function": {
        "name": "order",
        "parameters": {
            "type": "object",
            "properties": {"size": {"enum": ["s", "m"]}},
            "required": ["size"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client():
    with openai.OpenAI(base_url=f"{usual_server().url}/v1", api_key="none", max_retries=1) as client:
        yield client


def test_calls_and_schemas(client):
    """Tools are called, also in a stream; a pydantic class is the format of an answer."""

    class Shirt(BaseModel):
        size: bool

    fields = {"model": "small", "messages": TALK, "seed": 3}
    called = client.chat.completions.create(**fields, tools=[TOOL], tool_choice="required")
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "order" and json.loads(call.function.arguments)["size"] in ("s", "m")
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    named = {"type": "function", "function": {"name": "order"}}
    with client.chat.completions.stream(**fields, tools=[strict], tool_choice=named) as stream:
        names = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in names
    assert json.loads(call.function.arguments)["size"] in ("s", "m")
    parsed = client.chat.completions.parse(**fields, response_format=Shirt, extra_body={"temperature": 0.2})
    assert isinstance(parsed.choices[0].message.parsed, Shirt)


def test_fields_that_clients_send_by_default(client):
    """Fields of OpenAI's API without effect here, settings at their defaults, and messages sent
    back with all fields, including calls cut by `max_tokens`.
    """
    usual = {"model": "small", "messages": TALK, "max_completion_tokens": 4, "seed": 4}
    plain = client.chat.completions.create(**usual).choices[0].message.content
    ignored = {
        "store": True,
        "metadata": {"a": "b"},
        "user": "u",
        "service_tier": "auto",
        "modalities": ["text"],
    }
    ignored |= {
        "reasoning_effort": "low",
        "parallel_tool_calls": True,
        "safety_identifier": "s",
        "verbosity": "low",
    }
    defaults = {
        "n": 1,
        "temperature": 1,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "stop": None,
    }
    defaults |= {
        "logit_bias": None,
        "logprobs": False,
        "top_logprobs": None,
        "response_format": {"type": "text"},
    }
    defaults |= {"stream": False, "tools": [], "tool_choice": "auto", "prompt_cache_key": "k"}
    assert client.chat.completions.create(**usual, **ignored, **defaults).choices[0].message.content == plain
    text = {"model": "small", "prompt": "x", "max_tokens": 4, "seed": 4}
    of_text = {
        "best_of": 1,
        "echo": False,
        "n": 1,
        "suffix": None,
        "logprobs": None,
        "stop": None,
        "user": "u",
    }
    same = client.completions.create(**text, **of_text, top_p=1, temperature=1)
    assert same.choices[0].text == client.completions.create(**text).choices[0].text
    named = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "order"}}}
    for most in (None, 3):  # whole, and cut within its arguments
        fields = {**usual, **named, "max_completion_tokens": most}
        message = client.chat.completions.create(**fields).choices[0].message
        for form in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
            talk = [*TALK, form]
            talk.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"})
            assert client.chat.completions.create(**{**usual, "messages": talk}).choices[0].message.content
    assert not message.tool_calls[0].function.arguments.endswith("}")


def test_completions_models_and_responses(client):
    """The other paths, and vLLM's fields through `extra_body`."""
    assert client.models.retrieve("small").id == client.models.list().data[0].id == "small"
    fields = {"model": "small", "prompt": ["import", "def"], "max_tokens": 5, "seed": 1}
    full = client.completions.create(**fields, logprobs=1, extra_body={"top_k": 3, "ignore_eos": True})
    assert len(full.choices) == 2 and full.usage.completion_tokens == 10
    parts = ["", ""]
    for chunk in client.completions.create(
        **fields, stream=True, extra_body={"top_k": 3, "ignore_eos": True}
    ):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == [choice.text for choice in full.choices]
    yes = {"type": "json_schema", "name": "yes", "schema": {"type": "boolean"}}
    request = {"model": "small", "input": "hello", "text": {"format": yes}}
    extra = {"seed": 5, "temperature": 0.5}
    response = client.responses.create(**request, extra_body=extra)
    with client.responses.stream(**request, extra_body=extra) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == response.output_text in ("true", "false") and kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds and response.usage.output_tokens > 0


def test_the_async_client(client):
    """Many concurrent requests, streaming and not; each gets the result of a single one."""

    async def ask(asker, number, stream):
        fields = {"model": "small", "messages": TALK, "seed": number, "max_tokens": 6}
        if not stream:
            return (await asker.chat.completions.create(**fields)).choices[0].message.content
        chunks = await asker.chat.completions.create(**fields, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{usual_server().url}/v1", api_key="none") as asker:
            return await asyncio.gather(*(ask(asker, n // 2, n % 2) for n in range(8)))

    texts = asyncio.run(ask_all())
    assert texts[::2] == texts[1::2]
    fields = {"model": "small", "messages": TALK, "seed": 2, "max_tokens": 6}
    assert client.chat.completions.create(**fields).choices[0].message.content == texts[4]


def test_errors_become_the_clients_exceptions(client):
    """Statuses become the client's exceptions with message, parameter and code."""
    fields = {"model": "small", "messages": TALK}
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**fields, "model": "other"})
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**fields, "temperature": -1})
    assert caught.value.type == "invalid_request_error" and caught.value.message
    long = [{"role": "user", "content": "word " * 400}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="small", messages=long, stream=True)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    assert "This model's maximum context length is 256 tokens. However, you requested" in str(caught.value)
    assert '"code": "context_length_exceeded"' in caught.value.response.text


def test_an_error_in_the_middle_of_a_stream_is_raised(client):
    """A failure after the first chunk arrives as an event with `error`, which the client raises."""
    bomb = {"structured_outputs": {"regex": "c(a{1000}){1000}"}}
    fields = {"model": "small", "messages": TALK, "stream": True, "seed": 1}
    with pytest.raises(openai.APIError, match="limits of work"):
        for _ in client.chat.completions.create(**fields, extra_body=bomb):
            pass
    usual_server().wait_idle()
