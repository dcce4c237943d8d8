"""The check that nothing is left behind does see what is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
ORPHAN = """
import subprocess
def test_it():
    child = subprocess.Popen(["sh", "-c", "sleep 300 >/dev/null 2>&1 & "], start_new_session=True)
    child.wait()
"""
FOLDER = """
from selfplay.process import RuntimeDir
def test_it():
    RuntimeDir.create()
"""
CLEAN = """
import subprocess
from selfplay.process import RuntimeDir
def test_it():
    place = RuntimeDir.create()
    subprocess.run(["true"], check=True)
    place.remove()
"""


def run(folder: Path, test: str) -> tuple[int, str]:
    """A session of its own with this project's conftest, waiting less for things to end."""
    (folder / "conftest.py").write_text(CONFTEST.read_text("utf-8").replace("GRACE_S = 10.0", "GRACE_S = 0.5"))
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_an_orphan_is_seen(tmp_path: Path) -> None:
    code, out = run(tmp_path, ORPHAN)
    left = re.search(r"process (\d+): sleep 300", out)
    assert left, out
    os.kill(int(left.group(1)), signal.SIGKILL)
    assert code == 1


@pytest.mark.parametrize(("test", "code"), [(FOLDER, 1), (CLEAN, 0)], ids=["a runtime folder", "nothing"])
def test_a_runtime_folder_is_seen(tmp_path: Path, test: str, code: int) -> None:
    got, out = run(tmp_path, test)
    assert got == code, out
    assert ("runtime folder" in out) == bool(code)
