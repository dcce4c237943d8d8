"""The content hash: what it covers, what it does not, and that it goes with every description."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from selfplay.environment import Environment
from selfplay.errors import UserError
from selfplay.registry import describe, environment_source
from selfplay.registry.provenance import content_hash

GAME = "from selfplay import Environment\nfrom {package} import tables\n\n\nclass Game(Environment):\n    {body}\n"


def write_package(
    folder: Path, name: str, *, body: str = "x = 1", tables: str = "N = 3\n", words: str = "a b\n"
) -> None:
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", "utf-8")
    (package / "game.py").write_text(GAME.format(package=".", body=body), "utf-8")
    (package / "tables.py").write_text(tables, "utf-8")
    (package / "unused.py").write_text("import nothing_at_all\n", "utf-8")
    (package / "words.txt").write_text(words, "utf-8")


def hash_of(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(folder))
        kind: type[Environment] = importlib.import_module(f"{name}.game").Game
        found = content_hash(kind)
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[module]
    importlib.invalidate_caches()
    return found


def test_what_decides_the_game_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = "data_files = ('words.txt',)"
    variants = {
        "same": {}, "again": {}, "body": {"body": "x = 2"}, "imported": {"tables": "N = 4\n"}, "undeclared": {"words": "c\n"},
        "data": {"body": data}, "data2": {"body": data, "words": "c\n"},
    }  # fmt: skip
    found = {}
    for place, changes in variants.items():
        write_package(tmp_path / place, "hashed_game", **changes)  # type: ignore[arg-type]
        found[place] = hash_of(tmp_path / place, monkeypatch, "hashed_game")
    assert found["same"] == found["again"] == found["undeclared"]
    assert len(set(found.values())) == 5
    assert found["same"].startswith("sha256:")


def test_a_missing_data_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, "lost_words", body="data_files = ('nowhere.txt',)")
    with pytest.raises(UserError, match=r"data file 'nowhere\.txt' is not beside game\.py"):
        hash_of(tmp_path, monkeypatch, "lost_words")


def test_the_hash_goes_with_the_source() -> None:
    source = environment_source("nim-v0")
    assert source.split()[0] == "selfplay"
    assert source.split()[2].startswith("sha256:")
    assert describe("nim").source == source
    assert environment_source("debate-v0").split()[2] != source.split()[2]
