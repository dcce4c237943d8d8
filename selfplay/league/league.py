"""The league of a run: the matchmaker's matches with opponents by rule, and the snapshots they are drawn from.

In: the matchmaker's plain matches, the record of games, snapshots as they are taken. Out: matches in which one agent learns and the
other seats are filled by its rule. Agents take turns as the learner of a match. A draw depends on the run seed, the match's number
and the record so far; the next attempt of a match keeps the draw of the first.

Past versions are served under a name of their own (``past-pro`` for snapshots of ``pro``), so they neither age nor are retired
with the lineage; records call them by their real name.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from selfplay.config.league import LeagueConfig
from selfplay.errors import ConfigError, suggestion
from selfplay.league.matchmaker import LLM, Matchmaker
from selfplay.league.opponents import RULES, Rule, Tally, weights
from selfplay.league.pool import Snapshot, SnapshotPool
from selfplay.league.records import PAST, LeagueRecords
from selfplay.types import BASE, Match, PolicyVersion, SeatAssignment, derive_seed

MAX_DRAWS = 100_000


def served_name(version: PolicyVersion) -> PolicyVersion:
    """The name under which a snapshot is served."""
    return PolicyVersion(PAST + version.agent, version.version)


def check_league(config: LeagueConfig, agents: Sequence[str], bots: Sequence[str]) -> None:
    """Raise `ConfigError` for rules that name unknown agents, rules or bots, or that have nobody to choose from."""
    for agent in config.rules:
        if agent not in agents:
            raise ConfigError(f"league.rules.{agent}: no trained agent has that name{suggestion(agent, agents)}")
    for rule, weight in config.mix.items():
        if rule not in RULES:
            raise ConfigError(f"league.mix: unknown rule {rule!r}{suggestion(rule, RULES)}")
        if not weight > 0:
            raise ConfigError(f"league.mix.{rule}={weight:g}: weights are above 0")
    if "mix" in {config.opponents, *config.rules.values()} and not config.mix:
        raise ConfigError(
            "league.opponents=mix needs league.mix, for example league.mix.latest=0.5 league.mix.pfsp_hard=0.5"
        )
    if "fixed" in config.used_rules and not config.fixed:
        raise ConfigError("league.opponents=fixed needs league.fixed, for example league.fixed='[\"random\"]'")
    known = [b for b in bots if b not in (LLM, "human", "api")]
    for bot in (*config.fixed, *config.anchors):
        if bot not in known and not (bot == BASE and bot in config.fixed):
            raise ConfigError(f"league: {bot!r} is not a bot that can be met{suggestion(bot, [*known, BASE])}")


class League:
    """Draws opponents. One thread."""

    def __init__(
        self, maker: Matchmaker, config: LeagueConfig, pool: SnapshotPool, records: LeagueRecords, *, seed: int
    ) -> None:
        self._maker, self._config, self._pool, self._records, self._seed = maker, config, pool, records, seed
        self._agents = maker.trained_agents
        self._draws: OrderedDict[int, tuple[SeatAssignment, ...]] = OrderedDict()
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._members: list[Snapshot] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the record and the snapshots again; call it when either has changed."""
        self._members = self._pool.members()
        self._tallies = {
            pair: Tally(payoff.wins + payoff.won_by_forfeit + payoff.draws / 2, payoff.games)
            for pair, payoff in self._records.payoffs().items()
        }

    def match(self, index: int, attempt: int = 0) -> Match:
        """Match number ``index``, with its opponents."""
        plain = self._maker.match(index, attempt)
        if index not in self._draws:
            self._draws[index] = self._draw(plain)
            if len(self._draws) > MAX_DRAWS:
                self._draws.popitem(last=False)
        return msgspec.structs.replace(plain, seats=self._draws[index])

    def is_used(self, version: PolicyVersion, indices: Iterable[int]) -> bool:
        """Whether any of the matches ``indices`` was drawn with that snapshot."""
        served = served_name(version)
        return any(s.agent == served.agent and s.pin == served.version for i in indices for s in self._draws.get(i, ()))

    def learner(self, index: int) -> str:
        """Whose turn it is to learn in match ``index``."""
        return self._agents[index % len(self._agents)]

    def _draw(self, plain: Match) -> tuple[SeatAssignment, ...]:
        rng = random.Random(derive_seed(self._seed, "opponents", plain.index))
        learner = self.learner(plain.index)
        rule = self._rule(learner, rng)
        if rule == "latest":
            return plain.seats
        mine = [s for s in plain.seats if s.trained and s.agent == learner]
        kept = rng.choice(mine).seat
        like = mine[0]
        return tuple(
            s if s.seat == kept or not s.trained else self._opponent(rule, learner, s, like, rng) for s in plain.seats
        )

    def _rule(self, learner: str, rng: random.Random) -> Rule:
        named = self._config.rule_of(learner)
        if named != "mix":
            return named
        rules = sorted(self._config.mix)
        chosen = rng.choices(rules, [self._config.mix[r] for r in rules])[0]
        return next(r for r in RULES if r == chosen)

    def _opponent(
        self, rule: Rule, learner: str, seat: SeatAssignment, like: SeatAssignment, rng: random.Random
    ) -> SeatAssignment:
        if rule == "mirror":
            return msgspec.structs.replace(like, seat=seat.seat)
        names = list(self._config.fixed) if rule == "fixed" else self.candidates(learner, seat)
        chosen = rng.choices(names, weights(rule, learner, names, self._tallies))[0]
        return self._seat(chosen, seat)

    def candidates(self, learner: str, seat: SeatAssignment) -> list[str]:
        """Whom a rule over the past chooses from: snapshots of who sits there (of anybody, where nobody else does), and anchors."""
        agents = {seat.agent} if seat.agent != learner else {learner}
        past = [str(s.version) for s in self._members if s.version.agent in agents]
        return [*past, *self._config.anchors]

    def _seat(self, name: str, seat: SeatAssignment) -> SeatAssignment:
        if "@" in name:
            served = served_name(PolicyVersion.parse(name))
            return SeatAssignment(
                seat=seat.seat, player=LLM, agent=served.agent, pin=served.version, options=dict(seat.options)
            )
        if name == BASE:
            return SeatAssignment(seat=seat.seat, player=LLM, agent=BASE, options=dict(seat.options))
        return SeatAssignment(seat=seat.seat, player=name, agent=name)

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────

    def due(self, step: int) -> bool:
        """Whether snapshots are taken after ``step``."""
        return self._config.needs_past and step % self._config.snapshot_every == 0

    def add_snapshot(self, version: PolicyVersion, step: int, digest: str) -> list[PolicyVersion]:
        """Freeze ``version`` as a member; the versions that have to leave for it. Frozen before: nothing happens."""
        self._pool.add(Snapshot(version=version, step=step, digest=digest, standing="member"))
        members = self._pool.members(version.agent)
        leaving = [s.version for s in members[: max(0, len(members) - self._config.pool)]]
        for old in leaving:
            self._pool.mark(old, "evicted")
        self.refresh()
        return leaving

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Members, oldest first."""
        return tuple(self._members)


def league_slots(config: LeagueConfig, num_agents: int) -> int:
    """Adapter slots that snapshots need: the pool of every agent, and one that is on its way."""
    return num_agents * (config.pool + 1) if config.needs_past else 0
