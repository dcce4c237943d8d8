"""The episode log: nothing acknowledged is lost at any cut, damage is named, readers and writers agree."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from episode_samples import encode, episode
from selfplay.errors import StoreError
from selfplay.store import record_log
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.segment_file import HEADER, MAGIC
from selfplay.wire.codec import MAX_FRAME_BYTES

PAYLOADS = [b"first", b"the second", b"3", bytes(40)]


class Said(list[str]):
    def __call__(self, message: str) -> None:
        self.append(message)


def open_log(folder: Path, *, write: bool = True, say: Any = None, **kw: Any) -> EpisodeLog:
    return EpisodeLog.open(folder, write=write, say=Said() if say is None else say, **kw)


def write_log(folder: Path, payloads: list[bytes], **kw: Any) -> None:
    with open_log(folder, **kw) as log:
        for payload in payloads:
            log.append(payload)


def contents(folder: Path, **kw: Any) -> list[bytes]:
    with open_log(folder, **kw) as log:
        return [data for _, data in log.read_from(0)]


def test_what_is_appended_is_read_back_by_number(tmp_path: Path) -> None:
    with open_log(tmp_path / "episodes") as log:
        assert log.append(b"a") == 0
        assert log.append_many([b"b", b"c"]) == [1, 2]
        assert log.append_many([]) == []
        assert log.next_seq == 3
        assert log.read(1) == b"b"
        assert list(log.read_from(1)) == [(1, b"b"), (2, b"c")]
        assert list(log.read_from(3)) == []
    assert contents(tmp_path / "episodes", write=False) == [b"a", b"b", b"c"]


def test_episodes_come_back_decoded(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append_many([encode(episode(i)) for i in range(3)])
        assert list(log.episodes(1)) == [(1, episode(1)), (2, episode(2))]


def test_a_record_that_is_no_episode_is_named(tmp_path: Path) -> None:
    write_log(tmp_path, [b"junk"])
    with open_log(tmp_path, write=False) as log, pytest.raises(StoreError, match="record 0 is not an episode"):
        list(log.episodes())


@pytest.mark.parametrize("seq", [-1, 3, 99])
def test_a_number_that_is_not_there(tmp_path: Path, seq: int) -> None:
    write_log(tmp_path, [b"a", b"b", b"c"])
    with open_log(tmp_path, write=False) as log, pytest.raises(KeyError):
        log.read(seq)


def test_numbers_go_on_after_reopening(tmp_path: Path) -> None:
    write_log(tmp_path, [b"a"])
    with open_log(tmp_path) as log:
        assert log.append(b"b") == 1
    assert contents(tmp_path) == [b"a", b"b"]


def test_a_cut_at_every_byte_loses_no_acknowledged_record(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    ends = []
    with open_log(whole) as log:
        for payload in PAYLOADS:
            log.append(payload)
            ends.append(log.num_bytes)
    data = next(whole.glob("*.log")).read_bytes()
    for cut in range(len(data) + 1):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "000000000000.log").write_bytes(data[:cut])
        acknowledged = [p for p, end in zip(PAYLOADS, ends, strict=True) if end <= cut]
        assert contents(folder, write=False) == acknowledged
        said = Said()
        with open_log(folder, say=said) as log:
            assert [d for _, d in log.read_from(0)] == acknowledged
            assert log.append(b"next") == len(acknowledged)
        assert contents(folder) == [*acknowledged, b"next"]
        at_an_end = cut in (0, len(MAGIC), *ends)
        assert bool(said) == (not at_an_end), said


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=6), st.data())
def test_a_flipped_byte_is_never_read_as_something_else(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    write_log(folder, payloads)
    path = next(folder.glob("*.log"))
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    last_start = len(raw) - HEADER.size - len(payloads[-1])
    if at >= last_start:  # the last record: as good as torn, and what is before it stands
        assert contents(folder, write=False) == payloads[:-1]
    else:
        with pytest.raises(StoreError, match=r"\.log is damaged at offset"):
            contents(folder)


def test_damage_in_the_middle_is_named_and_nothing_is_cut(tmp_path: Path) -> None:
    write_log(tmp_path, PAYLOADS)
    path = next(tmp_path.glob("*.log"))
    raw = bytearray(path.read_bytes())
    offset = len(MAGIC) + HEADER.size + len(PAYLOADS[0])
    raw[offset : offset + 4] = (1 << 30).to_bytes(4, "little")  # a length that points beyond the end
    path.write_bytes(raw)
    with pytest.raises(StoreError, match=rf"000000000000\.log is damaged at offset {offset}: record 1 "):
        open_log(tmp_path)
    assert path.read_bytes() == raw


def test_zeros_after_a_power_cut_are_a_torn_tail(tmp_path: Path) -> None:
    write_log(tmp_path, PAYLOADS)
    path = next(tmp_path.glob("*.log"))
    with path.open("ab") as f:
        f.write(bytes(5000))
    said = Said()
    with open_log(tmp_path, say=said) as log:
        assert log.next_seq == len(PAYLOADS)
    assert "cut off 5000 bytes" in said[0]


def test_a_reader_leaves_a_torn_tail_alone(tmp_path: Path) -> None:
    write_log(tmp_path, PAYLOADS)
    path = next(tmp_path.glob("*.log"))
    os.truncate(path, path.stat().st_size - 3)
    before = path.read_bytes()
    assert contents(tmp_path, write=False) == PAYLOADS[:-1]
    assert path.read_bytes() == before


def test_another_file_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "000000000000.log").write_bytes(b"\x80\x04pickle, or so")
    with pytest.raises(StoreError, match="damaged at offset 0"):
        open_log(tmp_path)


def test_a_foreign_file_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.log").write_bytes(MAGIC)
    with pytest.raises(StoreError, match=r"notes\.log does not belong here"):
        open_log(tmp_path)


# ── several files ────────────────────────────────────────────────────────────────────────────────


def rotated(folder: Path) -> list[bytes]:
    payloads = [f"payload {i}".encode() for i in range(10)]
    write_log(folder, payloads, segment_bytes=70)
    return payloads


def test_files_rotate_by_size_and_read_as_one(tmp_path: Path) -> None:
    payloads = rotated(tmp_path)
    logs = sorted(p.name for p in tmp_path.glob("*.log"))
    assert len(logs) > 2
    assert logs[0] == "000000000000.log"
    said = Said()
    with open_log(tmp_path, write=False, say=said) as log:
        assert [d for _, d in log.read_from(0)] == payloads
        assert [log.read(i) for i in range(10)] == payloads
        assert list(log.read_from(4, 7)) == [(i, payloads[i]) for i in (4, 5, 6)]
        assert log.num_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.log"))
    assert said == []


def test_a_missing_index_is_made_up_for_and_said(tmp_path: Path) -> None:
    payloads = rotated(tmp_path)
    index = sorted(tmp_path.glob("*.idx"))
    index[0].unlink()
    index[1].write_bytes(b"rubbish" * 9)
    said = Said()
    assert contents(tmp_path, write=False, say=said) == payloads
    assert len(said) == 2


def test_damage_in_a_finished_file_is_found_when_it_is_read(tmp_path: Path) -> None:
    rotated(tmp_path)
    path = tmp_path / "000000000000.log"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with (
        open_log(tmp_path, write=False) as log,
        pytest.raises(StoreError, match=r"000000000000\.log is damaged at offset"),
    ):
        list(log.read_from(0))


def test_a_finished_file_that_was_shortened_is_damage(tmp_path: Path) -> None:
    rotated(tmp_path)
    path = tmp_path / "000000000000.log"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StoreError, match="damaged at offset"):
        open_log(tmp_path)


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    rotated(tmp_path)
    second = sorted(tmp_path.glob("*.log"))[1]
    second.unlink()
    with pytest.raises(StoreError, match="a file before it is missing"):
        open_log(tmp_path)


def test_a_crash_between_two_files_is_no_damage(tmp_path: Path) -> None:
    payloads = rotated(tmp_path)
    last = sorted(tmp_path.glob("*.log"))[-1]
    count = int(last.stem)
    for cut in range(len(MAGIC) + 1):
        folder = tmp_path / f"at{cut}"
        folder.mkdir()
        for path in tmp_path.glob("*.*"):
            shutil.copy(path, folder)
        os.truncate(folder / last.name, cut)
        with open_log(folder) as log:
            assert [d for _, d in log.read_from(0)] == payloads[:count]
            assert log.append(b"more") == count


# ── a disk that refuses ──────────────────────────────────────────────────────────────────────────


def test_a_full_disk_acknowledges_nothing_and_leaves_the_log_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with open_log(tmp_path) as log:
        log.append(b"safe")

        def half_then_full(fd: int, data: memoryview) -> int:
            if len(data) > 20:
                return write(fd, data[:20])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(record_log.os, "write", half_then_full)
        with pytest.raises(StoreError, match="No space left on device"):
            log.append_many([b"lost", b"also lost"])
        monkeypatch.undo()
        assert log.next_seq == 1
        assert log.append(b"after") == 1
    assert contents(tmp_path) == [b"safe", b"after"]


def test_after_an_fsync_that_cannot_be_undone_nothing_more_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_log(tmp_path) as log:
        log.append(b"safe")

        def fail(*args: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(record_log.os, "fsync", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            log.append(b"unsure")
        monkeypatch.undo()
        with pytest.raises(StoreError, match="takes no more episodes"):
            log.append(b"never")
    assert contents(tmp_path, write=False)[0] == b"safe"


@pytest.mark.parametrize("size", [0, MAX_FRAME_BYTES + 1])
def test_impossible_sizes_are_refused(tmp_path: Path, size: int) -> None:
    with open_log(tmp_path) as log, pytest.raises(StoreError, match="cannot be stored"):
        log.append(bytes(size))


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    write_log(tmp_path, [b"a"])
    with open_log(tmp_path, write=False) as log, pytest.raises(StoreError, match="reading only"):
        log.append(b"b")


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file"):
        open_log(tmp_path / "file" / "episodes")


def test_a_log_that_lost_known_episodes_is_refused_untouched(tmp_path: Path) -> None:
    write_log(tmp_path / "log", PAYLOADS)
    (path,) = (tmp_path / "log").glob("*.log")
    path.write_bytes(path.read_bytes()[:-3])
    before = path.read_bytes()
    with pytest.raises(
        StoreError, match=r"holds 3 whole episodes of the 4 .* removing the newer ones from checkpoints"
    ):
        open_log(tmp_path / "log", known=4)
    assert path.read_bytes() == before
    with open_log(tmp_path / "log", known=3) as log:
        assert log.next_seq == 3
