"""Checkpoints: ``checkpoints/STEP/`` with the controller's state beside the trainer's, whole or not there.

    STEP/state.json     controller state, and size and checksum of every other file
    STEP/trainer/       written by the trainer ranks (torch.distributed.checkpoint)

In: a step, a `RunState`, and whatever is written into the folder meanwhile. Out: the newest checkpoint that checks. A
kill at any moment leaves the earlier ones untouched and a temp folder that the next start removes.
"""

from __future__ import annotations

import contextlib
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from selfplay.errors import StoreError
from selfplay.store.atomic import new_folder, remove_leftovers, store_errors, write_bytes
from selfplay.store.state import RunState

STATE = "state.json"
REPLACED = ".replaced"
SCHEMA = 1
MAX_STATE_BYTES = 64 << 20


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One whole checkpoint."""

    step: int
    folder: Path
    state: RunState


class _StateFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    state: RunState
    files: dict[str, tuple[int, int]]
    """Relative path → (size, crc32)."""


class Checkpoints:
    """The checkpoints of one run; ``say`` hears of what was skipped or could not be deleted.

    >>> with checkpoints.writing(state) as folder:          # an exception inside leaves nothing behind
    ...     await trainer.save(folder / "trainer")
    """

    def __init__(self, root: Path, *, keep: int, say: Callable[[str], None]) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint is kept")
        self._root, self._keep, self._say = root, keep, say

    @contextlib.contextmanager
    def writing(self, state: RunState) -> Iterator[Path]:
        """A folder to fill; when the block ends well it is checkpoint ``state.step``, and old ones are deleted.

        A checkpoint of the same step is replaced. Raises `StoreError` when the disk refuses; the earlier checkpoints stand.
        """
        path = self._root / str(state.step)
        self._recover()
        try:
            with new_folder(path) as folder:
                yield folder
                with store_errors(path):
                    record = _StateFile(schema=SCHEMA, state=state, files=_fingerprints(folder))
                    write_bytes(folder / STATE, msgspec.json.encode(record))
                    if path.exists():
                        path.rename(path.with_name(path.name + REPLACED))
        finally:
            self._recover()
        self._delete_old(state.step)

    def steps(self) -> tuple[int, ...]:
        """Steps that have a folder, damaged or not, oldest first."""
        return tuple(sorted(self._folders()))

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that checks; damaged newer ones are named to ``say``. None when there is none."""
        for step, folder in sorted(self._folders().items(), reverse=True):
            try:
                return load_checkpoint(folder)
            except StoreError as e:
                self._say(f"checkpoint {step} is skipped: {e}")
        return None

    def remove_leftovers(self) -> int:
        """Delete what killed writers left; how many there were."""
        return remove_leftovers(self._root)

    def _folders(self) -> dict[int, Path]:
        """Step → folder; one that was about to be replaced counts while nothing has taken its place."""
        with store_errors(self._root):
            names = sorted(p.name for p in self._root.iterdir() if p.is_dir()) if self._root.is_dir() else []
        steps = {name: name.removesuffix(REPLACED) for name in names}
        found = {int(s): self._root / n for n, s in steps.items() if n != s and s.isascii() and s.isdigit()}
        return found | {int(s): self._root / n for n, s in steps.items() if n == s and s.isascii() and s.isdigit()}

    def _recover(self) -> None:
        """Finish or undo the replacing of a checkpoint by a newer one of the same step."""
        for old in self._root.glob(f"*{REPLACED}"):
            path = old.with_name(old.name.removesuffix(REPLACED))
            with store_errors(old):
                if path.exists():
                    shutil.rmtree(old, ignore_errors=True)
                else:
                    old.rename(path)

    def _delete_old(self, newest: int) -> None:
        """Keep the last few up to ``newest``, which was just written; later steps are not this timeline's to judge."""
        folders = sorted((step, path) for step, path in self._folders().items() if step <= newest)
        for _, path in folders[: -self._keep]:
            try:
                shutil.rmtree(path)
            except OSError as e:
                self._say(f"old checkpoint {path} could not be deleted: {e.strerror or e}")


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and check one checkpoint; raises `StoreError` saying what is missing or damaged."""
    path = folder / STATE
    with store_errors(path):
        if not path.is_file() or path.stat().st_size > MAX_STATE_BYTES:
            raise StoreError(f"{folder} has no usable {STATE}")
        data = path.read_bytes()
    try:
        record = msgspec.json.decode(data, type=_StateFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise StoreError(f"{path} is damaged: {e}") from None
    if record.schema != SCHEMA:
        raise StoreError(f"{path} has layout {record.schema}, this selfplay reads {SCHEMA}")
    if str(record.state.step) != folder.name.removesuffix(REPLACED):
        raise StoreError(f"{path} is of step {record.state.step}: the folder was renamed or mixed up")
    with store_errors(folder):
        _check_files(folder, record.files)
    return Checkpoint(step=record.state.step, folder=folder, state=record.state)


def _check_files(folder: Path, expected: dict[str, tuple[int, int]]) -> None:
    found = _fingerprints(folder)
    if found == expected:
        return
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise StoreError(f"{folder / name} is missing")
        if name not in expected:
            raise StoreError(f"{folder / name} does not belong to this checkpoint")
        if found[name] != expected[name]:
            raise StoreError(f"{folder / name} is damaged: size and checksum {found[name]}, written {expected[name]}")


def _fingerprints(folder: Path) -> dict[str, tuple[int, int]]:
    """Relative path → (size, crc32) of every file but the state; links are refused."""
    out = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise StoreError(f"{path} is a link or no plain file: checkpoints hold plain files only")
        if path.is_file() and path != folder / STATE:
            out[path.relative_to(folder).as_posix()] = _fingerprint(path)
    return out


def _fingerprint(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc
