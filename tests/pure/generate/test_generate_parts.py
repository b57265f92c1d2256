"""The parts of generation that need no model: sampling, pages, text from tokens."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tilewise.core import ConfigError, NotFinite
from tilewise.data import train_tokenizer
from tilewise.generate import check_prompt, encode_prompt
from tilewise.generate.detokenizer import Detokenizer, TextOffsets
from tilewise.generate.history import History
from tilewise.generate.sampling import Sampling, choose_token
from tilewise.generate.token_bytes import TokenBytes

LOGITS = np.random.default_rng(0).standard_normal(100).astype(np.float32)
TOKENIZER = train_tokenizer(["hello world ä€😀 " * 10], vocab_size=280)


def _samples(sampling, count=2000):
    history, tokens = History([]), []
    for _ in range(count):
        tokens.append(choose_token(LOGITS, sampling, history))
        history.append(0)
    return np.array(tokens)


def test_tiny_temperature_takes_the_likeliest():
    """Where logits over the temperature overflow a double."""
    sampling = Sampling(temperature=5e-324, top_p=0.9)
    assert set(_samples(sampling, 20)) == {int(np.argmax(LOGITS))}


def test_sample_depends_on_seed_and_position_only():
    """The same seed and position always sample the same token, others do not always."""
    samples = _samples(Sampling(temperature=1.0, seed=3), 100).tolist()
    for position in range(99, -1, -1):
        assert (
            choose_token(LOGITS, Sampling(temperature=1.0, seed=3), History([5] * position))
            == samples[position]
        )
    assert samples[:7] == [91, 74, 77, 79, 95, 11, 91]  # in any process, on any machine
    assert len(set(samples)) > 30
    assert (
        len(
            {
                choose_token(LOGITS, Sampling(temperature=1.0, seed=seed), History([0] * 9))
                for seed in range(20)
            }
        )
        > 3
    )


@pytest.mark.parametrize(("bad", "temperature"), [(np.nan, 0.0), (np.inf, 0.7), (-np.inf, 0.0)])
def test_nan_logits_are_an_error(bad, temperature):
    """An overflow or damaged weights give an error that names the token, not text."""
    logits = LOGITS.copy()
    logits[7] = bad
    with pytest.raises(NotFinite, match="token 7 at position 9"):
        choose_token(logits, Sampling(temperature=temperature), History([0] * 9))


def test_masked_logits_pick_nothing():
    """A token below the mask could come; `Sampling` and grammars say which may not."""
    with pytest.raises(ConfigError, match="logits must be an array without a mask"):
        choose_token(np.ma.masked_less(LOGITS, 0), Sampling(), History([0] * 9))


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": 2**63},
        {"temperature": "hot"},
        {"bad_words": [""]},
        {"bad_words_ids": [[-1]]},
        {"min_tokens": 129},
        {"n": 2},
    ],
)
def test_values_out_of_range_are_rejected(wrong):
    """The error names the setting; the tests of `settings` try the bounds of every one."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_pending_bytes_are_shown_at_the_end():
    """A text may end within a character, which is not shown before; a second flush gives nothing more."""
    detokenizer = Detokenizer(TOKENIZER, [])
    tokens = TOKENIZER.encode("a\U0001f680").ids[:-1]
    assert "".join(detokenizer.add(token) for token in (0, *tokens)) == "a"  # special tokens have no text
    assert [detokenizer.finish(), detokenizer.finish()] == ["\ufffd", ""]


def _streamed(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer, [])
    return [detokenizer.add(token) for token in ids]


BYTES = {c: TOKENIZER.token_to_id(c) for c in pre_tokenizers.ByteLevel.alphabet()}


@settings(max_examples=150)
@example([95, 95, 157, 269, 269])  # few tokens, each of several broken bytes
@given(
    st.lists(
        st.sampled_from(sorted(BYTES.values())) | st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=60
    )
    | st.text(alphabet=st.sampled_from("ab ä€😀한\n"), max_size=30).map(
        lambda text: TOKENIZER.encode(text).ids
    )
)
def test_streamed_bytes_are_the_decoded_bytes(ids):
    """For any tokens: the stream equals decoding at once, but for bytes that may still be completed."""
    detokenizer, decoded = Detokenizer(TOKENIZER, []), TOKENIZER.decode(ids)
    text = "".join(detokenizer.add(token) for token in ids)
    assert decoded.startswith(text)
    kept_back = decoded[len(text) :]
    assert set(kept_back) <= {"\ufffd"}
    assert len(kept_back) <= sum(len(TOKENIZER.id_to_token(token)) for token in ids[-7:])
    assert text + detokenizer.finish() == decoded


def test_character_after_many_broken_bytes_is_whole():
    """Invalid bytes are shown in time, and do not swallow the next character."""
    garbage = [TOKENIZER.token_to_id("Â")] * 7  # byte 0xC2, which begins a character, again and again
    rocket = [BYTES[c] for c in "ðŁļĢ"]
    pieces = _streamed(TOKENIZER, [*garbage, *rocket])
    assert "".join(pieces) == "\ufffd" * 7 + "🚀" and pieces[-1].endswith("🚀")
    assert len("".join(_streamed(TOKENIZER, garbage * 4))) >= len(garbage * 4) - 1


def test_sentencepiece_bytes_are_characters():
    """A tokenizer with byte fallback: a character of three tokens, after others like it."""
    vocab = {"<unk>": 0, "a": 1, **{f"<0x{i:02X}>": i + 2 for i in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = tokenizer.encode("a中文a").ids
    assert _streamed(tokenizer, ids) == ["a", "", "", "中", "", "", "文", "a"]


def _sentencepiece():
    """A tokenizer like those of Llama 2 and Mistral: a space before words, the first one dropped, and bytes."""
    words = ["▁", "a", "h", "i", "hi", "▁hi"]
    vocab = {"<s>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    vocab |= {word: n for n, word in enumerate(words, len(vocab))}
    merges = [("h", "i"), ("▁", "hi")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


TOKENIZERS = {"bytes": TOKENIZER, "sentencepiece": _sentencepiece()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(st.text(alphabet=st.sampled_from("hi a€😀한\n"), max_size=30))
def test_bytes_of_tokens_are_those_of_the_text(name, text):
    """Concatenated, they are the text; a token's offset is the character that contains its first byte."""
    tokenizer = TOKENIZERS[name]
    ids, token_bytes = tokenizer.encode(text).ids, TokenBytes(tokenizer)
    joined = b"".join(token_bytes[token] for token in ids)
    first = " " if name == "sentencepiece" and text else ""
    assert joined.decode() == first + text
    offsets, place = TextOffsets(Detokenizer(tokenizer, []), token_bytes), 0
    for token in ids:
        begun = joined[: place + 1].decode("utf-8", "ignore" if joined[place] < 128 else "replace")
        assert offsets.add(token)[1] == max(0, len(begun) - 1 - len(first))
        place += len(token_bytes[token])


def test_bytes_of_tokens_of_any_kind():
    """A space is kept in any position; special and added tokens are their text, unknown ids are U+FFFD."""
    made = TOKENIZERS["sentencepiece"]
    token_bytes = TokenBytes(made)
    names = ("▁hi", "hi", "▁", "<0x0A>", "<0xF0>", "<s>")
    pieces = [token_bytes[made.token_to_id(name)] for name in names]
    assert pieces == [b" hi", b"hi", b" ", b"\n", b"\xf0", b"<s>"]
    assert token_bytes.text(made.token_to_id("<0xF0>")) == token_bytes.text(99999) == "\ufffd"
    grown = Tokenizer.from_str(TOKENIZER.to_str())
    grown.add_tokens(["a b", "日本"])
    assert [TokenBytes(grown)[grown.token_to_id(name)] for name in ("a b", "日本")] == [
        b"a b",
        "日本".encode(),
    ]
    metaspace = Tokenizer(models.WordLevel({"▁hi": 0, "hi": 1}, unk_token="hi"))
    metaspace.decoder = decoders.Metaspace()
    assert [TokenBytes(metaspace)[token] for token in (0, 1)] == [b" hi", b"hi"]


def test_token_after_broken_bytes():
    """Incomplete bytes are a character of their own; special tokens have no text."""
    made = TOKENIZERS["sentencepiece"]
    ids = [
        made.token_to_id(name) for name in ("hi", "<0xE2>", "hi", "<0xF0>", "<0xF0>", "<s>", "<0x9F>", "a")
    ]
    offsets = TextOffsets(Detokenizer(made, []), TokenBytes(made))
    pieces = [offsets.add(token) for token in ids]
    text = "".join(piece for piece, _ in pieces)
    assert text == "hi\ufffdhi\ufffd\ufffd\ufffda" and offsets.end == len(text)
    assert [place for _, place in pieces] == [0, 2, 3, 5, 6, 7, 6, 8]


def test_unknown_ids_are_shown():
    """A padded vocabulary has ids without text: each is U+FFFD, and the text continues after it."""
    unknown = TOKENIZER.get_vocab_size() + 5
    hello = TOKENIZER.encode("hello").ids
    assert "".join(_streamed(TOKENIZER, [*hello, unknown, unknown, *hello])) == "hello\ufffd\ufffdhello"
    start = TOKENIZER.encode("🚀").ids[:1]
    assert _streamed(TOKENIZER, [*start, unknown, *hello])[:2] == ["", "\ufffd\ufffd"]


@pytest.mark.parametrize("prompt", ["\udcff", "a\ud800b", "x" * 100 + "\udc80"])
def test_prompt_is_valid_text(prompt):
    """Command line bytes that are not UTF-8 are rejected with their position."""
    with pytest.raises(
        ConfigError, match=rf"must be UTF-8 text; got '\\ud.* at character {prompt.find(max(prompt))}"
    ):
        encode_prompt(TOKENIZER, prompt)
    assert (
        encode_prompt(TOKENIZER, "hello ä😀") == TOKENIZER.encode("hello ä😀").ids
        and encode_prompt(TOKENIZER, "") == []
    )


def test_prompt_without_tokens_is_rejected():
    """A prompt that the tokenizer cannot encode, or panics on, is one error."""
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    assert encode_prompt(words, "a") == [0]
    with pytest.raises(ConfigError, match=r"must have tokens in tokenizer\.json; got 'b'"):
        encode_prompt(words, "b")
    words.post_processor = processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", 9)])
    assert encode_prompt(words, "a") == [9, 0]


def test_tokens_on_which_the_decoder_panics_are_rejected():
    """A panic of the tokenizers library is one TilewiseError; the twin has another decoder."""
    model = models.WordLevel({"": 0, "a": 1}, unk_token="a")
    broken = Tokenizer(model)
    broken.decoder = decoders.Strip(" ", 0, 1)
    with pytest.raises(ConfigError, match=r"must have a text in tokenizer\.json; got \[0\]"):
        Detokenizer(broken, []).add(0)
    assert Detokenizer(Tokenizer(model), []).add(1) == "a"


@pytest.mark.parametrize(
    ("kind", "error"),
    [(type("PanicException", (BaseException,), {}), ConfigError), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_panic_is_rejected_and_ctrl_c_is_not(kind, error):
    """The library's panics do not derive from Exception; other such exceptions pass through."""

    class Broken:
        def encode(self, text, add_special_tokens):
            raise kind("broken")

    with pytest.raises(error, match=r"must have tokens.*broken" if error is ConfigError else "broken"):
        encode_prompt(Broken(), "a")


def test_prompt_must_leave_room():
    """A prompt that fills the context is rejected, one token less is not."""
    check_prompt(63, 64)
    with pytest.raises(ConfigError, match="must leave room in the context of 64 tokens; got 64"):
        check_prompt(64, 64)
