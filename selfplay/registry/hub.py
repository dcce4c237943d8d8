"""A hub folder: environments as ordinary wheels in a plain package index, with what their check found.

    HUB/index.html                    projects
    HUB/PROJECT/index.html            its wheels with their SHA-256, as any package index lists them
    HUB/PROJECT/NAME.whl              the wheel
    HUB/PROJECT/NAME.whl.json         a `Published`: ids, seats, content hash, check report

A folder of this form can be served by any web server, and is an index for ``pip --index-url``.
"""

from __future__ import annotations

import hashlib
import html
import re
import shutil
from pathlib import Path
from urllib.parse import quote

import msgspec

from selfplay.errors import UnknownNameError, UserError
from selfplay.registry.ids import check_id

_ENTRY = ".json"
_MAX_ENTRY_BYTES = 4 << 20


class PublishedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """One environment of a wheel: what ``env info`` shows without installing it."""

    id: str
    source: str
    seats: tuple[str, ...]
    doc: str
    checks: dict[str, str]
    """Check → its status; none of them is a fault."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One wheel in a hub."""

    project: str
    version: str
    wheel: str
    sha256: str
    environments: tuple[PublishedEnvironment, ...]


def normalised(project: str) -> str:
    """A project's name as package indexes write it."""
    return re.sub(r"[-_.]+", "-", project).lower()


class Hub(msgspec.Struct, frozen=True, kw_only=True):
    """What a hub holds."""

    wheels: tuple[Published, ...]
    """Oldest version first."""
    broken: dict[str, str]
    """Path of an entry that is none → what is wrong with it. It hides nothing else."""


def read_hub(hub: Path) -> Hub:
    """Everything in a hub; raises `UserError` for a folder that is none."""
    if not hub.is_dir():
        raise UserError(f"{hub} is not a hub: there is no such folder")
    found, broken = [], {}
    for path in sorted(hub.glob(f"*/*.whl{_ENTRY}")):
        try:
            found.append(_entry(path))
        except (msgspec.DecodeError, OSError, UserError) as e:
            broken[str(path.relative_to(hub))] = str(e)
    return Hub(wheels=tuple(sorted(found, key=lambda p: (p.project, _version_key(p.version)))), broken=broken)


def published(hub: Path) -> tuple[Published, ...]:
    """The wheels of a hub, oldest version first."""
    return read_hub(hub).wheels


def _entry(path: Path) -> Published:
    """What stands beside a wheel. It may speak of that wheel alone: a path in it would lead out of the hub."""
    if path.stat().st_size > _MAX_ENTRY_BYTES:
        raise UserError(f"it has {path.stat().st_size} bytes, at most {_MAX_ENTRY_BYTES} are read")
    entry = msgspec.json.decode(path.read_bytes(), type=Published)
    if (entry.project, entry.wheel) != (path.parent.name, path.name.removesuffix(_ENTRY)):
        raise UserError(f"it speaks of {entry.wheel!r} of {entry.project!r}, not of the wheel beside it")
    for environment in entry.environments:
        check_id(environment.id)
        if not environment.source.strip():
            raise UserError(f"it does not say where {environment.id} comes from")
    said = [entry.project, entry.version, *(text for e in entry.environments for text in (e.source, *e.seats))]
    if odd := [text for text in said if not text.isprintable()]:
        raise UserError(f"it holds text that cannot be shown: {odd[0][:60]!r}")
    return entry


def find_published(hub: Path, wanted: str) -> Published:
    """The wheel behind ``owner/name``, ``name-vN`` or a project's name, with ``==VERSION`` for that one, else the newest.

    Raises `UnknownNameError` with the nearest names.
    """
    name, sep, version = wanted.partition("==")
    everything = published(hub)
    matches = [p for p in everything if normalised(name) == p.project or any(_is(e.id, name) for e in p.environments)]
    if sep:
        versions = [p.version for p in matches]
        matches = [p for p in matches if p.version == version]
        if versions and not matches:
            raise UserError(f"{hub} holds {name} {', '.join(versions)}, not {version}")
    if len(projects := sorted({p.project for p in matches})) > 1:
        raise UserError(f"{name!r} is offered by {' and '.join(projects)} in {hub}: name the project instead")
    if not matches:
        raise UnknownNameError(f"environment in {hub}", name, [e.id for p in everything for e in p.environments])
    return matches[-1]


def add_wheel(hub: Path, wheel: Path, entry: Published) -> Path:
    """Put a wheel into a hub and list it; raises `UserError` when that version is there with other contents."""
    folder = hub / entry.project
    target = folder / wheel.name
    if target.exists() and sha256_of(target) != entry.sha256:
        raise UserError(f"{target} exists with other contents: a published version never changes, raise the version")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(wheel, target)
        Path(f"{target}.json").write_bytes(msgspec.json.format(msgspec.json.encode(entry), indent=2))
        _write_index(folder, {f"{p.name}#sha256={sha256_of(p)}": p.name for p in sorted(folder.glob("*.whl"))})
        _write_index(hub, {f"{p.name}/": p.name for p in sorted(hub.iterdir()) if p.is_dir()})
    except OSError as e:
        raise UserError(f"the hub {hub} cannot be written: {e}") from None
    return target


def sha256_of(path: Path) -> str:
    """Hexadecimal digest of a file; raises `UserError` for one that cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None


def _write_index(folder: Path, links: dict[str, str]) -> None:
    lines = [
        f'<a href="{html.escape(quote(to, safe="/#="))}">{html.escape(name)}</a><br>' for to, name in links.items()
    ]
    text = "\n".join(["<!DOCTYPE html><html><body>", *lines, "</body></html>"])
    (folder / "index.html").write_text(text + "\n", "utf-8")


def _is(env_id: str, name: str) -> bool:
    return name in (env_id, env_id.rpartition("-v")[0])


def _version_key(version: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"[.+-]", version))
