"""What a tournament's games say: ratings with and without forfeits, head-to-head, cycles, seats, lengths, illegal answers.

In: the lines of one or more tournaments. Out: `Standings`, which the terminal table, ``ratings.json``, ``payoff.csv`` and the report
all draw from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import msgspec

from selfplay.ratings import RatingTable, rate
from selfplay.ratings.meta import alpha_rank, cyclic_share, nash_average
from selfplay.ratings.shares import wilson
from selfplay.tournament.gamelog import GameLine


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """One player's games against another: results by the game's verdict, forfeits counted apart as well."""

    wins: float = 0.0
    draws: float = 0.0
    losses: float = 0.0
    reward: float = 0.0
    """Mean reward of the player."""

    @property
    def games(self) -> float:
        return self.wins + self.draws + self.losses

    @property
    def score(self) -> float | None:
        return (self.wins + self.draws / 2) / self.games if self.games else None


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A share of games with Wilson's 95 % interval."""

    share: float
    low: float
    high: float


class SeatRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One player's games against another from one seat; forfeits are losses.

    The deal is what is independent: where a deal has several such games (three seats and more), intervals are as wide as
    if they were one.
    """

    player: str
    opponent: str
    seat: str
    games: int
    won: Share
    drawn: Share
    not_lost: Share


class Conduct(msgspec.Struct, frozen=True, kw_only=True):
    """How a player behaved."""

    games: int
    forfeited: int
    truncated: int
    answers: int
    illegal: int
    mean_turns: float

    @property
    def illegal_share(self) -> float:
        return self.illegal / self.answers if self.answers else 0.0


class MeanReward(msgspec.Struct, frozen=True, kw_only=True):
    """Mean reward per game with the half width of its 95 % interval (by pairs; None for fewer than two)."""

    mean: float
    half: float | None


class Standings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    ratings: RatingTable
    without_forfeits: RatingTable
    meetings: dict[str, dict[str, Meeting]]
    conduct: dict[str, Conduct]
    rewards: dict[str, MeanReward]
    """What each player earned, in the environment's units: who wins most games need not win most."""
    nash: dict[str, float]
    """Nash averaging over the payoff matrix; empty when some pair never met."""
    alpha_rank: dict[str, float]
    cyclic_share: float | None
    counts: dict[str, int]
    """Games by how they ended."""
    seat_scores: dict[str, float]
    """Seat → mean score of whoever sat there."""
    by_seat: tuple[SeatRecord, ...]
    """By player, opponent and seat of the player."""


def standings(
    lines: Sequence[GameLine], players: Sequence[str], anchors: Mapping[str, float], *, bootstraps: int = 200
) -> Standings:
    """Work everything out; the order of ``lines`` changes nothing."""
    lines = sorted(lines, key=lambda line: line.game)
    scored = [line for line in lines if line.scored]
    natural = [line for line in scored if line.ended == "natural"]
    table = rate([line.rated() for line in scored], players=players, anchors=anchors, bootstraps=bootstraps)
    if len(natural) == len(scored):
        without = table
    else:
        without = rate([line.rated() for line in natural], players=players, anchors=anchors, bootstraps=0)
    meetings = _meetings(scored, players)
    payoffs = _payoffs(meetings, players)
    return Standings(
        ratings=table, without_forfeits=without, meetings=meetings, conduct={p: _conduct(lines, p) for p in players},
        rewards={p: _reward(scored, p) for p in players},
        nash=dict(zip(players, nash_average(payoffs), strict=True)) if payoffs else {},
        alpha_rank=dict(zip(players, alpha_rank(payoffs), strict=True)) if payoffs else {},
        cyclic_share=cyclic_share(payoffs) if payoffs and len(players) > 2 else None,
        counts=dict(sorted(Counter(line.ended for line in lines).items())), seat_scores=_seat_scores(scored),
        by_seat=_by_seat(scored),
    )  # fmt: skip


class _Result(NamedTuple):
    mine: str
    theirs: str
    seat: str
    """Of ``mine``."""
    outcome: int
    """0 won, 1 drawn, 2 lost."""
    reward: float
    deal: str


def _results(lines: Sequence[GameLine]) -> Iterator[_Result]:
    """Every game once from each side of each two different players at its table."""
    for line in lines:
        game, seats = line.rated(), list(line.seats)
        for i, j in permutations(range(len(seats)), 2):
            mine, theirs = game.players[i], game.players[j]
            if mine != theirs:
                here, there = game.places[i], game.places[j]
                outcome = 0 if here < there else 1 if here == there else 2
                yield _Result(mine, theirs, seats[i], outcome, line.rewards[seats[i]], line.cluster)


def _meetings(lines: Sequence[GameLine], players: Sequence[str]) -> dict[str, dict[str, Meeting]]:
    sums: dict[tuple[str, str], list[float]] = {}
    for result in _results(lines):
        row = sums.setdefault((result.mine, result.theirs), [0.0, 0.0, 0.0, 0.0])
        row[result.outcome] += 1
        row[3] += result.reward
    out: dict[str, dict[str, Meeting]] = {p: {} for p in players}
    for (mine, theirs), (wins, draws, losses, reward) in sorted(sums.items()):
        num = wins + draws + losses
        out[mine][theirs] = Meeting(wins=wins, draws=draws, losses=losses, reward=reward / num)
    return out


def _by_seat(lines: Sequence[GameLine]) -> tuple[SeatRecord, ...]:
    found: dict[tuple[str, str, str], list[_Result]] = {}
    for result in _results(lines):
        found.setdefault((result.mine, result.theirs, result.seat), []).append(result)
    return tuple(_seat_record(results) for _, results in sorted(found.items()))


def _seat_record(results: Sequence[_Result]) -> SeatRecord:
    num, deals, outcomes = len(results), len({r.deal for r in results}), Counter(r.outcome for r in results)

    def share(count: int) -> Share:
        low, high = wilson(count / num * deals, deals)
        return Share(share=count / num, low=low, high=high)

    first = results[0]
    return SeatRecord(
        player=first.mine, opponent=first.theirs, seat=first.seat, games=num,
        won=share(outcomes[0]), drawn=share(outcomes[1]), not_lost=share(outcomes[0] + outcomes[1]),
    )  # fmt: skip


def _payoffs(meetings: Mapping[str, Mapping[str, Meeting]], players: Sequence[str]) -> list[list[float]]:
    """[n][n] mean score scaled to −1..1; empty when some pair never met."""
    rows = []
    for p in players:
        row = [0.0 if p == q else _payoff(meetings[p].get(q)) for q in players]
        if any(v is None for v in row):
            return []
        rows.append([float(v) for v in row if v is not None])
    return rows


def _payoff(meeting: Meeting | None) -> float | None:
    return None if meeting is None or meeting.score is None else 2 * meeting.score - 1


def _conduct(lines: Sequence[GameLine], player: str) -> Conduct:
    mine = [line for line in lines if player in line.seats.values()]
    seats = [(line, s) for line in mine for s, p in line.seats.items() if p == player]
    turns = [line.turns for line in mine if line.scored]
    return Conduct(
        games=len(mine), forfeited=sum(line.offender == s for line, s in seats),
        truncated=sum(line.ended == "truncated" for line in mine),
        answers=sum(line.answers.get(s, 0) for line, s in seats), illegal=sum(line.illegal.get(s, 0) for line, s in seats),
        mean_turns=sum(turns) / len(turns) if turns else 0.0,
    )  # fmt: skip


def _reward(lines: Sequence[GameLine], player: str) -> MeanReward:
    """The mean over pairs of the pair's mean, games against itself left out."""
    from scipy import stats

    pairs: dict[str, list[float]] = {}
    for line in lines:
        if len(set(line.seats.values())) > 1:
            pairs.setdefault(line.cluster, []).extend(line.rewards[s] for s, p in line.seats.items() if p == player)
    means = [sum(v) / len(v) for v in pairs.values() if v]
    if not means:
        return MeanReward(mean=0.0, half=None)
    mean = sum(means) / len(means)
    if len(means) < 2:
        return MeanReward(mean=mean, half=None)
    variance = sum((m - mean) ** 2 for m in means) / (len(means) - 1)
    return MeanReward(mean=mean, half=float(stats.t.ppf(0.975, len(means) - 1)) * (variance / len(means)) ** 0.5)


def _seat_scores(lines: Sequence[GameLine]) -> dict[str, float]:
    """Mean over games between different players of the seat's score against the others at the table."""
    sums: dict[str, list[float]] = {}
    for line in lines:
        game = line.rated()
        if game.is_mirror:
            continue
        for i, seat in enumerate(line.seats):
            others = [p for j, p in enumerate(game.places) if j != i]
            mine = game.places[i]
            score = sum(1.0 if mine < o else 0.5 if mine == o else 0.0 for o in others) / len(others)
            sums.setdefault(seat, []).append(score)
    return {seat: sum(v) / len(v) for seat, v in sums.items()}
