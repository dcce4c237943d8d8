"""An append-only log of encoded records: every one on disk, in order, before `append` returns.

    FOLDER/000000000000.log  000000000412.log ...     named by the first sequence number inside
    FOLDER/000000000000.idx                           places of a finished file's records, rebuilt when missing

In: bytes. Out: a sequence number each (0, 1, 2, ... without gaps), and the bytes again from any number on. One writer, any
number of readers, also while it writes. A torn tail (a crash in the middle of an append that was never acknowledged) is
cut off when a writer opens the log; damage anywhere else is a `StoreError` naming file and offset.
"""

from __future__ import annotations

import bisect
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Self

from selfplay.errors import StoreError
from selfplay.store.atomic import as_store_error, remove_leftovers, store_errors, sync_folder, write_bytes
from selfplay.store.segment_file import HEADER, MAGIC, Place, check_payload, encode_record, scan
from selfplay.wire.codec import MAX_FRAME_BYTES

SEGMENT_BYTES = 64 << 20
_INDEX = struct.Struct("<IQ")


class _Segment:
    """One file and where its records lie."""

    def __init__(self, path: Path, first_seq: int, places: list[Place], end: int) -> None:
        self.path, self.first_seq, self.places, self.end = path, first_seq, places, end

    @property
    def next_seq(self) -> int:
        return self.first_seq + len(self.places)


class RecordLog:
    """Append-only log of encoded records; what one is called stands in its messages."""

    NOUN: ClassVar[str] = "record"

    def __init__(self, folder: Path, segments: list[_Segment], fd: int, segment_bytes: int) -> None:
        self.folder, self._segments, self._fd, self._segment_bytes = folder, segments, fd, segment_bytes
        self._fault = ""
        self._busy = threading.Lock()
        """Held while writing: a writer in a thread may have been given up by its caller when the log is closed."""

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        write: bool,
        say: Callable[[str], None],
        known: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> Self:
        """Open a log, or start one when ``write``. ``say`` hears of a torn tail and of rebuilt indexes.

        ``known``: how many records are known to be in it. Raises `StoreError`, and changes nothing, when there are fewer.
        """
        with store_errors(folder):
            if write:
                folder.mkdir(exist_ok=True)
                remove_leftovers(folder)
            paths = sorted(folder.glob("*.log"))
            segments = [_load(path, is_last=path == paths[-1], say=say) for path in paths]
            _check_order(segments)
            found = segments[-1].next_seq if segments else 0
            if found < known:
                raise StoreError(
                    f"{folder} is damaged: it holds {found} whole {cls.NOUN}s of the {known} that the newest checkpoint knew; put "
                    "back a copy of the folder, or go back to an older checkpoint by removing the newer ones from checkpoints"
                )
            if not write:
                return cls(folder, segments, -1, segment_bytes)
            if not segments:
                segments = [_start(folder, 0)]
            return cls(folder, segments, _open_for_append(segments[-1], say), segment_bytes)

    @property
    def next_seq(self) -> int:
        """The number the next record will get: how many there are."""
        return self._segments[-1].next_seq if self._segments else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(segment.end for segment in self._segments)

    def append(self, data: bytes) -> int:
        """Store one record and return its number; it is on disk when this returns."""
        return self.append_many([data])[0]

    def append_many(self, batch: Sequence[bytes]) -> list[int]:
        """Store several with one fsync. Either all are acknowledged or `StoreError` is raised and none is."""
        with self._busy:
            return self._append(batch)

    def read(self, seq: int) -> bytes:
        """The record ``seq``. Raises KeyError for a number that is not there, `StoreError` for damage."""
        return next(self.read_from(seq, seq + 1))[1]

    def read_from(self, seq: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(number, record) from ``seq`` up to, not including, ``end`` (default: what is there now)."""
        end = self.next_seq if end is None else end
        if not 0 <= seq <= end <= self.next_seq or (seq == end and seq != self.next_seq):
            raise KeyError(f"{self.NOUN}s {seq} to {end} of a log of {self.next_seq}")
        start = bisect.bisect_right([s.first_seq for s in self._segments], seq) - 1
        for segment in self._segments[max(0, start) :]:
            yield from _read_segment(segment, max(seq, segment.first_seq), min(end, segment.next_seq))

    def close(self) -> None:
        """Idempotent."""
        with self._busy:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def _append(self, batch: Sequence[bytes]) -> list[int]:
        self._check_writable(batch)
        if not batch:
            return []
        if self._segments[-1].end >= self._segment_bytes:
            self._rotate()
        segment, first = self._segments[-1], self.next_seq
        records = [encode_record(first + i, data) for i, data in enumerate(batch)]
        self._write(segment, b"".join(records))
        for data in batch:
            segment.places.append(Place(segment.end + HEADER.size, len(data)))
            segment.end += HEADER.size + len(data)
        return list(range(first, self.next_seq))

    def _check_writable(self, batch: Sequence[bytes]) -> None:
        if self._fd < 0:
            raise StoreError(f"{self.folder}: the log is closed or open for reading only")
        if self._fault:
            raise StoreError(self._fault)
        for data in batch:
            if not 0 < len(data) <= MAX_FRAME_BYTES:
                raise StoreError(
                    f"{self.folder}: one {self.NOUN} of {len(data)} bytes cannot be stored (1 to {MAX_FRAME_BYTES})"
                )

    def _write(self, segment: _Segment, data: bytes) -> None:
        """Write and fsync; after a failure the file is as it was, or the log takes nothing any more."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except OSError as e:
            error = as_store_error(segment.path, e)
            self._roll_back(segment, str(error))
            raise error from e

    def _roll_back(self, segment: _Segment, why: str) -> None:
        try:
            os.ftruncate(self._fd, segment.end)
            os.fsync(self._fd)
        except OSError:
            self._fault = f"{why}; the log takes no more {self.NOUN}s until the run is resumed"

    def _rotate(self) -> None:
        """Finish the last file with its index and begin the next."""
        finished = self._segments[-1]
        _write_index(finished)
        with store_errors(self.folder):
            fresh = _start(self.folder, finished.next_seq)
            fd = os.open(fresh.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.close(self._fd)
        self._segments.append(fresh)
        self._fd = fd


def _start(folder: Path, first_seq: int) -> _Segment:
    path = folder / f"{first_seq:012d}.log"
    write_bytes(path, MAGIC)
    return _Segment(path, first_seq, [], len(MAGIC))


def _load(path: Path, *, is_last: bool, say: Callable[[str], None]) -> _Segment:
    """A file's places, from its index when that fits, else by reading it through."""
    if not path.stem.isascii() or not path.stem.isdigit():
        raise StoreError(f"{path} does not belong here: files of this log are named by a number")
    first_seq = int(path.stem)
    size = path.stat().st_size
    if not is_last:
        places = _read_index(path, size)
        if places is not None:
            return _Segment(path, first_seq, places, size)
    places, end = scan(path, path.read_bytes(), first_seq)
    if not is_last and end < size:
        raise StoreError(f"{path} is damaged at offset {end}: record {first_seq + len(places)} does not check")
    if not is_last:
        say(f"{path.with_suffix('.idx').name} was missing or did not fit: {path.name} was read through instead")
    return _Segment(path, first_seq, places, end)


def _open_for_append(segment: _Segment, say: Callable[[str], None]) -> int:
    """Open the last file for writing, without the torn tail a crash left."""
    torn = segment.path.stat().st_size - segment.end
    fd = os.open(segment.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        if torn or segment.end < len(MAGIC):
            os.ftruncate(fd, segment.end)
            if segment.end < len(MAGIC):
                os.write(fd, MAGIC[segment.end :])
                segment.end = len(MAGIC)
            os.fsync(fd)
            sync_folder(segment.path.parent)
        if torn:
            say(f"{segment.path.name}: cut off {torn} bytes that a crash left at the end; nothing acknowledged is lost")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_order(segments: Sequence[_Segment]) -> None:
    expected = 0
    for segment in segments:
        if segment.first_seq != expected:
            raise StoreError(
                f"{segment.path} should begin at number {expected}: a file before it is missing or damaged"
            )
        expected = segment.next_seq


def _read_segment(segment: _Segment, seq: int, end: int) -> Iterator[tuple[int, bytes]]:
    if seq >= end:
        return
    with store_errors(segment.path), segment.path.open("rb") as f:
        for number in range(seq, end):
            place = segment.places[number - segment.first_seq]
            f.seek(place.offset - HEADER.size)
            header, payload = f.read(HEADER.size), f.read(place.length)
            yield number, check_payload(segment.path, number, place, header, payload)


def _write_index(segment: _Segment) -> None:
    body = b"".join(struct.pack("<QI", *place) for place in segment.places)
    write_bytes(segment.path.with_suffix(".idx"), _INDEX.pack(zlib.crc32(body), segment.end) + body)


def _read_index(path: Path, size: int) -> list[Place] | None:
    index = path.with_suffix(".idx")
    data = index.read_bytes() if index.is_file() else b""
    if len(data) < _INDEX.size or _INDEX.unpack_from(data) != (zlib.crc32(data[_INDEX.size :]), size):
        return None
    return [Place(*fields) for fields in struct.iter_unpack("<QI", data[_INDEX.size :])]
