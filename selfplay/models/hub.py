"""Hugging Face hub ids: the local cache first, the network only when the model is not there.

Only weights in safetensors, JSON and tokenizer files are fetched; code in a repository is neither fetched nor run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfplay.errors import MissingExtraError, UserError
from selfplay.models.folder import weight_files

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt")


def fetch(name: str, say: Callable[[str], None]) -> Path:
    """The snapshot folder of ``org/name``. Raises `UserError` when it is neither cached nor reachable."""
    hub = _hub()
    cached = _cached(hub, name)
    if cached is not None:
        return cached
    say(f"fetching {name} from the Hugging Face hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(PATTERNS)))
    except Exception as e:
        # The boundary to the network: hub, HTTP and socket errors have no common base, and each means the same here.
        raise UserError(
            f"model {name!r} is not in the Hugging Face cache and could not be fetched ({_reason(e)}); "
            "give a local folder, or fetch it first where there is a network"
        ) from e


def _cached(hub: Any, name: str) -> Path | None:
    try:
        path = Path(hub.snapshot_download(name, allow_patterns=list(PATTERNS), local_files_only=True))
        weight_files(path, name)
    except (hub.errors.LocalEntryNotFoundError, UserError):
        return None
    return path if (path / "config.json").exists() else None


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as e:
        raise MissingExtraError("a model from the hub", "train", "huggingface_hub") from e
    return huggingface_hub


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
