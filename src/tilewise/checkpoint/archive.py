"""The directory of an uncompressed zip archive, as `torch.save` writes it.

A part is a file in the archive. Parts are stored uncompressed, so each part is a range of bytes in
the archive, and nothing is unpacked. Archives that are compressed, encrypted or in several volumes
are rejected, and so are entries that appear twice or lie outside of the archive. `torch_files`
reads the ranges.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilewise.checkpoint.open_file import OpenFile
from tilewise.core.validation import shown
from tilewise.files.reading import Unreadable

__all__ = ["Part", "read_archive", "read_part"]

_MAX_NAME_BYTES = 4096
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 1


@dataclass(frozen=True)
class Part:
    """A part of an archive, as a range of its file.

    Attributes:
        begin: first byte.
        size: in bytes.
        crc: CRC-32 of the part's bytes; None if the archive was written without checksums.
    """

    begin: int
    size: int
    crc: int | None


@dataclass(frozen=True)
class _Entry:
    name: str
    header: int
    size: int
    crc: int


def read_archive(file: OpenFile, begin: int, size: int, max_bytes: int) -> Mapping[str, Part]:
    """The parts, by name, of the archive that fills a range of a file.

    A zip archive has the CRC-32 of every part. PyTorch can omit the checksums
    (`set_crc32_options(False)`) and then writes 0 for each part. So if all checksums are 0, the
    archive has none; otherwise 0 is a valid checksum.

    Args:
        file: the open file.
        begin: first byte of the archive.
        size: size of the archive in bytes.
        max_bytes: maximum size of the archive's directory.

    Raises:
        Unreadable: the range is not an uncompressed archive.
        CheckpointError: the file has become shorter.
    """
    directory, count, where = _directory(file, begin, size, max_bytes)
    parts: dict[str, Part] = {}
    entries = list(_entries(directory, count))
    has_checksums = any(entry.crc for entry in entries)
    for entry in entries:
        if entry.name in parts:
            raise Unreadable(f"its entry {shown(entry.name)} appears twice")
        if entry.header + _LOCAL.size > where:
            raise Unreadable(f"its entry {shown(entry.name)} lies outside of the archive")
        local = _LOCAL.unpack(_read(file, begin + entry.header, _LOCAL.size))
        first = entry.header + _LOCAL.size + local[9] + local[10]
        if local[0] != b"PK\x03\x04" or first + entry.size > where:
            raise Unreadable(f"its entry {shown(entry.name)} lies outside of the archive")
        parts[entry.name] = Part(begin + first, entry.size, entry.crc if has_checksums else None)
    return parts


def read_part(file: OpenFile, part: Part, max_bytes: int) -> bytes:
    """The bytes of a part.

    Raises:
        Unreadable: the part is too large, or its checksum is wrong.
        CheckpointError: the file has become shorter.
    """
    if part.size > max_bytes:
        raise Unreadable(f"one of its entries has {part.size} bytes, more than {max_bytes}")
    content = _read(file, part.begin, part.size)
    if part.crc is not None and zlib.crc32(content) != part.crc:
        raise Unreadable("one of its entries has a wrong checksum: the file is damaged")
    return content


def _read(file: OpenFile, begin: int, size: int) -> bytes:
    content = bytearray(size)
    file.read_into(memoryview(content), begin)
    return bytes(content)


def _directory(file: OpenFile, begin: int, size: int, max_bytes: int) -> tuple[bytes, int, int]:
    """The directory, its number of entries, and its first byte in the archive."""
    if size < _END.size:
        raise Unreadable("it is not a complete torch.save archive")
    # torch.save writes no archive comment, so the end record is the last thing in the file
    end = _END.unpack(_read(file, begin + size - _END.size, _END.size))
    if end[0] != b"PK\x05\x06" or end[7]:
        raise Unreadable("it is not a complete torch.save archive")
    count, length, where = end[4], end[5], end[6]
    last = size - _END.size
    if count == _FULL_16 or length == _FULL_32 or where == _FULL_32:
        locator = _LOCATOR.unpack(_tail(file, begin, last, _LOCATOR.size))
        last -= _LOCATOR.size
        if locator[0] != b"PK\x06\x07" or locator[2] + _END_64.size > last:
            raise Unreadable("it is not a complete torch.save archive")
        large = _END_64.unpack(_read(file, begin + locator[2], _END_64.size))
        if large[0] != b"PK\x06\x06":
            raise Unreadable("it is not a complete torch.save archive")
        count, length, where, last = large[7], large[8], large[9], locator[2]
    if length > max_bytes or where + length > last:
        raise Unreadable("the directory of its archive lies outside of the archive, or is too large")
    return _read(file, begin + where, length), count, where


def _tail(file: OpenFile, begin: int, last: int, size: int) -> bytes:
    if last < size:
        raise Unreadable("it is not a complete torch.save archive")
    return _read(file, begin + last - size, size)


def _entries(directory: bytes, count: int) -> Iterator[_Entry]:
    at = num_read = 0
    while at < len(directory):
        if at + _ENTRY.size > len(directory) or num_read == count:
            break
        fields = _ENTRY.unpack_from(directory, at)
        flags, method, packed, size = fields[3], fields[4], fields[8], fields[9]
        name_bytes, extra_bytes, comment_bytes, header = fields[10], fields[11], fields[12], fields[16]
        at += _ENTRY.size
        name = directory[at : at + name_bytes]
        extra = directory[at + name_bytes : at + name_bytes + extra_bytes]
        at += name_bytes + extra_bytes + comment_bytes
        if fields[0] != b"PK\x01\x02" or at > len(directory) or name_bytes > _MAX_NAME_BYTES:
            break
        if method or flags & _ENCRYPTED:
            raise Unreadable(f"its entry {shown(name)} is compressed or encrypted")
        size, packed, header = _large(extra, [size, packed, header])
        if size != packed:
            raise Unreadable(f"the two sizes of its entry {shown(name)} differ")
        num_read += 1
        yield _Entry(name.decode("utf-8", "replace"), header, size, fields[7])
    if at != len(directory) or num_read != count:
        raise Unreadable("the directory of its archive is truncated")


def _large(extra: bytes, numbers: list[int]) -> list[int]:
    """The numbers of an entry, where numbers beyond 32 bits are taken from the extra field."""
    at = 0
    while _FULL_32 in numbers and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        values = extra[at + 4 : at + 4 + length]
        at += 4 + length
        if kind != 1:
            continue
        for place in [i for i, number in enumerate(numbers) if number == _FULL_32]:
            if len(values) < 8:
                raise Unreadable("the directory of its archive is truncated")
            numbers[place], values = int.from_bytes(values[:8], "little"), values[8:]
        break
    return numbers
