"""Pickles that would run code, and archives for them, for the tests of their readers."""

from __future__ import annotations

import os
import pickle
import zipfile
from functools import cache
from pathlib import Path
from typing import Any


class Planted:
    """Writes a file when unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def planted(file: Path) -> dict[str, bytes]:
    """Pickles that write `file` when unpickled, in every known way."""
    path = str(file).encode()
    call = b"cos\nsystem\n(X" + (6 + len(path)).to_bytes(4, "little") + b"touch " + path + b"tR."
    stack = b"\x80\x04\x8c\x02os\x8c\x06system\x93(X" + (6 + len(path)).to_bytes(4, "little")
    return {
        "reduce": pickle.dumps({"w": Planted(file)}, 2),
        "newest protocol": pickle.dumps({"w": Planted(file)}, 5),
        "oldest protocol": pickle.dumps({"w": Planted(file)}, 0),
        "global": b"\x80\x02" + call,
        "stack global": stack + b"touch " + path + b"tR.",
        "inst": b"(S'touch " + path + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nX" + (6 + len(path)).to_bytes(4, "little") + b"touch " + path + b"o.",
        "new object": b"\x80\x02cos\nsystem\nX"
        + (6 + len(path)).to_bytes(4, "little")
        + b"touch "
        + path
        + b"\x85\x81.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\n.",
        "dotted": b"\x80\x04\x8c\x0btorch._utils\x8c\x1a_rebuild_tensor_v2.__globals__\x93.",
        "extension": b"\x80\x02\x82\x01.",
        "nested": pickle.dumps({"w": pickle.dumps(Planted(file), 2)}, 2),
    }


@cache
def tricks() -> dict[str, bytes]:
    """Pickles that would use all memory, all time or the whole stack."""
    deep = 100_000
    laughs = b"\x80\x02]q\x00" + b"".join(
        b"](" + (b"h" + bytes([i])) * 10 + b"eq" + bytes([i + 1]) for i in range(60)
    )
    return {
        "deep lists": b"\x80\x02" + b"]" * deep + b"a" * (deep - 1) + b".",
        "deep tuples": b"\x80\x02)" + b"\x85" * deep + b".",
        "deep tuple as a key": b"\x80\x02})" + b"\x85" * deep + b"K\x01s.",
        "deep calls": b"\x80\x02" + b"ctorch\nSize\n" * deep + b")" + b"R\x85" * deep + b".",
        "marks": b"\x80\x02" + b"(" * deep + b".",
        "laughs": laughs + b".",
        "huge bytes": b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b".",
        "huge text": b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b".",
        "huge memo": b"\x80\x02)r\xff\xff\xff\xff.",
        "huge integer": b"\x80\x02\x8b" + (1 << 30).to_bytes(4, "little") + b"\xff" * 64 + b".",
        "negative length": b"\x80\x02\x8b\xff\xff\xff\xff.",
        "many containers": b"\x80\x02" + b"}" * (1 << 23) + b".",
        "colliding keys": b"\x80\x02}("
        + b"".join(
            b"\x8a\x10" + (i * ((1 << 61) - 1)).to_bytes(16, "little") + b"N" for i in range(9, 50_000)
        )
        + b"u.",
        "a list in itself": b"\x80\x02]q\x00h\x00a.",
        "a dictionary in itself": b"\x80\x02}q\x00X\x01\x00\x00\x00wh\x00s.",
        "a deep name": b"\x80\x04)" + b"\x85" * deep + b"\x8c\x01a\x93.",
        "laughs as a key": b"\x80\x02}" + laughs[2:] + b"K\x01s.",
        "laughs as a name": laughs + b"\x8c\x01a\x93.",
        "nothing": b"",
        "only a stop": b".",
        "a mark": b"(.",
        "pops a mark": b"(a.",
        "no key": b"\x80\x02}(K\x01u.",
    }


def write_archive(path: Path, content: bytes, parts: dict[str, bytes] | None = None) -> Path:
    """An archive in the format of `torch.save`, with any pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in {"data.pkl": content, "byteorder": b"little", **(parts or {})}.items():
            archive.writestr(f"archive/{name}", part)
    return path
