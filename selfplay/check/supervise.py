"""Run the checks in a child process: hanging, crashing, forking or printing code is a finding, never the caller's end.

    check_environment ──JSON──► python -m selfplay.check.child ──one JSON line per event──► Report

The child's standard output goes to a file that is measured; events come on a pipe of their own. At the time limit the
child tells where it is and is killed with everything that it started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import msgspec

from selfplay.check.events import Event, Request
from selfplay.check.report import Check, Finding, Report
from selfplay.check.runner import NUM_GAMES
from selfplay.errors import ConfigError, UserError
from selfplay.registry import resolve_environment_id
from selfplay.registry.describe import scrubbed_environ
from selfplay.types import Scalar

LIMIT_S = 60.0
OWN = Path(__file__).resolve().parents[1]
"""selfplay's own files, which are never where an environment hangs."""
_MAX_ERROR_BYTES = 16_384


def check_environment(
    env_id: str,
    params: Mapping[str, Scalar] | None = None,
    *,
    num_games: int = NUM_GAMES,
    limit_s: float = LIMIT_S,
    emit: Callable[[Check], None] = lambda check: None,  # noqa: ARG005
) -> Report:
    """Check an environment within ``limit_s``; ``emit`` hears of every check as it is done.

    Raises `UserError` or `ConfigError` when there is nothing that could be checked: an unknown id, a module that cannot
    be imported, a parameter that does not fit.
    """
    resolved = resolve_environment_id(env_id)
    read, write = os.pipe()
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as output, os.fdopen(read, "rb") as events:
        request = Request(resolved, dict(params or {}), num_games, write, output.fileno(), limit_s)
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "selfplay.check.child", msgspec.json.encode(request).decode()],
                stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=scrubbed_environ(),
                pass_fds=(write, output.fileno()), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(write)
        follow = _Follow(resolved, dict(params or {}), emit)
        killer = threading.Timer(limit_s, _kill, (child,))
        killer.start()
        try:
            follow.read(events)
            child.wait()
        finally:
            timed_out = not killer.is_alive()
            killer.cancel()
            _kill(child)
            child.wait()
        return follow.report(child.returncode, timed_out, limit_s, _tail(errors))


class _Follow:
    """Puts a child's events together."""

    def __init__(self, env_id: str, params: dict[str, Scalar], emit: Callable[[Check], None]) -> None:
        self._env_id, self._params, self._emit = env_id, params, emit
        self._checks: list[Check] = []
        self._begun = "import"
        self._report: Report | None = None

    def read(self, events: IO[bytes]) -> None:
        """Until the child is done or gone; raises what the child could not even begin with."""
        for line in events:
            event = msgspec.json.decode(line, type=Event)
            if event.error:
                raise (ConfigError if event.kind == "config" else UserError)(event.error)
            self._begun = event.begin or self._begun
            self._report = event.report or self._report
            if event.check is not None:
                self._checks.append(event.check)
                self._emit(event.check)
            if event.report is not None:
                return  # something it started may still hold the pipe open

    def report(self, code: int, timed_out: bool, limit_s: float, errors: str) -> Report:
        """The child's report; or, when it did not get that far, what is known and how it ended."""
        if self._report is not None:
            return self._report
        if timed_out:
            what = f"{self._begun} did not end within {limit_s:g} s"
            what += f"; it was {at}" if (at := _innermost(errors)) else ""
        elif code < 0:
            what = f"the process was killed by {signal.Signals(-code).name} during {self._begun}"
        else:
            last = errors.strip().splitlines()[-1:] or ["no message"]
            what = f"the process ended with exit code {code} during {self._begun}: {last[0]}"
        check = Check(name="process", status="fault", text=what, findings=(Finding(message=what),), num_findings=1)
        self._emit(check)
        return Report(
            env=self._env_id, source="unknown", params=self._params, num_games=0, checks=(*self._checks, check)
        )


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _tail(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
    return errors.read().decode("utf-8", "replace")


def _innermost(errors: str) -> str:
    """``at FILE:LINE in FUNCTION`` of the newest stack that was written, its innermost frame outside selfplay."""
    stack = errors.rpartition("most recent call first")[2].splitlines()
    frames = [line.strip() for line in stack if line.strip().startswith('File "')]
    for frame in [f for f in frames if not f.startswith(f'File "{OWN}')] or frames:
        path, _, rest = frame.removeprefix('File "').partition('", line ')
        return f"at {Path(path).name}:{rest}"
    return ""
