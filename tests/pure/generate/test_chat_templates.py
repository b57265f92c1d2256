"""Chat templates: rendered as by transformers, and contained whatever they do."""

import contextlib
import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import PreTrainedTokenizerFast

from pure.hostile import accepted
from tilewise.core import ConfigError
from tilewise.data import train_tokenizer
from tilewise.generate import ChatTemplate, template_process

TOKENIZER = train_tokenizer(["hello world " * 10], vocab_size=280)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says "how" it is <now> & там',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
    "name": "weather", "arguments": {"city": "Köln"}}}]}  # fmt: skip
TALK = [{"role": "user", "content": " Hi  there\n"}, {"role": "assistant", "content": "Hello."}]
ASK = {"role": "user", "content": "How is it?\n\n{{ 1 }} {% x %}"}
TALKS = {
    "short": [ASK],
    "long": [*TALK, ASK],
    "system": [{"role": "system", "content": "  Be kind. "}, *TALK, ASK],
    "called": [ASK, CALL, {"role": "tool", "name": "weather", "content": '{"rain": true}'}, *TALK[::-1]],
    "thought": [TALK[0], {"role": "assistant", "content": "Yes.", "thinking": "Hm."}, ASK],
}
TEMPLATES = {
    "llama3": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' + "<|eot|>" }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
""",
    "mistral": """{%- set ns = namespace(index=0, last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages if message.role != "system" %}
    {%- if message.role == "user" %}
        {%- if tools is defined and tools is not none and ns.last == loop.index0 %}
            {{- "[TOOLS] [" }}
            {%- for tool in tools %}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' + (val | tojson if val is not string else '"' ~ val ~ '"') }}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
            {%- endfor %}
            {{- "][/TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[CALLS] " ~ message.tool_calls | map(attribute="function") | list | tojson ~ eos_token }}
    {%- elif message["role"] == "assistant" %}
        {% generation %}{{- " " + message["content"]|trim + eos_token }}{% endgeneration %}
    {%- elif message["role"] in ["tool", "tool_results"] %}
        {{- '[RESULTS] {"content": ' + message.content|string + "}" }}
        {%- continue %}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool are roles!") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- ns.index }}
""",
    "qwen": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}{% break %}{% endif %}
    {{- loop.index }}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content.lstrip('\\n') }}
    {%- for call in message.tool_calls or [] %}
        {%- if call.function %}{%- set call = call.function %}{%- endif %}
        {{- '\\n<call>{"name": "' ~ call.name ~ '", "arguments": ' }}
        {{- call.arguments if call.arguments is string else call.arguments | tojson }}}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else "") }}
    {{ message['content'] | trim }}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
""",
    "phi3": "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}\n"
    "  {% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}  \n",
}


def _directory(folder, template, as_file=False):
    """A model directory with templates."""
    content = {**TOKENS, **({} if as_file else {"chat_template": template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    if as_file:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def _theirs(template, talk, **options):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, **TOKENS)
    return tokenizer.apply_chat_template(talk, chat_template=template, tokenize=False, **options)


def _rendered(call):
    """The text, or the template's own error."""
    try:
        return call()
    except Exception as error:
        return next(words for words in ("alternate", "are roles") if words in str(error))


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_by_transformers(tmp_path, name, monkeypatch):
    """Conversations with system messages, tools, calls and thoughts, with and without a generation
    prompt. One template is rendered in its process each time, the others in this process, which is
    faster.
    """
    if name != "mistral":
        problem_of = template_process.template_child.problem_of
        monkeypatch.setattr(template_process.TemplateProcesses, "render", lambda _, *args: problem_of(*args))
    ours = ChatTemplate(_directory(tmp_path, TEMPLATES[name], as_file=name in ("gemma", "qwen")))
    for index, talk in enumerate(TALKS.values()):
        for tools in (None, [TOOL]):
            options = {"tools": tools, "add_generation_prompt": (index + bool(tools)) % 2 == 0}
            more = {"enable_thinking": False} if index % 2 else {}
            expected = _rendered(lambda: _theirs(TEMPLATES[name], talk, **options, **more))  # noqa: B023
            assert _rendered(lambda: ours.render(talk, variables=more, **options)) == expected  # noqa: B023


ENDS = [
    "Sure: 1,",
    "Yes  ",
    "a\n\n",
    "",
    " x",
    "<|end|>",
    "assistant",
    "user",
]  # some stand in a template's own text


@pytest.mark.parametrize("name", TEMPLATES)
def test_last_message_is_continued_as_by_transformers(tmp_path, name, monkeypatch):
    """The text ends where the message does, also where the template has the same text again."""
    problem_of = template_process.template_child.problem_of
    monkeypatch.setattr(template_process.TemplateProcesses, "render", lambda _, *args: problem_of(*args))
    ours = ChatTemplate(_directory(tmp_path, TEMPLATES[name]))
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for end in ENDS:
        talk = [ASK, {"role": "assistant", "content": end}]
        assert ours.render(talk, **options) == _theirs(TEMPLATES[name], talk, **options), end


@pytest.mark.parametrize(
    ("talk", "template", "words"),
    [
        (
            [ASK, {"role": "assistant", "content": "x"}],
            "{{ messages[0].content }}",
            "that the template shows",
        ),
        ([ASK, {"role": "assistant"}], "{{ messages[0].content }}", "last message with text; got None"),
        ([], "x", "last message with text"),
    ],
)
def test_messages_that_cannot_be_continued_are_rejected(tmp_path, talk, template, words):
    """A last message that the template omits, or without text; and continuing combined with a generation prompt."""
    ours = ChatTemplate(_directory(tmp_path, template))
    with pytest.raises(ConfigError, match=words):
        ours.render(talk, continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(ConfigError, match="excludes add_generation_prompt"):
        ours.render(talk, continue_final_message=True)


def test_documents_are_passed_to_the_template(tmp_path):
    """Unchanged, in order."""
    template = "{% for d in documents %}[{{ d.title }}: {{ d['text'] }}]{% endfor %}"
    documents = [{"title": "A", "text": "x"}, {"title": "B", "text": "y"}]
    expected = _theirs(template, TALK, documents=documents)
    assert ChatTemplate(_directory(tmp_path, template)).render(TALK, documents=documents) == expected


def test_template_is_chosen_by_name(tmp_path):
    """By its name; otherwise the one for tools where there are tools, otherwise the default."""
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    ours = ChatTemplate(_directory(tmp_path, templates))
    texts = (ours.render(TALK), ours.render(TALK, tools=[TOOL]), ours.render(TALK, name="tool_use"))
    assert texts == ("d", "t", "t")
    with pytest.raises(ConfigError, match="must be one of 'default', 'tool_use'; got 'x'"):
        ours.render(TALK, name="x")


HARMFUL = {
    "escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "not allowed|undefined"),
    "attribute": ("{{ cycler.__init__.__globals__.os.system('true') }}", "not allowed"),
    "namespace": ("{% set ns = namespace(__init__=1) %}{{ ns }}", "got '__init__'"),
    "change": ("{{ messages.append(1) }}", "not allowed"),
    "include": ("{% include '/etc/passwd' %}", "TypeError|no loader"),
    "memory": ("{{ 'a' * 9999999999 }}", "too much memory"),
    "power": ("{% set x = 'ab' * 400000 %}{% for i in range(99) %}{{ x }}{% endfor %}", "more than 4194304"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses too deeply"),
    "syntax": ("{% if %}", "line 1"),
    "refusal": ("{{ raise_exception('I will\\nnot') }}", "it raises: I will not"),
    "undefined": ("{{ nothing.at.all }}", "'nothing' is undefined"),
    "surrogate": (r"{{ '\ud800' }}", "UnicodeEncodeError"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_template_is_one_error(tmp_path, name):
    """Sandbox escapes, unlimited text and memory, mistakes: named in one line."""
    template, words = HARMFUL[name]
    with pytest.raises(ConfigError, match=words) as caught:
        ChatTemplate(_directory(tmp_path, template)).render(TALK)
    assert "\n" not in str(caught.value) and repr(str(tmp_path)) in str(caught.value)


def test_template_without_end_is_stopped(tmp_path, monkeypatch):
    """The process that renders it is killed."""
    monkeypatch.setattr(template_process, "_DEADLINE_S", 0.5)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"does not end within 0\.5 s"):
        ChatTemplate(_directory(tmp_path, endless)).render(TALK)


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(3)",
        "print('{}')",
        r"print(end='\0\0\0\2{}')",
        r"print(end='\0\0\0\3[1]')",
        r"print(end='\0\0\0\x1b{\"name\": \"\", \"results\": []}')",
        "import os; os.kill(os.getpid(), 9)",
    ],
)
def test_renderer_that_dies_is_one_error(tmp_path, monkeypatch, program):
    """Any output of the process that is not an answer is rejected."""
    (tmp_path / "child.py").write_text(program)
    ours = ChatTemplate(_directory(tmp_path, "x"))
    monkeypatch.setattr(template_process.template_child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(ConfigError, match="the process that renders it"):
        ours.render(TALK)


def test_renderer_process_is_reused(tmp_path):
    """It also survives a template's error; a killed one is replaced, and the last ends with its templates."""
    ours = ChatTemplate(_directory(tmp_path, "{{ messages[0].content * (n or 1) }}"))
    started = []
    for number in (1, 2, "x", 9999999999, 3):  # the last but one takes too much memory
        with contextlib.suppress(ConfigError):
            assert ours.render(TALK, variables={"n": number}) == TALK[0]["content"] * number
        started += [each.process.pid for each in ours._processes._idle]
    assert len(set(started)) == 1
    (process,) = ours._processes._idle
    process._kill()
    process.process.wait()
    assert ours.render(TALK, variables={"n": 1}) == TALK[0]["content"]
    (process,) = ours._processes._idle
    assert process.process.pid not in started
    del ours
    gc.collect()
    assert process.process.returncode is not None


def test_threads_render_concurrently(tmp_path):
    """Each gets its own text."""
    ours = ChatTemplate(_directory(tmp_path, "{{ n }}"))
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda n: ours.render(TALK, variables={"n": n}), range(24)))
    assert texts == [str(n) for n in range(24)] and len(ours._processes._idle) <= 2


def test_many_conversations_are_rendered_at_once(tmp_path, monkeypatch):
    """With the places of `{% generation %}` as transformers has them. If the process fails, each is rendered alone,
    so that one conversation's error does not affect the others.
    """
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content * (m.n or 1) }}{{ eos_token }}{% endgeneration %}\n{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    ours = ChatTemplate(_directory(tmp_path, template))
    assert ours.has_generation() and not ChatTemplate(tmp_path, "x{%generations%}").has_generation()
    huge = [{**TALK[1], "n": 9999999999}]
    for talks in ([*TALKS.values()], [TALK, huge, [ASK], [{"role": "user"}]]):
        for talk, rendered in zip(talks, ours.render_all(talks)):
            if talk is huge:
                assert "too much memory" in str(rendered)
                continue
            assert rendered.text == ours.render(talk, add_generation_prompt=False)
            answers = [rendered.text[begin:end] for begin, end in rendered.spans]
            assert answers == [f"{m['content']}</s>" for m in talk if m["role"] == "assistant"]
    assert ours.render_all([]) == []
    monkeypatch.setattr(template_process, "_MAX_BYTES", 250)  # less than the answer for all together
    assert [r.text for r in ours.render_all([TALK] * 9)] == [ours.render(TALK)] * 9


def test_template_arguments_are_plain_values(tmp_path):
    """Objects through which a template could reach Python are not passed to it."""
    ours = ChatTemplate(_directory(tmp_path, "x"))
    arguments = {"messages": TALK, "tools": None, "documents": None, "variables": {}}
    taken = accepted(lambda **options: ours.render(**options), arguments)
    none_or_empty = {"None", "()", "[]"}
    assert taken == {
        "messages": {"()", "[]"},
        "tools": none_or_empty,
        "documents": none_or_empty,
        "variables": {"None", "{}", "{'a': 1}"},
    }


def test_model_without_a_template_cannot_converse(tmp_path):
    """The error says what is missing."""
    with pytest.raises(ConfigError, match=r"needs chat_template\.jinja"):
        ChatTemplate(tmp_path)
