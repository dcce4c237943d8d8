"""Adapter versions on disk: ``ROOT/AGENT/N/{adapter_model.safetensors,adapter_config.json,version.json}``.

A version is immutable. It is written into a temp folder, checked, digested, fsync'ed and renamed, so a reader sees it
whole or not at all. Each folder is an ordinary PEFT adapter: transformers, peft and vLLM load it as it is;
one of whole modules (`peft_format.whole_modules`) only peft does.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from selfplay.config.plain_file import read_plain
from selfplay.errors import ConfigError, StoreError
from selfplay.store import peft_format
from selfplay.store.atomic import new_folder, remove_leftovers, store_errors, write_bytes
from selfplay.types import PolicyVersion, Scalar, check_name
from selfplay.wire.messages import BucketHeader

INFO_NAME = "version.json"
MAX_INFO_BYTES = 1 << 20


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one version."""

    version: PolicyVersion
    parent: PolicyVersion | None
    digest: str
    """sha256 over weights and canonical adapter_config."""
    created: str
    """UTC, ISO 8601."""
    meta: dict[str, Scalar] = {}


class _InfoFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Annotated[str, Meta(max_length=64)]
    parent: Annotated[str, Meta(max_length=64)] | None
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    created: Annotated[str, Meta(max_length=40)]
    meta: dict[str, Scalar] = {}


class AdapterStore:
    """All versions of all agents of a run below ``root`` (the run's ``adapters`` folder)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, version: PolicyVersion) -> Path:
        """Where the version lies or will lie. Raises `ConfigError` for an agent name that is not fit for a path."""
        if version.version < 0:
            raise ConfigError(f"{version} is not a version: numbers count from 0")
        return self.root / check_name(version.agent, "agent") / str(version.version)

    def publish(
        self,
        version: PolicyVersion,
        write: Callable[[Path], None],
        *,
        parent: PolicyVersion | None,
        meta: Mapping[str, Scalar] | None = None,
    ) -> str:
        """Store what ``write(folder)`` writes as ``version`` and return its digest.

        The same contents again is a no-op; other contents under a published version is a `StoreError`, as is anything
        that `peft_format.check_folder` refuses.
        """
        final, digest = self.path(version), ""
        try:
            with new_folder(final) as folder:
                write(folder)
                peft_format.check_folder(folder)
                digest = peft_format.folder_digest(folder)
                _write_info(folder, version, parent, digest, dict(meta or {}))
                if final.exists():
                    raise _AlreadyThere
        except (_AlreadyThere, StoreError):
            # Somebody was first, seen before the rename or by it; anything else is passed on.
            if not digest or not final.exists():
                raise
            self._require_same(version, digest)
        return digest

    def versions(self, agent: str) -> tuple[PolicyVersion, ...]:
        """Published versions of an agent, oldest first; empty for an unknown one."""
        folder = self.root / check_name(agent, "agent")
        with store_errors(folder):
            names = [p.name for p in folder.iterdir() if (p / INFO_NAME).is_file()] if folder.is_dir() else []
        return tuple(
            sorted(PolicyVersion(agent, int(n)) for n in names if n.isascii() and n.isdigit() and str(int(n)) == n)
        )

    def agents(self) -> tuple[str, ...]:
        """Agents that have at least one version."""
        with store_errors(self.root):
            names = [p.name for p in self.root.iterdir() if p.is_dir()] if self.root.is_dir() else []
        return tuple(sorted(n for n in names if not n.startswith(".") and self.versions(n)))

    def latest(self, agent: str) -> PolicyVersion | None:
        """The newest published version, or None."""
        return max(self.versions(agent), default=None)

    def info(self, version: PolicyVersion) -> AdapterInfo:
        """What was recorded at `publish`; `StoreError` when the version does not exist or its record is damaged."""
        path = self.path(version) / INFO_NAME
        with store_errors(path):
            data = read_plain(path, MAX_INFO_BYTES)
        try:
            record = msgspec.json.decode(data, type=_InfoFile)
            parent = PolicyVersion.parse(record.parent) if record.parent is not None else None
        except (msgspec.DecodeError, ConfigError) as e:
            raise StoreError(f"{path} is damaged: {e}") from e
        if record.version != str(version):
            raise StoreError(f"{path} is the record of {record.version}, not of {version}")
        return AdapterInfo(
            version=version, parent=parent, digest=record.digest, created=record.created, meta=record.meta
        )

    def verify(self, version: PolicyVersion) -> AdapterInfo:
        """Check the folder's contents and recompute the digest; `StoreError` with both digests when they differ."""
        info, folder = self.info(version), self.path(version)
        if folder.parent.is_symlink():
            raise StoreError(f"{folder.parent} is a link; an adapter folder may not lie outside the store")
        peft_format.check_folder(folder)
        found = peft_format.folder_digest(folder)
        if found != info.digest:
            raise StoreError(
                f"{version} at {folder} is damaged: digest {found[:16]}…, published as {info.digest[:16]}…"
            )
        return info

    def bucket_header(self, version: PolicyVersion) -> BucketHeader:
        """A header with which an engine's ``file`` receiver reads the version straight from its folder.

        Verifies the version first. For start and resume: nobody has to send anything.
        """
        self.verify(version)
        folder = self.path(version)
        offset, entries = peft_format.read_entries(folder)
        dtype, itemsize = peft_format.bucket_dtype(folder / peft_format.WEIGHTS_NAME, entries)
        return BucketHeader(
            transport="file",
            address=str(folder.resolve()),
            offset=offset,
            num_bytes=entries[-1].end,
            crc32=peft_format.data_crc32(folder, offset),
            dtype=cast("Literal['float32', 'bfloat16', 'float16']", dtype),
            layout=tuple((e.name, e.shape, e.start // itemsize) for e in entries),
            adapter_config=peft_format.engine_config(peft_format.read_config(folder)),
        )

    def remove_leftovers(self) -> int:
        """Delete what killed writers left unfinished; how many there were. Call when nobody else publishes."""
        folders = [p for p in self.root.iterdir() if p.is_dir()] if self.root.is_dir() else []
        return sum(remove_leftovers(p) for p in folders)

    def _require_same(self, version: PolicyVersion, digest: str) -> None:
        there = self.info(version).digest
        if there != digest:
            raise StoreError(
                f"{version} is already published with other contents (digest {there[:16]}…, now {digest[:16]}…): "
                "a version never changes, publish the next number"
            )


class _AlreadyThere(Exception):
    """Leaves the `new_folder` block without publishing."""


def _write_info(
    folder: Path, version: PolicyVersion, parent: PolicyVersion | None, digest: str, meta: dict[str, Scalar]
) -> None:
    record = _InfoFile(
        version=str(version), parent=None if parent is None else str(parent), digest=digest, meta=meta,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    write_bytes(folder / INFO_NAME, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
