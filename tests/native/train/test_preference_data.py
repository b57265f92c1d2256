"""Pairs of a chosen and a rejected sequence: what records become, their order, errors with places."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native.train.small_pairs import dpo_config, write_base_model, write_pairs
from native.train.small_run import silent
from tilewise.core import ConfigError
from tilewise.data import IGNORED, Batches, ExampleList, PairBatches, PairedExamples
from tilewise.train import load_config, prepare_data
from tilewise.train.training_data import describe_source

TURNS = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}a:{% endif %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory, texts):
    """A small model with a chat template."""
    directory = write_base_model(tmp_path_factory.mktemp("base"), texts)
    (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def prepared(base, tmp_path, pairs, **source):
    config = dpo_config(base, tmp_path, held_out_percent=0.0, batch=1, steps=1)
    write_pairs(base, pairs)
    data = config.data
    sources = tuple(each.model_copy(update=source) for each in data.sources)
    config = config.model_copy(update={"data": data.model_copy(update={"sources": sources})})
    return prepare_data(config, silent())


def parts(data, number):
    """Texts of the prompt and of the counted labels, for both sequences of a pair."""
    source = data.batches.batches.sources[0]
    texts = []
    for tokens, labels in source.pair(number):
        ids = [*tokens.tolist(), int(labels[-1])]
        begin = 1 + int(np.argmax(labels != IGNORED))
        decode = data.tokenizer.decode
        texts += [decode(ids[:begin]), decode(ids[begin:], skip_special_tokens=False)]
    return texts


def message(role, content):
    return {"role": role, "content": content}


def test_texts_and_conversations_become_pairs(base, tmp_path):
    """Texts end with the end id; conversations are rendered, with their prompt or with what they have in common."""
    pairs = [{"prompt": "def f", "chosen": " return", "rejected": " x"}]
    end = "<|endoftext|>"
    assert parts(prepared(base, tmp_path, pairs), 0) == ["def f", f" return{end}", "def f", f" x{end}"]
    question, good, bad = message("user", "1"), message("assistant", "2"), message("assistant", "3")
    rendered = ["u:1;a:", "2;", "u:1;a:", "3;"]
    explicit = {"prompt": [question], "chosen": [good], "rejected": [bad]}
    implicit = {"chosen": [question, good], "rejected": [question, bad]}
    for pair in (explicit, implicit):
        assert parts(prepared(base, tmp_path, [pair]), 0) == rendered
    renamed = [{"question": "def f", "good": " return", "bad": " x"}]
    fields = {"field_prompt": "question", "field_chosen": "good", "field_rejected": "bad"}
    assert parts(prepared(base, tmp_path, renamed, **fields), 0)[1] == f" return{end}"


def test_long_pairs_are_truncated_or_dropped_as_one(base, tmp_path):
    """One sequence beyond the context; a prompt that fills it leaves nothing to learn."""
    short = {"prompt": [1, 2], "chosen": [3], "rejected": [4]}
    long = {"prompt": [1, 2], "chosen": [3] * 50, "rejected": [4]}
    filled = {"prompt": [1] * 40, "chosen": [3], "rejected": [4]}
    data = prepared(base, tmp_path, [long, short, filled])
    counts = data.sources[0].counts
    assert (counts.examples, counts.truncated, counts.unlabelled) == (2, 1, 1)
    assert "2 pairs" in describe_source(data.sources[0])
    source = data.batches.batches.sources[0]
    assert [len(tokens) for tokens, _ in source.pair(0)] == [32, 2]
    dropped = prepared(base, tmp_path, [long, short, filled], excess_length_strategy="drop")
    assert (dropped.sources[0].counts.examples, dropped.sources[0].counts.dropped) == (1, 2)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, r"must have the field 'rejected' in pairs.jsonl:2; got 'prompt'"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, r"'chosen' must be text in pairs.jsonl:2"),
        ({"prompt": [1], "chosen": [999], "rejected": [2]}, r"must .* in pairs.jsonl:2"),
        ({"chosen": [], "rejected": []}, "pairs.jsonl:2"),
    ],
    ids=str,
)
def test_errors_name_the_record(base, tmp_path, pair, words):
    """File and line, before any training."""
    with pytest.raises(ConfigError, match=words):
        prepared(base, tmp_path, [{"prompt": "a", "chosen": " b", "rejected": " c"}, pair])


def test_conversations_without_a_common_beginning_are_rejected(base, tmp_path):
    """There is no prompt then."""
    pair = {"chosen": [message("user", "1")], "rejected": [message("user", "2")]}
    with pytest.raises(
        ConfigError, match=r"must begin with the same messages and then differ in pairs.jsonl:1"
    ):
        prepared(base, tmp_path, [pair])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data]\ntype = 'preference'\npath = 'x'\n", "data of type = 'preference' needs model.path"),
        ("[dpo]\n", "dpo needs data of type = 'preference'"),
        ("[dpo]\nbeta = 0.2\n", "dpo needs data of type = 'preference'"),
        (
            "[model]\npath = 'm'\n[data]\ntype = 'preference'\npath = 'x'\ndocuments = 'packed'\n",
            "type = 'preference' excludes documents = 'packed'",
        ),
        (
            "[[data]]\ntype = 'preference'\npath = 'x'\n[[data]]\npath = 'y'\n",
            "type = 'preference' excludes other types, got 'text' too",
        ),
        ("[dpo]\nloss_type = 'ipo'\nlabel_smoothing = 0.1\n", "label_smoothing needs loss_type = 'sigmoid'"),
        ("[dpo]\nbetta = 0.1\n", r"did you mean dpo.beta\?"),
    ],
)
def test_configuration_of_pairs(tmp_path, text, words):
    """`[dpo]` needs pairs; pairs need a model, and exclude packing and other data."""
    (tmp_path / "train.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / "train.toml")


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    batch=st.integers(1, 4),
    seed=st.integers(0, 5),
    has_lengths=st.booleans(),
)
def test_each_pair_comes_once_per_epoch_with_its_reference(sizes, batch, seed, has_lengths):
    """Both sequences in adjacent rows, with the log-probabilities of their own pair."""
    sources, value = [], 0
    for size in sizes:
        examples = ExampleList(9, "truncate")
        for _ in range(2 * size):
            ids = np.full(2 + value % 5, value, np.int32)
            examples.add(ids, ids)
            value += 1
        sources.append(PairedExamples(examples.finish()))
    count = sum(sizes)
    reference = np.arange(2 * count, dtype=np.float32).reshape(-1, 2)
    batches = PairBatches(Batches(sources, batch, seed), has_lengths, reference)
    seen = []
    for step in range(count):
        inputs = batches.at(step)
        first = inputs["tokens"][:, 0]
        assert (first[1::2] == first[0::2] + 1).all() and (first[0::2] % 2 == 0).all()
        np.testing.assert_array_equal(inputs["reference_log_probs"], first)
        counted = (inputs["labels"] != IGNORED).sum(1)
        np.testing.assert_array_equal(counted, 1 + first % 5)
        if has_lengths:
            np.testing.assert_allclose(inputs["inverse_lengths"], 1 / counted, rtol=1e-6)
        seen += (first[0::2] // 2).tolist()
    for epoch in range(batch):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
