"""The league of a run: the matchmaker's matches with opponents by rule, and the snapshots they are drawn from.

In: the matchmaker's plain matches, the record of games, snapshots as they are taken. Out: matches in which one agent learns and the
other seats are filled by its rule. Agents take turns as the learner of a match. A draw depends on the run seed, the match's number
and the record so far; the next attempt of a match keeps the draw of the first.

Past versions are served under a name of their own (``past-pro`` for snapshots of ``pro``), so they neither age nor are retired
with the lineage; records call them by their real name.
"""

from __future__ import annotations

import importlib.util
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from selfplay.config.league import LeagueConfig
from selfplay.errors import ConfigError, MissingExtraError, suggestion
from selfplay.league.gate import Verdict, gate_hypotheses
from selfplay.league.matchmaker import LLM, Matchmaker
from selfplay.league.meetings import Meetings
from selfplay.league.opponents import FLOOR, RULES, Rule, Tally, normalised, weights
from selfplay.league.pool import Snapshot, SnapshotPool
from selfplay.league.records import LeagueRecords, served_name
from selfplay.league.skill import Skills
from selfplay.types import BASE, Match, PolicyVersion, SeatAssignment, derive_seed

MAX_DRAWS = 100_000


def check_league(config: LeagueConfig, agents: Sequence[str], bots: Sequence[str]) -> None:
    """Raise `ConfigError` for rules that name unknown agents, rules or bots, or that have nobody to choose from."""
    if config.gate:
        gate_hypotheses(config)
    if "openskill" in config.used_rules and importlib.util.find_spec("openskill") is None:
        raise MissingExtraError("league.opponents=openskill", "league", "openskill")
    for agent in config.rules:
        if agent in config.exploiters:
            raise ConfigError(
                f"league.rules.{agent}: an exploiter meets its target and nobody else; leave the rule out"
            )
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
        self._meetings = Meetings()
        self._draws: OrderedDict[int, tuple[SeatAssignment, ...]] = OrderedDict()
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._members: list[Snapshot] = []
        self._skills = Skills() if "openskill" in config.used_rules else None
        self._last_rated = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the record and the snapshots again; call it when either has changed."""
        self._members = self._pool.members()
        self._tallies = {
            pair: Tally(payoff.wins + payoff.won_by_forfeit + payoff.draws / 2, payoff.games)
            for pair, payoff in self._records.payoffs().items()
        }
        if self._skills is not None:
            for row, game in self._records.after(self._last_rated):
                self._skills.add([game])
                self._last_rated = row

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
        if learner in self._config.exploiters:
            self._meetings.add(learner, "exploit", self._config.exploiters[learner].target)
            return self._maker.table_of(learner)
        rule = self._rule(learner, rng)
        if rule == "latest":
            self._meetings.add(learner, rule, "everybody as they are")
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
        rules = [r for r in RULES if r in self._config.mix]
        shares = normalised([self._config.mix[r] for r in rules])
        chosen = rng.choices(rules, shares)[0]
        self._meetings.add(learner, "mix", chosen, dict(zip(rules, shares, strict=True)))
        return chosen

    def _opponent(
        self, rule: Rule, learner: str, seat: SeatAssignment, like: SeatAssignment, rng: random.Random
    ) -> SeatAssignment:
        if rule == "mirror":
            self._meetings.add(learner, rule, learner)
            return msgspec.structs.replace(like, seat=seat.seat)
        names = list(self._config.fixed) if rule == "fixed" else self.candidates(seat)
        shares = self._shares(rule, learner, names)
        chosen = rng.choices(names, shares)[0]
        self._meetings.add(learner, rule, chosen, dict(zip(names, shares, strict=True)))
        return self._seat(chosen, seat)

    def _shares(self, rule: Rule, learner: str, names: Sequence[str]) -> list[float]:
        if self._skills is None or rule != "openskill":
            return weights(rule, learner, names, self._tallies)
        return normalised([max(FLOOR, c) for c in self._skills.closeness(learner, names)])

    def candidates(self, seat: SeatAssignment) -> list[str]:
        """Whom a rule over the past chooses from: snapshots of who sits there, of exploiters of that seat, and anchors."""
        agents = {seat.agent, *(e for e in self._config.exploiters if seat.seat in self._maker.seats_of(e))}
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
        return self._config.takes_snapshots and step % self._config.snapshot_every == 0

    def add_snapshot(self, version: PolicyVersion, step: int, digest: str) -> list[PolicyVersion]:
        """Freeze ``version`` as a member; the versions that have to leave for it. Frozen before: nothing happens."""
        self._pool.add(Snapshot(version=version, step=step, digest=digest, standing="member"))
        return self._make_room(version.agent)

    def add_candidate(self, version: PolicyVersion, step: int, digest: str) -> None:
        """Freeze ``version``; nobody meets it before the gate has promoted it."""
        self._pool.add(Snapshot(version=version, step=step, digest=digest, standing="candidate"))

    def decide(self, verdict: Verdict) -> list[PolicyVersion]:
        """Do as the gate says; the versions that nobody meets any more."""
        if verdict.outcome == "rejected":
            self._pool.mark(verdict.candidate, "rejected")
            return [verdict.candidate]
        self._pool.mark(verdict.candidate, "member")
        self._pool.crown(verdict.candidate)
        return self._make_room(verdict.candidate.agent)

    def withdraw(self, agent: str, newer_than: int) -> list[PolicyVersion]:
        """Snapshots of an agent that was taken back behind them are met no more, but for the oldest where all are such.

        The newest that is left is its incumbent.
        """
        newer = [s for s in self._pool.all(agent) if s.version.version > newer_than]
        members = self._pool.members(agent)
        kept = members[:1] if all(s in newer for s in members) else []
        leaving = [s.version for s in newer if s.standing in ("member", "candidate") and s not in kept]
        for version in leaving:
            self._pool.mark(version, "evicted")
        self._pool.crown_where_none(agent)
        self.refresh()
        return leaving

    def _make_room(self, agent: str) -> list[PolicyVersion]:
        members = self._pool.members(agent)
        leaving = [s.version for s in members[: max(0, len(members) - self._config.pool)]]
        for old in leaving:
            self._pool.mark(old, "evicted")
        self.refresh()
        return leaving

    def free_candidates(self) -> None:
        """Without a gate whoever waits before it is a member."""
        for snapshot in self._pool.all():
            if snapshot.standing == "candidate":
                self._pool.mark(snapshot.version, "member")

    def num_members(self) -> dict[str, int]:
        """Agent → snapshots that can be met."""
        return {a: sum(s.version.agent == a for s in self._members) for a in self._agents} if self._members else {}

    def note_meetings(self) -> None:
        """Put on disk who was drawn how often since the last call."""
        self._pool.note(self._meetings.pop())

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Members, oldest first."""
        return tuple(self._members)


def league_slots(config: LeagueConfig, num_agents: int) -> int:
    """Adapter slots that snapshots need: the pool of every agent, one that is on its way, and one before the gate."""
    return num_agents * (config.pool + 1 + config.gate) if config.takes_snapshots else 0
