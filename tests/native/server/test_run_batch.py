"""`tilewise run-batch`: answers in order, in OpenAI's format; invalid lines are answered with
errors and do not affect others.
"""

import json

from native.serve.serving_models import TEXTS
from native.server.served import TALK, small_model
from tilewise import LLM, SamplingParams
from tilewise.cli.main import _run


def _line(number, url, **body):
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {"model": "m", **body}}


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RIGHT = [
    _line(0, CHAT, messages=TALK, max_completion_tokens=9, temperature=0, logprobs=True, top_logprobs=2),
    _line(1, COMPLETION, prompt=TEXTS[0], max_tokens=5, seed=4, n=2, logprobs=1, logit_bias={"7": 2.5}),
    _line(
        2, COMPLETION, prompt=[5, 6, 7], max_tokens=5, temperature=0, user="a\u2028b\x85c", prompt_logprobs=0
    ),
]
WRONG = [
    ("{", "line 4 must be JSON"),
    ("[]", "line 5 must be a dictionary"),
    (json.dumps(_line(5, "/v1/embeddings", input="x")), "url must be one of"),
    (json.dumps(_line(6, COMPLETION, prompt="x", colour=2)), "a field of body"),
    (json.dumps(_line(7, COMPLETION, prompt="x", temperature=-1)), "temperature"),
    (json.dumps(_line(8, COMPLETION, prompt="x " * 900)), "maximum context length is 256 tokens. "),
    (json.dumps(_line(9, CHAT, messages="x")), "messages: "),
    (  # which is found out while it is written
        json.dumps(_line(12, COMPLETION, prompt="x", structured_outputs={"regex": "(a{1000}){1000}"})),
        "must not exceed the limits of work",
    ),
]


def test_a_file_is_answered_line_by_line(tmp_path, capsys):
    """Valid lines get the results of `LLM`, invalid ones status 400 and the reason. CRLF ends a line,
    Unicode's line separators within texts do not.
    """
    texts = [json.dumps(line, ensure_ascii=False) for line in RIGHT]
    lines = [*texts, *(text for text, _ in WRONG), ""]
    (tmp_path / "in.jsonl").write_bytes("\r\n".join(lines).encode())
    out = tmp_path / "new" / "out.jsonl"
    code = _run(
        ["run-batch", str(small_model()), str(tmp_path / "in.jsonl"), "-o", str(out), "--dtype", "f32"]
    )
    assert code == 0, capsys.readouterr().err
    assert f"3 of {len(lines) - 1} requests answered" in capsys.readouterr().err
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers[:3]] == ["r0", "r1", "r2"]
    bodies = [answer["response"]["body"] for answer in answers]
    for answer, (_, words) in zip(answers[3:], WRONG):
        assert answer["response"]["status_code"] == 400 and words in answer["error"]["message"], words
    with LLM(small_model(), dtype="f32") as llm:
        greedy = {"temperature": 0}
        (talk,) = llm.chat(TALK, SamplingParams(max_tokens=9, logprobs=2, **greedy))
        (text,) = llm.generate(
            TEXTS[0], SamplingParams(max_tokens=5, seed=4, n=2, logprobs=1, logit_bias={7: 2.5})
        )
        (ids,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=5, prompt_logprobs=0, **greedy))
    chat = bodies[0]["choices"][0]
    assert chat["message"] == {"role": "assistant", "content": talk.outputs[0].text, "refusal": None}
    assert [entry["logprob"] for entry in chat["logprobs"]["content"]] == [
        figures[token].logprob for token, figures in zip(talk.outputs[0].token_ids, talk.outputs[0].logprobs)
    ]
    assert [choice["text"] for choice in bodies[1]["choices"]] == [o.text for o in text.outputs]
    assert bodies[1]["usage"]["completion_tokens"] == 10 == sum(len(o.token_ids) for o in text.outputs)
    (choice,) = bodies[2]["choices"]
    assert choice["text"] == ids.outputs[0].text and len(choice["prompt_logprobs"]) == 3
    assert bodies[0]["object"] == "chat.completion" and bodies[2]["object"] == "text_completion"


def test_an_unreadable_file_is_one_line(tmp_path, capsys):
    """Before a model is loaded."""
    for content in (None, b"\xff"):
        if content is not None:
            (tmp_path / "in.jsonl").write_bytes(content)
        code = _run(
            ["run-batch", str(small_model()), str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
        )
        assert code == 2 and "FILE must be lines of JSON" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_answers_do_not_replace_the_requests(tmp_path, capsys):
    """Under any name of that file; it stays unchanged."""
    file, other = tmp_path / "in.jsonl", tmp_path / "other.jsonl"
    file.write_text(json.dumps(RIGHT[1]), encoding="utf-8")
    other.symlink_to(file)
    for out in (file, other):
        assert _run(["run-batch", str(small_model()), str(file), "-o", str(out)]) == 2
        assert "must not replace the requests" in capsys.readouterr().err
    assert json.loads(file.read_text()) == RIGHT[1]
