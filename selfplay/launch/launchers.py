"""Who starts the processes of a run: this process itself, or a Ray cluster.

In: a name, a module and its argument. Out: a handle that says whether the process lives, how it ended, and that ends it.
Everything above this seam is the same for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from selfplay.config import Config
from selfplay.launch.serving import require_package
from selfplay.pool.config import WorkerConfig, worker_environment
from selfplay.pool.workers import Process
from selfplay.process import spawn

Kind = Literal["policy", "rank", "worker"]


class Handle(Process, Protocol):
    """A started process; `selfplay.process.Child` is one."""

    @property
    def name(self) -> str: ...
    def stop(self, grace_s: float) -> None: ...


class Launcher(Protocol):
    """Starts ``python -m module argument`` with its output in ``log``; ``env`` replaces the environment when given."""

    def start(
        self, kind: Kind, name: str, module: str, argument: str, *, log: Path, env: Mapping[str, str] | None = None
    ) -> Handle: ...


class LocalLauncher:
    """Plain child processes: nothing to install, nothing to start beforehand."""

    def start(
        self, kind: Kind, name: str, module: str, argument: str, *, log: Path, env: Mapping[str, str] | None = None
    ) -> Handle:
        """A child of this process; a host of our own needs no reservation, so the kind does not matter."""
        del kind
        return spawn(name, module, argument, log=log, env=env)


def check_launcher(config: Config) -> None:
    """Raise `MissingExtraError` when the chosen launcher is not installed."""
    if config.launch.orchestration == "ray":
        require_package("ray", "ray", "launch.orchestration=ray")


@contextlib.contextmanager
def open_launcher(config: Config, *, device: str, num_engines: int) -> Iterator[Launcher]:
    """The launcher that the config names; its cluster connection is closed at the end."""
    if config.launch.orchestration == "local":
        yield LocalLauncher()
        return
    from selfplay.launch.ray_cluster import RayLauncher

    with RayLauncher.open(config, device=device, num_engines=num_engines) as launcher:
        yield launcher


def worker_launch(launcher: Launcher, config: WorkerConfig, log: Path) -> Handle:
    """An environment worker through ``launcher``."""
    return launcher.start(
        "worker", config.worker, "selfplay.pool.worker", msgspec.json.encode(config).decode(),
        log=log, env=worker_environment(config.pool),
    )  # fmt: skip
