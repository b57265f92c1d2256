"""Readers of a model directory's files for text: generation settings, tokenizers, chat templates.

Part of the table in readers.py.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from support.sentence_pieces import ENTRIES, encoded_pieces, sentence_piece_tokenizer
from tilewise.checkpoint import load_generation_config, load_tokenizer, load_tokenizer_config
from tilewise.checkpoint.gguf_vocabulary import vocabulary_values
from tilewise.core import ConfigError
from tilewise.data import END_OF_TEXT, train_tokenizer
from tilewise.generate import combine_settings, template_child
from tilewise.generate.detokenizer import Detokenizer
from tilewise.generate.prompts import encode_prompt
from tilewise.strategy import PipelineStages, actions_for, read_actions, write_actions
from tilewise.strategy.layout_string import parse_layout

VOCABULARY = 300


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def read_generation_config(folder: Path, data: bytes) -> None:
    """generation_config.json: accepted settings can be combined with and without sampling, or are rejected."""
    (folder / "generation_config.json").write_bytes(data)
    settings = load_generation_config(folder, VOCABULARY)
    for options in ({}, {"temperature": 0.0, "max_tokens": 1 << 40}, {"temperature": 1.0}):
        sampling, taken = combine_settings(settings, options, 3)
        assert all(getattr(sampling, name) is not None for name in taken)


def valid_generation_config() -> list[bytes]:
    fields = {
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "max_length": 64,
        "temperature": 0.6,
        "do_sample": True,
    }
    all_ = {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.5,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[1], [2, 3]],
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "stop_strings": ["a", "b"],
        "num_return_sequences": 2,
        "num_beams": 1,
        "use_cache": True,
    }
    return [_json(fields), _json({**fields, **all_}), _json({"eos_token_id": 2, "min_length": 5}), _json({})]


def read_tokenizer(folder: Path, data: bytes) -> None:
    """tokenizer.json: an accepted tokenizer encodes a prompt or rejects it, and has a text for every id."""
    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = load_tokenizer(folder, 1 << 20)
    ids = encode_prompt(tokenizer, "def f(x):\n    return 'Grüße' + \"日本\"\U0001f600")
    text = Detokenizer(tokenizer, ids[:2])
    for token in (*ids, 0, 299, (1 << 20) - 1):
        text.add(token)
    text.finish()


@cache
def valid_tokenizer() -> list[bytes]:
    trained = train_tokenizer([f"def f{i}(x):\n    return x + {i}\n" for i in range(20)], 262)
    content = json.loads(trained.to_str())
    padded = {"direction": "Left", "pad_to_multiple_of": 8, "strategy": {"Fixed": 9}}
    more = {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {**padded, "pad_id": 0, "pad_type_id": 0, "pad_token": END_OF_TEXT},
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
    }
    unknown = {"unk_token": "[UNK]"}
    words = {"type": "WordLevel", "vocab": {"def": 0, "f": 1, "[UNK]": 2}, **unknown}
    pieces = {
        "type": "WordPiece",
        "vocab": {"de": 0, "##f": 1, "[UNK]": 2},
        "max_input_chars_per_word": 9,
        **unknown,
    }
    pieces["continuing_subword_prefix"] = "##"
    scored = {
        "type": "Unigram",
        "unk_id": 2,
        "vocab": [["d", -1.0], ["ef", -2.0], ["<unk>", 0.0]],
        "byte_fallback": True,
    }
    merging = {
        "type": "BPE",
        "vocab": {"a": 0, "##b": 1, "ab": 2, "de": 3, "d": 4, "##e": 5},
        "merges": ["a ##b", "d ##e"],
    }
    merging |= {
        "continuing_subword_prefix": "##",
        "end_of_word_suffix": "",
        "dropout": 0.0,
        "ignore_merges": True,
    }
    plain = {**content, "added_tokens": [], "decoder": None, "post_processor": None}
    sequence = [{"SpecialToken": {"id": "[UNK]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special_tokens = {"[UNK]": {"id": "[UNK]", "ids": [2], "tokens": ["[UNK]"]}}
    template = {
        "type": "TemplateProcessing",
        "single": sequence,
        "pair": sequence,
        "special_tokens": special_tokens,
    }
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "_"}
    split = {"type": "Split", "pattern": {"Regex": r"\w+|\s"}, "behavior": "Isolated", "invert": False}
    metaspace = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    return [
        _json(content),
        _json({**content, **more}),
        _json({**plain, "model": words, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": template}),
        _json(
            {
                **plain,
                "model": pieces,
                "pre_tokenizer": split,
                "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            }
        ),
        _json(
            {**plain, "model": scored, "normalizer": replace, "pre_tokenizer": metaspace, "decoder": decoders}
        ),
        _json({**plain, "model": merging, "pre_tokenizer": {"type": "Digits", "individual_digits": True}}),
    ]


def read_pieces(folder: Path, data: bytes) -> None:
    """tokenizer.model, next to the valid tokenizer.json of the same tokenizer, as a GGUF file has them."""
    if not (folder / "tokenizer.json").exists():
        sentence_piece_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer.model").write_bytes(data)
    values = vocabulary_values(folder, len(ENTRIES) + 3, 1, [2])
    counts = {len(values[f"tokenizer.ggml.{name}"]) for name in ("tokens", "scores", "token_type")}
    assert counts == {len(ENTRIES) + 3}


def valid_pieces() -> list[bytes]:
    """With and without the space before texts."""
    return [encoded_pieces(*ENTRIES, has_prefix=has_prefix) for has_prefix in (True, False)]


def read_tokenizer_config(folder: Path, data: bytes) -> None:
    """tokenizer_config.json next to vocab.json and merges.txt: an accepted one encodes a text."""
    trained = json.loads(valid_tokenizer()[0])["model"]
    if not (folder / "vocab.json").exists():
        (folder / "vocab.json").write_bytes(_json(trained["vocab"]))
        merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in trained["merges"])
        (folder / "merges.txt").write_text("\n".join(merges))
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "tokenizer_config.json").write_bytes(data)
    assert all(isinstance(text, str) for text in load_tokenizer_config(folder).chat_templates.values())
    encode_prompt(load_tokenizer(folder, 1 << 20), "def f(x): <|im_end|>")


def _merging(folder: Path, vocab: bytes, merges: bytes) -> None:
    """A tokenizer of vocab.json and merges.txt encodes a text and has texts for its ids, or is rejected."""
    (folder / "vocab.json").write_bytes(vocab)
    (folder / "merges.txt").write_bytes(merges)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(folder, 1 << 20)
    text = Detokenizer(tokenizer, [])
    for token in encode_prompt(tokenizer, "def f(x):\n    return 'Grüße'"):
        text.add(token)
    text.finish()


def read_vocabulary(folder: Path, data: bytes) -> None:
    _merging(folder, data, valid_merges()[0])


def valid_vocabulary() -> list[bytes]:
    return [_json(json.loads(valid_tokenizer()[0])["model"]["vocab"])]


def read_merges(folder: Path, data: bytes) -> None:
    _merging(folder, valid_vocabulary()[0], data)


def valid_merges() -> list[bytes]:
    pairs = json.loads(valid_tokenizer()[0])["model"]["merges"]
    lines = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    return ["\n".join(("#version: 0.2", *lines, "")).encode(), b""]


def valid_tokenizer_config() -> list[bytes]:
    flags = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False, "special": True}
    next_ = len(json.loads(valid_tokenizer()[0])["model"]["vocab"])
    return [
        _json(
            {"tokenizer_class": "Qwen2Tokenizer", "eos_token": END_OF_TEXT, "chat_template": "{{ messages }}"}
        ),
        _json(
            {
                "added_tokens_decoder": {str(next_): {"content": "<|im_end|>", **flags}},
                "bos_token": {"content": "<|im_end|>", **flags, "__type": "AddedToken"},
                "pad_token": None,
                "add_bos_token": True,
                "add_eos_token": False,
                "add_prefix_space": True,
                "tokenizer_class": "GPT2Tokenizer",
                "model_max_length": 1e30,
                "chat_template": [
                    {"name": "default", "template": "a"},
                    {"name": "tool_use", "template": "b"},
                ],
            }
        ),
    ]


def read_chat_template(folder: Path, data: bytes) -> None:
    """chat_template.jinja gives a text or an error message, in this process, without a child's limits."""
    (folder / "chat_template.jinja").write_bytes(data)
    template = load_tokenizer_config(folder).chat_templates["default"]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    variables = {"messages": messages, "tools": tools, "bos_token": "<s>", "add_generation_prompt": True}
    problem = template_child.problem_of(template, variables)
    json.dumps(problem, allow_nan=False)
    assert problem.keys() in ({"text", "spans"}, {"problem"})
    if "problem" in problem:
        raise ConfigError(" ".join(problem["problem"].split()))


def valid_chat_template() -> list[bytes]:
    one = (
        "{{ bos_token }}{% set ns = namespace(a=0) %}{%- for m in messages -%}\n  {%- if m.role == 'user' -%}"
        "[{{ m['content'] | trim }}]{% set ns.a = ns.a + 1 %}{% else %}{{ raise_exception('no') if m.x else ns.a }}"
        "{%- endif %}\n{% endfor %}{% if add_generation_prompt %}{{ '<|a|>' ~ loop }}{% endif %}"
    )
    two = (
        "{% macro f(t) %}{{ t | tojson(indent=2) }}{% endmacro %}{% for t in tools %}{{ f(t.function) }}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}"
        "{% generation %}{{ messages[1:] | map(attribute='content') | join(', ') }}{% endgeneration %}"
    )
    return [one.encode(), two.encode()]


def read_passes(folder: Path, data: bytes) -> None:
    """A schedule's file gives passes that can run, or is refused; what can run survives a round trip."""
    (folder / "passes.csv").write_bytes(data)
    stages = PipelineStages(schedule=read_actions(folder / "passes.csv"))
    assert stages.microbatches is not None
    actions = actions_for(stages.schedule, len(stages.schedule), stages.chunks, stages.microbatches)
    write_actions(folder / "again.csv", actions)
    assert PipelineStages(schedule=read_actions(folder / "again.csv")) == stages


def valid_passes() -> list[bytes]:
    schedules = (("1f1b", 1, 3), ("interleaved", 2, 4), ("zero_bubble", 1, 4))
    rows = [actions_for(name, 2, chunks, microbatches) for name, chunks, microbatches in schedules]
    return ["\n".join(",".join(map(str, own)) for own in actions).encode() for actions in rows]


def read_layout(folder: Path, data: bytes) -> None:
    """A layout of layers is a number per stage, or refused."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError("it is not text") from None
    numbers = parse_layout(text)
    assert len(numbers) == text.count("|") + 1 or "*" in text
    assert all(number >= 0 for number in numbers)


def valid_layouts() -> list[bytes]:
    return [b"Et*3|(tt|)*29, tL", b"E|t|t|L", b"Et((t|)*2t|)*2L"]
