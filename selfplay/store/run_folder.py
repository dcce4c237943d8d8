"""The run folder: one place on disk per run, owned by one controller at a time.

    runs/NAME/
        config.toml     the effective config            metrics.jsonl   one JSON object per report
        manifest.json   what ran, where, how it ended   tensorboard/    the same as events
        episodes/       append-only log                 adapters/       AGENT/N/, PEFT format
        scores/         what scorers said of them
        checkpoints/    STEP/                           league.sqlite   every game's result
        logs/           one file per process            .lock           held while a controller owns the run
        gate/           games of the promotion gate, as a tournament's folder, where ``league.gate`` is on
        good/           what agents can be taken back to, where ``league.on_alarm`` says so

In: a name, a config, and what the manifest shall say. Out: paths, and a lock that the kernel releases however the
controller ends. Everything is written by temp name, fsync and rename.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from selfplay.config import Config, config_from_tree, dump_toml, load_config
from selfplay.errors import ConfigError, StoreError, UserError
from selfplay.store.atomic import remove_leftovers, store_errors, write_bytes
from selfplay.store.manifest import Manifest, RunStatus, read_manifest, utc_now

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_RESERVED = re.compile(r"(con|nul|prn|aux|com\d|lpt\d)(\..*)?\Z", re.IGNORECASE)


class RunFolder:
    """One run on disk.

    >>> with RunFolder.create("runs", "first", config, manifest) as run:      # locked until the block ends
    ...     run.update_manifest(status="finished")

    ``open`` gives a reader's view without the lock, ``own`` takes the lock of an existing run to go on with it.
    """

    def __init__(self, path: Path, lock_fd: int | None = None) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, runs_dir: str | Path, name: str, config: Config, manifest: Manifest) -> RunFolder:
        """Make and lock a new run. Raises `ConfigError` for a bad or taken name, `StoreError` for what the disk refuses."""
        path = Path(runs_dir).expanduser() / check_run_name(name)
        with store_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
            except FileExistsError:
                raise ConfigError(
                    f"run {name!r} exists in {path.parent}: choose another name, or  selfplay resume {path}"
                ) from None
        run = cls(path, _lock(path))
        try:
            with store_errors(path):
                for folder in (run.episodes, run.adapters, run.checkpoints, run.logs):
                    folder.mkdir()
            write_bytes(run.config_path, dump_toml(config).encode())
            write_bytes(run.manifest_path, manifest.to_json())
        except BaseException:
            run.close()
            shutil.rmtree(path, ignore_errors=True)
            raise
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run, to look at. Raises `UserError` when there is none."""
        path = Path(path).expanduser()
        with store_errors(path):
            if not (path / "manifest.json").is_file():
                raise UserError(f"{path} is not a run: it has no manifest.json")
        return cls(path)

    @classmethod
    def own(cls, path: str | Path) -> RunFolder:
        """An existing run, locked, to go on with. Raises `UserError` when another controller has it, or it holds links."""
        folder = cls.open(path).path
        _refuse_links(folder)
        run = cls(folder, _lock(folder))
        remove_leftovers(folder)
        return run

    def close(self) -> None:
        """Give the lock back; idempotent."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ── what lies where ──────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def episodes(self) -> Path:
        return self.path / "episodes"

    @property
    def scores(self) -> Path:
        return self.path / "scores"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def league_path(self) -> Path:
        return self.path / "league.sqlite"

    @property
    def gate(self) -> Path:
        return self.path / "gate"

    @property
    def good(self) -> Path:
        return self.path / "good"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    # ── what it says ─────────────────────────────────────────────────────────────────────────────

    def config(self) -> Config:
        """The config as it is now."""
        return load_config(self.config_path)

    def first_config(self) -> Config:
        """The config the run was started with, whatever has been written into config.toml since."""
        return config_from_tree(tomllib.loads(self.manifest().config))

    def write_config(self, config: Config) -> None:
        """Replace the config (a resume with changed settings)."""
        write_bytes(self.config_path, dump_toml(config).encode())

    def manifest(self) -> Manifest:
        """Raises `StoreError` for a damaged one."""
        return read_manifest(self.manifest_path)

    def update_manifest(self, **changes: Any) -> Manifest:
        """Replace fields of the manifest, in one step on disk."""
        manifest = msgspec.structs.replace(self.manifest(), **changes, updated=utc_now())
        write_bytes(self.manifest_path, manifest.to_json())
        return manifest

    def is_owned(self) -> bool:
        """Whether a living controller holds the run."""
        if self._lock_fd is not None:
            return True
        with store_errors(self.path):
            try:
                fd = _try_lock(self.path / ".lock", create=False)
            except FileNotFoundError:
                return False
        if fd is not None:
            os.close(fd)
        return fd is None

    def status(self) -> tuple[RunStatus | str, str]:
        """(status, reason): as the manifest says, except that a run without its controller is not ``running`` but ``killed``."""
        manifest = self.manifest()
        if manifest.status == "running" and not self.is_owned():
            return "killed", f"its controller is gone; go on with  selfplay resume {self.path}"
        return manifest.status, manifest.reason


def check_run_name(name: str) -> str:
    """Return ``name`` when it is fit to be a folder everywhere; else raise `ConfigError`."""
    if not _NAME.match(name) or _RESERVED.match(name) or name.endswith("."):
        shown = name if len(name) <= 60 else name[:60] + "…"
        raise ConfigError(
            f"run name {shown!r} is not allowed: 1 to 100 of letters, digits, '.', '_' and '-', starting with a letter or digit"
            " and not a device name; where runs are made is set by runs_dir"
        )
    return name


def default_run_name(runs_dir: str | Path, env: str, now: datetime.datetime | None = None) -> str:
    """``ENV-YYYYMMDD-HHMMSS``, with a number after it when that is taken."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(env).stem if env.endswith(".py") else env).strip("-._")[:60] or "run"
    stamp = f"{label}-{now or datetime.datetime.now():%Y%m%d-%H%M%S}"
    taken = Path(runs_dir).expanduser()
    with store_errors(taken):
        return next(n for n in (stamp, *(f"{stamp}-{k}" for k in range(2, 10_000))) if not (taken / n).exists())


def list_runs(runs_dir: str | Path, warn: Callable[[str], None]) -> list[RunFolder]:
    """Every run below ``runs_dir``, oldest first; folders whose manifest is damaged are named to ``warn`` and left out."""
    root = Path(runs_dir).expanduser()
    runs: list[tuple[str, RunFolder]] = []
    with store_errors(root):
        paths = sorted(p for p in root.iterdir() if (p / "manifest.json").is_file()) if root.is_dir() else []
    for path in paths:
        try:
            runs.append((RunFolder(path).manifest().created, RunFolder(path)))
        except StoreError as e:
            warn(str(e))
    return [run for _, run in sorted(runs, key=lambda pair: pair[0])]


def _refuse_links(path: Path) -> None:
    """A run goes on by writing into its folder: a link there would have it write, or cut, a file that is elsewhere."""
    with store_errors(path):
        folders = [path]
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    elif not entry.is_file(follow_symlinks=False):
                        raise UserError(
                            f"{entry.path} is a link or not a plain file: a run is not resumed into places outside its "
                            "folder; put a copy there"
                        )


def _lock(path: Path) -> int:
    with store_errors(path):
        fd = _try_lock(path / ".lock", create=True)
        if fd is None:
            with contextlib.suppress(OSError):
                owner = (path / ".lock").read_text("ascii", "replace").strip()
                raise UserError(
                    f"run {path} is in use by process {owner or '?'}: stop that first, or start a run of another name"
                )
            raise UserError(f"run {path} is in use by another process: stop that first, or start a run of another name")
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _try_lock(path: Path, *, create: bool) -> int | None:
    """An open, locked descriptor (not inherited by children), or None when somebody else has the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd
