"""The promotion gate: a candidate takes its agent's best place only when a sequential test on paired games says that it is better.

    candidate ──► pairs on one deal: candidate at the table, then the incumbent ──► SPRT ──► promoted | rejected | open

In: the snapshots' standings and the games that were played for the gate. Out: the next such game, and verdicts. One candidate is
tested at a time, so nobody else at its tables changes meanwhile. Nothing is remembered here: the games are in the record, known
by their numbers, so a resumed run stands where it stood.

Where one agent sits at both seats of a game, candidate and incumbent play each other, and the seats are swapped within a pair.
Elsewhere both play their own seats against the best of the others, and what counts is the difference of their results on a deal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from selfplay.config.league import LeagueConfig
from selfplay.errors import ConfigError
from selfplay.league.matchmaker import LLM, Matchmaker
from selfplay.league.pool import Snapshot, SnapshotPool
from selfplay.league.records import GameRecord, served_name
from selfplay.ratings.match import Hypotheses, Scores, SprtState, sprt
from selfplay.types import Match, PolicyVersion, SeatAssignment, derive_seed

Outcome = Literal["promoted", "rejected", "open"]
DIRECT = (0.0, 0.25, 0.5, 0.75, 1.0)
"""What a pair of games against each other can come to."""
PAIRED = (-0.5, 0.0, 0.5, 1.0, 1.5)
"""1/2 and the difference of two results: it has the mean of a score against an opponent of the incumbent's strength."""
POINTS = {"win": 1.0, "draw": 0.5, "loss": 0.0}
_FLAG, _RANK_AT, _VERSION_AT, _PAIR_AT = 1 << 60, 51, 21, 1
"""A gate game's match number: the flag, then the agent's place, its version, the pair and the half."""
_PAIR_MASK = (1 << (_VERSION_AT - _PAIR_AT)) - 1


class GateGame(msgspec.Struct, frozen=True, kw_only=True):
    """One game of the gate: half 0 seats the candidate, half 1 the incumbent (or swaps the seats)."""

    agent: str
    version: int
    pair: int
    half: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """``promoted``: the candidate is the incumbent from now on. ``rejected``: it is not, for good. ``open``: more games."""

    candidate: PolicyVersion
    incumbent: PolicyVersion
    outcome: Outcome
    pairs: int
    score: float
    """Mean over pairs; 1/2 when they are level, and before there is one."""
    test: SprtState

    def __str__(self) -> str:
        how = {
            "promoted": "takes the place of",
            "rejected": "is not shown to be better than",
            "open": "is tested against",
        }
        return (
            f"{self.candidate} {how[self.outcome]} {self.incumbent}: mean score {self.score:.3f} in {self.pairs} pairs, "
            f"log likelihood ratio {self.test.llr:+.2f} in [{self.test.lower:.2f}, {self.test.upper:.2f}]"
        )


def gate_hypotheses(config: LeagueConfig) -> Hypotheses:
    """What the gate tests; raises `ConfigError`."""
    low, high = config.gate_elo
    try:
        return Hypotheses(elo0=low, elo1=high, alpha=config.gate_error, beta=config.gate_error)
    except ConfigError as e:
        raise ConfigError(f"league.gate_elo: {e}") from None


class Gate:
    """Tests candidates one after the other. One thread."""

    def __init__(self, maker: Matchmaker, config: LeagueConfig, pool: SnapshotPool, *, seed: int, most: int) -> None:
        """``most``: games under way at once."""
        self._maker, self._config, self._pool, self._seed, self._most = maker, config, pool, seed, most
        self._hypotheses = gate_hypotheses(config)
        self._candidate: Snapshot | None = None
        self._incumbents: dict[str, PolicyVersion] = {}
        self._points: dict[tuple[int, int], float] = {}
        self._given: set[tuple[int, int]] = set()
        """Games that are under way, or over."""
        self._spoilt: set[int] = set()
        self._next = 0
        self._again: list[Match] = []
        self._flying: dict[str, Match] = {}

    # ── what is tested ───────────────────────────────────────────────────────────────────────────

    def refresh(self, games: Iterable[GameRecord]) -> None:
        """Read the standings again; ``games`` are those played so far, of which the present candidate's count."""
        self._incumbents = {s.version.agent: s.version for s in self._pool.all() if s.incumbent}
        waiting = [s for s in self._pool.all() if s.standing == "candidate" and s.version.agent in self._incumbents]
        before, self._candidate = self._candidate, waiting[0] if waiting else None
        if self._candidate is None or (before is not None and before.version == self._candidate.version):
            return
        self._points, self._given, self._spoilt, self._next, self._again = {}, set(), set(), 0, []
        for game in games:
            self._count(self.read(int(game.episode_id.partition(".")[0])), game)

    @property
    def verdict(self) -> Verdict | None:
        """How the present test stands; None when nobody is tested."""
        if self._candidate is None:
            return None
        version = self._candidate.version
        pairs = self._pairs(direct=self._is_direct(version.agent))
        values = sorted({*(DIRECT if self._is_direct(version.agent) else PAIRED), *pairs})
        counts = Counter(pairs)
        test = sprt(Scores(values=tuple(values), counts=tuple(counts[v] for v in values), games=2), self._hypotheses)
        outcome: Outcome = {"H1": "promoted", "H0": "rejected", None: "open"}[test.decision]  # type: ignore[assignment]
        if outcome == "open" and len(pairs) + len(self._spoilt) >= self._config.gate_pairs:
            outcome = "rejected"
        return Verdict(
            candidate=version, incumbent=self._incumbents[version.agent], outcome=outcome, pairs=len(pairs),
            score=sum(pairs) / len(pairs) if pairs else 0.5, test=test,
        )  # fmt: skip

    # ── games ────────────────────────────────────────────────────────────────────────────────────

    def owns(self, match: Match) -> bool:
        """Whether the match is the gate's: it is neither trained on nor counted among the run's episodes."""
        return bool(match.index & _FLAG)

    def wants(self) -> bool:
        """Whether `next_match` has one to give."""
        if self._candidate is None or len(self._flying) >= self._most:
            return False
        self._skip()
        return bool(self._again) or self._next < 2 * self._config.gate_pairs

    def next_match(self) -> Match:
        """The next game to play; call it when `wants`."""
        self._skip()
        match = self._again.pop(0) if self._again else self.match(*divmod(self._next, 2))
        self._given.add(((match.index >> _PAIR_AT) & _PAIR_MASK, match.index & 1))
        self._flying[match.episode_id] = match
        return match

    def _skip(self) -> None:
        while divmod(self._next, 2) in self._given or self._next // 2 in self._spoilt:
            self._next += 1

    def take(self, match: Match, game: GameRecord | None) -> None:
        """A game is over; None: it cannot be played, and its pair does not count."""
        self._flying.pop(match.episode_id, None)
        found = self.read(match.index)
        if game is not None:
            self._count(found, game)
        elif found is not None and self._is_present(found):
            self._spoilt.add(found.pair)

    def void(self, match: Match) -> None:
        """Infrastructure failed: the same game again, as the next attempt."""
        self._flying.pop(match.episode_id, None)
        if self._is_present(self.read(match.index)):
            self._again.append(replace(match, attempt=match.attempt + 1))

    def is_used(self, version: PolicyVersion) -> bool:
        """Whether a game under way was seated with that snapshot."""
        served = served_name(version)
        return any(s.agent == served.agent and s.pin == served.version for m in self._flying.values() for s in m.seats)

    def match(self, pair: int, half: int) -> Match:
        """A game of the present candidate: who sits where and on which deal follows from the numbers alone."""
        if self._candidate is None:
            raise ValueError("nobody is tested")
        version = self._candidate.version
        rank = self._maker.trained_agents.index(version.agent)
        return replace(
            self._maker.match(0),
            index=_FLAG | rank << _RANK_AT | version.version << _VERSION_AT | pair << _PAIR_AT | half,
            seed=derive_seed(self._seed, "gate", str(version), pair),
            seats=tuple(self._seat(s, self._who(version, s, pair, half)) for s in self._maker.table_of(version.agent)),
        )

    # ── seating ──────────────────────────────────────────────────────────────────────────────────

    def _focus(self, agent: str, pair: int, half: int) -> tuple[str, ...]:
        """Seats whose results are the candidate's (half 0) or the incumbent's: all of the agent's, or, where it sits everywhere, one."""
        mine, everybody = self._maker.seats_of(agent), [s for s in self._maker.match(0).seats if s.trained]
        if len(mine) < len(everybody) or len(everybody) == 1:
            return mine
        return (mine[(pair + (half if self._is_direct(agent) else 0)) % len(mine)],)

    def _is_direct(self, agent: str) -> bool:
        seats = self._maker.match(0).seats
        return len(seats) == 2 and set(self._maker.seats_of(agent)) == {s.seat for s in seats}

    def _who(self, version: PolicyVersion, seat: SeatAssignment, pair: int, half: int) -> PolicyVersion | None:
        """Which snapshot sits there; None for seats of bots, of the base and of versions that were named."""
        agent = version.agent
        if seat.seat in self._focus(agent, pair, half) and (half == 0 or self._is_direct(agent)):
            return version
        if seat.seat in self._maker.seats_of(agent):
            return self._incumbents[agent]
        return None if isinstance(seat.pin, int) else self._incumbents.get(seat.agent)

    def _seat(self, seat: SeatAssignment, who: PolicyVersion | None) -> SeatAssignment:
        if who is None:
            return seat
        served = served_name(who)
        return replace(seat, player=LLM, agent=served.agent, pin=served.version, trained=False)

    # ── counting ─────────────────────────────────────────────────────────────────────────────────

    def read(self, index: int) -> GateGame | None:
        """Which game of the gate a match's number means; None when it is none."""
        if not index & _FLAG:
            return None
        rank, agents = (index & ~_FLAG) >> _RANK_AT, self._maker.trained_agents
        if rank >= len(agents):
            return None  # of a run whose agents were others
        version = (index >> _VERSION_AT) & ((1 << (_RANK_AT - _VERSION_AT)) - 1)
        pair = (index >> _PAIR_AT) & _PAIR_MASK
        return GateGame(agent=agents[rank], version=version, pair=pair, half=index & 1)

    def _is_present(self, found: GateGame | None) -> bool:
        return found is not None and self._candidate is not None and (
            self._candidate.version == PolicyVersion(found.agent, found.version)
        )  # fmt: skip

    def _count(self, found: GateGame | None, game: GameRecord) -> None:
        """Forfeits count as results; a truncated game is none, and spoils its pair."""
        if found is None or not self._is_present(found):
            return
        self._given.add((found.pair, found.half))
        if game.ended == "truncated":
            self._spoilt.add(found.pair)
            return
        focus = self._focus(found.agent, found.pair, found.half)
        self._points[found.pair, found.half] = sum(POINTS[game.result(s)] for s in focus) / len(focus)

    def _pairs(self, *, direct: bool) -> list[float]:
        """Scores of the pairs that are whole."""
        whole = [p for p, half in self._points if half == 0 and (p, 1) in self._points and p not in self._spoilt]
        halves = [(self._points[p, 0], self._points[p, 1]) for p in sorted(whole)]
        return [(a + b) / 2 if direct else 0.5 + a - b for a, b in halves]
