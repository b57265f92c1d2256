"""Reads input files whole, and validates JSON against a model.

It rejects whatever is not a regular file (a pipe would block for ever), files larger than their
kind can be, and JSON that readers interpret differently or cannot process: deep nesting, duplicate
keys, NaN, numbers beyond a double, invalid UTF-8, values of other types than the model's.
`Unreadable` describes the fault in a few words. The caller knows the purpose of the file and raises
a ConfigError or a CheckpointError with it. Parsing is a pure function of bytes.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeVar

from tilewise.core.errors import ResourceError
from tilewise.core.sizes import format_bytes
from tilewise.core.validation import bare, shown

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

__all__ = [
    "MAX_JSON_BYTES",
    "Forbidden",
    "Unreadable",
    "decode_text",
    "first_fault",
    "first_problem",
    "joined_rules",
    "open_regular",
    "parse_json",
    "plain_json",
    "read_json",
    "read_whole",
    "refusals_of",
    "validate_json",
]

MAX_JSON_BYTES = 64 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_TYPE_NAME = re.compile(r"(?:str|int|float|bool|none|dict|constrained-\w+|[\w-]+\[.*\])", re.DOTALL)
Model = TypeVar("Model", bound="BaseModel")


class Unreadable(ValueError):
    """Input that is rejected. The text of this exception continues a message that ends in `got
    FILE: `.
    """


class Forbidden(Unreadable):
    """A file that the system does not allow this process to read. Its content is unknown."""


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. This never blocks.

    Raises:
        Unreadable: the file does not exist or is not a regular file.
        Forbidden: this process may not read the file.
        ResourceError: this process cannot open more files.
    """
    try:
        # O_NONBLOCK: opening a pipe returns at once instead of waiting for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Unreadable("the link is dangling" if os.path.islink(path) else "no such file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise ResourceError(
                f"[files.reading] a file must be openable; got {error.strerror!r} for {str(path)!r}; raise "
                "the limit of open files (ulimit -n)"
            ) from None
        refusal = Forbidden if isinstance(error, PermissionError) else Unreadable
        raise refusal(_reason(error)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise Unreadable(f"it must be a regular file and is {kind}")
    return os.fdopen(descriptor, "rb")


def read_whole(path: str | Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """All bytes of a regular file.

    Raises:
        Unreadable: as for `open_regular`, or the file has more than `max_bytes`.
    """
    with open_regular(path) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise Unreadable(_reason(error)) from None
    if content is None:  # a file of /proc or /sys that would block
        raise Unreadable("it cannot be read without blocking")
    if len(content) > max_bytes:
        raise Unreadable(f"it is larger than {format_bytes(max_bytes)}")
    return content


def decode_text(content: bytes) -> str:
    """The text of a UTF-8 file.

    Raises:
        Unreadable: the content is not UTF-8, or starts with a byte order mark.
    """
    _refuse_byte_order_mark(content)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start} is not UTF-8") from None


def validate_json(content: bytes, model: type[Model]) -> Model:
    """Validate JSON against a model (a class of pydantic). Nesting is limited to about 200 levels,
    and strings must be UTF-8.

    Raises:
        Unreadable: the content is not JSON, or does not match the model.
    """
    from pydantic import ValidationError

    _refuse_byte_order_mark(content)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise Unreadable(first_problem(error)) from None


def parse_json(content: bytes, model: type[Model]) -> Model:
    """Like `validate_json`, but accept only JSON that every reader interprets alike: keys must be
    unique and numbers finite.

    Raises:
        Unreadable: as for `validate_json`, or a key appears twice, or a number is not finite.
    """
    parsed = validate_json(content, model)
    plain_json(content)
    return parsed


def plain_json(content: bytes) -> Any:
    """JSON as lists, dictionaries and plain values. Keys must be unique and numbers finite.

    Raises:
        Unreadable: the content is not JSON, a key appears twice, or a number is not finite.
    """
    try:
        return json.loads(
            decode_text(content),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("it is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"it is not JSON: {error}") from None


@contextmanager
def refusals_of(library: str) -> Iterator[None]:
    """A `with` block that turns exceptions which a library raises about its input into
    `Unreadable`. These include bare Exceptions, and panics of Rust, which do not derive from
    Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise Unreadable(f"the {library} library says: {' '.join(str(error).split())}") from None


def read_json(path: str | Path, model: type[Model], max_bytes: int = MAX_JSON_BYTES) -> Model:
    """Read and validate a JSON file.

    Raises:
        Unreadable: as for `read_whole` and `parse_json`.
    """
    return parse_json(read_whole(path, max_bytes), model)


def first_problem(error: ValidationError) -> str:
    """A model's first validation error in one line: the place, what is wrong there, and the value."""
    loc, (first, *others) = first_fault(error)
    place = ".".join(bare(str(part)) for part in loc)  # keys come from outside; keep them on one line
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        return f"it is not JSON: {message.removeprefix('Invalid JSON: ')}"
    if kind == "extra_forbidden":
        return f"{place} must be a known key; got an unknown one"
    if kind == "missing":
        return f"{place} is required; got nothing"
    message = joined_rules([first, *others]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    got = "" if kind == "value_error" else f"; got {shown(first['input'])}"
    return f"{place}: {message}{got}" if place else f"{message}{got}"


def first_fault(error: ValidationError) -> tuple[tuple[int | str, ...], list[ErrorDetails]]:
    """The place of a model's first validation error, and what is wrong there.

    If a field may have several types, pydantic reports an error for each type. This function
    chooses the error for the type that the value has, if the value is only out of range. Otherwise
    it chooses the error that is deepest within the value, or at the last entry of a list. So if one
    entry is wrong, the message names this entry.
    """
    problems = [(_place_of(one), one) for one in error.errors(include_url=False)]
    start = problems[0][0]
    problems = [one for one in problems if one[0][: len(start)] == start]

    def nearness(problem: tuple[tuple[int | str, ...], ErrorDetails]) -> tuple[bool, int, int]:
        place, one = problem
        is_of_type = not one["type"].endswith("_type") and one["type"] != "literal_error"
        last = place[-1] if place else 0
        return is_of_type, len(place), last if isinstance(last, int) else 0

    nearest = max(map(nearness, problems))
    chosen = [problem for problem in problems if nearness(problem) == nearest]
    return chosen[0][0], [one for _, one in chosen]


def joined_rules(problems: Sequence[ErrorDetails]) -> str:
    """The rules of all problems with one value, as one text. There are several if the value may
    have several types.
    """
    first, *others = dict.fromkeys(one["msg"] for one in problems)
    return " or ".join([first, *(rule.removeprefix("Input should be ") for rule in others)])


def _place_of(problem: ErrorDetails) -> tuple[int | str, ...]:
    """The fields and entries that lead to an error, without the names of types that pydantic inserts."""
    loc = problem["loc"]
    if problem["type"] == "model_type" and loc[-1:] == (problem["ctx"]["class_name"],):
        loc = loc[:-1]
    return tuple(part for part in loc if isinstance(part, int) or not _TYPE_NAME.fullmatch(part))


def _refuse_byte_order_mark(content: bytes) -> None:
    if content.startswith(b"\xef\xbb\xbf"):
        raise Unreadable("it starts with a byte order mark; save it as UTF-8 without one")


def _reason(error: Exception) -> str:
    words = error.strerror if isinstance(error, OSError) else None
    return words or str(error)


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise Unreadable(f"key {shown(key)} appears twice")
        keys[key] = value
    return keys


def _refuse_constant(text: str) -> NoReturn:
    raise Unreadable(f"{text} is not a number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise Unreadable(f"{bare(text, 40)} is beyond the range of a double")
    return value
