"""Conversations as clients send them back, as templates get them, and warnings about templates for clients."""

import json
import logging

import pytest

from tilewise.core import ConfigError
from tilewise.data import train_tokenizer
from tilewise.generate import template_process
from tilewise.serve import Delta, SamplingParams
from tilewise.server.endpoints.answers import call_id
from tilewise.server.endpoints.chat import open_run, take, whole_chat
from tilewise.server.endpoints.responses import chat_body
from tilewise.server.requests.bodies import ChatBody, ResponseBody
from tilewise.server.requests.conversation import Conversation, Renderer
from tilewise.server.requests.reading import OutputFormat, Part


@pytest.fixture(autouse=True)
def _render_in_this_process(monkeypatch):
    """Templates are rendered without a process of their own, which is faster."""
    problem_of = template_process.template_child.problem_of
    monkeypatch.setattr(template_process.TemplateProcesses, "render", lambda _, *args: problem_of(*args))


TOKENIZER = train_tokenizer(["hello world"], vocab_size=280)
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SHOWS_NULL = "{% for m in messages %}[{{ m.content is none }}|{{ m.tool_calls is defined }}]{% endfor %}"
SHOWS_CALLS = "{% for m in messages if m.tool_calls %}{{ m.tool_calls | tojson }}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CONCATENATES = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN


def _call(arguments="{}", id_="call_1"):
    return {"id": id_, "type": "function", "function": {"name": "f", "arguments": arguments}}


def _text(folder, template, *messages, has_short_ids=False, **fields):
    """The rendered prompt of a body."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    body = ChatBody.model_validate({"messages": [USER, *messages], **fields})
    return Renderer(folder, TOKENIZER, has_short_ids=has_short_ids).render(Conversation.of(body))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"content": None, "tool_calls": [_call()]}, "[True|True]"),
        ({"tool_calls": [_call()]}, "[True|True]"),
        ({"content": "", "tool_calls": [_call()]}, "[False|True]"),
        ({"content": None, "tool_calls": [], "function_call": None, "audio": None}, "[False|False]"),
        ({"content": "x", "tool_calls": None, "refusal": None, "annotations": []}, "[False|False]"),
    ],
)
def test_null_content_stays_null_next_to_calls(tmp_path, message, shown):
    """As clients of OpenAI, LangChain and LiteLLM send their own messages back; an empty list means no call."""
    assert _text(tmp_path, SHOWS_NULL, {"role": "assistant", **message}).text == f"[False|False]{shown}"


def test_templates_that_cannot_show_null_get_an_empty_text(tmp_path):
    """One that would print `None`, and one that fails; a text that contains None is unchanged."""
    message = {"role": "assistant", "content": None, "tool_calls": [_call()]}
    assert _text(tmp_path, PLAIN, message).text == "user: hi\nassistant: \n"
    assert _text(tmp_path, CONCATENATES, message).text == "<user>hi<assistant>"
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(ConfigError, match="last message with text; got None"):  # as transformers
        _text(tmp_path, PLAIN, message, **goes_on)
    assert _text(tmp_path, CONCATENATES, message, USER, **goes_on).text == "<user>hi<assistant><user>hi"
    none = {"role": "user", "content": "None"}
    assert _text(tmp_path, SHOWS_CALLS + "{{ messages[1].content }}", none, message).text.endswith("]None")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" ", {}),
        (None, {}),
        ('{"a": "b', '{"a": "b'),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
    ],
)
def test_arguments_are_objects_or_the_original_text(tmp_path, arguments, shown):
    """Arguments that `max_tokens` has truncated are text again."""
    text = _text(tmp_path, SHOWS_CALLS, {"role": "assistant", "tool_calls": [_call(arguments)]}).text
    assert json.loads(text)[0]["function"]["arguments"] == shown
    with pytest.raises(ConfigError, match=r"messages\.1\.tool_calls\.0\.function\.arguments must be JSON"):
        _text(tmp_path, SHOWS_CALLS, {"role": "assistant", "tool_calls": [_call([])]})
    custom = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}
    with pytest.raises(ConfigError, match=r"tool_calls\.1\.type must be 'function'; got 'custom'"):
        _text(tmp_path, SHOWS_CALLS, {"role": "assistant", "tool_calls": [_call(), custom]})


def test_response_items_of_calls_are_equal(tmp_path):
    """Items of `/v1/responses`: a message of calls alone has no content."""
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a'}
    body = chat_body(ResponseBody.model_validate({"input": [USER, call]}))
    (folder := tmp_path / "m").mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": SHOWS_NULL}))
    assert Renderer(folder, TOKENIZER).render(Conversation.of(body)).text == "[False|False][True|True]"


def test_ids_of_calls_have_nine_characters_for_mistral(tmp_path):
    """Ids of other servers are shortened; a call and its answer keep one id; valid ones are unchanged."""
    talk = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [_call(id_="call_" + "0" * 24), _call(id_="aB3456789")],
        },
        {"role": "tool", "tool_call_id": "call_" + "0" * 24, "content": "x"},
        {"role": "tool", "tool_call_id": "aB3456789", "content": "y"},
    ]
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}"
        "{% if m.tool_call_id %}{{ m.tool_call_id }} {% endif %}{% endfor %}"
    )
    first, second, answer, other = _text(tmp_path, template, *talk, has_short_ids=True).text.split()
    assert first == answer and second == other == "aB3456789" and len(first) == 9 and first.isalnum()
    assert _text(tmp_path, template, *talk).text.split()[0] == "call_" + "0" * 24
    made = call_id(Part("call", "", "f"), is_short=True)
    assert (
        len(made) == 9
        and made.isalnum()
        and call_id(Part("call", "", "f", "aB3456789"), False) == "aB3456789"
    )


def test_tools_that_a_template_ignores_are_a_warning(tmp_path, caplog):
    """In every such answer, and once in the log; templates that show tools give no warning."""
    with caplog.at_level(logging.WARNING, "tilewise.server"):
        assert not _text(tmp_path, WITH_TOOLS, tools=[TOOL]).warnings
        assert not _text(tmp_path, PLAIN, tools=[TOOL], tool_choice="none").warnings
        assert not _text(tmp_path, PLAIN).warnings and not caplog.records
        body = ChatBody.model_validate({"messages": [USER], "tools": [TOOL]})
        renderer = Renderer(tmp_path, TOKENIZER)
        for _ in range(2):
            rendered = renderer.render(Conversation.of(body))
            assert "does not show tools" in rendered.warnings[0]
    assert len(caplog.records) == 1
    run = open_run(None, "m", rendered, rendered.ids, SamplingParams(), OutputFormat("hermes"))
    take(run, Delta(0, 0, 7, "no", "stop"))
    assert whole_chat(run, body)["warnings"] == list(rendered.warnings)


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "file"])
def test_other_parts_than_text_are_rejected_in_a_sentence(tmp_path, kind):
    """Also for models whose files can read images; text parts are joined."""
    text = {"type": "text", "text": "what is this?"}
    assert "what is this?" in _text(tmp_path, PLAIN, {"role": "user", "content": [text]}).text
    with pytest.raises(ConfigError, match=r"content\.1\.type must be text; images, audio and files are not"):
        _text(tmp_path, PLAIN, {"role": "user", "content": [text, {"type": kind, kind: {"url": "x"}}]})
