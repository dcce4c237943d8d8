"""The league's part in a running controller: snapshots onto the engines, opponents for matches, the collapse watch.

In: finished steps with the episodes that were trained on. Out: snapshots installed from the adapter store beside the live versions,
old ones retired, and a word (or a stop) when an agent seems to collapse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from selfplay.config.league import LeagueConfig
from selfplay.controller.policy_link import PolicyLink
from selfplay.errors import StoreError
from selfplay.league.league import League, served_name
from selfplay.league.pool import SnapshotPool
from selfplay.league.watch import CollapseWatch, WatchLimits
from selfplay.store.adapters import AdapterStore
from selfplay.types import Episode, PolicyVersion


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
    ) -> None:
        self.league = league
        self._pool, self._config, self._store, self._engines = pool, config, store, engines
        self._timeout_s, self._say = timeout_s, say
        limits = WatchLimits(
            window=config.window, min_anchor_share=config.min_anchor_share, max_length_ratio=config.max_length_ratio,
            min_entropy=config.min_entropy, max_illegal=config.max_illegal, max_repetition=config.max_repetition,
        )  # fmt: skip
        anchors = {*config.anchors, *config.fixed}
        self._watches = [CollapseWatch(a, limits, anchors) for a in agents] if config.on_alarm != "off" else []
        self._told: set[str] = set()
        self._leaving: list[PolicyVersion] = []
        """No longer drawn, but games that were drawn with them are still to end."""

    async def start(self, step: int, published: Mapping[str, int]) -> None:
        """Put the snapshots of the pool back on the engines; take the first ones where there are none."""
        if not self._config.needs_past:
            return
        self._pool.go_back(step)
        self.league.refresh()
        for snapshot in self.league.snapshots:
            await self._install(snapshot.version, snapshot.digest)
        known = {s.version.agent for s in self.league.snapshots}
        for agent, version in sorted(published.items()):
            if agent not in known:
                await self._freeze(PolicyVersion(agent, version), step)

    async def after_step(
        self, step: int, published: Mapping[str, int], episodes: Sequence[Episode], busy: Collection[int]
    ) -> str:
        """Snapshots where they are due; why the run shall stop, or nothing. ``busy``: matches that have yet to end."""
        if self.league.due(step):
            for agent, version in sorted(published.items()):
                await self._freeze(PolicyVersion(agent, version), step)
        self.league.refresh()
        await self._let_go(busy)
        alarms = self._look(episodes)
        for alarm in alarms:
            self._say(f"collapse watch: {alarm}")
        return alarms[0] if alarms and self._config.on_alarm == "stop" else ""

    async def _freeze(self, version: PolicyVersion, step: int) -> None:
        if any(s.version == version for s in self._pool.all()):
            return  # the agent has not moved since its last snapshot
        digest = self._store.verify(version).digest
        await self._install(version, digest)
        leaving = self.league.add_snapshot(version, step, digest)
        self._say(f"snapshot {version} is an opponent from now on" + (f"; {leaving[0]} is no more" if leaving else ""))
        self._leaving += leaving

    async def _let_go(self, busy: Collection[int]) -> None:
        """Retire what left the pool as soon as no game needs it."""
        for old in [v for v in self._leaving if not self.league.is_used(v, busy)]:
            for engine in self._engines:
                await engine.retire(served_name(old), self._timeout_s)
            self._leaving.remove(old)

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

    def _look(self, episodes: Sequence[Episode]) -> list[str]:
        """New alarms; each kind is told once."""
        out = []
        for watch in self._watches:
            watch.add(episodes)
            for alarm in watch.alarms():
                kind = alarm.translate({ord(c): None for c in "0123456789."})
                if kind not in self._told:
                    self._told.add(kind)
                    out.append(alarm)
        return out
