"""The zip archives that torch.save writes, and their checksums."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

#: Bytes that are read at once.
_READ_BYTES = 2**22
#: Threads that compute checksums.
_THREADS = 8
_REMEDY = "load an earlier checkpoint"
_ZIP_HEADER = b"PK\3\4"
#: What comes before an entry; the last numbers are the lengths of its name and of its extra field.
_LOCAL = struct.Struct("<26x2H")


def entries(file: IO[bytes]) -> list[zipfile.ZipInfo]:
    """Return what is in a file that ``torch.save`` has written; empty if it has no checksums: it is in torch's old
    format, or was saved without them.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    begins_as_archive = not size or file.read(len(_ZIP_HEADER)) == _ZIP_HEADER
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                found = archive.infolist()
            if not all(0 <= entry.header_offset < size for entry in found):
                raise zipfile.BadZipFile("an entry begins outside of the file")
            return found if any(entry.CRC for entry in found) else []
    except Exception as error:  # of many kinds
        raise ValueError(f"it is damaged: the table of its contents cannot be read; {_REMEDY}") from error
    if begins_as_archive:
        raise ValueError(f"it is truncated: its end is missing after {size} bytes; {_REMEDY}")
    return []


def verify(file: IO[bytes], part: int = 0, parts: int = 1) -> None:
    """Read a file, or one of equal parts of it, into the host's page cache, and compare it with its checksums.

    What cannot be read raises here; in mapped memory it kills.
    """
    found = entries(file)
    if not found:
        size = file.seek(0, os.SEEK_END)
        for _ in pieces(file, size * part // parts, size // parts + 1):
            pass
    mine = sorted(found, key=lambda entry: entry.file_size)[part::parts]
    with ThreadPoolExecutor(max(1, min(_THREADS, (os.cpu_count() or 1) // parts))) as pool:
        damaged = [
            entry.filename for entry, right in zip(mine, pool.map(lambda e: _is_right(file, e), mine)) if not right
        ]
    if damaged:
        raise ValueError(f"it is damaged: {damaged[0]} in it does not have its checksum; {_REMEDY}")


def _is_right(file: IO[bytes], entry: zipfile.ZipInfo) -> bool:
    header = b"".join(pieces(file, entry.header_offset, _LOCAL.size))
    if len(header) < _LOCAL.size or not header.startswith(_ZIP_HEADER):
        return False
    *_, name_bytes, extra_bytes = _LOCAL.unpack(header)
    start = entry.header_offset + _LOCAL.size + name_bytes + extra_bytes
    checksum = 0
    for piece in pieces(file, start, entry.file_size):
        checksum = zlib.crc32(piece, checksum)
    return checksum == entry.CRC and entry.compress_type == zipfile.ZIP_STORED


def pieces(file: IO[bytes], start: int, size: int) -> Iterator[memoryview]:
    """Yield the bytes of a part of a file, a few at a time; what is yielded changes with the next one."""
    if isinstance(file, io.BytesIO):
        yield file.getbuffer()[start : start + size]
        return
    buffer = memoryview(bytearray(min(size, _READ_BYTES)))
    end = start + size
    while start < end and (count := os.preadv(file.fileno(), [buffer[: end - start]], start)):
        yield buffer[:count]
        start += count
