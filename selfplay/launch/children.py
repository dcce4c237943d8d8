"""The model-bearing children of a run, policy servers and trainer ranks: started, watched, stopped."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from selfplay.controller.policy_link import PolicyLink
from selfplay.controller.trainer_link import TrainerLink
from selfplay.errors import EngineError, RunError, TrainerError
from selfplay.launch.launchers import Handle, Kind, Launcher

WATCH_EVERY_S = 0.1
GRACE_S = 10.0


class RunChildren:
    """Starts children and tells the links when one died, so that no call waits for the dead."""

    def __init__(self, logs: Path, launcher: Launcher) -> None:
        self._logs, self._launcher = logs, launcher
        self._policies: list[tuple[Handle, PolicyLink]] = []
        self._ranks: list[tuple[Handle, TrainerLink]] = []
        self._fault: RunError | None = None
        self._watcher: asyncio.Task[None] | None = None

    def start_policy(self, config: msgspec.Struct, link: PolicyLink) -> None:
        """Start a policy server that ``link`` speaks to."""
        child = self._start("policy", f"policy-{len(self._policies)}", "selfplay.policy.server", config)
        self._policies.append((child, link))

    def start_rank(self, config: msgspec.Struct, link: TrainerLink) -> None:
        """Start one trainer rank."""
        child = self._start("rank", f"trainer-{len(self._ranks)}", "selfplay.training.rank", config)
        self._ranks.append((child, link))

    def watch(self) -> None:
        """Begin to watch; the first death is kept as `fault` and ends the calls of its link."""
        self._watcher = asyncio.create_task(self._watch(), name="children")

    def fault(self) -> RunError | None:
        """What died, in words; None while all live."""
        return self._fault

    @property
    def pids(self) -> dict[str, int]:
        return {c.name: c.pid for c, _ in (*self._policies, *self._ranks)}

    async def close(self) -> None:
        """Stop all children together and wait until they are gone."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        children = [c for c, _ in (*self._policies, *self._ranks)]
        await asyncio.gather(*(asyncio.to_thread(c.stop, GRACE_S) for c in children))

    def _start(self, kind: Kind, name: str, module: str, config: msgspec.Struct) -> Handle:
        argument = msgspec.json.encode(config).decode()
        return self._launcher.start(kind, name, module, argument, log=self._logs / f"{name}.log")

    async def _watch(self) -> None:
        while True:
            for child, link in self._policies:
                if child.exit_code() is not None:
                    error = EngineError(child.describe_exit())
                    self._fault = self._fault or error
                    link.fail(error)
            for rank, trainer in self._ranks:
                if rank.exit_code() is not None:
                    failure = TrainerError(rank.describe_exit())
                    self._fault = self._fault or failure
                    trainer.fail(failure)
            await asyncio.sleep(WATCH_EVERY_S)
