"""Parses pickles as data, with an interpreter that cannot call anything.

Python's own unpickler calls whatever a file names. This one supports only the instructions that
build numbers, strings and containers. Names are compared with a list of the names that tensor files
use. Where Python's unpickler would call something, this one makes a `Record` of the name and the
arguments. So nothing in a file can run. Time and memory are bounded: instructions and bytes are
counted, there is no recursion, and keys are plain values. `torch_files` and `dcp` provide the bytes
and make tensors of the records.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable

__all__ = ["MAX_PICKLE_BYTES", "Name", "Record", "parse_pickle", "worded"]

MAX_PICKLE_BYTES = 64 << 20
_MAX_INSTRUCTIONS = 1 << 22
_MAX_INT_BYTES = 16
_STORAGES = "Float Double Half BFloat16 Long Int Short Char Byte Bool"
_METADATA = (
    "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex"
)
_NAMES: Mapping[str, frozenset[str]] = {
    "torch": frozenset(
        {
            "Size",
            "float32",
            "float64",
            "float16",
            "bfloat16",
            "int64",
            "int32",
            "int16",
            "int8",
            "uint8",
            "bool",
        }
        | {f"{name}Storage" for name in _STORAGES.split()}
    ),
    "torch._utils": frozenset({"_rebuild_tensor_v2", "_rebuild_parameter"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.distributed.checkpoint.metadata": frozenset(
        {*_METADATA.split(), "StorageMeta", "_MEM_FORMAT_ENCODING"}
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}),
}


@dataclass(frozen=True)
class Name:
    """A name in a pickle, such as `torch FloatStorage`. It stands for itself, not for the object
    with that name.
    """

    module: str
    name: str


@dataclass(eq=False)
class Record:
    """A call or an object of a pickle, as data.

    Attributes:
        name: name of the callable; None for a reference to something outside of the pickle.
        arguments: arguments of the call.
        state: the state that unpickling would set on the result; None for no state.
    """

    name: Name | None
    arguments: tuple[Any, ...]
    state: Any = None


def worded(value: object) -> str:
    """A pickle's value as text for an error message. For a container only the type is shown,
    because a container may contain itself, or nested copies that grow exponentially.
    """
    return shown(value) if isinstance(value, (str, bytes, int, float, Name)) else f"a {type(value).__name__}"


class _Mark:
    """Marks the beginning of a container's items on the stack."""


_MARK = _Mark()


def parse_pickle(content: bytes) -> Any:
    """The content of a pickle, as plain values, lists, tuples, dictionaries, `Name` and `Record`.

    Raises:
        Unreadable: the content is not a pickle, is too large, or names something that tensor files
            do not need.
    """
    if len(content) > MAX_PICKLE_BYTES:
        raise Unreadable(f"its pickle has {len(content)} bytes, more than {MAX_PICKLE_BYTES}")
    try:
        return _Machine(content).run()
    except (IndexError, struct.error):
        raise Unreadable("its pickle is truncated or empty") from None
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable("its pickle is malformed") from None


class _Machine:
    """The interpretation of one pickle."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MAX_INSTRUCTIONS):
            code = self.content[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self.pop()
            act = _ACTS.get(code)
            if act is None:
                raise Unreadable(
                    f"its pickle has the instruction {code:#04x}, which files of tensors do not need"
                )
            act(self)
        raise Unreadable(f"its pickle has more than {_MAX_INSTRUCTIONS} instructions")

    def pop(self) -> Any:
        value = self.stack.pop()
        if isinstance(value, _Mark):
            raise Unreadable("its pickle is malformed")
        return value

    def top(self) -> Any:
        value = self.stack[-1]
        if isinstance(value, _Mark):
            raise Unreadable("its pickle is malformed")
        return value

    def items(self) -> list[Any]:
        """Remove and return the items above the last mark."""
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                items = self.stack[place + 1 :]
                del self.stack[place:]
                return items
        raise IndexError

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.content):
            raise IndexError
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> str:
        end = self.content.index(b"\n", self.at)
        text = self.content[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    def text(self, layout: str) -> None:
        self.stack.append(self.take(self.number(layout)).decode("utf-8", "surrogatepass"))

    def integer(self, layout: str) -> None:
        size = self.number(layout)
        if size > _MAX_INT_BYTES:
            raise Unreadable(f"its pickle has an integer of more than {_MAX_INT_BYTES} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def remember(self, place: int) -> None:
        self.memo[place] = self.top()

    def recall(self, place: int) -> None:
        if place not in self.memo:
            raise Unreadable("its pickle refers to a value that it has not stored")
        self.stack.append(self.memo[place])

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Unreadable("its pickle has a name that is not text")
        if name not in _NAMES.get(module, ()):
            raise Unreadable(
                f"it names {shown(f'{module}.{name}')}, which is not part of a tensor; nothing was executed"
            )
        self.stack.append(Name(module, name))

    def call(self) -> None:
        arguments, callee = self.pop(), self.pop()
        if not isinstance(callee, Name) or not isinstance(arguments, tuple):
            raise Unreadable("its pickle calls something that is not a name")
        is_dictionary = callee == Name("collections", "OrderedDict") and not arguments
        self.stack.append({} if is_dictionary else Record(callee, arguments))

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):  # an ordered dictionary's attributes do not matter to its tensors
            raise Unreadable("its pickle sets the state of a value that has none")

    def refer(self) -> None:
        reference = self.pop()
        self.stack.append(Record(None, reference if isinstance(reference, tuple) else (reference,)))

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise Unreadable("its pickle appends to a value that is not a list")
        target.extend(values)

    def set(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, dict):
            raise Unreadable("its pickle sets items of a value that is not a dictionary")
        for key, value in _pairs(values):
            is_number = isinstance(key, int) and -(1 << 63) <= key < 1 << 63  # larger ones can share one hash
            if not (is_number or isinstance(key, (str, Record))):  # the hash of a nested tuple would recurse
                raise Unreadable("its pickle has a key that is neither text nor number")
            target[key] = value

    def push_mark(self) -> None:
        self.stack.append(_MARK)

    def pop_any(self) -> None:
        self.stack.pop()


def _pairs(values: list[Any]) -> Iterator[tuple[Any, Any]]:
    if len(values) % 2:
        raise Unreadable("its pickle has a key without a value")
    return zip(values[::2], values[1::2])


def _two(machine: _Machine) -> list[Any]:
    value, key = machine.pop(), machine.pop()
    return [key, value]


def _named(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.name(module, name)


_ACTS: Mapping[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME: its length is not needed
    ord("("): _Machine.push_mark,
    ord("0"): _Machine.pop_any,
    ord("1"): _Machine.items,  # POP_MARK
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("J"): lambda m: m.stack.append(m.number("<i")),
    ord("K"): lambda m: m.stack.append(m.number("<B")),
    ord("M"): lambda m: m.stack.append(m.number("<H")),
    0x8A: lambda m: m.integer("<B"),  # LONG1
    0x8B: lambda m: m.integer("<i"),  # LONG4
    ord("G"): lambda m: m.stack.append(m.number(">d")),
    ord("X"): lambda m: m.text("<I"),
    0x8C: lambda m: m.text("<B"),
    0x8D: lambda m: m.text("<Q"),
    ord("C"): lambda m: m.stack.append(m.take(m.number("<B"))),
    ord("B"): lambda m: m.stack.append(m.take(m.number("<I"))),
    ord("]"): lambda m: m.stack.append([]),
    ord("}"): lambda m: m.stack.append({}),
    ord(")"): lambda m: m.stack.append(()),
    ord("t"): lambda m: m.stack.append(tuple(m.items())),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.items()),
    ord("s"): lambda m: m.set(_two(m)),
    ord("u"): lambda m: m.set(m.items()),
    ord("q"): lambda m: m.remember(m.number("<B")),
    ord("r"): lambda m: m.remember(m.number("<I")),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("h"): lambda m: m.recall(m.number("<B")),
    ord("j"): lambda m: m.recall(m.number("<I")),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: _named,
    ord("R"): _Machine.call,
    0x81: _Machine.call,  # NEWOBJ
    ord("b"): _Machine.build,
    ord("Q"): _Machine.refer,
}
