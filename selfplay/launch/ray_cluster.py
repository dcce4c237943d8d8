"""The Ray launcher: every process of a run is an actor's child, and all actors stand in one placement group.

    controller ── placement group: one bundle per policy server, trainer rank, environment worker ──► Ray
        │
        └── ProcessActor × N ── python -m module argument ──► the same process as under the local launcher

Ray decides whether there is room, counts CPUs and GPUs against other users of the cluster, and ends everything when the
controller is gone; sockets, run folder and weights stay as they are. All bundles are placed on the controller's host:
the run's sockets are ipc and its runtime folder is private memory. Ray's own restarts are off: what a lost process
means is the controller's business.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from selfplay.config import Config
from selfplay.errors import RunError
from selfplay.launch.launchers import Kind
from selfplay.process import Child, spawn, tail_of

LOST_EXIT_CODE = -9
"""Of a process whose actor is gone: Ray has killed it, and its lifeline ended the process."""
STOP_TIMEOUT_S = 60.0
"""How long an actor may take to answer beyond the grace it gives its process; then it is killed with all it holds."""


class ProcessActor:
    """Runs in a worker process of Ray: owns one child process. Made an actor by `RayLauncher`."""

    def __init__(self, name: str, module: str, argument: str, log: str, env: dict[str, str]) -> None:
        self._child: Child = spawn(name, module, argument, log=Path(log), env=env)

    def pid(self) -> int:
        return self._child.pid

    def exit_code(self) -> int | None:
        return self._child.exit_code()

    def signal(self, number: int) -> None:
        self._child.signal(number)

    def stop(self, grace_s: float) -> int | None:
        self._child.stop(grace_s)
        return self._child.exit_code()


class RayHandle:
    """A process behind an actor. The log lies in the run folder, so its end is read without asking anybody."""

    def __init__(self, name: str, actor: Any, log: Path, start_timeout_s: float) -> None:
        self._actor = actor
        self.name, self.log = name, log
        self.pid: int = _started(actor, name, start_timeout_s)
        self._asked: Any = None
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """As last heard: the question is put without waiting for the answer."""
        if self._code is None:
            if self._asked is None:
                self._asked = self._actor.exit_code.remote()
            if ray.wait([self._asked], timeout=0)[0]:
                self._code, self._asked = self._answer(self._asked), None
        return self._code

    def describe_exit(self) -> str:
        return f"{self.name} (pid {self.pid}, under Ray) ended with exit code {self._code}; log {self.log}\n{self.log_tail(12)}"

    def log_tail(self, num_lines: int) -> str:
        return tail_of(self.log, num_lines)

    def signal(self, number: int) -> None:
        self._actor.signal.remote(number)

    def stop(self, grace_s: float) -> None:
        """Ask it to terminate, kill what is left after ``grace_s``, and release its bundle."""
        try:
            self._code = ray.get(self._actor.stop.remote(grace_s), timeout=grace_s + STOP_TIMEOUT_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            self._code = LOST_EXIT_CODE  # the actor is gone or stuck; killing it closes the child's lifeline
        ray.kill(self._actor)

    def kill(self) -> None:
        self.stop(0.0)

    def _answer(self, ref: Any) -> int | None:
        try:
            code: int | None = ray.get(ref)
        except ray.exceptions.RayActorError:
            return LOST_EXIT_CODE
        return code


class RayLauncher:
    """A connection to a cluster and the run's placement group in it."""

    def __init__(
        self, group: Any, bundles: dict[Kind, list[int]], shapes: list[dict[str, float]], start_timeout_s: float
    ) -> None:
        self._group, self._free, self._shapes, self._start_timeout_s = group, bundles, shapes, start_timeout_s
        self._taken: list[tuple[Kind, int, RayHandle]] = []

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: Config, *, device: str, num_engines: int) -> Iterator[RayLauncher]:
        """Connect (or start a cluster on this host), and reserve everything at once; `RunError` when there is no room."""
        kinds = _demand(config, device, num_engines)
        needed = sum(shape["CPU"] for _, shape in kinds)
        _connect(config.launch.ray_address, needed)
        try:
            here = f"node:{ray.util.get_node_ip_address()}"
            shapes = [shape for _, shape in kinds]
            group = placement_group([shape | {here: 0.001} for shape in shapes], strategy="STRICT_PACK")
            if not group.wait(config.launch.start_timeout_s):
                remove_placement_group(group)
                raise RunError(
                    f"Ray found no room for {needed:g} CPUs and {sum(s.get('GPU', 0) for s in shapes):g} GPUs on this host "
                    f"within {config.launch.start_timeout_s:g} s; free are {_free_resources()}"
                )
            bundles: dict[Kind, list[int]] = {"policy": [], "rank": [], "worker": []}
            for i, (kind, _) in enumerate(kinds):
                bundles[kind].append(i)
            try:
                yield cls(group, bundles, shapes, config.launch.start_timeout_s)
            finally:
                remove_placement_group(group)
        finally:
            ray.shutdown()

    def start(
        self, kind: Kind, name: str, module: str, argument: str, *, log: Path, env: Mapping[str, str] | None = None
    ) -> RayHandle:
        """An actor in the next bundle of its kind, and the process under it."""
        self._reclaim()
        if not self._free[kind]:
            raise RunError(f"{name}: all places that were reserved for a {kind} are taken")
        index = self._free[kind].pop(0)
        shape = self._shapes[index]
        actor = (
            ray.remote(ProcessActor)
            .options(
                num_cpus=shape["CPU"], num_gpus=shape.get("GPU", 0), max_restarts=0, max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                ),
            )
            .remote(name, module, argument, str(log), dict(os.environ if env is None else env))
        )  # fmt: skip
        handle = RayHandle(name, actor, log, self._start_timeout_s)
        self._taken.append((kind, index, handle))
        return handle

    def _reclaim(self) -> None:
        """Places of processes that have ended are free for the next of their kind."""
        for entry in list(self._taken):
            kind, index, handle = entry
            if handle.exit_code() is not None:
                self._taken.remove(entry)
                self._free[kind].append(index)


def _demand(config: Config, device: str, num_engines: int) -> list[tuple[Kind, dict[str, float]]]:
    gpu = {"GPU": 1.0} if device == "cuda" else {}
    return [
        *[("policy", {"CPU": float(config.policy.threads), **gpu}) for _ in range(num_engines)],
        *[("rank", {"CPU": float(config.train.threads), **gpu}) for _ in range(config.train.ranks)],
        *[("worker", {"CPU": 1.0}) for _ in range(config.rollout.workers)],
    ]


def _connect(address: str, needed_cpus: float) -> None:
    """Join the cluster at ``address``; without one start a cluster here that has as many CPU places as the run asks for."""
    # Ranks and engines choose their GPU by number, as under the local launcher.
    os.environ.setdefault("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    options: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False, "configure_logging": False}
    try:
        if address:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        else:
            ray.init(num_cpus=max(os.cpu_count() or 1, int(needed_cpus + 0.999)), **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as e:
        where = f"the Ray cluster at {address}" if address else "a Ray cluster on this host"
        raise RunError(f"could not {'join' if address else 'start'} {where}: {e}") from e


def _free_resources() -> str:
    free = ray.available_resources()
    return f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs in the whole cluster"


def _started(actor: Any, name: str, timeout_s: float) -> int:
    """Its process id, once Ray has brought the actor up; killed when it does not come in time."""
    try:
        pid: int = ray.get(actor.pid.remote(), timeout=timeout_s)
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as e:
        raise RunError(f"{name} did not start under Ray: {e}") from e
    except ray.exceptions.GetTimeoutError as e:
        ray.kill(actor)
        raise RunError(f"{name} did not start under Ray within {timeout_s:g} s (launch.start_timeout_s)") from e
    return pid
