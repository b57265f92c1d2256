"""Log probabilities of answers agree with their text (bytes, offsets, names) for tokenizers of both kinds."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from native.serve.serving_models import save_model
from native.server.served import usual_server
from tilewise.serve import Engine
from tilewise.server import ServerSettings, answer_lines
from tilewise.server.requests.model_files import ModelFiles

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = "hi 😀 한a hi"


def _sentencepiece():
    """A space before words, the first one of a text removed, byte tokens, and two tokens with one text."""
    words = ["▁", "a", "h", "i", "hi", "▁hi"]
    vocab = {"<s>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    vocab |= {word: n for n, word in enumerate(words, len(vocab))}
    tokenizer = Tokenizer(models.BPE(vocab, [("h", "i"), ("▁", "hi")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def served(request, tmp_path_factory):
    """An engine and its model's files."""
    directory = save_model(tmp_path_factory.mktemp("model") / request.param)
    if request.param == "sentencepiece":
        _sentencepiece().save(str(directory / "tokenizer.json"))
    with Engine(directory, dtype="f32") as engine:
        yield engine, ModelFiles(str(directory), ServerSettings(), {})


def _answers(served, *bodies):
    lines = [
        json.dumps({"custom_id": "x", "method": "POST", "url": url, "body": body}) for url, body in bodies
    ]
    return [answer["response"]["body"] for answer in answer_lines(*served, lines)]


def _check(figures, text, count):
    """Offsets lie in the text and never decrease; a full token is at its offset, except bytes
    that the decoder shows as U+FFFD; no entry is lost.
    """
    offsets = figures["text_offset"]
    assert offsets == sorted(offsets) and len(offsets) == len(figures["tokens"])
    for name, offset, top in zip(figures["tokens"], offsets, figures["top_logprobs"]):
        if not name.startswith(("bytes:", "<s>")) and text[offset : offset + 1] != "\ufffd":
            assert text.startswith(name, offset) or (offset == 0 and text.startswith(name.lstrip()))
        if top is not None:
            assert name in top and count <= len(top) <= count + 1


def test_offsets_and_entries_agree_with_the_text(served):
    """For prompts as text and as ids, several texts, and text after a prompt; names are unique."""
    ids = served[1].tokenizer.encode(PROMPT).ids
    usual = {"max_tokens": 24, "seed": 3, "logprobs": 5, "ignore_eos": True, "n": 2}
    bodies = [{"prompt": prompt, **usual, "echo": echo} for prompt in (PROMPT, ids) for echo in (True, False)]
    for body, answer in zip(bodies, _answers(served, *((COMPLETION, body) for body in bodies))):
        for choice in answer["choices"]:
            _check(choice["logprobs"], choice["text"], 5)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 24 + len(ids) * body["echo"]
    own = served[1].token_bytes
    (full,) = _answers(served, (COMPLETION, {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}))
    figures = full["choices"][0]["logprobs"]
    read = [b"" if own[id_] == b"<s>" else own[id_] for id_ in ids]
    assert b"".join(read).decode().lstrip() == PROMPT == full["choices"][0]["text"]
    assert [PROMPT[place] for place in figures["text_offset"]].count("😀") >= 3
    assert len(figures["tokens"]) == len(ids)


def test_special_tokens_in_a_prompt_have_their_offsets(served):
    """Special tokens that the text contains count as its characters; added ones do not."""
    tokenizer = served[1].tokenizer
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special][-1]
    prompt = f"{special}hi {special}a hi"
    fields = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    (full,) = _answers(served, (COMPLETION, fields))
    figures = full["choices"][0]["logprobs"]
    assert full["choices"][0]["text"] == prompt
    offsets = [offset for offset, name in zip(figures["text_offset"], figures["tokens"]) if name == special]
    # SentencePiece decodes a space after a special token that the prompt does not have.
    assert offsets[-2] == 0 and offsets[-1] - prompt.rindex(special) in (0, 1)


def test_a_prompt_that_fills_the_context_can_be_scored(served):
    """With `max_tokens: 0` the prompt may fill the context; a new token, or a longer prompt, does not fit."""
    size = served[0].model.limits.max_context
    ids = [5] * size
    fields = {"max_tokens": 0, "echo": True, "logprobs": 0}
    scored, shorter, writes, longer = _answers(
        served,
        (COMPLETION, {**fields, "prompt": ids}),
        (COMPLETION, {**fields, "prompt": ids[:-1]}),
        (COMPLETION, {**fields, "prompt": ids, "max_tokens": 1}),
        (COMPLETION, {**fields, "prompt": [*ids, 5]}),
    )
    assert scored["usage"]["prompt_tokens"] == size and scored["usage"]["completion_tokens"] == 0
    expected = shorter["choices"][0]["logprobs"]["token_logprobs"]
    figures = scored["choices"][0]["logprobs"]["token_logprobs"]
    assert len(figures) == size and figures[:-1] == expected
    for answer, new in ((writes, 1), (longer, 0)):
        message = f"you requested {size + 1} tokens ({size + 1 - new} in the prompt, {new} in the completion)"
        assert message in answer["error"]["message"] and answer["error"]["param"] == "prompt"


def test_bytes_of_a_chat_give_its_text(served):
    """Joined bytes are the message, with parts of characters as their own bytes; each position has
    all requested entries.
    """
    talk = [{"role": "user", "content": PROMPT}]
    fields = {"messages": talk, "max_tokens": 99, "seed": 5, "logprobs": True, "top_logprobs": 4}
    fields["structured_outputs"] = {"regex": "( hi|😀|한|a){12}"}
    (answer,) = _answers(served, (CHAT, fields))
    entries = answer["choices"][0]["logprobs"]["content"]
    content = answer["choices"][0]["message"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == content
    assert any(entry["token"].startswith("bytes:") for entry in entries)
    for entry in entries:
        assert len(entry["top_logprobs"]) == 4
        for one in (entry, *entry["top_logprobs"]):
            text = bytes(one["bytes"]).decode("utf-8", "replace")
            assert one["token"] == text or (one["token"].startswith("bytes:") and "\ufffd" in text)


def test_a_stream_has_the_offsets_of_the_whole_answer():
    """Chunk by chunk, with and without the prompt; no offset is beyond a text that a stop string ended."""
    server = usual_server()
    for echo in (False, True):
        fields = {"prompt": PROMPT, "echo": echo, "max_tokens": 20, "seed": 1, "logprobs": 2}
        fields["ignore_eos"] = True
        full = server.ask(COMPLETION, fields)[1]["choices"][0]
        chunks = [json.loads(line)["choices"][0] for line in server.chunks(COMPLETION, fields)[:-1]]
        assert "".join(chunk["text"] for chunk in chunks) == full["text"]
        for name, values in full["logprobs"].items():
            assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values
    stopped = server.ask(COMPLETION, {**fields, "stop": full["text"][-4:-2]})[1]["choices"][0]
    assert max(stopped["logprobs"]["text_offset"]) <= len(stopped["text"])
