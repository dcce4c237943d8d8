"""Runs of ``selfplay train`` as child processes, for the tests that look at a run from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from tests.patience import PATIENCE_S

TINY = ("model=tiny", "train.batch=4", "rollout.concurrency=4", "rollout.max_tokens=8")
MODULES = {
    "worker": "selfplay.pool.worker",
    "policy": "selfplay.policy.server",
    "rank": "selfplay.training.rank",
}


_started: list[Run] = []


class Run:
    """One ``selfplay`` command under way in a folder of its own."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.folder = folder
        number = sum(run.folder == folder for run in _started)
        self.out, self.err = folder / f"stdout-{number}", folder / f"stderr-{number}"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "selfplay.cli.main", *args],
                cwd=folder, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "160"},
            )  # fmt: skip
        _started.append(self)

    def wait(self, timeout_s: float = 300.0) -> int:
        """Its exit code; whatever happens it is gone afterwards."""
        try:
            return self.process.wait(timeout_s)
        finally:
            self.end()

    def end(self) -> None:
        """Kill it, if it still runs; its children notice and go by themselves."""
        self.process.kill()
        self.process.wait()

    def error_text(self) -> str:
        return self.err.read_text("utf-8", "replace")

    def result(self) -> dict[str, Any]:
        """The JSON object it printed."""
        loaded: dict[str, Any] = json.loads(self.out.read_text().splitlines()[-1])
        return loaded

    def descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def child(self, kind: str) -> psutil.Process:
        """One child process by its part in the run."""
        for process in self.descendants():
            try:
                if MODULES[kind] in process.cmdline():
                    return process
            except psutil.NoSuchProcess:
                continue
        raise LookupError(f"no {kind} process; stderr:\n{self.error_text()}")

    def until(self, ready: Callable[[str], bool], timeout_s: float = 300.0) -> None:
        """Wait until its error output satisfies ``ready``."""
        deadline = time.monotonic() + timeout_s
        while not ready(self.error_text()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"did not come to the point; exit {self.process.poll()}:\n{self.error_text()}")
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda text: f"step {step}/" in text)

    def kill(self, kind: str) -> None:
        os.kill(self.child(kind).pid, signal.SIGKILL)


def end_all() -> None:
    """End the runs that a failed test has left under way, so that the failure stays its own."""
    for run in _started:
        run.end()


def still_alive(processes: list[psutil.Process], timeout_s: float = PATIENCE_S) -> list[psutil.Process]:
    """Those of ``processes`` that have not ended after ``timeout_s``."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return alive


def runtime_folders() -> set[Path]:
    """Runtime folders of the runs of this test session, and the shared memory that nobody has any more."""
    return set(Path(os.environ["SELFPLAY_RUNTIME_DIR"]).iterdir()) | abandoned_shared_memory()


def abandoned_shared_memory() -> set[Path]:
    """Segments of Python's and vLLM's making that no process has mapped: whoever made them left without removing them.

    Other sessions of tests may run beside this one, so that a segment that is in use says nothing.
    """
    segments = set(Path("/dev/shm").glob("psm_*"))
    if segments:
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):  # the process has ended, or is another user's
                text = maps.read_text("utf-8", "replace")
                segments = {s for s in segments if str(s) not in text}
    return {s for s in segments if s.exists()}
