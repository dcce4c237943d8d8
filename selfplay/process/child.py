"""Start a module as a child process, and say in words how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

LOG_TAIL_LINES = 12


class Child:
    """A running child: its own session, a lifeline on standard input, output in a log file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.log = name, log
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        code = self._process.poll()
        if code is not None:
            self._drop_lifeline()
        return code

    def describe_exit(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """One paragraph: name, exit code or signal, last log lines."""
        code = self.exit_code()
        if code is None:
            how = "is still running"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        tail = self.log_tail(num_lines)
        return f"{self.name} (pid {self.pid}) {how}; log {self.log}" + (f"\n{tail}" if tail else "")

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of its log."""
        return tail_of(self.log, num_lines)

    def stop(self, grace_s: float) -> None:
        """Ask it to terminate; kill its whole session after ``grace_s``, or sweep what it left in its session."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the child and everything in its session, and reap it; idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._drop_lifeline()

    def _drop_lifeline(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def tail_of(log: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log file; empty when it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as f:
        f.seek(max(0, log.stat().st_size - 8192))
        return "\n".join(f.read().decode("utf-8", "replace").splitlines()[-num_lines:])
    return ""


def spawn(name: str, module: str, argument: str, *, log: Path, env: Mapping[str, str] | None = None) -> Child:
    """Run ``python -m module argument`` with output appended to ``log``. Never forks this process's state.

    ``env`` replaces the environment when given; otherwise the child inherits it. The working folder is not searched
    for modules: a file that happens to lie there cannot take the place of a package.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, argument],
            stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
            env=None if env is None else dict(env), start_new_session=True,
        )  # fmt: skip
    return Child(name, process, log)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
