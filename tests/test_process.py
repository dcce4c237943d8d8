"""Children: started clean, watched, ended with their parent, and described when they end."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_S

from selfplay.process import RuntimeDir, spawn

_CHILD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from selfplay.process import live_with_parent
what = sys.argv[1]
if what.startswith("live"):
    folder = what.partition(" ")[2]
    live_with_parent(Path(folder) if folder else None)
    print(os.getpid(), "reads", repr(sys.stdin.read()), flush=True)
    time.sleep(600)
if what == "exit":
    print("last words"); sys.exit(7)
if what == "signal":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "family":
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(grandchild.pid, flush=True)
    time.sleep(600)
if what == "graceful":
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
    print("up", flush=True)
    time.sleep(600)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "process_test_child.py").write_text(_CHILD)
    root = Path(__file__).resolve().parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{root}")
    return "process_test_child"


def until(condition, within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize(("what", "says"), [("exit", "exit code 7"), ("signal", "SIGKILL")])
def test_an_end_is_described_with_the_last_words(what: str, says: str, module: str, tmp_path: Path) -> None:
    child = spawn("worker 1", module, what, log=tmp_path / "logs" / "w.log")
    until(lambda: child.exit_code() is not None)
    text = child.describe_exit()
    assert says in text
    assert "worker 1" in text
    assert str(tmp_path / "logs" / "w.log") in text
    assert ("last words" in text) == (what == "exit")
    child.kill()


def test_a_graceful_child_may_save_and_a_stubborn_one_is_killed(module: str, tmp_path: Path) -> None:
    for what, code in (("graceful", 0), ("stubborn", -signal.SIGKILL)):
        child = spawn(what, module, what, log=tmp_path / f"{what}.log")
        until(lambda child=child: child.log_tail() == "up")
        child.stop(20.0 if what == "graceful" else 0.2)
        assert child.exit_code() == code
        assert child.log_tail() == ("up\nsaved" if what == "graceful" else "up")


def test_grandchildren_go_too(module: str, tmp_path: Path) -> None:
    child = spawn("family", module, "family", log=tmp_path / "family.log")
    until(lambda: child.log_tail().isdigit())
    grandchild = int(child.log_tail())
    child.kill()
    until(lambda: not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE)


def test_a_child_reads_nothing_from_its_lifeline_and_ends_when_it_closes(module: str, tmp_path: Path) -> None:
    runtime = RuntimeDir.create()
    child = spawn("w", module, f"live {runtime.path}", log=tmp_path / "w.log")
    until(lambda: "reads ''" in child.log_tail())
    assert runtime.path.is_dir()
    child._drop_lifeline()  # what the kernel does when the parent dies
    until(lambda: child.exit_code() is not None)
    assert child.exit_code() == 17
    assert not runtime.path.exists()


def test_a_killed_parent_takes_its_children_along(module: str, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from selfplay.process import spawn\n"
        f"c = spawn('w', {module!r}, 'live', log=Path({str(tmp_path / 'w.log')!r})); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    log = tmp_path / "w.log"
    until(lambda: log.exists() and b"reads" in log.read_bytes())
    pid = int(log.read_text().split()[0])
    parent.kill()
    parent.wait()
    until(lambda: not psutil.pid_exists(pid))


def test_files_in_the_working_folder_do_not_shadow_modules(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "subprocess.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(here)
    child = spawn("w", module, "exit", log=tmp_path / "w.log")
    until(lambda: child.exit_code() is not None)
    assert child.exit_code() == 7
    child.kill()


def test_runtime_folders_are_private_and_go_away() -> None:
    first, second = RuntimeDir.create(), RuntimeDir.create()
    assert first.path != second.path
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    assert first.endpoint("x").startswith("ipc:///")
    assert len(os.fsencode(first.file("a" * 25))) <= 107
    (first.path / "leftover").write_text("x")
    for runtime in (first, second):
        runtime.remove()
        runtime.remove()
        assert not runtime.path.exists()
