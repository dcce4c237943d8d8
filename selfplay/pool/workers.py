"""One worker process as its supervisor sees it: started, ready, alive, stuck, gone."""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from selfplay.pool.board import Board, Pulse
from selfplay.pool.config import PoolConfig, WorkerConfig, worker_environment
from selfplay.pool.results import Result
from selfplay.process import RuntimeDir, spawn
from selfplay.types import Match
from selfplay.wire.messages import ControllerMessage

STACK_LINES = 40
_STACK_WAIT_S = 2.0


class Process(Protocol):
    """The part of `selfplay.process.Child` that a supervisor needs."""

    @property
    def pid(self) -> int: ...
    def exit_code(self) -> int | None: ...
    def describe_exit(self) -> str: ...
    def log_tail(self, num_lines: int) -> str: ...
    def signal(self, number: int) -> None: ...
    def kill(self) -> None: ...


Launch = Callable[[WorkerConfig, Path], Process]
"""Starts a worker that logs to a path; `launch_local` unless a test brings its own."""


def launch_local(config: WorkerConfig, log: Path) -> Process:
    """A worker process on this machine."""
    argument = msgspec.json.encode(config).decode()
    return spawn(config.worker, "selfplay.pool.worker", argument, log=log, env=worker_environment(config.pool))


class Guest(Protocol):
    """A pool of another process or host, as the supervisor needs it."""

    name: str
    slots: int
    ready: bool

    def give(self, match: Match) -> bool:
        """Send a match; False when it cannot be sent."""
        ...

    def tell(self, message: ControllerMessage) -> bool: ...

    def judged(self, result: Result) -> Result:
        """What may be believed of a result that came from it."""
        ...

    def expel(self, why: str) -> None:
        """Send it away; calls `PoolSupervisor.leave`."""
        ...


class WorkerHandle:
    """A started worker: its process, its board, and whether it has said hello."""

    def __init__(
        self,
        slot: int,
        config: PoolConfig,
        *,
        controller: str,
        runtime: RuntimeDir,
        log: Path,
        launch: Launch,
        now: float,
    ) -> None:
        self.slot, self.started_at, self.ready = slot, now, False
        self.name = f"env-{slot}-{secrets.token_hex(4)}"
        path = runtime.file(f"{self.name}.board")
        self._board = Board(path, create=True)
        self._config = config
        self.process = launch(
            WorkerConfig(
                worker=self.name, controller=controller, runtime_dir=str(runtime.path), board=str(path), pool=config
            ),
            log,
        )  # fmt: skip

    @property
    def slots(self) -> int:
        return self._config.concurrency

    @property
    def identity(self) -> bytes:
        return self.name.encode()

    def pulse(self) -> Pulse:
        return self._board.read()

    def stuck_for(self, now: float) -> float | None:
        """Seconds since the worker's loop moved, when that is more than it may be; else None."""
        limit = self._config.stuck_after_s if self.ready else self._config.start_timeout_s
        idle = now - (self._board.read().moved_at if self.ready else self.started_at)
        return None if idle <= limit else idle if math.isfinite(idle) else limit

    def show_stack(self) -> None:
        """Have the worker write to its log where it is."""
        self.process.signal(signal.SIGUSR1)

    def end(self) -> None:
        """Kill what is left of it and forget its board; idempotent enough to be called once per worker."""
        self.process.kill()
        self._board.close(remove=True)


async def stack_of(worker: WorkerHandle) -> str:
    """Where the worker is, from its log; empty when it does not tell in time."""
    before = worker.process.log_tail(STACK_LINES)
    worker.show_stack()
    deadline = time.monotonic() + _STACK_WAIT_S
    while worker.process.log_tail(STACK_LINES) == before and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.05)  # the stack is written line by line
    return worker.process.log_tail(STACK_LINES)
