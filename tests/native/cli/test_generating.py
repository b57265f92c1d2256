"""`tilewise generate`: sources of prompts, precedence of settings, several texts, conversations."""

import io
import json
import os
import re
import shutil
import signal
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from native.cli.test_mistakes import WEIGHTS, save_model
from tilewise.cli.main import _run
from tilewise.generate import ChatTemplate, Sampling, encode_prompt
from tilewise.serve import Delta, Engine

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'no' %}{{ raise_exception('no systems') }}"
    "{% endif %}{{ m.role[0] + m.content }}\n{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model with a chat template."""
    directory = save_model(tmp_path_factory.mktemp("model") / "model", max_position_embeddings=256)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs `generate` in this process with text on standard input (None: closed); returns standard
    output and error.
    """

    def call(*arguments, typed=b"", code=0):
        stdin = None if typed is None else io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        exit_code = _run(["generate", *map(str, arguments)])
        output = capsys.readouterr()
        assert exit_code == code, output.err
        return output.out, output.err

    return call


def _changed(model, directory, **settings):
    """A copy of the model with another generation_config.json."""
    shutil.copytree(model, directory)
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


def test_prompts_come_from_arguments_files_and_standard_input(model, run, tmp_path):
    """The same text from all three sources, including its last line end."""
    (tmp_path / "prompt").write_text("def ü(x):\n")
    one = run(model, "def ü(x):\n", "--max-tokens", 6)[0]
    assert run(model, "--prompt-file", tmp_path / "prompt", "--max-tokens", 6)[0] == one
    assert run(model, "-", "--max-tokens", 6, typed="def ü(x):\n".encode())[0] == one
    assert run(model, "--prompt-file", tmp_path / "prompt", "--max-tokens", 7)[0] != one
    assert "byte 1 is not UTF-8" in run(model, "-", typed=b"a\xff", code=2)[1]


def test_a_closed_standard_input_is_empty(model, run):
    """A prompt from a closed standard input is empty, and a conversation ends at once."""
    assert run(model, "-", "--max-tokens", 6, typed=None)[0] == run(model, "", "--max-tokens", 6)[0]
    assert run(model, "--chat", typed=None)[0] == ""


def test_generation_config_sets_defaults(model, run, tmp_path):
    """generation_config.json has the settings that the command line does not set; one line reports them."""
    made = _changed(model, tmp_path / "made", do_sample=True, temperature=0.9, top_p=0.8, max_new_tokens=7)
    text, err = run(made, "def f")
    assert "from generation_config.json: top_k=50, temperature=0.9, top_p=0.8, max_tokens=7\n" in err
    same = ["--temperature", 0.9, "--top-p", 0.8, "--max-tokens", 7, "--top-k", 50]
    plain = run(made, "def f", "--no-generation-config", *same)
    assert plain[0] == text and "from generation_config" not in plain[1]
    greedy, err = run(made, "def f", "--temperature", 0)
    assert greedy != text and "json: max_tokens=7\n" in err
    assert run(model, "def f", "--max-tokens", 7)[0] == greedy


def test_an_invalid_generation_config_can_be_ignored(model, run, tmp_path):
    """A wrong value is an error unless the option that ignores the file is set."""
    made = _changed(model, tmp_path / "made", temperature="hot")
    assert "temperature" in run(made, "def f", code=2)[1]
    assert run(made, "def f", "--no-generation-config", "--max-tokens", 3)[0]


def test_several_texts(model, run):
    """Each below its heading, in order. Text i is the same for any number of texts."""
    options = ["def f", "--temperature", 1.2, "--max-tokens", 5, "--seed", 3]
    three = run(model, *options, "--n", 3)[0]
    texts = [part.split(" of 3 ---\n")[1] for part in f"\n{three}".split("\n--- ")[1:]]
    assert len(texts) == 3 and len(set(texts)) == 3
    assert f"{texts[0]}\n" == run(model, *options)[0]
    assert run(model, *options, "--n", 2)[0] == f"--- 1 of 2 ---\n{texts[0]}\n--- 2 of 2 ---\n{texts[1]}\n"


def test_settings_reach_the_text(model, run):
    """bad_words, stop strings, penalties and lengths change the text as expected."""
    plain = run(model, "def f", "--max-tokens", 12)[0].rstrip("\n")
    stop = plain[3:5]
    assert run(model, "def f", "--max-tokens", 12, "--stop", stop)[0] == plain[: plain.find(stop)] + "\n"
    included = run(model, "def f", "--max-tokens", 12, "--stop", "zzz", "--stop", stop, "--include-stop")[0]
    assert included == plain[: plain.find(stop) + 2] + "\n"
    for option in (
        ["--repetition-penalty", 1.9],
        ["--frequency-penalty", 2, "--presence-penalty", 2],
        ["--bad-words", plain[0]],
    ):
        assert run(model, "def f", "--max-tokens", 12, *option)[0].rstrip("\n") != plain, option
    sampled = ["def f", "--max-tokens", 12, "--temperature", 1.5]
    text = run(model, *sampled)[0]
    for option in (["--min-p", 0.5], ["--typical-p", 0.2], ["--top-k", 1], ["--top-p", 0.1]):
        assert run(model, *sampled, *option)[0] != text, option


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string", "maxLength": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_texts_follow_a_structure(model, run, tmp_path):
    """A schema from text or file, an expression, choices, a grammar; for several texts, and over two devices."""
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    sampled = ["def f", "--temperature", 0.9, "--max-tokens", 120, "--seed", 5, "--repetition-penalty", 1.5]
    text = run(model, *sampled, "--json-schema", json.dumps(SCHEMA))[0]
    value = json.loads(text)
    assert set(value) == {"a", "b"} and value["a"] in (1, 2) and len(value["b"]) <= 3
    assert run(model, *sampled, "--json-schema", tmp_path / "schema.json", "--tp", 2)[0] == text
    assert re.fullmatch("[a-c]{3}x\n", run(model, *sampled, "--regex", "[a-c]{3}x")[0])
    assert run(model, "def f", "--choice", "yes", "--choice", "no")[0] in ("yes\n", "no\n")
    (tmp_path / "digits.lark").write_text('start: /[0-9]/ sign /[0-9]/\nsign: "+" | "-"\n')
    texts = run(model, *sampled, "--grammar", tmp_path / "digits.lark", "--n", 2)[0]
    assert re.fullmatch("(--- [12] of 2 ---\n[0-9][+-][0-9]\n){2}", texts), texts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--regex", "a", "--choice", "b"], "only one of these is possible: --regex, --choice"),
        (["--json-schema", "no.json"], "--json-schema must name a UTF-8 text file"),
        (["--grammar", "no.lark"], "--grammar must name a UTF-8 text file"),
        (["--json-schema", '{"type": "no"}'], "json must be a JSON schema that llguidance supports"),
        (["--choice", "a", "--ignore-eos"], "structured_outputs end with their grammar"),
        (["--choice", "a", "--chat"], "--chat does not support"),
    ],
)
def test_invalid_structures_are_rejected_before_weights_are_read(model, run, tmp_path, options, words):
    """One line each, even without weights."""
    shutil.copytree(model, tmp_path / "bare")
    (tmp_path / "bare" / WEIGHTS).unlink()
    err = run(tmp_path / "bare", "def f", *options, code=2)[1]
    assert words in " ".join(err.replace("│", " ").split()), err


def test_random_weights_are_the_same_over_devices(model, run, tmp_path):
    """`--load-format dummy` needs no weights, says so, and generates the same over two devices."""
    shutil.copytree(model, tmp_path / "bare")
    (tmp_path / "bare" / WEIGHTS).unlink()
    options = [tmp_path / "bare", "def f", "--load-format", "dummy", "--max-tokens", 8]
    text, err = run(*options)
    assert "the weights are random (--load-format dummy)" in err
    assert run(*options, "--tp", 2)[0] == text
    assert WEIGHTS in run(tmp_path / "bare", "def f", code=2)[1]


def test_float16_weights_are_reported(model, run, tmp_path):
    """Weights stored as float16 run in another dtype, which is reported once."""
    shutil.copytree(model, tmp_path / "half")
    stored = load_file(model / WEIGHTS)
    save_file({n: x.astype(np.float16) for n, x in stored.items()}, tmp_path / "half" / WEIGHTS)
    for dtype in ("bf16", "f32"):
        err = run(tmp_path / "half", "def f", "--max-tokens", 2, "--dtype", dtype)[1]
        assert err.count(f"stored as float16 and run as {dtype}\n") == 1
    assert "float16" not in run(model, "def f", "--max-tokens", 2)[1]


def _answers(model, talk, max_tokens=6):
    """The model's answers in a conversation."""
    text = ChatTemplate(model).render(talk)
    with Engine(model, dtype="bf16") as engine:
        ids = encode_prompt(engine.model.tokenizer, text, add_special_tokens=False)
        return "".join(p.text for p in engine.stream([ids], Sampling(max_tokens=max_tokens)))


def test_a_conversation_has_memory_until_reset(model, run):
    """Answers depend on earlier messages, but on nothing before a reset; blank lines are not messages."""
    out, err = run(
        model, "--chat", "--system", "s", "--max-tokens", 6, typed=b"one\n\ntwo\n/reset\none\n/exit\nthree\n"
    )
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    first = _answers(model, talk)
    more = [{"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    second = _answers(model, [*talk, *more])
    assert out == f"{first}\n{second}\n{first}\n" and first != second
    assert "new conversation" in err
    assert run(model, "one", "--chat", "--system", "s", "--max-tokens", 6)[0] == f"{first}\n"


def test_a_message_that_cannot_be_answered_is_reported(model, run):
    """A too long message gives one line, and the conversation continues without it."""
    out, err = run(model, "--chat", "--max-tokens", 6, typed=b"x" * 400 + b"\none\n")
    assert out == _answers(model, [{"role": "user", "content": "one"}]) + "\n"
    assert "must leave room" in err
    assert "no systems" in run(model, "--chat", "--system", "no", code=2)[1]
    again, err = run(model, "--chat", "--max-tokens", 6, typed=b"\xff\none\n")
    assert again == out and r"got {'role': 'user', 'content': '\udcff'}" in err


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_stops_only_an_answer(model, run, monkeypatch):
    """The answer ends at once and stays in the conversation; the next message is answered."""
    stream = Engine.stream

    def interrupted(self, prompts, sampling):
        for number, delta in enumerate(stream(self, prompts, sampling)):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield delta

    monkeypatch.setattr(Engine, "stream", interrupted)
    out, err = run(model, "--chat", "--max-tokens", 9, typed=b"one\n/reset\none\n")
    assert err.count("(stopped)") == 2
    monkeypatch.undo()
    short = _answers(model, [{"role": "user", "content": "one"}], 3)
    assert out == f"{short}\n{short}\n"


@pytest.mark.parametrize("options", [(), ("--chat",)])
def test_control_characters_are_escaped_on_a_terminal(model, run, monkeypatch, options):
    """Control characters in generated text are escaped for a terminal and unchanged for a file."""
    evil = "\x1b]52;c;cm0=\x07\n"

    def stream(self, prompts, sampling):
        yield Delta(0, 0, 5, evil, "stop")

    monkeypatch.setattr(Engine, "stream", stream)
    assert evil in run(model, "x", *options)[0]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(model, "x", *options)[0].startswith("\\x1b]52;c;cm0=\\x07\n")
