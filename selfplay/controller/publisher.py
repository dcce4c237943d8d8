"""Publishing a version: from the trainer's tensors to *current* on every engine, proven by a probe.

    trainer rank 0            controller               every engine
        │  ◄── Export ────────────┤                         │
        ├── Exported(header) ────►│                         │      the bucket is gathered; the store is written beside
        │                         ├── BeginInstall ────────►│      a thread receives beside generation
        │  ◄── Send ──────────────┤                         │
        ├═══════ flat bucket, nccl | gloo | shm | file ════►│
        ├── Sent(digest) ────────►│                         │      the adapter is in the store, whole
        │                         ├── CommitInstall ───────►│      checksum, new name and id: addressable
        │  ◄── TrainerProbe ──────┤── Probe ───────────────►│      |Δlogprob| within the bound, else hard stop
        │                         ├── MakeCurrent ─────────►│      only when all engines have committed
        │                         ├── Retire(old) ─────────►│      dropped when its last user is done

A failed move is given up on every engine, the old version serves on, and `SyncError` says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from selfplay.controller.policy_link import PolicyLink
from selfplay.controller.trainer_link import TrainerLink
from selfplay.errors import EngineError, SyncError, TrainerError
from selfplay.types import PolicyVersion
from selfplay.wire.messages import BucketHeader, Export, JoinWeights, Send

Transport = Literal["nccl", "gloo", "shm", "file"]


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one publication did and cost. Times in seconds, logprobs natural."""

    version: PolicyVersion
    digest: str
    num_bytes: int
    export_s: float
    move_s: float
    total_s: float
    probe_mean: float
    """Mean |Δlogprob| trainer against engine on the probe tokens."""
    probe_max: float
    policy_moved: float
    """Mean |Δlogprob| of the engine between this version and the one before; 0 for a first version."""


class Publisher:
    """Moves versions one at a time and remembers which is current."""

    def __init__(
        self,
        *,
        trainer: TrainerLink,
        engines: Sequence[PolicyLink],
        transport: Transport,
        address: str,
        adapters: Path,
        probe_ids: tuple[int, ...],
        probe_bound: float,
        timeout_s: float,
        keep: int,
    ) -> None:
        self._trainer, self._engines = trainer, engines
        self._transport: Transport = transport
        self._address, self._adapters = address, adapters
        self._probe_ids, self._probe_bound, self._timeout_s, self._keep = probe_ids, probe_bound, timeout_s, keep
        self._live: dict[str, list[int]] = {}
        self._last_probe: dict[str, tuple[float, ...]] = {}

    async def join(self, engine_workers: int = 1) -> None:
        """Form the weights group of trainer rank 0 and all engine workers; nothing to do for shm and file."""
        if self._transport not in ("nccl", "gloo"):
            return
        transport, world_size = self._transport, 1 + engine_workers * len(self._engines)

        def make(rank: int, request: int) -> JoinWeights:
            return JoinWeights(
                request=request, transport=transport, address=self._address, rank=rank, world_size=world_size,
                timeout_s=self._timeout_s,
            )  # fmt: skip

        await all_or_first_error(
            self._trainer.join_weights(partial(make, 0), self._timeout_s),
            *(
                engine.join_weights(partial(make, 1 + i * engine_workers), self._timeout_s)
                for i, engine in enumerate(self._engines)
            ),
        )

    async def publish(self, version: PolicyVersion) -> SyncReport:
        """Make ``version`` (the trainer's present weights of that agent) current everywhere.

        Raises `SyncError` when the move failed or the probe is out of bounds; the old version is then still current.
        """
        start = time.monotonic()
        exported = await self._trainer.export(
            lambda request: Export(
                request=request, version=version, folder=str(self._adapters), transport=self._transport,
                address=self._address,
            ),
            self._timeout_s,
        )  # fmt: skip
        exported_at = time.monotonic()
        digest = await self._move(version, exported.header)
        moved_at = time.monotonic()
        mean, worst, moved = await self._prove(version)
        await self._each(lambda engine: engine.make_current(version, self._timeout_s))
        await self._retire_older(version)
        return SyncReport(
            version=version, digest=digest, num_bytes=exported.header.num_bytes,
            export_s=exported_at - start, move_s=moved_at - exported_at, total_s=time.monotonic() - start,
            probe_mean=mean, probe_max=worst, policy_moved=moved,
        )  # fmt: skip

    async def _move(self, version: PolicyVersion, header: BucketHeader) -> str:
        """Bring the bucket to every engine; the digest under which the version is stored."""
        try:
            await self._each(lambda engine: engine.begin_install(version, header, self._timeout_s))
            sent, *_ = await all_or_first_error(
                self._trainer.send(
                    lambda request: Send(request=request, version=version, timeout_s=self._timeout_s),
                    self._timeout_s + 5.0,
                ),
                *(engine.commit_install(version, self._timeout_s) for engine in self._engines),
            )
        except (SyncError, EngineError, TrainerError) as error:
            await self._give_up(version)
            raise SyncError(
                f"{version} did not reach the engines over {self._transport}; the old version serves on: {error}"
            ) from error
        return str(sent.digest)

    async def _give_up(self, version: PolicyVersion) -> None:
        for engine in self._engines:
            try:
                await engine.abort_install(version, self._timeout_s)
            except (EngineError, SyncError):
                continue  # the first error is already on its way to the user; a dead engine needs no abort

    async def _prove(self, version: PolicyVersion) -> tuple[float, float, float]:
        """(mean |Δ|, max |Δ|, movement since the last version), the worst over all engines; `SyncError` out of bounds."""
        ours = await self._trainer.probe(version.agent, self._probe_ids, self._timeout_s)
        theirs = [await engine.probe(version, self._probe_ids, self._timeout_s) for engine in self._engines]
        means = [mean_difference(ours, t) for t in theirs]
        worst = max(abs(a - b) for t in theirs for a, b in zip(ours, t, strict=True))
        for mean in means:
            if not mean <= self._probe_bound:  # NaN is out of bounds too
                raise SyncError(
                    f"probe of {version}: mean |Δlogprob| between trainer and engine is {mean:.4f} (max {worst:.4f}), "
                    f"the bound is {self._probe_bound:.4f}: the engine does not serve what was trained"
                )
        before = self._last_probe.get(version.agent)
        self._last_probe[version.agent] = theirs[0]
        return max(means), worst, mean_difference(before, theirs[0]) if before else 0.0

    async def _retire_older(self, version: PolicyVersion) -> None:
        live = self._live.setdefault(version.agent, [])
        live.append(version.version)
        while len(live) > self._keep:
            old = PolicyVersion(version.agent, live.pop(0))
            for engine in self._engines:
                await engine.retire(old, self._timeout_s)

    async def _each(self, call: Callable[[PolicyLink], Coroutine[Any, Any, object]]) -> None:
        await all_or_first_error(*(call(engine) for engine in self._engines))


def mean_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean of |a − b|; NaN when either holds one."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


async def all_or_first_error(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run all at once, results in order; at the first error cancel the rest and raise that error itself, not a group."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    return results
