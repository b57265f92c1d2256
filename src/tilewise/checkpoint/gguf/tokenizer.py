"""The tokenizer in a GGUF file's metadata, as the content of tokenizer.json and tokenizer_config.json.

Three kinds are read: byte-level BPE (`gpt2`), SentencePiece with bytes for unknown characters
(`llama`), and WordPiece (`bert`). The results have the token ids of the tokenizer.json that the file
was made from. What files do not say is added by name: how byte-level tokenizers divide texts
(`tokenizer.ggml.pre`), and llama.cpp's defaults. Other kinds and names are rejected.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilewise.checkpoint.gguf.metadata import Metadata
from tilewise.core.log import warn_once
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable

__all__ = ["end_tokens", "has_tokenizer", "tokenizer_config", "tokenizer_file"]

_MODELS = ("gpt2", "llama", "bert")
_MAX_TOKENS = 1 << 21
_MAX_MERGES = 1 << 22
_MAX_PIECE = 256  # characters of a token that may result from merging two others
# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece writes spaces so
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Control tokens that end a text or a turn, by which llama.cpp stops too.
_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "<|end_of_text|>",
    )
)


def _characters(ranges: str) -> str:
    """The content of a class of characters, from hexadecimal code points and ranges of them."""
    return "".join("-".join(chr(int(end, 16)) for end in each.split("-")) for each in ranges.split())


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)  # a word begins at a change from lower to upper case
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join(_CASED) + r"|\p{N}" + _REST
_GPT4O = "|".join(f"{word}{_CONTRACTIONS}?" for word in _CASED) + r"|\p{N}{1,3}" + _REST
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
# Code points of letters with upper and lower case, as this model's tokenizer.json lists them.
_DEEPSEEK_LETTERS = """
41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c
38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b
1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4
1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113
2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b
2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06
fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df
1e900-1e943
"""
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_characters(_DEEPSEEK_LETTERS)}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}+",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

# How byte-level tokenizers divide texts before merges apply: expressions that are applied one after the
# other, by the name in files.
_PRE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("", "default"), _DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "mellum", "gigachat"), (_GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)
    ),
    **dict.fromkeys(("gpt-4o", "kanana2"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK3,
    "deepseek-coder": _DEEPSEEK_CODER,
}
# Of these, whole words of the vocabulary are tokens, whatever merges say; and texts begin with bos_token.
_WHOLE_WORDS = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken"))
# Normalised by their tokenizer.json. (llama.cpp leaves texts as they are; NFC texts have the same ids.)
_NFC = frozenset(("qwen2", "deepseek-r1-qwen", "megrez"))


def has_tokenizer(values: Metadata) -> bool:
    """Whether a file has a tokenizer."""
    return values.text("tokenizer.ggml.model") not in ("", "no_vocab", "none")


def end_tokens(values: Metadata) -> list[int]:
    """Ids of the tokens at which generation stops: end of text, of a turn, of a message; and control
    tokens with a usual name for one of these. In this order, each once.
    """
    own = values.within("tokenizer.ggml")
    ids = [own.token(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    texts, kinds = _tokens(own), _kinds(own)
    ids += [i for i, text in enumerate(texts) if text in _ENDS and kinds[i] in (_CONTROL, _USER_DEFINED)]
    return list(dict.fromkeys(i for i in ids if i is not None and 0 <= i < len(texts)))


def tokenizer_config(values: Metadata) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens and chat templates.

    Raises:
        Unreadable: a key is invalid.
    """
    own = values.within("tokenizer.ggml")
    texts = _tokens(own)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _begins(own),
        "add_eos_token": own.truth("add_eos_token", False),
    }
    for role, key in _ROLES.items():
        token = own.token(key)
        if token is not None and 0 <= token < len(texts):
            config[role] = texts[token]
    named = {"default": values.text("tokenizer.chat_template")}
    for name in values.texts("tokenizer.chat_templates"):
        named[name] = values.text(f"tokenizer.chat_template.{name}")
    templates = [{"name": name, "template": text} for name, text in named.items() if text]
    if templates:
        only = templates[0]["template"] if len(templates) == 1 and named["default"] else None
        config["chat_template"] = only or templates
    return config


def tokenizer_file(values: Metadata, architecture: str) -> dict[str, Any]:
    """The content of tokenizer.json.

    Args:
        values: the key-values of the file.
        architecture: `general.architecture`.

    Raises:
        Unreadable: a key is missing or invalid, or the tokenizer's kind is not supported.
    """
    own = values.within("tokenizer.ggml")
    kind = own.text("model")
    if kind not in _MODELS:
        raise Unreadable(
            f"tokenizer.ggml.model must be one of {', '.join(_MODELS)}; got {shown(kind)}, which is not supported"
        )
    texts, kinds = _tokens(own), _kinds(own)
    if kind == "gpt2":
        parts = _byte_level(own, texts, kinds)
    elif kind == "llama":
        parts = _sentence_pieces(own, texts, kinds, is_gemma=architecture.startswith("gemma"))
    else:
        parts = _word_pieces(own, texts)
    vocabulary = parts["model"]["vocab"]
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[i] != _USER_DEFINED,
        }
        for i, text in enumerate(texts)
        if kinds[i] in (_CONTROL, _USER_DEFINED, _UNKNOWN) and text and vocabulary.get(text) == i
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _ends(own, texts),
        **parts,
    }


def _tokens(own: Metadata) -> list[str]:
    texts = own.texts("tokens")
    if not 0 < len(texts) <= _MAX_TOKENS:
        raise Unreadable(f"tokenizer.ggml.tokens must have 1 to {_MAX_TOKENS} entries; got {len(texts)}")
    return texts


def _kinds(own: Metadata) -> list[int]:
    """The type of every token; normal if the file does not say."""
    kinds, count = own.numbers("token_type"), len(own.texts("tokens"))
    if kinds is None:
        return [_NORMAL] * count
    if len(kinds) != count:
        raise Unreadable(
            f"tokenizer.ggml.token_type must have {count} entries, as many as tokens; got {len(kinds)}"
        )
    return [int(kind) for kind in kinds]


def _vocabulary(texts: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Ids by text, without what converters add to reach the number of rows of the embedding. If two
    tokens have one text, the last has it.
    """
    return {text: i for i, text in enumerate(texts) if not (kinds[i] == _UNUSED and text == f"[PAD{i}]")}


def _begins(own: Metadata) -> bool:
    """Whether texts begin with bos_token."""
    kind, pre = own.text("model"), own.text("pre")
    return own.truth("add_bos_token", kind in ("llama", "bert") or pre in _WHOLE_WORDS)


def _ends(own: Metadata, texts: Sequence[str]) -> dict[str, Any] | None:
    """The post-processor that adds the tokens before and after a text."""
    is_bert = own.text("model") == "bert"
    first = own.token("cls_token_id" if is_bert and own.get("cls_token_id") is not None else "bos_token_id")
    last = own.token("seperator_token_id" if is_bert else "eos_token_id")  # the format spells it so
    if is_bert and last is None:
        last = own.token("separator_token_id")
    before = first if _begins(own) else None
    after = last if is_bert or own.truth("add_eos_token", False) else None
    if before is None and after is None:
        return None

    def entry(token: int | None) -> list[dict[str, Any]]:
        if token is None:
            return []
        if not 0 <= token < len(texts):
            raise Unreadable(f"a special token must be one of {len(texts)} tokens; got id {token}")
        return [{"SpecialToken": {"id": texts[token], "type_id": 0}}]

    single = [*entry(before), {"Sequence": {"id": "A", "type_id": 0}}, *entry(after)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}, *entry(after)]
    used = {texts[token]: token for token in (before, after) if token is not None}
    special = {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in used.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _byte_level(own: Metadata, texts: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    pre = own.text("pre")
    if pre not in _PRE:
        raise Unreadable(
            f"tokenizer.ggml.pre must be one of {', '.join(name for name in _PRE if name)}; got {shown(pre)}, which "
            "is not supported"
        )
    if not pre:
        warn_once(
            "checkpoint",
            "[checkpoint.gguf] a file has no tokenizer.ggml.pre, so texts are divided as llama.cpp divides them then; "
            "some may have other tokens than the original's: use a newer conversion of the model",
        )
    vocabulary = _vocabulary(texts, kinds)
    merges = [list(pair) for pair in _stored_merges(own, vocabulary)]
    split = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _PRE[pre]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, level]},
        "decoder": {**level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _WHOLE_WORDS,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _stored_merges(own: Metadata, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The merges of a file, without those whose tokens do not exist, which never apply."""
    merges = own.texts("merges")
    if not merges or len(merges) > _MAX_MERGES:
        raise Unreadable(f"tokenizer.ggml.merges must have 1 to {_MAX_MERGES} entries; got {len(merges)}")
    for merge in merges:
        cut = merge.find(" ", 1)  # the left side may be a space
        left, right = merge[: max(cut, 0)], merge[cut + 1 :]
        if not left or not right:
            raise Unreadable(f"tokenizer.ggml.merges must have two tokens in each entry; got {shown(merge)}")
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            yield left, right


def _sentence_pieces(
    own: Metadata, texts: Sequence[str], kinds: Sequence[int], *, is_gemma: bool
) -> dict[str, Any]:
    """SentencePiece's merges of the pair with the best score, as merges in this order.

    Gemma's files write tokens of several spaces as spaces. Its scores are not in the order of the
    original's merges; ids are.
    """
    scores = own.numbers("scores")
    if scores is None or len(scores) != len(texts):
        raise Unreadable("tokenizer.ggml.scores must have as many entries as tokens")
    if is_gemma:
        texts = [_SPACE * len(t) if len(t) > 1 and not t.strip(" ") else t for t in texts]
    vocabulary = _vocabulary(texts, kinds)
    merged = [i for i, kind in enumerate(kinds) if kind in (_NORMAL, _USER_DEFINED, _UNUSED)]
    order = {i: -i if is_gemma else float(scores[i]) for i in merged}
    if any(math.isnan(rank) for rank in order.values()):
        raise Unreadable("tokenizer.ggml.scores must be numbers")
    own_pieces = [i for i in merged if vocabulary.get(texts[i]) == i]
    own_pieces.sort(key=lambda i: -order[i])
    merges = [pair for i in own_pieces for pair in _halves(texts[i], vocabulary)]
    has_prefix = own.truth("add_space_prefix", not is_gemma)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    unknown = own.token("unknown_token_id")
    is_token = unknown is not None and 0 <= unknown < len(texts)
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": texts[unknown] if unknown is not None and is_token else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _halves(text: str, vocabulary: Mapping[str, int]) -> list[list[str]]:
    """Every pair of tokens that together are a text, in the order of their ids."""
    if len(text) > _MAX_PIECE:
        return []
    pairs = []
    for cut in range(1, len(text)):
        left = vocabulary.get(text[:cut])
        if left is not None and (right := vocabulary.get(text[cut:])) is not None:
            pairs.append((left, right, cut))
    return [[text[:cut], text[cut:]] for _, _, cut in sorted(pairs)]


def _word_pieces(own: Metadata, texts: Sequence[str]) -> dict[str, Any]:
    """Converters mark tokens at the beginning of a word, and the original those inside of a word."""
    special = re.compile(r"\[[^\]]+\]")
    vocabulary = {}
    for i, text in enumerate(texts):
        is_first = text.startswith(_SPACE)
        name = text[1:] if is_first else text if special.fullmatch(text) else f"##{text}"
        vocabulary[name] = i
    unknown = own.token("unknown_token_id")
    is_token = unknown is not None and 0 <= unknown < len(texts)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": texts[unknown] if unknown is not None and is_token else "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }


def as_json(content: Any) -> bytes:
    """The bytes of a JSON file."""
    return json.dumps(content, ensure_ascii=False).encode()
