"""Imports point one way, heavy libraries stay in their rooms, and light commands stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LEVELS = (
    ("types", "errors", "config", "process"),
    ("wire", "registry", "environment", "agent", "models"),
    ("play", "check", "buffer", "store", "league", "scoring", "sync", "evaluation", "ratings", "tournament"),
    ("pool", "policy", "training", "export"),
    ("controller",),
    ("launch", "cli", "bench"),
)
LEVEL_OF = {room: i for i, rooms in enumerate(LEVELS) for room in rooms}
STRANGERS = {"pool", "policy", "training"}
"""Talk to each other over the wire only."""

ROOMS_OF = {
    "torch": {"training", "sync", "policy", "models", "bench"},
    "transformers": {"training", "policy", "models", "bench"},
    "peft": {"training", "policy", "models", "bench"},
    "safetensors": {"training", "sync", "policy", "models", "store", "bench"},
    "vllm": {"policy", "bench"},
    "ray": {"launch"},
}
LAZY_ONLY = {"models", "bench", "store"}
"""Rooms that light processes import too: their heavy imports stay inside functions."""

PLUGIN_ROOMS = {
    "environments": {"types", "errors", "environment"},
    "agents": {"types", "errors", "environment", "agent", "registry", "play", "evaluation"},
}
"""What first-party environments and agents may use: what anybody else's may."""

HEAVY = ("torch", "vllm", "ray", "transformers", "peft")


class Import:
    """One import: the module it names, and whether it runs when the file is imported."""

    def __init__(self, name: str, line: int, at_import: bool) -> None:
        self.name, self.line, self.at_import = name, line, at_import


def imports(path: Path) -> Iterator[Import]:
    yield from _walk(ast.parse(path.read_text("utf-8")), at_import=True)


def _walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module is not None:
            if child.module == "selfplay":
                yield from (Import(f"selfplay.{alias.name}", child.lineno, at_import) for alias in child.names)
            else:
                yield Import(child.module, child.lineno, at_import)
        else:
            yield from _walk(child, at_import and not _runs_later(child))


def _runs_later(node: ast.AST) -> bool:
    """Function bodies, and what only a type checker sees."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def package_files() -> list[Path]:
    return sorted(p for p in (ROOT / "selfplay").rglob("*.py") if p.parent != ROOT / "selfplay" or p.stem != "__init__")


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT / "selfplay").parts[0]
    return first.removesuffix(".py")


def direction_faults(room: str, found: Iterator[Import]) -> list[str]:
    faults = []
    for item in found:
        parts = item.name.split(".")
        if parts[0] in ("selfplay_envs", "selfplay_agents"):
            faults.append(f"line {item.line}: {item.name} is a plugin; reach it by entry point")
        if parts[0] != "selfplay" or len(parts) == 1:
            continue
        other = parts[1]
        if other not in LEVEL_OF:
            continue
        if LEVEL_OF[other] > LEVEL_OF[room]:
            faults.append(f"line {item.line}: {room} imports {other}, which is above it")
        if {room, other} <= STRANGERS and room != other:
            faults.append(f"line {item.line}: {room} imports {other}; they talk over the wire")
    return faults


def heavy_faults(room: str, found: Iterator[Import]) -> list[str]:
    faults = []
    for item in found:
        library = item.name.split(".")[0]
        if library not in ROOMS_OF:
            continue
        if room not in ROOMS_OF[library]:
            faults.append(f"line {item.line}: {library} does not belong in {room}")
        elif room in LAZY_ONLY and item.at_import:
            faults.append(f"line {item.line}: {library} at import time; {room} is imported by light processes")
    return faults


@pytest.mark.parametrize("path", package_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way_and_heavy_libraries_stay_in_their_rooms(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL_OF, f"{room} has no level: give it one in LEVELS"
    assert direction_faults(room, imports(path)) + heavy_faults(room, imports(path)) == []


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "environments").rglob("*.py"), *(ROOT / "agents").rglob("*.py")]),
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_plugins_use_only_what_other_peoples_plugins_may(path: Path) -> None:
    for item in imports(path):
        parts = item.name.split(".")
        assert parts[0] not in ROOMS_OF, f"line {item.line}: {item.name}"
        if parts[0] == "selfplay" and len(parts) > 1 and parts[1] in LEVEL_OF:
            assert parts[1] in PLUGIN_ROOMS[path.relative_to(ROOT).parts[0]], f"line {item.line}: {item.name}"


@pytest.mark.parametrize(
    ("room", "code", "fault"),
    [
        ("wire", "from selfplay.pool.worker import x", "above it"),
        ("pool", "def f():\n    import selfplay.policy.server", "over the wire"),
        ("types", "from selfplay import controller", "above it"),
        ("play", "import selfplay_envs.debate", "plugin"),
    ],
)
def test_a_wrong_direction_is_seen(tmp_path: Path, room: str, code: str, fault: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert fault in "".join(direction_faults(room, imports(path)))


@pytest.mark.parametrize(
    ("room", "code", "fault"),
    [
        ("controller", "import torch", "does not belong"),
        ("pool", "def f():\n    from vllm import LLM", "does not belong"),
        ("models", "from transformers import AutoModel", "at import time"),
        ("models", "def f():\n    import torch.nn", ""),
        ("training", "import torch", ""),
    ],
)
def test_a_misplaced_heavy_import_is_seen(tmp_path: Path, room: str, code: str, fault: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    found = "".join(heavy_faults(room, imports(path)))
    assert fault in found if fault else not found


def loaded_after(code: str, watched: tuple[str, ...], cwd: Path) -> list[str]:
    """Which of ``watched`` a fresh interpreter has loaded after running ``code``."""
    tail = f"\nimport sys, json; print(json.dumps([m for m in {watched!r} if m in sys.modules]), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code + tail], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stderr.strip().splitlines()[-1])
    return loaded


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "list"]])
def test_help_loads_nothing_but_the_command_line(arguments: list[str], tmp_path: Path) -> None:
    code = f"from selfplay.cli.main import main\nassert main({arguments!r}) == 0"
    assert loaded_after(code, (*HEAVY, "rich", "numpy", "zmq", "asyncio"), tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["env", "list"],
        ["runs", "list"],
        *(
            [name, "--help"]
            for name in (
                "train",
                "sft",
                "resume",
                "play",
                "eval",
                "tournament",
                "match",
                "rate",
                "replay",
                "env",
                "runs",
                "bench",
                "doctor",
            )
        ),
    ],
    ids=" ".join,
)
def test_light_commands_load_no_heavy_library(arguments: list[str], tmp_path: Path) -> None:
    code = f"from selfplay.cli.main import main\nassert main({arguments!r}) == 0"
    assert loaded_after(code, HEAVY, tmp_path) == []


@pytest.mark.parametrize(
    "module", ["selfplay", "selfplay.pool.worker", "selfplay.controller", "selfplay.play", "selfplay.models"]
)
def test_light_modules_load_no_heavy_library(module: str, tmp_path: Path) -> None:
    assert loaded_after(f"import {module}", HEAVY, tmp_path) == []
