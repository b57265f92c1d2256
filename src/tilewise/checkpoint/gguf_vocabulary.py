"""The key-values of a GGUF file that describe a tokenizer: byte-level BPE or SentencePiece.

Byte-level tokenizers come from the `tokenizers` library's description (tokenizer.json, or vocab.json
with merges.txt). llama.cpp knows how they divide texts by a name, so other divisions are rejected.
SentencePiece tokenizers need tokenizer.model, which has the scores of pieces; tokenizer.json does not
have them. Tokens beyond the model's vocabulary are left out, and missing ids are filled with unused
tokens, because llama.cpp expects one token per row of the embedding.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tilewise.checkpoint.gguf_writer import Value
from tilewise.checkpoint.tokenizer import load_tokenizer
from tilewise.checkpoint.tokenizer_config import load_tokenizer_config
from tilewise.core.errors import CheckpointError, ConfigError
from tilewise.core.validation import Validator, shown
from tilewise.files.reading import Unreadable, read_whole, refusals_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Piece", "parse_pieces", "vocabulary_values"]

_validate = Validator("checkpoint")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_END_OF_MESSAGE = "<|eom_id|>"
_MAX_PIECES = 1 << 21
_MAX_MODEL_BYTES = 64 << 20
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# llama.cpp's names of the ways in which texts are divided before merges apply: the expressions, and whether
# whole words of the vocabulary are tokens whatever merges say.
_DIVISIONS: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((r"\p{N}", _GPT2), False): "smollm",
}


def vocabulary_values(
    directory: Path, vocab_size: int, bos: int | None, ends: Sequence[int]
) -> dict[str, Value]:
    """The key-values of a model directory's tokenizer and chat templates.

    Args:
        directory: of the model.
        vocab_size: rows of the embedding.
        bos: the token at the beginning of texts, from config.json; None for no such token.
        ends: the tokens at which generation stops.

    Raises:
        ConfigError: the tokenizer cannot be described in GGUF; the message says why.
        CheckpointError: there is no tokenizer, or a file is invalid.
    """
    tokenizer = load_tokenizer(directory, vocab_size)
    content = json.loads(tokenizer.to_str())
    settings = load_tokenizer_config(directory)
    if content["model"]["type"] != "BPE":
        _lacks(f"a {content['model']['type']} tokenizer")
    if content["model"].get("byte_fallback"):
        values = _sentence_pieces(directory, content, vocab_size)
    else:
        values = _byte_level(content, vocab_size)
    roles = {name: tokenizer.token_to_id(text) for name, text in settings.special_tokens.items()}
    bos = bos if bos is not None else roles.get("bos_token")
    tokens = {
        "bos": bos,
        **_end_tokens(ends, roles.get("eos_token"), tokenizer.token_to_id(_END_OF_MESSAGE)),
        "unknown": roles.get("unk_token"),
        "padding": roles.get("pad_token"),
    }
    for name, token in tokens.items():
        if token is not None and token < vocab_size:
            values[f"tokenizer.ggml.{name}_token_id"] = token
    first, last = _added_tokens(tokenizer)
    if first not in (None, bos):
        _lacks(f"texts that begin with token {first}, which is not bos_token")
    values["tokenizer.ggml.add_bos_token"] = first is not None
    values["tokenizer.ggml.add_eos_token"] = last is not None
    templates = dict(settings.chat_templates)
    if "default" in templates:
        values["tokenizer.chat_template"] = templates.pop("default")
    if templates:
        values["tokenizer.chat_templates"] = sorted(templates)
        values |= {f"tokenizer.chat_template.{name}": text for name, text in templates.items()}
    return values


def _end_tokens(ends: Sequence[int], usual: int | None, message: int | None) -> dict[str, int]:
    """The keys of end tokens: the tokenizer's own is `eos`, that of a message to a tool is `eom`, and another
    one ends a turn.
    """
    eos = usual if usual in ends else next(iter(ends), None)
    others = [token for token in ends if token != eos]
    if message in others:
        others.remove(message)
        others.insert(1, message)
    named = {"eos": eos, **dict(zip(("eot", "eom"), others))}
    if others == [message]:
        named = {"eos": eos, "eom": message}
    return {name: token for name, token in named.items() if token is not None}


def _lacks(what: str) -> NoReturn:
    rule = "a GGUF file must describe the model's tokenizer"
    _validate.invalid(
        "gguf_vocabulary", rule, what, "convert it with llama.cpp's converter, or use the safetensors"
    )


def _added_tokens(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """The tokens that are added before and after every text; None if there is no such token."""
    with refusals_of("tokenizers"):
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        whole = tokenizer.encode("a", add_special_tokens=True).ids
    for before in range(len(whole) - len(plain) + 1):
        after = len(whole) - len(plain) - before
        if whole[before : before + len(plain)] == plain and max(before, after) <= 1:
            return (whole[0] if before else None), (whole[-1] if after else None)
    _lacks(f"{len(whole) - len(plain)} special tokens around texts")


def _tokens(entries: Mapping[int, tuple[str, int]], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types by id, for every row of the embedding."""
    rows = [entries.get(id_, (f"[PAD{id_}]", _UNUSED)) for id_ in range(vocab_size)]
    return [text for text, _ in rows], [kind for _, kind in rows]


def _added(content: Mapping[str, Any]) -> dict[int, tuple[str, int]]:
    """Texts and types of added tokens, by id."""
    return {
        token["id"]: (token["content"], _CONTROL if token["special"] else _USER_DEFINED)
        for token in content.get("added_tokens") or ()
    }


def _byte_level(content: Mapping[str, Any], vocab_size: int) -> dict[str, Value]:
    model = content["model"]
    normalizer = content.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":
        _lacks(f"a normalizer {normalizer['type']}")
    divisions = tuple(_expressions(content.get("pre_tokenizer")))
    name = _DIVISIONS.get((divisions, bool(model.get("ignore_merges"))))
    if name is None:
        _lacks(f"texts divided by {shown(divisions)}")
    entries = {id_: (text, _NORMAL) for text, id_ in model["vocab"].items()}
    texts, kinds = _tokens({**entries, **_added(content)}, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }


def _expressions(pre: Mapping[str, Any] | None) -> Iterator[str]:
    """The expressions by which a byte-level tokenizer divides texts, one after the other."""
    parts = [] if pre is None else pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    if not parts or parts[-1]["type"] != "ByteLevel":
        _lacks("a tokenizer that is not byte-level")
    for part in parts:
        if part["type"] == "ByteLevel":
            if part.get("add_prefix_space"):
                _lacks("a space before every text")
            if part.get("use_regex", True):
                yield _GPT2
        elif part["type"] == "Digits" and part.get("individual_digits"):
            yield r"\p{N}"
        elif part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            yield str(part["pattern"].get("Regex", ""))
        else:
            _lacks(f"texts divided by {part['type']}")


def _sentence_pieces(directory: Path, content: Mapping[str, Any], vocab_size: int) -> dict[str, Value]:
    path = directory / "tokenizer.model"
    if not os.path.lexists(path):
        _lacks("a SentencePiece tokenizer without tokenizer.model, which has the scores of pieces")
    try:
        pieces, has_prefix = parse_pieces(read_whole(path, _MAX_MODEL_BYTES))
    except Unreadable as error:
        raise CheckpointError(
            f"[checkpoint.gguf_vocabulary] tokenizer.model must be a SentencePiece model; got {str(path)!r}: {error}; "
            "download it again"
        ) from None
    added = _added(content)
    vocabulary = content["model"]["vocab"]
    for id_, piece in enumerate(pieces[:vocab_size]):
        if id_ not in added and vocabulary.get(piece.text) != id_:
            raise ConfigError(
                "[checkpoint.gguf_vocabulary] tokenizer.model and tokenizer.json must have the same tokens; got "
                f"{shown(piece.text)} with id {id_} in tokenizer.model and {vocabulary.get(piece.text)} in "
                f"tokenizer.json of {str(directory)!r}; download both again"
            )
    entries = {id_: (piece.text, piece.kind) for id_, piece in enumerate(pieces)}
    for id_, (text, kind) in added.items():
        own = entries.get(id_, ("", _NORMAL))
        entries[id_] = own if own[0] == text and own[1] != _NORMAL else (text, kind)
    texts, kinds = _tokens(entries, vocab_size)
    scores = [pieces[i].score if i < len(pieces) else -1000.0 for i in range(vocab_size)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }


@dataclass(frozen=True)
class Piece:
    """A piece of a SentencePiece model.

    Attributes:
        text: its text.
        score: pieces with higher scores are merged first.
        kind: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    """

    text: str
    score: float
    kind: int


def parse_pieces(data: bytes) -> tuple[list[Piece], bool]:
    """The pieces of a SentencePiece model in the order of their ids, and whether a space is put before
    texts.

    Args:
        data: the file, a message in the encoding of Protocol Buffers.

    Raises:
        Unreadable: it is not such a message, or a piece is invalid.
    """
    pieces: list[Piece] = []
    has_prefix = True
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(value))
            if len(pieces) > _MAX_PIECES:
                raise Unreadable(f"it has more than {_MAX_PIECES} pieces")
        elif number == 3:
            flags = [flag for place, flag in _fields(_message(value)) if place == 3]
            has_prefix = bool(flags[-1]) if flags else True
    if not pieces:
        raise Unreadable("it has no pieces")
    return pieces, has_prefix


def _message(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise Unreadable("a number stands in the place of a message")
    return value


def _piece(value: bytes | int) -> Piece:
    text, score, kind = "", 0.0, _NORMAL
    for number, field in _fields(_message(value)):
        if number == 1:
            try:
                text = _message(field).decode("utf-8")
            except UnicodeDecodeError:
                raise Unreadable("a piece is not UTF-8") from None
        elif number == 2:
            encoded = _message(field)
            score = struct.unpack("<f", encoded)[0] if len(encoded) == 4 else float("nan")
        elif number == 3:
            kind = field if isinstance(field, int) else 0
    if not text or not _NORMAL <= kind <= _BYTE or not math.isfinite(score):
        raise Unreadable(f"a piece is invalid: {shown(text)}, type {kind}, score {score}")
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Numbers and values of a message's fields: integers, and the bytes of all other types."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if kind == 2:
            size, place = _varint(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise Unreadable(f"a field has the unknown type {kind}")
        if size > len(data) - place:
            raise Unreadable("a field is longer than the file")
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """An integer of variable length, and the place after it."""
    value = 0
    for count in range(10):
        if place + count >= len(data):
            raise Unreadable("it ends within a number")
        byte = data[place + count]
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            return value, place + count + 1
    raise Unreadable("a number is too long")
