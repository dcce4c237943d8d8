"""Files and folders that are whole when they are seen."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from selfplay.errors import StoreError
from selfplay.store.atomic import new_folder, remove_leftovers, write_bytes


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_write_bytes_replaces_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_bytes(path, b"one")
    write_bytes(path, memoryview(b"two"), durable=False, mode=0o600)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["f"]


def test_a_failed_write_keeps_the_old_file_and_no_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_bytes(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=rf"{path}: No space left on device"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        write_bytes(tmp_path / "no" / "f", b"")


def test_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "1") as folder:
        (folder / "x").write_text("x")
        (folder / "deep").mkdir()
        (folder / "deep" / "y").write_text("y")
        assert names(tmp_path / "a") == [folder.name]
    assert (tmp_path / "a" / "1" / "deep" / "y").read_text() == "y"
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "a" / "2"):
        _ = 1 / 0
    assert names(tmp_path / "a") == ["1"]


def test_new_folder_never_replaces(tmp_path: Path) -> None:
    with new_folder(tmp_path / "1") as folder:
        (folder / "x").write_text("first")
    with pytest.raises(StoreError, match=r"Directory not empty|File exists"), new_folder(tmp_path / "1") as folder:
        (folder / "x").write_text("second")
    assert (tmp_path / "1" / "x").read_text() == "first"
    assert names(tmp_path) == ["1"]


def test_an_os_error_inside_new_folder_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"{tmp_path / '1'}: No such file"), new_folder(tmp_path / "1") as folder:
        (folder / "no" / "x").write_text("x")


def test_leftovers_are_counted_and_removed_links_not_followed(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "x").write_text("x")
    (tmp_path / ".tmp-1-aa").mkdir()
    (tmp_path / ".tmp-1-aa" / "x").write_text("x")
    (tmp_path / ".tmp-f-bb").write_text("x")
    (tmp_path / ".tmp-l-cc").symlink_to(tmp_path / "keep")
    assert remove_leftovers(tmp_path) == 3
    assert remove_leftovers(tmp_path / "nowhere") == 0
    assert names(tmp_path) == ["keep"]
    assert names(tmp_path / "keep") == ["x"]
