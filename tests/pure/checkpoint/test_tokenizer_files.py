"""All forms of tokenizers in a model directory, compared with transformers."""

import json

import pytest
import transformers

from tilewise.checkpoint import load_tokenizer, load_tokenizer_config
from tilewise.core import CheckpointError
from tilewise.data import train_tokenizer

TEXTS = [
    "Hello world's  end\n\n  12345 Ünï ＡＢ e\u0301",
    "",
    " a<|end|>b <|im_start|>user\n",
    "don'T x\t\r\n",
]
TRAINED = train_tokenizer(["hello world, it's 123 things\n    and more " * 10], vocab_size=320)
SIZE = 400


def _save(directory, kind="Qwen2Tokenizer", config=None, added=None):
    """Save vocab.json, merges.txt and the files next to them."""
    model = json.loads(TRAINED.to_str())["model"]
    vocab = {text: id_ for text, id_ in model["vocab"].items() if id_ != 0}
    (directory / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, **vocab}))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    content = {"tokenizer_class": kind, "eos_token": "<|endoftext|>", **(config or {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    if added:
        (directory / "added_tokens.json").write_text(json.dumps(added))
    return directory


FIRST = TRAINED.get_vocab_size()
TOKEN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
DECODER = {
    "added_tokens_decoder": {
        str(FIRST): {**TOKEN, "content": "<|im_start|>"},
        str(FIRST + 1): {**TOKEN, "content": "<|end|>"},
    }
}


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GPT2Tokenizer"])
@pytest.mark.parametrize(
    ("config", "added"),
    [({}, None), (DECODER, None), (DECODER, {"<|im_start|>": FIRST, "<|end|>": FIRST + 1})],
    ids=["plain", "decoder", "both"],
)
def test_vocabulary_and_merges_are_read_as_by_transformers(tmp_path, kind, config, added):
    """Ids of texts with special tokens, odd spaces and composed letters, and the texts of ids."""
    _save(tmp_path, kind, config, added)
    theirs = getattr(transformers, kind).from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path, SIZE)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_kinds_of_tokenizers_differ(tmp_path):
    """The twin: a file of one kind read as the other kind gives other ids."""
    ids = []
    for kind in ("Qwen2Tokenizer", "GPT2Tokenizer"):
        tokenizer = load_tokenizer(_save(tmp_path, kind), SIZE)
        ids.append([tokenizer.encode(text).ids for text in TEXTS])
    assert ids[0] != ids[1]


@pytest.mark.parametrize("has_begin", [True, False])
@pytest.mark.parametrize("has_end", [True, False, None])
def test_begin_and_end_follow_the_configuration(tmp_path, has_begin, has_end):
    """`add_bos_token` and `add_eos_token` apply to vocab.json; tokenizer.json has its own rules."""
    begin = {
        "bos_token": {"content": "h", "special": True, "__type": "AddedToken"},
        "add_bos_token": has_begin,
    }
    _save(tmp_path, config=begin | ({} if has_end is None else {"add_eos_token": has_end}))
    ids = load_tokenizer(tmp_path, SIZE).encode("world").ids
    assert ids == transformers.Qwen2Tokenizer.from_pretrained(tmp_path)("world")["input_ids"]
    assert (ids[0] == TRAINED.token_to_id("h"), ids[-1] == 0) == (has_begin, bool(has_end))
    (tmp_path / "tokenizer.json").write_text(TRAINED.to_str())
    plain = load_tokenizer(tmp_path, SIZE).encode("world").ids
    assert (
        plain
        == transformers.AutoTokenizer.from_pretrained(tmp_path)("world")["input_ids"]
        == ids[has_begin:][:2]
    )


def test_lone_sentencepiece_model_is_rejected_with_advice(tmp_path):
    """The error says how to convert it."""
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.model \(SentencePiece\) only; convert it: .*save_pre"
    ):
        load_tokenizer(tmp_path, SIZE)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("vocab.json", '{"a": -1}', "vocab.json: a: "),
        ("vocab.json", '{"a": 1, "b": 1}', "two texts have one id"),
        ("vocab.json", '{"a": 1, "a": 2}', "appears twice"),
        ("vocab.json", '{"a\\n\\u001b[2J": "1"}', r"vocab.json: a\\n\\x1b\[2J: "),
        ("merges.txt", None, "merges.txt: no such file"),
        ("merges.txt", "#version\na b c\n", "line 2 must be two tokens"),
        ("merges.txt", "q zz\n", "the tokenizers library says"),
        ("tokenizer_config.json", '{"tokenizer_class": "RobertaTokenizer"}', "must be one of GPT2Tokenizer"),
        ("tokenizer_config.json", '{"add_bos_token": 1}', "add_bos_token"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "x", "template": ""}, {"name": "x", "template": ""}]}',
            "'x' twice",
        ),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}', "ids as keys"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"999": {"content": "<u>"}}}',
            "has id 999 in the file, but the next free id",
        ),
        ("chat_template.jinja", b"\xff", "chat_template.jinja.*not UTF-8"),
        ("added_tokens.json", '{"<u>": 999}', "has id 999 in the file, but the next free id"),
    ],
)
def test_damaged_files_are_one_error(tmp_path, name, content, words):
    """The error names the file and what is wrong with it."""
    _save(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(tmp_path, SIZE)


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ([(FIRST + 3, "<u>")], rf"'<u>' has id {FIRST + 3} in the file, .* assigns it {FIRST}"),
        ([(FIRST, "h")], rf"'h' has id {FIRST} in the file, .* assigns it {TRAINED.token_to_id('h')}"),
        (
            [(FIRST, "<u>"), (FIRST + 1, "<u>")],
            f"'<u>' has id {FIRST + 1} in the file, .* assigns it {FIRST}",
        ),
        ([(FIRST, "")], "assigns no id"),
        ([(FIRST, "<u>"), (FIRST + 1, "<v>"), (TRAINED.token_to_id("h"), "h")], None),
    ],
)
def test_added_tokens_have_the_ids_of_the_file(tmp_path, added, words):
    """The library silently renumbers those that do not fit; a model would then read another token."""
    content = json.loads(TRAINED.to_str())
    content["added_tokens"] += [{**TOKEN, "id": id_, "content": text} for id_, text in added]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    if added == [(FIRST + 3, "<u>")]:  # beyond the model's vocabulary, so no text may use it
        assert load_tokenizer(tmp_path, FIRST).token_to_id("<u>") >= FIRST
    if words is None:
        tokenizer = load_tokenizer(tmp_path, SIZE)
        assert [(tokenizer.token_to_id(text), text) for _, text in added] == added
        return
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(tmp_path, SIZE)


def test_templates_have_names_and_files_take_precedence(tmp_path):
    """One template is the default; a separate file takes precedence over the configuration."""
    assert load_tokenizer_config(tmp_path).chat_templates == {}
    _save(tmp_path, config={"chat_template": "a"})
    assert load_tokenizer_config(tmp_path).chat_templates == {"default": "a"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    _save(tmp_path, config={"chat_template": named})
    assert load_tokenizer_config(tmp_path).chat_templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    assert load_tokenizer_config(tmp_path).chat_templates["default"] == "c"


def test_empty_role_means_no_token(tmp_path):
    """`"bos_token": ""`, as early conversions of Llama 1 have it, in both forms of a role."""
    _save(tmp_path, config={"bos_token": "", "unk_token": {**TOKEN, "content": ""}, "add_bos_token": True})
    assert load_tokenizer_config(tmp_path).special_tokens == {"eos_token": "<|endoftext|>"}
    assert load_tokenizer(tmp_path, SIZE).encode("h").ids == [TRAINED.token_to_id("h")]
