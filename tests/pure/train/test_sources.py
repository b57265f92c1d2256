"""Sources of fine-tuning data: tokens and masks as transformers has them, and errors with file and line."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from support.chat_model import MARKED, PLAIN, conversation, write_chat_model, write_lines
from tilewise.checkpoint import load_tokenizer
from tilewise.core import ConfigError
from tilewise.data import IGNORED
from tilewise.generate import template_process
from tilewise.train import check_config, prepare_data
from tilewise.train.training_data import describe_source

CONVERSATIONS = [conversation(number) for number in range(24)]
ENDS_ONCE = PLAIN.replace("{% if add", "{% if not add_generation_prompt %}[end]{% endif %}{% if add")
FORGETS = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '' }}")


@pytest.fixture(autouse=True)
def rendered_here(monkeypatch):
    """Renders templates in this process, which is faster; runs of these sources use the process."""
    problem_of = template_process.template_child.problem_of
    monkeypatch.setattr(
        template_process.TemplateProcesses,
        "render_all",
        lambda _, template, conversations: [problem_of(template, each) for each in conversations],
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose template marks answers."""
    return write_chat_model(tmp_path_factory.mktemp("marked"))


def prepare(model, *tables, **sequences):
    """The data of a configuration with these sources."""
    content = {"data": [*tables], "sequences": {"context": 128, **sequences}, "train": {"batch": 2}}
    if model is not None:
        content["model"] = {"path": str(model)}
    return prepare_data(check_config(content, "a test"), Console(file=io.StringIO()))


def examples(prepared, number=0):
    """Ids and labels of the examples of a source, unshifted."""
    own = prepared.sources[number].train.examples
    return [own[index] for index in range(len(own))]


def chat(folder, conversations=CONVERSATIONS, **keys):
    """A source of conversations, none of them held out."""
    path = write_lines(folder / "chat.jsonl", [{"messages": each} for each in conversations])
    return {"type": "chat", "path": str(path), "held_out_percent": 0, **keys}


def learned(prepared):
    """The text that is counted in each example."""
    return [
        prepared.tokenizer.decode(ids[labels != IGNORED].tolist(), skip_special_tokens=False)
        for ids, labels in examples(prepared)
    ]


def answers(conversations=CONVERSATIONS, only=slice(None)):
    """What the model should learn of conversations."""
    turns = (
        [m["content"] + "[end]" for m in messages if m["role"] == "assistant"] for messages in conversations
    )
    return ["".join(each[only]) for each in turns]


WORDS = ["a", " ", "\n", "ä", "€", "😀", "[end]", "one ", "{{ 1 }}"]
CONTENT = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)


@pytest.mark.slow  # imports transformers
@settings(max_examples=50)
@given(st.lists(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3), min_size=1, max_size=3))
def test_masks_equal_those_of_transformers(model, tmp_path_factory, talks):
    """Ids and counted labels of `apply_chat_template(..., return_assistant_tokens_mask=True)`."""
    from transformers import PreTrainedTokenizerFast

    conversations = [
        [{"role": role, "content": c} for pair in talk for role, c in zip(("user", "assistant"), pair)]
        for talk in talks
    ]
    folder = tmp_path_factory.getbasetemp()
    prepared = prepare(model, chat(folder, conversations))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=load_tokenizer(model, 300))
    for messages, (ids, labels) in zip(conversations, examples(prepared)):
        theirs = tokenizer.apply_chat_template(
            messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids.tolist() == theirs["input_ids"]
        expected = np.where(np.array(theirs["assistant_masks"]) == 1, ids, IGNORED)
        np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize("template", [MARKED, PLAIN, ENDS_ONCE], ids=["marked", "plain", "ends once"])
def test_the_turns_of_the_model_are_learned(tmp_path, template):
    """By `{% generation %}`, or by the rendered messages before a turn; all of them, or the last."""
    model = write_chat_model(tmp_path / "model", template)
    mark = "[end]" * (template is ENDS_ONCE)  # after the last turn
    assert learned(prepare(model, chat(tmp_path))) == [text + mark for text in answers()]
    last = prepare(model, chat(tmp_path, mask_history=True))
    assert learned(last) == [text + mark for text in answers(only=slice(-1, None))]
    whole = prepare(model, chat(tmp_path, train_on_inputs=True))
    assert all((ids == labels).all() for ids, labels in examples(whole))
    for (ids, _), (all_ids, _) in zip(examples(last), examples(whole)):
        np.testing.assert_array_equal(ids, all_ids)


def test_a_template_that_changes_earlier_turns_is_an_error(tmp_path):
    """With the line, and what to do; the last turn can still be learned."""
    model = write_chat_model(tmp_path / "model", FORGETS)
    talks = [CONVERSATIONS[1], CONVERSATIONS[0]]
    with pytest.raises(
        ConfigError, match=r"must render a conversation as the beginning .* in chat.jsonl:2; .*mask_hi"
    ):
        prepare(model, chat(tmp_path, talks))
    assert learned(prepare(model, chat(tmp_path, talks, mask_history=True))) == answers(
        talks, slice(-1, None)
    )


def test_other_names_of_messages_and_roles(model, tmp_path):
    """ShareGPT's `from` and `value`, `human` and `gpt`; in JSON lines and in Parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = {"user": "human", "assistant": "gpt", "system": "system"}
    records = [
        {"talk": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}
        for messages in CONVERSATIONS
    ]
    write_lines(tmp_path / "a.jsonl", records)
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    keys = {
        "field_messages": "talk",
        "message_property_mappings": {"role": "from", "content": "value"},
        "roles": {"user": ["human"], "assistant": ["gpt", "bot"]},
    }
    for name in ("a.jsonl", "a.parquet"):
        prepared = prepare(model, chat(tmp_path) | keys | {"path": str(tmp_path / name)})
        assert learned(prepared) == answers()
        assert prepared.digest == prepare(model, chat(tmp_path)).digest
    in_parts = [
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]}
        for messages in CONVERSATIONS
    ]
    write_lines(tmp_path / "parts.jsonl", in_parts)
    parts = prepare(model, chat(tmp_path) | {"path": str(tmp_path / "parts.jsonl")})
    assert parts.digest == prepared.digest


def test_tools_are_rendered(tmp_path):
    """Of the records that have them."""
    model = write_chat_model(
        tmp_path / "model", "{% for t in tools or [] %}<{{ t.name }}>{% endfor %}" + MARKED
    )
    records = [{"messages": CONVERSATIONS[1]}, {"messages": CONVERSATIONS[1], "tools": [{"name": "add"}]}]
    path = str(write_lines(tmp_path / "a.jsonl", records))
    prepared = prepare(model, {"type": "chat", "path": path, "held_out_percent": 0})
    texts = [
        prepared.tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids, _ in examples(prepared)
    ]
    assert texts[1] == "<add>" + texts[0] and learned(prepared) == answers([CONVERSATIONS[1]] * 2)


def pair_source(folder, records, **keys):
    path = write_lines(folder / "pairs.jsonl", records)
    return {"type": "prompt_completion", "path": str(path), "held_out_percent": 0, **keys}


def test_completions_of_pairs_are_learned(model, tmp_path):
    """Of texts, with the end token; of messages, as a conversation. Fields have any name."""
    texts = [{"question": f"one {i}", "answer": f" two {i}"} for i in range(5)]
    keys = {"field_prompt": "question", "field_completion": "answer"}
    prepared = prepare(model, pair_source(tmp_path, texts, **keys))
    end = prepared.tokenizer.id_to_token(prepared.end)
    assert learned(prepared) == [record["answer"] + end for record in texts]
    for (ids, _), record in zip(examples(prepared), texts):
        whole = prepared.tokenizer.encode(record["question"] + record["answer"]).ids
        assert ids.tolist() == [*whole, prepared.end]
    everything = prepare(model, pair_source(tmp_path, texts, train_on_inputs=True, **keys))
    assert all((ids == labels).all() for ids, labels in examples(everything))
    for template in (MARKED, PLAIN):
        other = write_chat_model(tmp_path / f"m{len(template)}", template)
        talks = [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in CONVERSATIONS]
        assert learned(prepare(other, pair_source(tmp_path, talks))) == answers(only=slice(-1, None))


def test_a_new_model_learns_pairs_of_texts(tmp_path):
    """Its tokenizer is trained on them; lists of messages need a model with a template."""
    texts = [{"prompt": f"one {i} ", "completion": f"two {i}"} for i in range(50)]
    prepared = prepare(None, pair_source(tmp_path, texts))
    assert learned(prepared)[3] == "two 3<|endoftext|>" and prepared.tokenizer.get_vocab_size() > 257
    talks = [{"prompt": CONVERSATIONS[1][:1], "completion": CONVERSATIONS[1][1:]}]
    with pytest.raises(ConfigError, match=r"field 'prompt' must be text in pairs.jsonl:1"):
        prepare(None, pair_source(tmp_path, talks))


def test_ids_are_taken_as_they_are(model, tmp_path):
    """With labels or without; long ones are split by default."""
    records = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"input_ids": [*range(20)]}]
    keys = {
        "type": "pretokenized",
        "path": str(write_lines(tmp_path / "a.jsonl", records)),
        "held_out_percent": 0,
    }
    prepared = prepare(model, keys, context=8, documents="padded")
    assert [(i.tolist(), lab.tolist()) for i, lab in examples(prepared)] == [
        ([5, 6, 7, 8], [IGNORED, IGNORED, 7, 8]),
        *((part, part) for part in ([*range(9)], [*range(8, 17)], [*range(16, 20)])),
    ]
    assert prepared.sources[0].counts.split == 1
    assert prepare(model, keys | {"field_labels": "none"}, context=8).sources[0].counts.counted == 3 + 19


def test_a_share_or_a_file_is_held_out(model, tmp_path):
    """Records are held out by a hash of file and line; another file is used whole."""
    table = chat(tmp_path)
    del table["held_out_percent"]
    content = {"model": {"path": str(model)}, "train": {"evaluate_every": 1, "batch": 2}, "data": {**table}}

    def both(**keys):
        config = check_config({**content, "data": {**table, **keys}}, "a test")
        prepared = prepare_data(config, Console(file=io.StringIO()))
        return len(prepared.sources[0].train), prepared.held_out.num_windows

    num_train, num_held_out = both(held_out_percent=30.0)
    assert num_train + num_held_out == 24 and 2 < num_held_out < 15
    other = write_lines(tmp_path / "other.jsonl", [{"messages": CONVERSATIONS[1]}] * 3)
    assert both(validation_path=str(other)) == (24, 3)
    assert both(held_out_percent=99.9999) == (1, 23)
    with pytest.raises(ConfigError, match="validation_path excludes held_out_percent"):
        both(validation_path=str(other), held_out_percent=3.0)
    with pytest.raises(ConfigError, match=r"evaluate_every needs .* or an example"):
        both(path=str(write_lines(tmp_path / "one.jsonl", [{"messages": CONVERSATIONS[1]}])))


def test_examples_without_a_counted_label_are_dropped_and_counted(model, tmp_path):
    """Conversations without an answer, and those whose answers lie beyond the context."""
    talks = [
        *CONVERSATIONS[:3],
        CONVERSATIONS[1][:1],
        [{"role": "user", "content": "x" * 500}, CONVERSATIONS[1][1]],
    ]
    prepared = prepare(model, chat(tmp_path, talks))
    counts = prepared.sources[0].counts
    assert (counts.examples, counts.unlabelled, counts.truncated) == (3, 2, 0)
    assert "3 examples in 3 sequences" in describe_source(prepared.sources[0])
    assert "2 without a counted label and dropped" in describe_source(prepared.sources[0])
    dropped = prepare(model, chat(tmp_path, talks, excess_length_strategy="drop")).sources[0].counts
    assert (dropped.examples, dropped.dropped, dropped.unlabelled) == (3, 1, 1)
    with pytest.raises(ConfigError, match="got 0 longer than the context and 1 without a counted label"):
        prepare(model, chat(tmp_path, talks[3:4]))
    (tmp_path / "text.txt").write_text("one two three. " * 60)
    text = prepare(model, {"path": str(tmp_path / "text.txt")}, context=32).sources[0]
    left_out = text.counts.tokens - 1 - 32 * len(text.train)
    assert 0 < left_out < 32 and f"{left_out} tokens at the end left out" in describe_source(text)


@pytest.mark.parametrize("strategy", ["truncate", "drop"])
def test_long_texts_are_truncated_or_dropped(model, tmp_path, strategy):
    """Text is split by default, so that no token is lost."""
    path = str(write_lines(tmp_path / "a.jsonl", [{"text": "one " * 200}, {"text": "two"}]))
    table = {"path": path, "held_out_percent": 0, "excess_length_strategy": strategy}
    prepared = prepare(model, table, documents="padded", context=16)
    counts = prepared.sources[0].counts
    assert (counts.truncated, counts.dropped) == ((1, 0) if strategy == "truncate" else (0, 1))
    assert prepared.batches.num_windows == (2 if strategy == "truncate" else 1)
    assert len(prepare(model, {"path": path, "held_out_percent": 0}).sources[0].train) > 1


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"x": 1}, "must have the field 'messages' in bad.jsonl:2; got 'x'"),
        ({"messages": "hi"}, "field 'messages' must be a list of messages in bad.jsonl:2"),
        ({"messages": []}, "must be a list of messages in bad.jsonl:2"),
        (
            {"messages": [{"from": "x"}]},
            "a message must have a role in bad.jsonl:2; got 'from'; set message_property_",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "bad.jsonl:2"),
        (
            {"messages": [{"role": "user"}]},
            "bad.jsonl:2: the chat template must render the conversation; got .* no c",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "the content of a message must be text, or a list of parts of type 'text' in bad.jsonl:2",
        ),
        ({"messages": CONVERSATIONS[1], "tools": 3}, "tools must be a list of JSON schemas in bad.jsonl:2"),
    ],
)
def test_wrong_conversations_are_one_error(tmp_path, record, words):
    """With file and line, before any training."""
    strict = "{% for m in messages %}{% if not m.content %}{{ raise_exception('no content') }}{% endif %}{% endfor %}"
    model = write_chat_model(tmp_path / "model", strict + MARKED)
    path = write_lines(tmp_path / "bad.jsonl", [{"messages": CONVERSATIONS[1]}, record])
    with pytest.raises(ConfigError, match=words) as caught:
        prepare(model, {"type": "chat", "path": str(path), "held_out_percent": 0})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"input_ids": [1, 300]}, r"ids of field 'input_ids' must lie in \[0, 299\] in a.jsonl:1; got 300"),
        ({"input_ids": [1, -1]}, "must lie in"),
        ({"input_ids": [1, 1 << 70]}, "must be a list of integers"),
        ({"input_ids": [1, 2.5]}, "must be a list of integers"),
        ({"input_ids": [[1], [2, 3]]}, "must be a list of integers"),
        ({"input_ids": [True, False]}, "must be a list of integers"),
        ({"input_ids": "12"}, "must be a list of integers"),
        (
            {"input_ids": [1, 2], "labels": [1]},
            "'labels' must be as long as 'input_ids' in a.jsonl:1; got 1 and 2",
        ),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "'labels' must lie in .* or be -100"),
    ],
)
def test_wrong_ids_are_one_error(model, tmp_path, record, words):
    """Ids of another tokenizer, lists of other things."""
    path = write_lines(tmp_path / "a.jsonl", [record])
    with pytest.raises(ConfigError, match=words):
        prepare(model, {"type": "pretokenized", "path": str(path), "held_out_percent": 0})


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[[data]]\ntype = 'chatt'\n", r"data\[0\].type: .*'chat'.*; got 'chatt' in .*; did you mean chat\?"),
        (
            "[[data]]\n[[data]]\npth = 'x'\n",
            r"data\[1\].pth must be a known key; .*; did you mean data.path\?",
        ),
        ("[[data]]\ncontext = 8\n", r"data\[0\].context must be a known key; .*did you mean data.context\?"),
        ("[data]\ntype = 'chat'\n", "path must be set for type = 'chat'"),
        ("[data]\ntype = 'chat'\npath = 'x'\n", "needs a model with a chat template, got no model.path"),
        ("[data]\ntype = 'pretokenized'\npath = 'x'\n", "needs a model with a vocabulary, got no model.path"),
        ("[data]\nfield_prompt = 'x'\n", "field_prompt needs type = 'prompt_completion', got 'text'"),
        ("[[data]]\nweight = 1\n[[data]]\n", "weight must be set for all sources .* no weight for source 2"),
        ("[data]\nweight = 0\n", "data.weight: .*; got 0"),
        (
            "[data]\ntype = 'chat'\npath = 'x'\nexcess_length_strategy = 'split'\n",
            "must be 'truncate' or 'drop'",
        ),
        ("[data]\nroles = { robot = ['x'] }\n", "data.roles"),
        ("data = []\n", "data"),
        ("data = [3]\n", r"data\[0\]"),
        ("sequences = 3\n", "sequences and data must be tables"),
        ("[sequences]\ncontxt = 8\n", "sequences.contxt must be a known key"),
        ("[sequences]\ncontext = 7\n", "data.context: "),
        (
            "[data]\ncontext = 8\n[sequences]\ncontext = 8\n",
            "data.context and sequences.context are the same setting",
        ),
        ("[data]\npath = 'x'\n[[data.sources]]\n", "data.sources excludes keys of a single source"),
    ],
)
def test_wrong_sections_are_one_error(tmp_path, toml, words):
    """The message has the place as it is in the file."""
    from tilewise.train import load_config

    (tmp_path / "train.toml").write_text(toml)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(tmp_path / "train.toml")
    assert "\n" not in str(caught.value)


def test_a_list_and_a_table_are_the_same_run(tmp_path):
    """One source in either form; paths are relative to the file; `--set` changes a table, or [sequences]."""
    from tilewise.train import load_config

    (tmp_path / "a.toml").write_text("[data]\npath = 'texts'\ncontext = 64\n")
    (tmp_path / "b.toml").write_text("[[data]]\npath = 'texts'\n[sequences]\ncontext = 32\n")
    table = load_config(tmp_path / "a.toml")
    listed = load_config(tmp_path / "b.toml", ["sequences.context=64"])
    assert table == listed and table.what_must_match() == listed.what_must_match()
    assert table.data.sources[0].path == str(tmp_path / "texts")
    with pytest.raises(ConfigError, match=r"--set data.KEY needs one \[data\] table; got 1 in \[\[data\]\]"):
        load_config(tmp_path / "b.toml", ["data.path=x"])
    (tmp_path / "c.toml").write_text("[[data]]\nweight = 1\n[[data]]\nweight = 2\n")
    settings = load_config(tmp_path / "c.toml").what_must_match()["data"]
    assert settings["weight"] == [1.0, 2.0] and settings["held_out_percent"] == [5.0, 5.0]
