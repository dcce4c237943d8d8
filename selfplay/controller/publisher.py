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

Whatever of it fails or takes too long, the version is given up on every engine and tried again, over a weights group with a
fresh address; the old version serves meanwhile. Only a probe out of bounds is final. `Manner` says what a new version does to generation: nothing, or a hold of the agent or of everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from selfplay.config import Config
from selfplay.controller.policy_link import NotNow, PolicyLink
from selfplay.controller.trainer_link import TrainerLink
from selfplay.errors import EngineError, SyncError, TrainerError
from selfplay.types import PolicyVersion
from selfplay.wire.messages import BucketHeader, Export, Flights, JoinWeights, Send

Transport = Literal["nccl", "gloo", "shm", "file"]
JOIN_SLACK_S = 5.0
ROOM_EVERY_S = 0.2
LEASE_FACTOR = 20.0
"""A hold nobody released ends after so many times the limit of one sync."""


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """What becoming current does to generation: ``sync.interrupt`` and ``rollout.partial`` in the server's terms."""

    flights: Flights = "finish"
    hold: Literal["nobody", "agent", "everybody"] = "nobody"
    """agent: while it becomes current. everybody: during the whole move."""
    abort: bool = False
    """What is held ends at once and goes on from its tokens afterwards; otherwise it is waited for."""
    hold_s: float = 120.0
    """Longest wait for answers under way."""
    room_s: float = 300.0
    """Longest wait for games that hold so many old versions that the engine has no room for a new one."""

    @classmethod
    def of(cls, config: Config) -> Manner:
        """The manner of a run's settings."""
        resume = config.rollout.partial == "abort_resume"
        hold: dict[str, Literal["agent", "everybody"]] = {"drain": "agent", "blocking": "everybody"}
        flights: Flights = "resume" if resume else "finish"
        if config.sync.interrupt == "token":
            flights = "swap" if config.sync.cache == "keep" else "resume"
        return cls(
            flights=flights, hold=hold.get(config.sync.interrupt, "nobody"), abort=resume,
            hold_s=config.rollout.request_timeout_s, room_s=config.rollout.episode_timeout_s,
        )  # fmt: skip


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
    tries: int = 1
    """Moves it took; more than one after a failure."""
    held_s: float = 0.0
    """How long generation was held back for it: of the agent, or of everybody."""
    waited_for: int = 0
    """Answers under way that the hold waited for or ended early."""
    swapped: int = 0
    """Answers under way that went on with the new weights in mid-answer."""
    resumed: int = 0
    """Answers under way that were aborted and went on under the new version."""
    left: int = 0
    """Answers under way that end on the old version."""


class ProbeError(SyncError):
    """The engine does not serve what was trained: to try again would not mend it."""


class _Done(msgspec.Struct, frozen=True, kw_only=True):
    """One try that succeeded, in the terms of `SyncReport`."""

    digest: str
    moved_at: float
    probe_mean: float
    probe_max: float
    policy_moved: float
    flipped: dict[str, Any]


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
        manner: Manner | None = None,
        retries: int = 0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._trainer, self._engines = trainer, engines
        self._transport: Transport = transport
        self._address, self._adapters = address, adapters
        self._probe_ids, self._probe_bound, self._timeout_s, self._keep = probe_ids, probe_bound, timeout_s, keep
        self._manner, self._retries, self._say = manner or Manner(), retries, say
        self._num_groups = 0
        self._engine_workers = 1
        self._goal = ""
        """What the version under way is to do next, for messages."""
        self._live: dict[str, list[int]] = {}
        self._last_probe: dict[str, tuple[float, ...]] = {}

    async def join(self, engine_workers: int = 1) -> None:
        """Form the weights group of trainer rank 0 and all engine workers; nothing to do for shm and file.

        Called again it forms a new group, at an address that no group had before.
        """
        self._engine_workers = engine_workers
        if self._transport not in ("nccl", "gloo"):
            return
        transport, world_size = self._transport, 1 + engine_workers * len(self._engines)
        address = f"{self._address}-{self._num_groups}"
        self._num_groups += 1

        def make(rank: int, request: int) -> JoinWeights:
            return JoinWeights(
                request=request, transport=transport, address=address, rank=rank, world_size=world_size,
                timeout_s=self._timeout_s,
            )  # fmt: skip

        # A rank that is still in a send that nobody takes is free again when that has timed out.
        limit_s = self._timeout_s * (1 if self._num_groups == 1 else 2) + JOIN_SLACK_S
        await all_or_first_error(
            self._trainer.join_weights(partial(make, 0), limit_s),
            *(
                engine.join_weights(partial(make, 1 + i * engine_workers), limit_s)
                for i, engine in enumerate(self._engines)
            ),
        )

    async def publish_all(
        self, versions: Sequence[PolicyVersion], parents: Mapping[str, PolicyVersion] | None = None
    ) -> dict[str, SyncReport]:
        """`publish` each of ``versions``; under one hold where the manner is to hold everybody.

        ``parents``: agent → the version that its new one comes from, where that is not the one before it.
        """
        parents = parents or {}
        if self._manner.hold != "everybody" or not versions:
            return {v.agent: await self.publish(v, parents.get(v.agent)) for v in versions}
        start = time.monotonic()
        async with self._held(()) as waited_for:
            reports = [await self.publish(v, parents.get(v.agent)) for v in versions]
        held_s = time.monotonic() - start
        return {
            r.version.agent: msgspec.structs.replace(r, held_s=held_s, waited_for=waited_for) for r in reports
        }  # fmt: skip

    async def publish(self, version: PolicyVersion, parent: PolicyVersion | None = None) -> SyncReport:
        """Make ``version`` (the trainer's present weights of that agent) current everywhere.

        ``parent``: the version it comes from, where that is not the one before it.
        Raises `SyncError` when every try failed or the probe is out of bounds; the old version is then still current.
        """
        start = time.monotonic()
        exported = await self._trainer.export(
            lambda request: Export(
                request=request, version=version, folder=str(self._adapters), transport=self._transport,
                address=self._address, parent=parent,
            ),
            self._timeout_s,
        )  # fmt: skip
        exported_at = time.monotonic()
        done, tries = await self._become_current(version, exported.header)
        await self._retire_older(version)
        return SyncReport(
            version=version, digest=done.digest, num_bytes=exported.header.num_bytes,
            export_s=exported_at - start, move_s=done.moved_at - exported_at, total_s=time.monotonic() - start,
            probe_mean=done.probe_mean, probe_max=done.probe_max, policy_moved=done.policy_moved, tries=tries, **done.flipped,
        )  # fmt: skip

    async def _become_current(self, version: PolicyVersion, header: BucketHeader) -> tuple[_Done, int]:
        """Try until it succeeds or the retries are used up; what came of it, and the number of tries."""
        tries = 1
        while True:
            try:
                if tries > 1:
                    await self.join(self._engine_workers)
                return await self._try(version, header), tries
            except ProbeError:
                raise
            except (SyncError, EngineError, TrainerError) as error:
                await self._give_up(version)
                failed = f"{version} did not {self._goal}; {self._serving(version.agent)}"
                if self._trainer.is_lost or any(e.is_lost for e in self._engines) or tries > self._retries:
                    raise SyncError(f"{failed}: {error}") from error
                self._say(f"{failed}; try {tries + 1} of {self._retries + 1} follows: {str(error).splitlines()[0]}")
                tries += 1

    async def _try(self, version: PolicyVersion, header: BucketHeader) -> _Done:
        self._goal = f"reach the engines over {self._transport}"
        digest = await self._move(version, header)
        moved_at = time.monotonic()
        self._goal = "answer its probe"
        probes = await self._probes(version)
        mean, worst = self._prove(version, *probes)
        self._goal = "become current"
        flipped = await self._flip(version)
        before, now = self._last_probe.get(version.agent), probes[1][0]
        self._last_probe[version.agent] = now
        return _Done(
            digest=digest, moved_at=moved_at, probe_mean=mean, probe_max=worst, flipped=flipped,
            policy_moved=mean_difference(before, now) if before else 0.0,
        )  # fmt: skip

    def _serving(self, agent: str) -> str:
        live = self._live.get(agent)
        return f"the old version {agent}@{live[-1]} serves on" if live else "nothing of this agent serves yet"

    # ── moving ────────────────────────────────────────────────────────────────────────────────

    async def _move(self, version: PolicyVersion, header: BucketHeader) -> str:
        """Bring the bucket to every engine; the digest under which the version is stored."""
        await all_or_first_error(*(self._begin(engine, version, header) for engine in self._engines))
        sent, *_ = await all_or_first_error(
            self._trainer.send(
                lambda request: Send(request=request, version=version, timeout_s=self._timeout_s), self._timeout_s + 5.0
            ),
            *(engine.commit_install(version, self._timeout_s) for engine in self._engines),
        )
        return str(sent.digest)

    async def _begin(self, engine: PolicyLink, version: PolicyVersion, header: BucketHeader) -> None:
        """A version in use is never dropped for a new one: where there is no room, some game has to end first."""
        deadline, said = time.monotonic() + self._manner.room_s, False
        while True:
            try:
                return await engine.begin_install(version, header, self._timeout_s)
            except NotNow as error:
                if time.monotonic() > deadline:
                    raise
                if not said:
                    self._say(f"{version} waits for games to let go of older versions: {error}")
                said = True
            await asyncio.sleep(ROOM_EVERY_S)

    async def _give_up(self, version: PolicyVersion) -> None:
        """Wherever it did not arrive it is forgotten, and where it did it is dropped."""
        for engine in self._engines:
            try:
                await engine.abort_install(version, self._timeout_s)
                await engine.retire(version, self._timeout_s)
            except (EngineError, SyncError):
                continue  # the first error is already on its way to the user; a dead engine needs no abort

    # ── becoming current ──────────────────────────────────────────────────────────────────────

    async def _flip(self, version: PolicyVersion) -> dict[str, Any]:
        """Current on all engines, or on none; what it did to answers under way, as fields of `SyncReport`."""
        if self._manner.hold != "agent" or not self._live.get(version.agent):
            return await self._flip_all(version)
        start = time.monotonic()
        async with self._held((version.agent,)) as waited_for:
            flipped = await self._flip_all(version)
        return flipped | {"waited_for": waited_for, "held_s": time.monotonic() - start}

    async def _flip_all(self, version: PolicyVersion) -> dict[str, int]:
        try:
            values = await all_or_first_error(
                *(engine.make_current(version, self._manner.flights, self._timeout_s) for engine in self._engines)
            )
        except (SyncError, EngineError):
            await self._flip_back(version.agent)
            raise
        return {name: int(sum(v.get(name, 0) for v in values)) for name in ("swapped", "resumed", "left")}

    async def _flip_back(self, agent: str) -> None:
        for engine in self._engines if self._live.get(agent) else ():
            try:
                await engine.make_current(PolicyVersion(agent, self._live[agent][-1]), "finish", self._timeout_s)
            except (EngineError, SyncError):
                continue  # as above: the first error is on its way

    @contextlib.asynccontextmanager
    async def _held(self, agents: tuple[str, ...]) -> AsyncIterator[int]:
        """``agents`` (empty: everybody) generate nothing meanwhile; yields how many answers were under way."""
        manner = self._manner
        lease_s = manner.hold_s + LEASE_FACTOR * self._timeout_s * (1 + self._retries)
        try:
            try:
                values = await all_or_first_error(
                    *(
                        e.hold(agents, abort=manner.abort, timeout_s=manner.hold_s, lease_s=lease_s)
                        for e in self._engines
                    )
                )
            except (SyncError, EngineError) as error:
                raise SyncError(
                    f"generation of {', '.join(agents) or 'everybody'} was not held back: {error}"
                ) from error
            yield int(sum(v.get("under_way", 0) for v in values))
        finally:
            for engine in self._engines:
                try:
                    await engine.release(self._timeout_s)
                except (EngineError, SyncError):
                    continue  # a hold has a lease; a dead engine holds nobody

    async def _probes(self, version: PolicyVersion) -> tuple[tuple[float, ...], list[tuple[float, ...]]]:
        """Log-probabilities of the probe tokens as the trainer has them, and as each engine has them, computed at once."""
        ours, *theirs = await all_or_first_error(
            self._trainer.probe(version.agent, self._probe_ids, self._timeout_s),
            *(engine.probe(version, self._probe_ids, self._timeout_s) for engine in self._engines),
        )
        return ours, theirs

    def _prove(
        self, version: PolicyVersion, ours: tuple[float, ...], theirs: list[tuple[float, ...]]
    ) -> tuple[float, float]:
        """(mean |Δ|, max |Δ|) of the worst engine; `ProbeError` out of bounds."""
        means = [mean_difference(ours, t) for t in theirs]
        worst = max(abs(a - b) for t in theirs for a, b in zip(ours, t, strict=True))
        for mean in means:
            if not mean <= self._probe_bound:  # NaN is out of bounds too
                raise ProbeError(
                    f"probe of {version}: mean |Δlogprob| between trainer and engine is {mean:.4f} (max {worst:.4f}), "
                    f"the bound is {self._probe_bound:.4f}: the engine does not serve what was trained"
                )
        return max(means), worst

    async def _retire_older(self, version: PolicyVersion) -> None:
        """What cannot be retired now is retired with the next version."""
        live = self._live.setdefault(version.agent, [])
        live.append(version.version)
        while len(live) > self._keep:
            old = PolicyVersion(version.agent, live[0])
            try:
                await all_or_first_error(*(engine.retire(old, self._timeout_s) for engine in self._engines))
            except (SyncError, EngineError) as error:
                self._say(f"{old} stays on the engines until the next version of {version.agent}: {error}")
                return
            live.pop(0)


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
