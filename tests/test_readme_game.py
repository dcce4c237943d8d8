"""The game of the README, as it stands there: at most 25 lines, sound, playable, and trained on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runs import TINY, Run

from selfplay.check import check_here
from selfplay.cli.main import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def nim(tmp_path: Path) -> Path:
    (source,) = re.findall(
        r"```python\n(.*?from selfplay import Environment\n.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    path = tmp_path / "nim.py"
    path.write_text(source, "utf-8")
    return path


def test_it_has_at_most_25_lines(nim: Path) -> None:
    assert len(nim.read_text().splitlines()) <= 25


def test_it_is_the_example_too(nim: Path) -> None:
    assert nim.read_text("utf-8") == (ROOT / "examples" / "nim.py").read_text("utf-8")


def test_it_is_sound(nim: Path) -> None:
    assert [c.text for c in check_here(str(nim), num_games=30).faults] == []


def test_it_plays(nim: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", str(nim), "--players", "random"]) == 0
    assert re.search(r"result: (first|second) won \(natural\)", capsys.readouterr().out)


@pytest.mark.engine
def test_it_trains_two_steps(nim: Path) -> None:
    run = Run(nim.parent, "train", "--env", "./nim.py", "train.steps=2", "name=nim", "--json", *TINY)
    assert run.wait(300.0) == 0, run.error_text()
    assert run.result()["step"] == 2


# ── env new ───────────────────────────────────────────────────────────────────────────────────────


def test_a_new_package_is_green_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["env", "new", "alice/count-up"]) == 0
    folder = tmp_path / "count-up"
    assert '"alice/count-up-v0" = "count_up.game:CountUp"' in (folder / "pyproject.toml").read_text()
    assert main(["play", str(folder / "count_up" / "game.py"), "--players", "random"]) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_new_file_is_a_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["env", "new", "--file", "mine.py"]) == 0
    assert main(["play", "./mine.py", "--players", "random", "-p", "target=5"]) == 0
    assert main(["env", "new", "--file", "mine.py"]) == 2  # nothing is overwritten


@pytest.mark.parametrize("bad", ["../x", "a b", "9lives", "a/b/c", "", "x" * 300, "nul\0"])
def test_names_that_cannot_be(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["env", "new", bad]) == 2
    assert list(tmp_path.iterdir()) == []
