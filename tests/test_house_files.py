"""Every file says what it is for, stays short, and speaks of the project alone."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES, MAX_FUNCTION_LINES = 400, 100

KNOWN_HOSTS = {
    "127.0.0.1",
    "localhost",
    "host",
    "example.com",
    "example.org",
    "download.pytorch.org",
    "www.w3.org",  # the namespace of every SVG
    "www.apache.org",
    "arxiv.org",
    "doi.org",
}
"""The only hosts a file may name."""
ADDRESS = re.compile(r"https?://(\[?[\w.:-]+)")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|home|root|opt|Users|tmp)/[\w.-]+")
UNFINISHED = re.compile(
    r"\b(?:TO" + r"DO|FIX" + r"ME|X{3})\b|pytest\.(?:mark\.)?(?:skip|skipif|xfail|import" + r"orskip)\b"
)


def tracked(*suffixes: str) -> list[Path]:
    """Files of the repository, or of the folder where there is no repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else map(str, _walked())
    return sorted(p for n in names if (p := ROOT / n).is_file() and (not suffixes or p.suffix in suffixes))


def _walked() -> list[Path]:
    hidden = {".venv", "runs", "__pycache__", ".git"}
    return [r for p in ROOT.rglob("*") if not hidden & set((r := p.relative_to(ROOT)).parts)]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", tracked(".py"), ids=_name)
def test_python_files_are_short_and_begin_with_what_they_are_for(path: Path) -> None:
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    assert len(source.splitlines()) < MAX_LINES
    assert ast.get_docstring(tree), "no docstring at the top"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long"


@pytest.mark.parametrize("path", tracked(), ids=_name)
def test_files_speak_of_the_project_alone(path: Path) -> None:
    if path.name == "LICENSE" or path.suffix in (".png", ".webp"):
        return
    text = path.read_text("utf-8")
    hosts = {h.strip("[").partition(":")[0] for h in ADDRESS.findall(text)}
    assert {h for h in hosts if not h.endswith((".example", ".invalid", ".test"))} <= KNOWN_HOSTS
    assert MACHINE_PATH.findall(text) == []


@pytest.mark.parametrize("path", tracked(".py", ".toml", ".md"), ids=_name)
def test_nothing_is_left_unfinished(path: Path) -> None:
    assert UNFINISHED.findall(path.read_text("utf-8")) == []


def test_the_cpu_index_stands_in_one_place() -> None:
    files = [_name(p) for p in tracked() if p != Path(__file__) and b"download.pytorch.org" in p.read_bytes()]
    assert files == ["tools/install.py"]


def test_ci_runs_the_command_of_the_readme() -> None:
    assert (ROOT / ".ci" / "run").read_text("utf-8").rstrip().endswith("exec make test")
    assert "make test" in (ROOT / "README.md").read_text("utf-8")


def test_no_pickle_or_eval_in_the_package() -> None:
    """Nothing received or loaded may run code."""
    wrong = []
    for path in tracked(".py"):
        if path.is_relative_to(ROOT / "tests"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import) and any(
                a.name in ("pickle", "marshal", "shelve", "dill") for a in node.names
            ):
                wrong.append(f"{_name(path)}:{node.lineno}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                wrong.append(f"{_name(path)}:{node.lineno}")
    assert wrong == []
