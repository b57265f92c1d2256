"""Mutations of valid files, from a seed, that random bytes would seldom find.

`mutate` changes words of a text (numbers, strings, names, brackets) and bytes. `mutate_json`
usually changes values of a JSON file, so that the result is JSON. `mutate_safetensors` does so with
the header and corrects its length. `mutate_plan` changes rows of a plan and usually corrects the
digest. Pure functions: a seed gives the same input on every machine.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

Mutation = Callable[[random.Random, bytes, list[bytes]], bytes]

_WORD = re.compile(rb'"(?:\\.|[^"\\])*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\w+|\s+|.', re.DOTALL)
_LENGTH_BYTES = 8
_MOST_BYTES = 1 << 15  # of an input: what takes long to read says nothing about hanging
_ODD_WORDS = [
    b"0", b"-1", b"1", b"2", b"255", b"256", b"65536", b"2147483648", b"4294967296", b"4611686018427387904",
    b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"1" + b"0" * 30, b"9" * 5000,
    b"0.5", b"-0.0", b"1e-320", b"1e308", b"1e309", b"1e999999999", b"nan", b"inf", b"NaN", b"Infinity", b"-Infinity",
    b"true", b"false", b"null", b"None", b"[]", b"{}", b"[[]]", b'{"":0}', b"[0,0]", b"[" * 300, b'{"a":' * 300,
    b'""', b'" "', b'"0"', b'"\\u0000"', b'"\\ud800"', b'"\\udfff"', b'"\xef\xbf\xbd"', b'"\xff"', b'"."', b'".."',
    b'"../x"', b'"/"', b'"a/b"', b'"' + b"a" * 5000 + b'"', b'"' + b"a." * 500 + b'"', b'"__proto__"', b'"__class__"',
    b",", b":", b"=", b"[", b"]", b"{", b"}", b'"', b"'", b"\\", b"\n", b"\r\n", b"\0", b"#", b".",
    b"\xef\xbb\xbf", b"\xff\xfe",
]  # fmt: skip
_ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 3.5, 0.0, -0.0, 1e-320, 1e308, float("inf"), float("nan"), 1 << 31, 1 << 32,
    1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**400, "", "a", "\0", "\ud800",
    "/", "..", "0", "F32", "é" * 3000, [], {}, [0], [1, 1], [[]], [None] * 200, {"": None}, {"a": 1}, list(range(40)),
]  # fmt: skip


def mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """`data` with one to four changes, mostly of whole words; `others` are files to take words from."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        data = rng.choice(_CHANGES)(rng, data, others)
    return data[:_MOST_BYTES]


def mutate_json(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """JSON with one to three changed values, keys or members; sometimes like `mutate`, which breaks the syntax."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return mutate(rng, data, others)
    if rng.random() < 0.3:
        return mutate(rng, data, others)
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = _change_inside(rng, content)
    return json.dumps(content).encode()[:_MOST_BYTES]


def mutate_safetensors(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Like `mutate_json`, usually of the header only, with a correct length in front."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if end > len(data) or rng.random() < 0.2:
        return mutate(rng, data, others)
    headers = [other[_LENGTH_BYTES:] for other in others]
    header = mutate_json(rng, data[_LENGTH_BYTES:end], headers)
    body = data[end:] if rng.random() < 0.8 else mutate(rng, data[end:], others)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header + body


def mutate_plan(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Like `mutate_safetensors`, for the part after the first line; usually with a correct digest."""
    line, _, body = data.partition(b"\n")
    if rng.random() < 0.1:
        return mutate(rng, data, others)
    bodies = [other.partition(b"\n")[2] for other in others]
    body = mutate_safetensors(rng, body, bodies)
    if rng.random() < 0.9:
        line = line.rpartition(b" ")[0] + b" " + hashlib.sha256(body).hexdigest().encode()
    return line + b"\n" + body


def _change_inside(rng: random.Random, content: Any) -> Any:
    """Change parsed JSON in place at a random position; returns it, or its replacement."""
    holders = list(_holders(content))
    if not holders or rng.random() < 0.02:
        return json.loads(json.dumps(rng.choice(_ODD_VALUES)))
    holder = rng.choice(holders)
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key, kind = rng.choice(keys), rng.randrange(10)
    other = rng.choice(holders)
    value = rng.choice(list(other.values()) if isinstance(other, dict) else other)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(["", "a", "dtype", "__metadata__", f"{key}x"])] = holder.pop(key)
    elif kind == 1:
        holder.append(holder[key])
    elif kind <= 3 and type(holder[key]) in (int, float):
        holder[key] += rng.choice((-1, 1, 2, 64, -holder[key]))
    elif kind <= 5:
        holder[key] = json.loads(json.dumps(value))  # a copy: nothing stands inside itself
    else:
        holder[key] = json.loads(json.dumps(rng.choice(_ODD_VALUES)))
    return content


def _holders(content: Any) -> Iterator[Any]:
    """Every non-empty object and list in parsed JSON."""
    if isinstance(content, (dict, list)) and content:
        yield content
        for value in content.values() if isinstance(content, dict) else content:
            yield from _holders(value)


def _words_of(data: bytes) -> list[bytes]:
    return _WORD.findall(data) or [b""]


def _other_word(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Replace a word by an unusual one, or insert it."""
    words = _words_of(data)
    at = rng.randrange(len(words))
    words[at : at + rng.randrange(2)] = [rng.choice(_ODD_WORDS)]
    return b"".join(words)


def _known_word(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Replace a word by one from this or another file."""
    words = _words_of(data)
    words[rng.randrange(len(words))] = rng.choice(_words_of(rng.choice([data, *others])))
    return b"".join(words)


def _words_moved(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Remove, repeat or move a run of words."""
    words = _words_of(data)
    begin, length = rng.randrange(len(words)), rng.choice((1, 1, 2, 5, 20, 100))
    run = words[begin : begin + length]
    kind = rng.randrange(3)
    if kind != 1:
        del words[begin : begin + length]
    if kind != 0:
        at = rng.randrange(len(words) + 1)
        words[at:at] = run
    return b"".join(words)


def _nested(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Put a word into many brackets."""
    words, depth = _words_of(data), rng.choice((1, 3, 150, 1000, 3000))
    at = rng.randrange(len(words))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"k":', b"}"), (b"(", b")")))
    words[at] = opening * depth + words[at] + closing * depth
    return b"".join(words)


def _bytes_changed(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Replace some bytes by random ones, or flip a bit."""
    changed = bytearray(data or b"\0")
    at = rng.randrange(len(changed))
    if rng.random() < 0.5:
        changed[at] ^= 1 << rng.randrange(8)
    else:
        changed[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
    return bytes(changed)


def _cut(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Only the beginning, only the end, or two files joined."""
    at = rng.randrange(len(data) + 1)
    other = rng.choice([data, *others])
    return rng.choice((data[:at], data[at:], data[:at] + other[rng.randrange(len(other) + 1) :]))


_CHANGES: list[Mutation] = [
    _other_word, _other_word, _other_word, _known_word, _known_word, _words_moved, _words_moved, _nested,
    _bytes_changed, _cut,
]  # fmt: skip
