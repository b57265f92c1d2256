"""From a source of `[[data]]` to sequences of token ids with labels.

Reads texts or records, renders conversations with the model's chat template, encodes them, decides
which labels the loss counts, and holds some documents out. Every error about a record names its
file and line, and is raised before any training. Tokens and masks are those of transformers'
`apply_chat_template` with `return_assistant_tokens_mask`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilewise.checkpoint import check_token_ids
from tilewise.core import ConfigError, shown
from tilewise.data import (
    IGNORED,
    Corpus,
    ExampleCounts,
    ExampleList,
    Examples,
    PackedExamples,
    PaddedExamples,
    PairedExamples,
    Record,
    Sequences,
    TextDocuments,
    TextWindows,
    encode_files,
    is_held_out,
    load_corpus,
    load_standard_library,
    read_records,
    record_files,
)
from tilewise.files.reading import Unreadable, refusals_of
from tilewise.train.data_sections import STDLIB, DataSection, DataSource

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from tilewise.generate import ChatTemplate, RenderedChat

__all__ = ["Encoder", "PreparedSource", "prepare_source", "read_corpus", "training_texts"]

_T = TypeVar("_T")
_BATCH = 256  # records that are rendered and encoded together
Spans = Sequence[tuple[int, int]]
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Encoder:
    """What turns texts into ids.

    Attributes:
        tokenizer: of the model.
        end: id that ends a document.
        vocab_size: number of ids that the model has weights for.
        template: the model's chat template; called when the first conversation needs it.
    """

    tokenizer: Tokenizer
    end: int
    vocab_size: int
    template: Callable[[], ChatTemplate]


@dataclass(frozen=True)
class PreparedSource:
    """The sequences of a source.

    Attributes:
        source: its settings.
        train: sequences to train on.
        held_out: sequences for evaluation; None without such data, or if training does not evaluate.
        counts: figures about the documents to train on.
        corpus: the texts of a source of text; otherwise empty.
        digest: SHA-256 of the ids, and labels, to train on.
    """

    source: DataSource
    train: Sequences
    held_out: Sequences | None
    counts: ExampleCounts
    corpus: Corpus
    digest: str


def read_corpus(source: DataSource) -> Corpus:
    """The texts of a source of text.

    Raises:
        ConfigError: there is no text.
    """
    percent = 0.0 if source.validation_path is not None else source.held_out_percent
    if source.path == STDLIB:
        corpus = load_standard_library(percent)
    else:
        corpus = load_corpus(source.path, percent, source.field_text)
    if source.validation_path is None:
        return corpus
    return replace(corpus, held_out=load_corpus(source.validation_path, 0.0, source.field_text).train)


def training_texts(source: DataSource) -> Iterator[str]:
    """The texts of pairs, for a tokenizer that is trained on the data."""
    for record, is_for_training in _records(source):
        if is_for_training:
            yield from (record.text(field) for field in (source.field_prompt, source.field_completion))


def prepare_source(
    source: DataSource,
    data: DataSection,
    corpus: Corpus | None,
    encoder: Encoder,
    show: Callable[[int, int], None],
    *,
    evaluates: bool,
) -> PreparedSource:
    """Encode a source.

    Args:
        source: its settings.
        data: what concerns all sources.
        corpus: its texts, if it is a source of text.
        encoder: of the model.
        show: called with the number of documents that are done and of all; the latter may be 0 if
            it is unknown.
        evaluates: whether data for evaluation is encoded too.

    Raises:
        ConfigError: a record is invalid, or there is too little data.
    """
    if corpus is None and source.type == "preference":
        return _from_pairs(source, data, encoder, show, evaluates)
    if corpus is None:
        return _from_records(source, data, encoder, show, evaluates)
    stream, counts = _stream(source, data, [file.text for file in corpus.train], encoder, show)
    digest = hashlib.sha256(stream.tobytes()).hexdigest()
    train, held_out = _of_stream(stream, data, encoder.end), None
    if evaluates and corpus.held_out:
        held_out_stream, _ = _stream(source, data, [file.text for file in corpus.held_out], encoder)
        if data.is_padded or len(held_out_stream) > data.context:
            held_out = _of_stream(held_out_stream, data, encoder.end)
    return PreparedSource(source, train, held_out, counts, corpus, digest)


def _stream(
    source: DataSource,
    data: DataSection,
    texts: Sequence[str],
    encoder: Encoder,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Ids, ExampleCounts]:
    """All texts as one stream, and figures about it."""
    counts = ExampleCounts(examples=len(texts))

    def fit(ids: Ids) -> Ids:
        if source.excess_length_strategy == "split" or len(ids) <= data.context:
            return ids
        if source.excess_length_strategy == "truncate":
            counts.truncated += 1
            return ids[: data.context]
        counts.dropped += 1
        counts.examples -= 1
        return ids[:0]

    stream = encode_files(encoder.tokenizer, texts, encoder.end, show, fit)
    beyond = stream[stream >= encoder.vocab_size][:1].tolist()
    check_token_ids(encoder.tokenizer, beyond, encoder.vocab_size, "the training data")
    counts.tokens = counts.counted = len(stream)
    return stream, counts


def _of_stream(stream: Ids, data: DataSection, end: int) -> Sequences:
    return TextDocuments(stream, data.context, end) if data.is_padded else TextWindows(stream, data.context)


def _from_pairs(
    source: DataSource,
    data: DataSection,
    encoder: Encoder,
    show: Callable[[int, int], None],
    evaluates: bool,
) -> PreparedSource:
    """The pairs of a source. A pair whose sequences do not both fit is truncated or dropped as one."""
    train, held_out = _PairList(data.context + 1, source), _PairList(data.context + 1, source)
    for record, is_for_training, pair in _encoded(source, _Preferences(source, encoder), show):
        for ids, _ in pair:
            _check_ids(encoder, record, ids)
        if is_for_training or evaluates:
            (train if is_for_training else held_out).add(pair)
    _require_some(train.counts, source, "a pair")
    rest = PairedExamples(held_out.finish()) if held_out.counts.examples else None
    examples = train.finish()
    return _prepared(source, examples, PairedExamples(examples), rest, train.counts)


def _encoded(
    source: DataSource, encode: Callable[[list[Record]], Iterable[_T]], show: Callable[[int, int], None]
) -> Iterator[tuple[Record, bool, _T]]:
    """The records of a source, whether each is for training, and what `encode` makes of it. Records
    are encoded in groups.
    """
    records, num_done = _records(source), 0
    while group := list(islice(records, _BATCH)):
        for (record, is_for_training), encoded in zip(group, encode([r for r, _ in group])):
            yield record, is_for_training, encoded
        num_done += len(group)
        show(num_done, 0)


def _check_ids(encoder: Encoder, record: Record, ids: Ids) -> None:
    beyond = ids[ids >= encoder.vocab_size][:1].tolist()
    check_token_ids(encoder.tokenizer, beyond, encoder.vocab_size, f"the training data ({record.place})")


def _require_some(counts: ExampleCounts, source: DataSource, what: str) -> None:
    """Raise ConfigError if there is nothing to train on."""
    if not counts.examples:
        raise ConfigError(
            f"[train.data] data must hold {what} to train on; got {counts.dropped} longer than the context and "
            f"{counts.unlabelled} without a counted label in {source.path!r}; raise the context, set roles if the "
            "file has other names for the assistant's turns, or give other data"
        )


def _prepared(
    source: DataSource,
    examples: Examples,
    train: Sequences,
    held_out: Sequences | None,
    counts: ExampleCounts,
) -> PreparedSource:
    digest = hashlib.sha256()
    for array in (examples.tokens, examples.labels, examples.ends):
        digest.update(array.tobytes())
    return PreparedSource(source, train, held_out, counts, Corpus((), ()), digest.hexdigest())


class _PairList:
    """Collects pairs that fit sequences.

    Args:
        most: maximum number of tokens of a sequence.
        source: says what happens to longer ones.
    """

    def __init__(self, most: int, source: DataSource) -> None:
        self._most, self._strategy = most, source.excess_length_strategy
        self._examples = ExampleList(most, self._strategy)
        self.counts = ExampleCounts()

    def add(self, pair: tuple[tuple[Ids, Ids], tuple[Ids, Ids]]) -> None:
        """Add a pair, if both sequences have a counted label within the context."""
        is_long = any(len(ids) > self._most for ids, _ in pair)
        if is_long and self._strategy == "drop":
            self.counts.dropped += 1
        elif not all((labels[1 : self._most] != IGNORED).any() for _, labels in pair):
            self.counts.unlabelled += 1
        else:
            for ids, labels in pair:
                self._examples.add(ids, labels)
            own = self._examples.counts
            self.counts.examples, self.counts.truncated = own.examples // 2, self.counts.truncated + is_long
            self.counts.tokens, self.counts.counted = own.tokens, own.counted

    def finish(self) -> Examples:
        """The examples so far: chosen and rejected ones in turns."""
        return self._examples.finish()


def _from_records(
    source: DataSource,
    data: DataSection,
    encoder: Encoder,
    show: Callable[[int, int], None],
    evaluates: bool,
) -> PreparedSource:
    # without packing, the last token of an example is only predicted
    most = data.context + 1 if data.is_padded else data.context
    train, held_out = (ExampleList(most, source.excess_length_strategy) for _ in range(2))
    first_held_out: tuple[Ids, Ids] | None = None
    for record, is_for_training, (ids, labels) in _encoded(
        source, _ENCODERS[source.type](source, encoder), show
    ):
        _check_ids(encoder, record, ids)
        if is_for_training:
            train.add(ids, labels)
        elif not first_held_out:
            first_held_out = ids, labels
        elif evaluates:
            held_out.add(ids, labels)
    if first_held_out is not None:  # it is for training if the hash held out all of a few records
        if not train.counts.examples and source.validation_path is None:
            train.add(*first_held_out)
        elif evaluates:
            held_out.add(*first_held_out)
    _require_some(train.counts, source, "an example")
    rest = _of_examples(held_out.finish(), data) if held_out.counts.examples else None
    examples = train.finish()
    return _prepared(source, examples, _of_examples(examples, data), rest, train.counts)


def _of_examples(examples: Examples, data: DataSection) -> Sequences:
    if data.is_padded:
        return PaddedExamples(examples)
    return PackedExamples(examples, data.context, data.pad_to_multiple_of)


def _records(source: DataSource) -> Iterator[tuple[Record, bool]]:
    """The records of a source, and whether each is for training."""
    fields = [getattr(source, name) for name in type(source).model_fields if name.startswith("field_")]
    percent = 0.0 if source.validation_path is not None else source.held_out_percent
    for path in (source.path, source.validation_path):
        if path is None:
            continue
        for name, file in record_files(path).items():
            for record in read_records(name, file, fields):
                is_for_training = path == source.path and not is_held_out(record.name, percent)
                yield record, is_for_training


class _Conversations:
    """Encodes conversations. The labels of the model's turns are counted: of what the template puts
    in `{% generation %}`; without such blocks, of what follows the rendered messages before the turn.
    """

    def __init__(self, source: DataSource, encoder: Encoder) -> None:
        self._source, self._encoder, self._template = source, encoder, encoder.template()
        self._names = {name: role for role, names in source.roles.items() for name in names}
        self._added = [token.content for token in encoder.tokenizer.get_added_tokens_decoder().values()]

    def __call__(self, records: Sequence[Record]) -> Iterator[tuple[Ids, Ids]]:
        conversations = [self.messages(record, self._source.field_messages) for record in records]
        whole = self.render(records, conversations, False)
        if self._source.train_on_inputs:
            spans: list[Spans] = [[(0, len(each.text))] for each in whole]
        else:
            spans = [each.spans for each in whole]
            unmarked = [n for n, record in enumerate(records) if not self._is_marked(record)]
            turns = self._spans_of_turns(
                [records[n] for n in unmarked],
                [conversations[n] for n in unmarked],
                [whole[n].text for n in unmarked],
            )
            for number, own in zip(unmarked, turns):
                spans[number] = own
        last = slice(-1, None) if self._source.mask_history else slice(None)
        texts = [(each.text, own[last]) for each, own in zip(whole, spans)]
        yield from _with_masks(self._encoder, records, texts)

    def _is_marked(self, record: Record) -> bool:
        return self._template.has_generation(tools=self._tools(record) is not None)

    def messages(self, record: Record, field: str) -> list[dict[str, Any]]:
        """The messages in a field, with the usual names of roles and contents."""
        value = record.value(field)
        if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
            rule = f"field {field!r} must be a list of messages"
            record.invalid(rule, shown(value, 40), "set the names of fields, or repair the record")
        return [self._message(record, message) for message in value]

    def _message(self, record: Record, message: dict[str, Any]) -> dict[str, Any]:
        """A message with the usual names of its role and content."""
        names = {"role": "role", "content": "content", **self._source.message_property_mappings}
        renamed = {
            key: value for key, value in message.items() if value is not None or key == names["content"]
        }
        for ours, theirs in names.items():
            if theirs != ours and theirs in renamed:
                renamed[ours] = renamed.pop(theirs)
        role = renamed.get("role")
        if not isinstance(role, str):
            keys = ", ".join(shown(key, 40) for key in list(message)[:6])
            advice = "set message_property_mappings, for example { role = 'from', content = 'value' }"
            record.invalid("a message must have a role", keys or "an empty message", advice)
        renamed["role"] = self._names.get(role, role)
        content = renamed.get("content")
        if isinstance(content, list):
            parts = [
                part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
            ]
            if len(parts) == len(content) and all(isinstance(part, str) for part in parts):
                content = renamed["content"] = "".join(map(str, parts))
        if content is not None and not isinstance(content, str):
            rule = "the content of a message must be text, or a list of parts of type 'text'"
            record.invalid(rule, shown(content, 40), "convert it to text")
        return renamed

    def _tools(self, record: Record) -> list[dict[str, Any]] | None:
        tools = record.fields.get(self._source.field_tools)
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            record.invalid("tools must be a list of JSON schemas", shown(tools, 40), "set field_tools")
        return tools

    def _spans_of_turns(
        self,
        records: Sequence[Record],
        conversations: Sequence[list[dict[str, Any]]],
        texts: Sequence[str],
    ) -> list[Spans]:
        """The places of the assistant's turns, by rendering the messages before each turn, with the
        tokens that introduce an answer, and those up to its end.
        """
        turns = [
            (number, turn) for number, messages in enumerate(conversations) for turn in self._turns(messages)
        ]
        owners = [records[number] for number, _ in turns]
        before = self.render(owners, [conversations[n][:t] for n, t in turns], True)
        after = self.render(owners, [conversations[n][: t + 1] for n, t in turns], False)
        spans: list[list[tuple[int, int]]] = [[] for _ in conversations]
        for (number, turn), first, last in zip(turns, before, after):
            text = texts[number]
            is_last = turn + 1 == len(conversations[number])
            end = len(text) if is_last else _end_of_turn(last.text, text, self._added)
            if not text.startswith(first.text) or end < len(first.text):
                records[number].invalid(
                    "the template must render a conversation as the beginning of the longer one, or mark answers with "
                    "{% generation %}",
                    f"another text for the messages before or up to number {turn + 1}",
                    "put {% generation %} into chat_template.jinja, or set mask_history = true",
                )
            spans[number].append((len(first.text), end))
        return list(spans)

    def _turns(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The numbers of the messages that are learned."""
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        return turns[-1:] if self._source.mask_history else turns

    def render(
        self,
        records: Sequence[Record],
        conversations: Sequence[Sequence[dict[str, Any]]],
        add_generation_prompt: bool,
    ) -> list[RenderedChat]:
        """The texts of conversations, with the tools of their records.

        Raises:
            ConfigError: the template does not render one. The message names its record.
        """
        tools = [self._tools(record) for record in records]
        groups = [[n] for n, own in enumerate(tools) if own is not None]
        groups.append([n for n, own in enumerate(tools) if own is None])
        texts: dict[int, RenderedChat] = {}
        for group in filter(None, groups):
            options: dict[str, Any] = {
                "tools": tools[group[0]],
                "add_generation_prompt": add_generation_prompt,
            }
            try:
                rendered = self._template.render_all([conversations[n] for n in group], **options)
            except ConfigError:  # a value is not JSON: find its record
                rendered = [self._alone(records[n], conversations[n], options) for n in group]
            for number, each in zip(group, rendered):
                if isinstance(each, ConfigError):
                    raise _in_record(each, records[number])
                texts[number] = each
        return [texts[number] for number in range(len(records))]

    def _alone(
        self, record: Record, messages: Sequence[dict[str, Any]], options: dict[str, Any]
    ) -> RenderedChat | ConfigError:
        try:
            return self._template.render_all([messages], **options)[0]
        except ConfigError as error:
            raise _in_record(error, record) from None


def _end_of_turn(beginning: str, text: str, added: Sequence[str]) -> int:
    """Where a conversation's beginning ends in the text of the longer conversation; -1 if it is not its
    beginning. Some templates put a mark after the last message only, which is not part of a turn. The
    mark may begin as the next message does, but no added token is divided.
    """
    if text.startswith(beginning):
        return len(beginning)
    common = next((i for i, (a, b) in enumerate(zip(beginning, text)) if a != b), len(text))
    if not text.endswith(beginning[common:]):
        return -1
    divided = (
        begin
        for token in added
        for begin in range(max(0, common - len(token) + 1), common)
        if text.startswith(token, begin)
    )
    return min(divided, default=common)


def _in_record(error: ConfigError, record: Record) -> ConfigError:
    """An error of the template, with the record's place."""
    return ConfigError(f"[train.data] {record.place}: {str(error).partition('] ')[2]}")


class _Pairs:
    """Encodes prompts with their completions, which are texts or lists of messages. The labels of
    completions are counted. Texts are encoded as prompts are, with the tokens that the tokenizer puts
    before a text, and the end id follows.
    """

    def __init__(self, source: DataSource, encoder: Encoder) -> None:
        self._source, self._encoder = source, encoder
        self._chat: _Conversations | None = None

    def __call__(self, records: Sequence[Record]) -> Iterator[tuple[Ids, Ids]]:
        source = self._source
        if isinstance(records[0].fields.get(source.field_completion), list):
            yield from self._conversations(records)
            return
        texts: list[tuple[str, Spans]] = []
        for record in records:
            prompt, completion = record.text(source.field_prompt), record.text(source.field_completion)
            begin = 0 if source.train_on_inputs else len(prompt)
            texts.append((prompt + completion, [(begin, len(prompt) + len(completion))]))
        end = np.array([self._encoder.end], np.int32)
        for ids, labels in _with_masks(self._encoder, records, texts, add_special_tokens=True):
            rest = end[: int(not len(ids) or ids[-1] != end[0])]
            yield np.concatenate([ids, rest]), np.concatenate([labels, rest])

    def _conversations(self, records: Sequence[Record]) -> Iterator[tuple[Ids, Ids]]:
        """Pairs of lists of messages."""
        if self._chat is None:
            self._chat = _Conversations(self._source, self._encoder)
        source, chat = self._source, self._chat
        prompts = [chat.messages(record, source.field_prompt) for record in records]
        completions = [chat.messages(record, source.field_completion) for record in records]
        whole = chat.render(records, [[*p, *c] for p, c in zip(prompts, completions)], False)
        texts: list[tuple[str, Spans]] = []
        for record, each, before in zip(records, whole, chat.render(records, prompts, True)):
            if not each.text.startswith(before.text):
                rule = "the template must render a prompt as the beginning of prompt and completion"
                record.invalid(rule, "another text", "use type = 'chat' and a template with {% generation %}")
            begin = 0 if source.train_on_inputs else len(before.text)
            texts.append((each.text, [(begin, len(each.text))]))
        yield from _with_masks(self._encoder, records, texts)


class _Pretokenized:
    """Takes ids, and labels if there are any, as they are."""

    def __init__(self, source: DataSource, encoder: Encoder) -> None:
        self._source, self._vocab_size = source, encoder.vocab_size

    def __call__(self, records: Sequence[Record]) -> Iterator[tuple[Ids, Ids]]:
        for record in records:
            ids = self.ids(record, self._source.field_input_ids)
            labels = ids
            if record.fields.get(self._source.field_labels) is not None:
                labels = self.ids(record, self._source.field_labels, IGNORED)
            if len(labels) != len(ids):
                rule = f"{self._source.field_labels!r} must be as long as {self._source.field_input_ids!r}"
                record.invalid(rule, f"{len(labels)} and {len(ids)}", "repair the record")
            yield ids, labels

    def ids(self, record: Record, field: str, also: int = 0) -> Ids:
        """The ids in a field of a record; `also` is a further number that may be in it.

        Raises:
            ConfigError: the field is not a list of ids of the model.
        """
        value = record.value(field)
        try:
            ids = np.asarray(value) if value != [] else np.empty(0, np.int32)
        except (ValueError, OverflowError):  # lists of several lengths
            ids = np.empty((0, 0))
        if not isinstance(value, list) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            record.invalid(
                f"field {field!r} must be a list of integers", shown(value, 40), "repair the record"
            )
        wrong = ids[(ids != also) & ((ids < 0) | (ids >= self._vocab_size))]
        if wrong.size:
            rule = f"ids of field {field!r} must lie in [0, {self._vocab_size - 1}]" + (
                f" or be {IGNORED}" if also else ""
            )
            record.invalid(rule, str(wrong[0]), "use the tokenizer of the model")
        return ids.astype(np.int32)


class _Preferences:
    """Encodes prompts with a chosen and a rejected completion: texts, lists of messages, or lists of
    ids. Completions that are whole conversations need no prompt; what they have in common is the
    prompt. The labels of completions are counted.
    """

    def __init__(self, source: DataSource, encoder: Encoder) -> None:
        self._source, self._encoder = source, encoder
        self._ids = _Pretokenized(source, encoder)
        fields = (source.field_chosen, source.field_rejected)
        self._pairs = [_Pairs(source.model_copy(update={"field_completion": f}), encoder) for f in fields]

    def __call__(self, records: Sequence[Record]) -> Iterator[tuple[tuple[Ids, Ids], tuple[Ids, Ids]]]:
        source = self._source
        if all(_is_ids(record.fields.get(source.field_chosen)) for record in records):
            for record in records:
                yield self._of_ids(record, source.field_chosen), self._of_ids(record, source.field_rejected)
            return
        records = [self._with_prompt(record) for record in records]
        chosen, rejected = (encode(records) for encode in self._pairs)
        yield from zip(chosen, rejected)

    def _of_ids(self, record: Record, field: str) -> tuple[Ids, Ids]:
        prompt, completion = (self._ids.ids(record, name) for name in (self._source.field_prompt, field))
        masked = np.full(len(prompt), IGNORED, np.int32)
        return np.concatenate([prompt, completion]), np.concatenate([masked, completion])

    def _with_prompt(self, record: Record) -> Record:
        """A record whose prompt is what both conversations begin with."""
        source = self._source
        both = [record.fields.get(field) for field in (source.field_chosen, source.field_rejected)]
        chosen, rejected = both
        if record.fields.get(source.field_prompt) is not None or not (
            isinstance(chosen, list) and isinstance(rejected, list)
        ):
            return record
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), 0)
        if not shared:
            record.invalid(
                "two conversations without a prompt must begin with the same messages and then differ",
                "conversations without a common beginning, or equal ones",
                f"add the field {source.field_prompt!r}, or repair the record",
            )
        fields = {source.field_prompt: chosen[:shared], source.field_chosen: chosen[shared:]}
        return replace(record, fields={**record.fields, **fields, source.field_rejected: rejected[shared:]})


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(number) is int for number in value)


_ENCODERS: Mapping[str, type[_Conversations] | type[_Pairs] | type[_Pretokenized]] = {
    "chat": _Conversations,
    "prompt_completion": _Pairs,
    "pretokenized": _Pretokenized,
}


def _with_masks(
    encoder: Encoder,
    records: Sequence[Record],
    texts: Sequence[tuple[str, Spans]],
    *,
    add_special_tokens: bool = False,
) -> Iterator[tuple[Ids, Ids]]:
    """Ids of texts, and labels that count the tokens which overlap a span of characters."""
    encoded = _encode(encoder.tokenizer, records, [text for text, _ in texts], add_special_tokens)
    for encoding, (_, spans) in zip(encoded, texts):
        ids = np.array(encoding.ids, np.int32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        is_counted = np.zeros(len(ids), bool)
        for begin, end in spans:
            is_counted |= (offsets[:, 1] > begin) & (offsets[:, 0] < end)
        yield ids, np.where(is_counted, ids, np.int32(IGNORED)).astype(np.int32)


def _encode(
    tokenizer: Tokenizer, records: Sequence[Record], texts: Sequence[str], add_special_tokens: bool
) -> Sequence[Encoding]:
    for record, text in zip(records, texts):
        record.checked(text)
    try:
        with refusals_of("tokenizers"):
            encoded: Sequence[Encoding] = tokenizer.encode_batch(
                list(texts), add_special_tokens=add_special_tokens
            )
            return encoded
    except Unreadable as error:
        raise ConfigError(
            f"[train.data] texts must have tokens in tokenizer.json; got {error} in {records[0].place} to "
            f"{records[-1].place}; check the tokenizer"
        ) from None
