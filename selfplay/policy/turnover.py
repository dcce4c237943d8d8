"""Versions come and go on one server: installing, becoming current, holds, and dropping what nobody needs any more.

    Begin ─► Commit ─► [Hold ─►] MakeCurrent [─► Release] ─► Retire(the one before)
                                     └─ answers under way: they finish, are swapped, or begin again

In: the controller's control requests. Out: what `Done` carries.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from selfplay.policy.adapter_check import AdapterRules, check_adapter
from selfplay.policy.engine import Engine
from selfplay.policy.flights import Flight, Flights
from selfplay.policy.versions import Installed, VersionRegistry
from selfplay.wire.messages import (
    AbortInstall,
    BeginInstall,
    CommitInstall,
    Hold,
    JoinWeights,
    MakeCurrent,
    Release,
    Retire,
)

EXPIRE_EVERY_S = 5.0
Control = BeginInstall | CommitInstall | AbortInstall | MakeCurrent | Hold | Release | Retire | JoinWeights


class Refusal(Exception):
    """The request is refused; becomes `Refused` on the wire."""

    def __init__(self, kind: Literal["bad_request", "unavailable", "timeout", "cancelled"], message: str) -> None:
        self.kind: Literal["bad_request", "unavailable", "timeout", "cancelled"] = kind
        super().__init__(message)


class Turnover:
    """What the controller asks of a server's versions. ``rules``: what adapters must look like; None: anything goes."""

    def __init__(
        self,
        engine: Engine,
        versions: VersionRegistry,
        flights: Flights,
        rules: AdapterRules | None,
        counts: Counter[str],
    ) -> None:
        self._engine, self._versions, self._flights, self._rules = engine, versions, flights, rules
        self._counts = counts
        self._expired_at = time.monotonic()

    async def handle(self, m: Control) -> dict[str, float]:
        """Serve one control request; what `Done` carries. Raises `Refusal`, `VersionRefused`, `SyncError`, `EngineError`."""
        match m:
            case BeginInstall():
                await self._begin(m)
            case CommitInstall():
                return await self._commit(m)
            case AbortInstall():
                if (gone := self._versions.abort(m.version)) is not None:
                    await self._engine.abort_install(gone.name)
            case MakeCurrent():
                return await self._make_current(m)
            case Hold():
                return await self._hold(m)
            case Release():
                self._flights.release()
            case Retire():
                self._versions.retire(m.version)
                await self.drop_unused()
            case JoinWeights():
                await self._engine.join_weights(m)
        return {}

    async def _make_current(self, m: MakeCurrent) -> dict[str, float]:
        """Turn the agent over to the new version, and its unpinned answers under way as ``m.flights`` says."""
        self._versions.make_current(m.version)
        flights = [f for f in self._flights.of((m.version.agent,)) if f.pin == "turn"]
        older = {f.entry.name: f.entry for f in flights if f.entry and f.entry.version != m.version}
        counts = Counter(left=sum(bool(f.entry and f.entry.name in older) for f in flights), swapped=0, resumed=0)
        if m.flights == "resume":
            counts["resumed"] = await self._abort(f for f in flights if f.entry and f.entry.name in older)
        elif m.flights == "swap":
            new = self._versions.exact(m.version)
            for entry in older.values():
                counts["swapped"] += await self._swap(entry, new)
        counts["left"] -= counts["swapped"] + counts["resumed"]
        self._counts["swapped"] += counts["swapped"]
        return dict(counts)

    async def _swap(self, old: Installed, new: Installed) -> int:
        """Answers under way on ``old`` go on as ``new``; how many. Not while somebody counts on ``old`` as it is."""
        flights = [f for f in self._flights.of((old.version.agent,)) if f.entry is old]
        if old.holders or old.uses > len(flights) or any(f.pin != "turn" for f in flights):
            return 0
        sampled = await self._engine.swap(old.name, new.name)
        for flight in flights:
            # One that waits for its slot is not with the engine yet: all its tokens will be of the new weights.
            at = sampled.get(flight.request, None if flight.with_engine else 0)
            if at is not None:
                flight.marks.append((at, new.version.version))
        return len(flights)

    async def _abort(self, flights: Iterable[Flight]) -> int:
        """End answers early, to go on from the tokens they have; how many."""
        ending = list(flights)
        for flight in ending:
            flight.resumes = True
        await asyncio.gather(*(self._engine.abort(flight.request) for flight in ending))
        return len(ending)

    async def _hold(self, m: Hold) -> dict[str, float]:
        """Let nobody of ``m.agents`` begin, and wait until none of them is under way."""
        agents, started = (m.agents or None), time.monotonic()
        self._flights.hold(m.agents, m.lease_s)
        flights = self._flights.of(agents)
        if m.abort:
            await self._abort(f for f in flights if f.pin == "turn")
        try:
            async with asyncio.timeout(m.timeout_s):
                await self._flights.landed(agents)
        except TimeoutError:
            self._flights.release()
            left = len(self._flights.of(agents))
            raise Refusal(
                "timeout", f"{left} answers were still under way after {m.timeout_s:g} s of waiting"
            ) from None
        return {"under_way": float(len(flights)), "waited_s": time.monotonic() - started}

    async def _begin(self, m: BeginInstall) -> None:
        if self._rules is not None:
            check_adapter(m.header, self._rules)
        entry = self._versions.begin(m.version)
        try:
            await self._engine.begin_install(entry.name, m.header)
        except BaseException:  # a cancelled begin must not keep its place either
            self._versions.abort(m.version)
            raise

    async def _commit(self, m: CommitInstall) -> dict[str, float]:
        entry = self._versions.staging(m.version)
        try:
            values = await self._engine.commit_install(entry.name, m.timeout_s)
        except BaseException:  # a cancelled commit must not keep its place either
            self._versions.abort(m.version)
            await asyncio.shield(self._engine.abort_install(entry.name))
            raise
        self._versions.commit(m.version)
        self._counts["installs"] += 1
        return values

    async def drop_unused(self) -> None:
        """Free what nobody needs any more; holds whose lease is out are let go of first."""
        now = time.monotonic()
        if now - self._expired_at > EXPIRE_EVERY_S:
            self._expired_at = now
            self._counts["leases_expired"] += self._versions.expire(now)
        unused = self._versions.take_unused()
        self._counts["drops"] += len(unused)
        if unused:  # shielded: whose request was just cancelled must not leave them behind in the engine
            await asyncio.shield(asyncio.gather(*(self._engine.drop(e.name) for e in unused)))
