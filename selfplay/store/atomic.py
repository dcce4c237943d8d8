"""Files and folders that are whole when they are seen: temp name + fsync + rename + fsync of the folder above.

Every failure of the file system becomes a `StoreError` with the path and the system's own words ("No space left on
device"), and the temp name is gone again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from selfplay.errors import StoreError

TEMP_MARK = ".tmp-"
"""Names that start so are unfinished: never read, removed by `remove_leftovers`."""


def write_bytes(path: Path, data: bytes | memoryview, *, durable: bool = True, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data`` in one step. ``durable`` waits for the disk."""
    temp = temp_name(path)
    with store_errors(path):
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
            with os.fdopen(fd, "wb", buffering=0) as f:
                _write_all(f.write, memoryview(data))
                if durable:
                    os.fsync(fd)
            temp.replace(path)
            if durable:
                sync_folder(path.parent)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a temp folder; it becomes ``path`` when the block ends well, and vanishes otherwise.

    >>> with new_folder(run / "checkpoints" / "12") as folder:
    ...     save_into(folder)

    Raises `StoreError` when ``path`` exists and is not empty: what is published is never replaced.
    """
    temp = temp_name(path)
    with store_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir()
    try:
        yield temp
        with store_errors(path):
            sync_tree(temp)
            temp.rename(path)
            sync_folder(path.parent)
    except BaseException as e:
        shutil.rmtree(temp, ignore_errors=True)
        if isinstance(e, OSError):
            raise as_store_error(path, e) from e
        raise


@contextlib.contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn OSError inside the block into a `StoreError` about ``path``."""
    try:
        yield
    except OSError as e:
        raise as_store_error(path, e) from e


def as_store_error(path: Path, error: OSError) -> StoreError:
    """One line: what could not be done, where, and why in the system's words."""
    where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
    return StoreError(f"cannot write or read {path}: {error.strerror or error}{where}")


def sync_tree(folder: Path) -> None:
    """fsync every file below ``folder``, and the folders themselves."""
    for parent, _, files in os.walk(folder):
        for name in files:
            _fsync(Path(parent) / name, os.O_RDONLY | os.O_NOFOLLOW)
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that a rename in it survives a power cut."""
    _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)


def remove_leftovers(folder: Path) -> int:
    """Delete unfinished temp names directly below ``folder`` (their writers were killed); how many there were."""
    leftovers = list(folder.glob(f"{TEMP_MARK}*")) if folder.is_dir() else []
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return len(leftovers)


def temp_name(path: Path) -> Path:
    """A fresh unfinished name beside ``path``."""
    return path.with_name(f"{TEMP_MARK}{path.name}-{secrets.token_hex(4)}")


def _fsync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(write: Callable[[memoryview], int | None], view: memoryview) -> None:
    view = view.cast("B")
    while view:
        view = view[write(view) or 0 :]
