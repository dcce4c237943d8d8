"""What an environment id can be, told apart without importing anything.

name-vN, owner/name-vN   an entry point of group ``selfplay.environments``; without -vN the highest version is meant
scheme:name              a game of another library, through an adapter of group ``selfplay.adapters``
path/to/file.py          a Python file that holds exactly one environment
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from selfplay.errors import UserError

MAX_ID_CHARS = 200
_PART = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
_VERSIONED = re.compile(rf"((?:{_PART}/)?{_PART}?)-v(0|[1-9][0-9]{{0,8}})\Z")
_UNVERSIONED = re.compile(rf"(?:{_PART}/)?{_PART}\Z")
_ADAPTED = re.compile(r"([a-z][a-z0-9_]{0,31}):(\S.*)\Z")
FORM = "an id is name-vN or owner/name-vN, of letters, digits, '_' and '-'"


def is_file_id(env_id: str) -> bool:
    """Whether ``env_id`` is the path of a Python file rather than an id."""
    return env_id.endswith(".py")


def shown_id(env_id: str) -> str:
    """The id without the folders of this host: what another host may hear, and how it knows a file."""
    return Path(env_id).name if is_file_id(env_id) else env_id


def may_be_one_game(a: str, b: str) -> bool:
    """Whether ids of two hosts can mean one game: the same id, or two files, wherever they lie (their content decides)."""
    return a == b or (is_file_id(a) and is_file_id(b))


def split_adapted(env_id: str) -> tuple[str, str] | None:
    """(scheme, name) of an adapted game's id, or None."""
    found = _ADAPTED.match(env_id)
    return (found[1], found[2]) if found else None


def split_version(env_id: str) -> tuple[str, int] | None:
    """(name with its owner, version) of a full id, or None."""
    found = _VERSIONED.match(env_id)
    return (found[1], int(found[2])) if found else None


def check_id(env_id: str) -> str:
    """Return ``env_id`` if it can be one at all; raises `UserError` that shows it safely."""
    if not env_id or len(env_id) > MAX_ID_CHARS or not env_id.isprintable():
        raise UserError(f"{env_id[:60]!r} is not an environment id: it is empty, too long or has control characters")
    if not (split_adapted(env_id) or split_version(env_id) or _UNVERSIONED.match(env_id)):
        raise UserError(f"{env_id[:60]!r} is not an environment id: {FORM}; a file's path ends in .py")
    return env_id


def highest_version(name: str, known: Iterable[str]) -> str | None:
    """The id of the highest version of ``name`` among ``known`` ids, or None."""
    versions = [(v[1], k) for k in known if (v := split_version(k)) and v[0] == name]
    return max(versions)[1] if versions else None


def existing_file(env_id: str) -> Path:
    """The absolute path behind a file id; raises `UserError` for one that is not there."""
    try:
        path = Path(env_id).resolve()
        if path.is_file():
            if len(str(path)) > MAX_ID_CHARS:
                raise UserError(f"the path of {path.name} has {len(str(path))} characters; at most {MAX_ID_CHARS} fit")
            return path
    except (OSError, ValueError) as e:
        raise UserError(f"{env_id[:60]!r} is not a readable file: {e}") from None
    raise UserError(f"there is no environment file {env_id[:80]!r}")
