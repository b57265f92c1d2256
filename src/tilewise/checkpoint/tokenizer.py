"""The tokenizer of a model directory: tokenizer.json, or vocab.json with merges.txt (early GPT-2
and Qwen2). The metadata of a GGUF file has the content of a tokenizer.json.

The `tokenizers` library parses the files; this module checks what the library does not check. A
tokenizer may have tokens without weights in the model (text Gemma 3 has one, CodeLlama-34b four);
`check_token_ids` rejects texts that use them. A directory with only tokenizer.model (SentencePiece)
is rejected with advice, because the file lacks information that transformers' converters add.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, RootModel

from tilewise.checkpoint.companions import Companions, open_companions
from tilewise.checkpoint.tokenizer_config import AddedTokenFile, TokenizerConfig, load_tokenizer_config
from tilewise.core import CheckpointError, ConfigError, Validator
from tilewise.core.log import warn_once
from tilewise.core.validation import shown
from tilewise.files.reading import (
    Unreadable,
    decode_text,
    parse_json,
    refusals_of,
    validate_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import AddedToken, Tokenizer

__all__ = ["check_token_ids", "load_tokenizer"]

_MAX_TOKENIZER_BYTES = 512 << 20
_MAX_VOCABULARY = 1 << 31
_FILES = ("tokenizer.json", "vocab.json")
_validate = Validator("checkpoint", CheckpointError)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How texts are divided before merges apply, by tokenizer class or, if no file names one, by the model's type.
_KINDS = {
    "GPT2Tokenizer": "gpt2",
    "GPT2TokenizerFast": "gpt2",
    "gpt2": "gpt2",
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
}


class _Subwords(BaseModel):
    """The prefix of tokens inside of a word, for models that have one."""

    model_config = ConfigDict(strict=True, extra="ignore")

    continuing_subword_prefix: str | None = None


class _Added(BaseModel):
    """An added token, with its id in the file."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: int
    content: str


class _TokenizerFile(BaseModel):
    """tokenizer.json, which the library reads; this model checks that it is a JSON object of
    limited depth.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    model: _Subwords | None = None
    added_tokens: list[_Added] | None = None


class _Merges(_Subwords):
    """Pairs of tokens that are merged: lists of two, or strings with a space in between, as in
    older files.
    """

    merges: list[tuple[str, str] | str] = Field(default_factory=list)


class _MergingFile(_TokenizerFile):
    """tokenizer.json of a model with merges."""

    model: _Merges


class _Vocabulary(RootModel[dict[str, Annotated[int, Field(ge=0, lt=_MAX_VOCABULARY)]]]):
    """vocab.json and added_tokens.json: ids by text."""

    model_config = ConfigDict(strict=True)


class _ModelKind(BaseModel):
    """The fields of config.json that determine the tokenizer's kind."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model_type: str | None = None
    tokenizer_class: str | None = None


def load_tokenizer(directory: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model directory.

    Truncation and padding in its file are ignored, as in transformers: a prompt is encoded as it
    is.

    Args:
        directory: directory of the model, or its GGUF file.
        vocab_size: vocabulary size of the model. A tokenizer may have fewer tokens, or added tokens
            beyond it (see `check_token_ids`). If the tokenizer's own vocabulary is larger, a
            warning is logged, because the files may not belong together.

    Raises:
        CheckpointError: there is neither tokenizer.json nor vocab.json with merges.txt, or the
            files cannot be read.
    """
    place = _validate.path("load_tokenizer", "a model directory", directory)
    vocab_size = _validate.integer("load_tokenizer", "vocab_size", vocab_size, 1, _MAX_VOCABULARY)
    config, files = load_tokenizer_config(place), open_companions(place)
    names = [name for name in _FILES if files.has(name)]
    if not names:
        raise _missing(files)
    try:
        tokenizer = _from_json(files, vocab_size) if names[0] == _FILES[0] else _from_merges(files, config)
        with refusals_of("tokenizers"):
            tokenizer.encode("")  # raises if its template uses tokens that do not exist
    except Unreadable as error:
        raise CheckpointError(
            f"[checkpoint.load_tokenizer] {names[0]} must be readable; got {files.called(names[0])}: {error}; "
            "download it again"
        ) from None
    largest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
    if largest >= vocab_size:
        warn_once(
            "checkpoint",
            f"[checkpoint.load_tokenizer] the tokenizer's vocabulary reaches id {largest}, beyond config.json's "
            f"vocab_size {vocab_size}; texts that use such tokens are rejected; check that the files of "
            f"{str(directory)!r} belong together",
        )
    return tokenizer


def check_token_ids(tokenizer: Tokenizer, ids: Sequence[int], vocab_size: int, what: str) -> None:
    """Reject tokens for which the model has no weights.

    Args:
        tokenizer: the model's tokenizer, for the token's text in the message.
        ids: the token ids to check; none is negative.
        vocab_size: vocabulary size of the model.
        what: the source of the ids, for the message: `a prompt`, `logit_bias`.

    Raises:
        ConfigError: an id is at or beyond `vocab_size`. The message names the first such id and its
            text.
    """
    if max(ids, default=-1) < vocab_size:
        return
    wrong = int(next(id_ for id_ in ids if id_ >= vocab_size))
    with refusals_of("tokenizers"):
        text = tokenizer.id_to_token(wrong) if wrong < _MAX_VOCABULARY else None
    raise ConfigError(
        f"[checkpoint.check_token_ids] token ids of {what} must lie below the model's vocab_size {vocab_size}; got "
        f"{wrong}{'' if text is None else f', which is {shown(text)}'}; the model has no weights for it: leave it out"
    )


def _parse_tokenizer(content: bytes, vocab_size: int) -> Tokenizer:
    """A tokenizer that encodes whole texts as they are.

    If the id of an added token in the file is in use or leaves a gap, the library silently gives
    the token another id: the next free id, or the id of the same text in the vocabulary. The model
    would then read a wrong token. So this is rejected, unless the model has weights for neither id.

    Raises:
        Unreadable: the library rejects the content, or fails on it.
    """
    from tokenizers import Tokenizer

    file = parse_json(content, _TokenizerFile)
    if file.model is not None and file.model.continuing_subword_prefix:
        _check_merges(content)
    with refusals_of("tokenizers"):
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = [tokenizer.token_to_id(token.content) for token in file.added_tokens or ()]
    for token, id_ in zip(file.added_tokens or (), ids):
        if id_ != token.id and (id_ is None or min(id_, token.id) < vocab_size):
            raise Unreadable(
                f"added token {shown(token.content)} has id {token.id} in the file, but the tokenizers library assigns "
                f"{'no id' if id_ is None else f'it {id_}'}"
            )
    return tokenizer


def _check_merges(content: bytes) -> None:
    """Check that the right side of every merge begins with the prefix of tokens inside a word. The
    library removes as many bytes without checking, even in the middle of a character, and then
    aborts the process because the text is not UTF-8.

    Raises:
        Unreadable: a merge does not begin with the prefix.
    """
    model = validate_json(content, _MergingFile).model
    prefix = model.continuing_subword_prefix or ""
    for merge in model.merges:
        right = merge[1] if isinstance(merge, tuple) else merge.partition(" ")[2]
        if not right.startswith(prefix):
            raise Unreadable(f"merge {shown(merge)} does not continue with the prefix {shown(prefix)}")


def _missing(files: Companions) -> CheckpointError:
    """The error about a model without a supported tokenizer."""
    has_pieces = files.has("tokenizer.model")
    got = f"{str(files.place)!r}" + (" with tokenizer.model (SentencePiece) only" if has_pieces else "")
    convert = "convert it: transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes tokenizer.json"
    return CheckpointError(
        "[checkpoint.load_tokenizer] a model directory must hold tokenizer.json, or vocab.json and merges.txt; got "
        f"{got}; {convert if has_pieces else 'give a directory that has one'}"
    )


def _from_json(files: Companions, vocab_size: int) -> Tokenizer:
    return _parse_tokenizer(files.read(_FILES[0], _MAX_TOKENIZER_BYTES), vocab_size)


def _from_merges(files: Companions, config: TokenizerConfig) -> Tokenizer:
    """A byte-level tokenizer from vocab.json, merges.txt, and the files of added tokens.

    Raises:
        Unreadable: the files are not of the kind of GPT-2 or Qwen2.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocab = _read_vocabulary(files, "vocab.json")
    merges = _read_merges(files)
    kind = _kind(files, config)
    with refusals_of("tokenizers"):
        tokenizer = Tokenizer(
            models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
        )
        tokenizer.decoder = decoders.ByteLevel()
        _cut_texts(tokenizer, kind, config.add_prefix_space)
    added = {id_: _added(token) for id_, token in config.added_tokens.items()}
    if files.has("added_tokens.json"):
        more = _read_vocabulary(files, "added_tokens.json")
        added = {
            **{id_: AddedToken(text, special=True, normalized=False) for text, id_ in more.items()},
            **added,
        }
    added_texts = {token.content for token in added.values()}
    roles = dict.fromkeys(text for text in config.special_tokens.values() if text not in added_texts)
    with refusals_of("tokenizers"):
        for id_, token in sorted(added.items()):
            tokenizer.add_tokens([token])
            assigned = tokenizer.token_to_id(token.content)
            if assigned != id_:
                raise Unreadable(
                    f"added token {shown(token.content)} has id {id_} in the file, but the next free id is {assigned}"
                )
        for text in roles:
            tokenizer.add_tokens([AddedToken(text, special=True, normalized=False)])
        _put_ends(tokenizer, config)
    return tokenizer


def _added(token: AddedTokenFile) -> AddedToken:
    from tokenizers import AddedToken

    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=not token.special if token.normalized is None else token.normalized,
        special=token.special,
    )


def _cut_texts(tokenizer: Tokenizer, kind: str, add_prefix_space: bool) -> None:
    """Set how the tokenizer divides texts before merges apply."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        return
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
        ]
    )


def _kind(files: Companions, config: TokenizerConfig) -> str:
    """The kind of vocab.json and merges.txt.

    Raises:
        Unreadable: no file says the kind, or the kind is not supported.
    """
    model = _ModelKind()
    if files.has("config.json"):
        model = parse_json(files.read("config.json"), _ModelKind)
    name = config.tokenizer_class or model.tokenizer_class or model.model_type
    if name not in _KINDS:
        raise Unreadable(
            f"tokenizer_class in tokenizer_config.json must be one of {', '.join(k for k in _KINDS if k[0].isupper())}"
            f"; got {shown(name)}"
        )
    return _KINDS[name]


def _read_vocabulary(files: Companions, name: str) -> dict[str, int]:
    try:
        vocab = parse_json(files.read(name, _MAX_TOKENIZER_BYTES), _Vocabulary).root
    except Unreadable as error:
        raise Unreadable(f"{name}: {error}") from None
    if len(set(vocab.values())) != len(vocab):
        raise Unreadable(f"{name}: two texts have one id")
    return vocab


def _read_merges(files: Companions) -> list[tuple[str, str]]:
    name = "merges.txt"
    try:
        text = decode_text(files.read(name, _MAX_TOKENIZER_BYTES))
    except Unreadable as error:
        raise Unreadable(f"{name}: {error}") from None
    merges = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise Unreadable(f"{name}: line {number} must be two tokens; got {shown(line)}")
        merges.append((pair[0], pair[1]))
    return merges


def _put_ends(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Add the tokens at the beginning and end of texts that tokenizer_config.json asks for. (A
    tokenizer.json itself says which tokens to add.)
    """
    from tokenizers import processors

    bos = config.special_tokens.get("bos_token") if config.add_bos_token else None
    eos = config.special_tokens.get("eos_token") if config.add_eos_token else None
    tokens = []
    for text in dict.fromkeys(t for t in (bos, eos) if t is not None):
        id_ = tokenizer.token_to_id(text)
        if id_ is None:
            raise Unreadable(
                f"tokenizer_config.json names {shown(text)}, which is not a token of the vocabulary"
            )
        tokens.append((text, id_))
    single = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
