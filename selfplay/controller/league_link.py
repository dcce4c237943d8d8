"""The league's part in a running controller: snapshots onto the engines, opponents for matches, the gate, the collapse watch.

In: finished steps with the episodes that were trained on. Out: snapshots installed from the adapter store beside the live versions,
old ones retired, and a word, a stop, or agents to take back, when one seems to collapse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from selfplay.config.league import LeagueConfig
from selfplay.controller.gate_stage import GateStage
from selfplay.controller.good_versions import GoodVersions
from selfplay.controller.policy_link import PolicyLink
from selfplay.errors import StoreError
from selfplay.league.league import League
from selfplay.league.pool import SnapshotPool
from selfplay.league.records import served_name
from selfplay.league.watch import CollapseWatch, WatchLimits
from selfplay.store.adapters import AdapterStore
from selfplay.types import Episode, PolicyVersion


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What the collapse watch wants of the controller."""

    stop: str = ""
    """Why the run shall stop; empty: it goes on."""
    roll_back: tuple[str, ...] = ()
    """Agents to take back to their last good version."""


class LeagueLink:
    """Keeps the engines' snapshots as the league's pool says."""

    def __init__(
        self,
        league: League,
        pool: SnapshotPool,
        config: LeagueConfig,
        store: AdapterStore,
        engines: Sequence[PolicyLink],
        *,
        agents: Sequence[str],
        timeout_s: float,
        say: Callable[[str], None],
        gate: GateStage | None = None,
        good: GoodVersions | None = None,
    ) -> None:
        self.league, self.gate, self.good = league, gate, good
        self._pool, self._config, self._store, self._engines = pool, config, store, engines
        self._timeout_s, self._say = timeout_s, say
        limits = WatchLimits(
            window=config.window, min_anchor_share=config.min_anchor_share, max_length_ratio=config.max_length_ratio,
            min_entropy=config.min_entropy, max_illegal=config.max_illegal, max_repetition=config.max_repetition,
        )  # fmt: skip
        anchors = {*config.anchors, *config.fixed}
        self._watches = {a: CollapseWatch(a, limits, anchors) for a in agents} if config.on_alarm != "off" else {}
        self._told: set[tuple[str, str]] = set()
        self._rollbacks: dict[str, int] = {}
        """Agent → how often it was taken back since it was last healthy."""
        self._leaving: list[PolicyVersion] = []
        """No longer drawn, but games that were drawn with them are still to end."""
        self._owed: set[str] = set()
        """Agents whose snapshot is due."""

    async def start(self, step: int, published: Mapping[str, int]) -> None:
        """Put the snapshots of the pool back on the engines; take the first ones where there are none."""
        self._pool.go_back(step)
        if self.good is not None:
            await self.good.start(step, published)
        if not self._config.takes_snapshots:
            return
        if not self._config.gate:
            self.league.free_candidates()
        self.league.refresh()
        standing = [s for s in self._pool.all() if s.standing in ("member", "candidate")]
        for snapshot in standing:
            await self._install(snapshot.version, snapshot.digest)
        known = {s.version.agent for s in standing if s.standing == "member"}
        for agent, version in sorted(published.items()):
            if agent not in known:
                await self._freeze(PolicyVersion(agent, version), step)
            self._pool.crown_where_none(agent)
        if self.gate is not None:
            self.gate.start()

    async def after_step(
        self, step: int, published: Mapping[str, int], episodes: Sequence[Episode], busy: Collection[int]
    ) -> Orders:
        """Snapshots where they are due; what the collapse watch wants. ``busy``: matches that have yet to end."""
        self.league.note_meetings()
        alarms = self._look(episodes)
        for alarm in alarms.values():
            self._say(f"collapse watch: {alarm}")
        if self.league.due(step):
            self._owed |= set(published)
        orders = self._orders(alarms)
        self._owed -= set(orders.roll_back)
        await self._let_go(busy)
        await self._take_snapshots(step, published)
        await self._let_go(busy)
        self.league.refresh()
        if self.good is not None and step % self._config.snapshot_every == 0:
            await self._mark_good(step, published)
        return orders

    def taken_back(self, agent: str, good: PolicyVersion) -> None:
        """The controller has taken ``agent`` back to ``good``: what it was in between is no opponent."""
        left = self.league.withdraw(agent, good.version)
        self._leaving += left
        if left:
            self._say(f"met no more: {', '.join(map(str, left))}")
        if self.gate is not None:
            self.gate.start()
        self._watches[agent].reset()
        self._told = {t for t in self._told if t[0] != agent}
        self._rollbacks[agent] = self._rollbacks.get(agent, 0) + 1

    def figures(self) -> dict[str, float]:
        """For the metrics."""
        sizes = {f"members/{a}": float(n) for a, n in self.league.num_members().items()}
        backs = {f"rollbacks/{a}": float(n) for a, n in self._rollbacks.items()}
        return sizes | backs | (self.gate.figures() if self.gate is not None else {})

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────

    async def _take_snapshots(self, step: int, published: Mapping[str, int]) -> None:
        """Of the agents that are due; who still has one leaving, or before the gate, waits: slots are counted."""
        waiting = {v.agent for v in self._leaving}
        waiting |= {s.version.agent for s in self._pool.all() if s.standing == "candidate"}
        for agent in sorted(self._owed - waiting):
            await self._freeze(PolicyVersion(agent, published[agent]), step)
            self._owed.discard(agent)
        if self.gate is not None:
            self.gate.start()

    async def _freeze(self, version: PolicyVersion, step: int) -> None:
        if any(s.version == version for s in self._pool.all()):
            return  # the agent has not moved since its last snapshot
        digest = self._store.verify(version).digest
        await self._install(version, digest)
        if self.gate is not None and self._pool.incumbent(version.agent) is not None:
            self.league.add_candidate(version, step, digest)
            self._say(f"snapshot {version} is before the gate")
            return
        leaving = self.league.add_snapshot(version, step, digest)
        self._say(f"snapshot {version} is an opponent from now on" + (f"; {leaving[0]} is no more" if leaving else ""))
        self._leaving += leaving

    async def _let_go(self, busy: Collection[int]) -> None:
        """Retire what left the pool as soon as no game needs it."""
        if self.gate is not None:
            self._leaving += self.gate.pop_left()
        for old in [v for v in self._leaving if not self._is_used(v, busy)]:
            for engine in self._engines:
                await engine.retire(served_name(old), self._timeout_s)
            self._leaving.remove(old)

    def _is_used(self, version: PolicyVersion, busy: Collection[int]) -> bool:
        return self.league.is_used(version, busy) or (self.gate is not None and self.gate.is_used(version))

    async def _install(self, version: PolicyVersion, digest: str) -> None:
        """From the store, which proves that it is still what was frozen."""
        header = self._store.bucket_header(version)
        found = self._store.info(version).digest
        if found != digest:
            raise StoreError(f"{version} was frozen with digest {digest[:16]}… and has {found[:16]}… now")
        served = served_name(version)
        for engine in self._engines:
            await engine.begin_install(served, header, self._timeout_s)
            await engine.commit_install(served, self._timeout_s)

    # ── collapse watch ───────────────────────────────────────────────────────────────────────────

    def _look(self, episodes: Sequence[Episode]) -> dict[str, str]:
        """Agent → its first new alarm; each kind is told once."""
        out: dict[str, str] = {}
        for agent, watch in self._watches.items():
            watch.add(episodes)
            for kind, alarm in watch.alarms().items():
                if (agent, kind) not in self._told:
                    self._told.add((agent, kind))
                    out.setdefault(agent, alarm)
        return out

    async def _mark_good(self, step: int, published: Mapping[str, int]) -> None:
        for agent, watch in self._watches.items():
            if self.good is not None and watch.is_healthy:
                await self.good.mark(PolicyVersion(agent, published[agent]), step)
                self._rollbacks[agent] = 0

    def _orders(self, alarms: Mapping[str, str]) -> Orders:
        how = self._config.on_alarm
        if alarms and how == "stop":
            return Orders(stop=f"league.on_alarm=stop: {next(iter(alarms.values()))}")
        if how != "rollback":
            return Orders()
        spent = [a for a in alarms if self._rollbacks.get(a, 0) >= self._config.max_rollbacks]
        if spent:
            return Orders(
                stop=f"{spent[0]} was taken back {self._config.max_rollbacks} times (league.max_rollbacks) and collapsed again: {alarms[spent[0]]}"
            )
        return Orders(roll_back=tuple(sorted(alarms)))
