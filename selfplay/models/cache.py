"""The cache folder: built models, and digests of weights that were hashed before.

``$SELFPLAY_CACHE``, else ``$XDG_CACHE_HOME/selfplay``, else ``~/.cache/selfplay``. Everything in it can be deleted at
any time between runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from selfplay.errors import StoreError, UserError

_CHUNK = 4 << 20


def cache_folder(given: Path | None = None) -> Path:
    """The cache folder, made if need be; `StoreError` when it cannot be."""
    base = os.environ.get("SELFPLAY_CACHE")
    path = given or (Path(base).expanduser() if base else _platform_cache() / "selfplay")
    with _store_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def built_once(folder: Path, is_sound: Callable[[Path], bool], build: Callable[[Path], None]) -> Path:
    """``folder``, built by ``build(temp)`` unless it is there and sound. Safe for any number of processes at once.

    A folder that is not sound is replaced.
    """
    if is_sound(folder):
        return folder
    with _store_errors(folder), _locked(folder.with_name(f".{folder.name}.lock")):
        if is_sound(folder):
            return folder
        _remove_leftovers(folder)
        temp = folder.with_name(f".tmp-{folder.name}-{secrets.token_hex(4)}")
        temp.mkdir()
        try:
            build(temp)
            _sync(temp)
            shutil.rmtree(folder, ignore_errors=True)
            temp.rename(folder)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return folder


def cached_digest(files: Sequence[Path], cache: Path) -> str:
    """sha256 over the contents of ``files`` in order; hashed again only when a size or a time of change differs."""
    with _store_errors(files[0].parent):
        state = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    key = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    record = cache / "digests" / key
    with contextlib.suppress(OSError):
        known = record.read_text(encoding="ascii")
        if len(known) == 64:
            return known
    digest = hashlib.sha256()
    with _store_errors(files[0].parent):
        for path in files:
            _update(digest, path)
    with _store_errors(record):
        record.parent.mkdir(exist_ok=True)
        temp = record.with_name(f".tmp-{key}-{secrets.token_hex(4)}")
        temp.write_text(digest.hexdigest(), encoding="ascii")
        temp.replace(record)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)


def _platform_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel frees it when the process dies."""
    with path.open("ab") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


_WRONG_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        problem = f"cannot write or read {e.filename or path}: {e.strerror or e}"
        if e.errno in _WRONG_PLACE:
            raise UserError(f"{problem}; name another cache folder in SELFPLAY_CACHE") from e
        raise StoreError(problem) from e


def _remove_leftovers(folder: Path) -> None:
    for path in folder.parent.glob(f".tmp-{folder.name}-*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
