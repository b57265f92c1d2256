"""A SentencePiece tokenizer in both of its files: tokenizer.model, written byte by byte, and tokenizer.json."""

from __future__ import annotations

import struct
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

Entry = tuple[str, float, int]
ENTRIES: tuple[Entry, ...] = (
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    ("a", -2.0, 1),
    ("b", -3.0, 1),
    ("ab", -1.0, 1),
)
"""Texts, scores and types of pieces."""


def encoded_pieces(*entries: Entry, has_prefix: bool = True) -> bytes:
    """tokenizer.model: pieces with texts of less than 100 bytes, and the flag of the space before texts."""
    data = b""
    for text, score, kind in entries:
        encoded = text.encode()
        piece = b"\x0a" + bytes([len(encoded)]) + encoded
        piece += b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
        data += b"\x0a" + bytes([len(piece)]) + piece
    return data + b"\x1a\x02\x18" + bytes([has_prefix])


def sentence_piece_tokenizer() -> Any:
    """The tokenizer of `ENTRIES`, with one more token that was added later."""
    vocabulary = {text: id_ for id_, (text, _, _) in enumerate(ENTRIES)}
    model = models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<more>", normalized=False)])
    return tokenizer
