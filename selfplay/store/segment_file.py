"""One file of the episode log: a magic, then records; how to write, scan and check it.

    file    = MAGIC record*
    record  = length u32 | crc32 u32 | sequence number u64 | payload[length]        (little endian)

The checksum covers sequence number and payload. A crash can leave a torn last record: bytes that no later valid record
follows. Anything else that does not check is damage, never cut away.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from selfplay.errors import StoreError

MAGIC = b"SPEPLOG\x01"
HEADER = struct.Struct("<IIQ")
_SEQ = struct.Struct("<Q")


class Place(NamedTuple):
    """Where a payload lies in its file."""

    offset: int
    length: int


def encode_record(seq: int, payload: bytes) -> bytes:
    """The bytes of one record."""
    return HEADER.pack(len(payload), _checksum(seq, payload), seq) + payload


def scan(path: Path, data: bytes | memoryview, first_seq: int) -> tuple[list[Place], int]:
    """(places of the records, end of the last whole one). What follows the end is a torn tail.

    Raises `StoreError` with file and offset for damage: wrong magic, or a bad record that a good one follows.
    """
    view = memoryview(data)
    if len(view) < len(MAGIC) and MAGIC.startswith(bytes(view)):
        return [], 0
    if view[: len(MAGIC)] != MAGIC:
        raise StoreError(f"{path} is damaged at offset 0: it is not a log of a layout known here")
    places, end = [], len(MAGIC)
    for place in _records(view, end, first_seq):
        places.append(place)
        end = place.offset + place.length
    if _record_follows(view, end, first_seq + len(places)):
        raise StoreError(
            f"{path} is damaged at offset {end}: record {first_seq + len(places)} does not check, and whole records follow it"
        )
    return places, end


def check_payload(path: Path, seq: int, place: Place, header: bytes, payload: bytes) -> bytes:
    """``payload`` when it is what was written as record ``seq``; else `StoreError` with file and offset."""
    offset = place.offset - HEADER.size
    if len(header) < HEADER.size or HEADER.unpack(header) != (len(payload), _checksum(seq, payload), seq):
        raise StoreError(f"{path} is damaged at offset {offset}: record {seq} does not check")
    return payload


def _records(view: memoryview, offset: int, seq: int) -> Iterator[Place]:
    while (place := _record_at(view, offset, seq)) is not None:
        yield place
        offset, seq = place.offset + place.length, seq + 1


def _record_at(view: memoryview, offset: int, seq: int) -> Place | None:
    start = offset + HEADER.size
    if start > len(view):
        return None
    length, crc, found = HEADER.unpack_from(view, offset)
    if found != seq or not 0 < length <= len(view) - start or _checksum(seq, view[start : start + length]) != crc:
        return None
    return Place(start, length)


def _record_follows(view: memoryview, offset: int, seq: int) -> bool:
    """Whether any later record of this log (``seq`` or one soon after it) lies whole behind ``offset``."""
    data = bytes(view[offset:])
    most = seq + len(data) // HEADER.size
    high = _SEQ.pack(most)
    shared = next((i for i in range(7, -1, -1) if _SEQ.pack(seq)[i] != high[i]), -1) + 1
    tail = high[shared:]  # the bytes of the number that all candidates share: a fast filter
    at = data.find(tail, shared)
    while at >= 0:
        start = at - shared - 8
        if start >= 0 and start + HEADER.size <= len(data):
            found = _SEQ.unpack_from(data, start + 8)[0]
            if seq <= found <= most and _record_at(memoryview(data), start, found) is not None:
                return True
        at = data.find(tail, at + 1)
    return False


def _checksum(seq: int, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(_SEQ.pack(seq)))
