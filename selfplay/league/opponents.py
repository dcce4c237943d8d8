"""Who a learner meets: rules that weigh past versions, bots and the present selves by what the record says.

In: a rule, the candidates, and the learner's record against each. Out: a probability per candidate. Pure functions; the draws are
made by `selfplay.league.league.League`.

``latest``: the other seats' agents as they are now. ``mirror``: the learner itself at every seat. ``uniform_past``: any snapshot.
``pfsp_hard``, ``pfsp_even``: prioritised fictitious self-play (Vinyals et al., 2019): weight (1 − p)² or p (1 − p), p the learner's
chance to win. ``psro_nash``: the Nash equilibrium of the snapshots' payoffs (Lanctot et al., 2017). ``openskill``: whoever is likely to
make a level game by online ratings (`selfplay.league.skill`). ``fixed``: named opponents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Rule = Literal["mirror", "latest", "uniform_past", "pfsp_hard", "pfsp_even", "psro_nash", "openskill", "fixed"]
RULES: tuple[Rule, ...] = (
    "mirror",
    "latest",
    "uniform_past",
    "pfsp_hard",
    "pfsp_even",
    "psro_nash",
    "openskill",
    "fixed",
)
PRIOR_GAMES = 2.0
"""Drawn games that every record is taken to begin with, so that one game decides nothing."""
FLOOR = 1e-3
"""Least weight of a candidate: an opponent that was always beaten is still met now and then."""


class Tally:
    """Wins and games of one player against another."""

    def __init__(self, points: float = 0.0, games: int = 0) -> None:
        self.points, self.games = points, games

    @property
    def win_rate(self) -> float:
        """Chance to win, draws half, shrunk towards 1/2."""
        return (self.points + PRIOR_GAMES / 2) / (self.games + PRIOR_GAMES)


Record = Mapping[tuple[str, str], Tally]
"""(player, opponent) → tally."""


def weights(rule: Rule, learner: str, candidates: Sequence[str], record: Record) -> list[float]:
    """Probability of each of ``candidates`` as the next opponent of ``learner``, an agent of whatever version.

    Raises ValueError for a rule that does not choose among candidates, or when there are none.
    """
    if not candidates:
        raise ValueError(f"rule {rule} has no candidates")
    if rule in ("uniform_past", "fixed"):
        return [1.0 / len(candidates)] * len(candidates)
    if rule in ("pfsp_hard", "pfsp_even"):
        rates = [lineage_tally(learner, c, record).win_rate for c in candidates]
        shape: Callable[[float], float] = (lambda p: (1 - p) ** 2) if rule == "pfsp_hard" else (lambda p: p * (1 - p))
        return normalised([max(FLOOR, shape(p)) for p in rates])
    if rule == "psro_nash":
        return normalised([max(FLOOR, w) for w in _nash(candidates, record)])
    raise ValueError(f"rule {rule} does not choose among candidates")


def lineage_tally(learner: str, opponent: str, record: Record) -> Tally:
    """The record of all versions of an agent against one opponent."""
    total = Tally()
    for (player, other), tally in record.items():
        if other == opponent and player != opponent and lineage(player) == learner:
            total.points += tally.points
            total.games += tally.games
    return total


def lineage(player: str) -> str:
    """``pro`` of ``pro@3``, of ``pro@2..4``, and of ``pro``."""
    return player.partition("@")[0]


def _nash(candidates: Sequence[str], record: Record) -> list[float]:
    """Weights of the candidates in the game of choosing one of them; pairs that never met count as level."""
    from selfplay.ratings.meta import nash_average

    def payoff(a: str, b: str) -> float:
        tally = record.get((a, b))
        return 0.0 if tally is None or a == b else 2 * tally.win_rate - 1

    table = [[(payoff(a, b) - payoff(b, a)) / 2 for b in candidates] for a in candidates]
    return nash_average(table)


def normalised(values: Sequence[float]) -> list[float]:
    """Shares of their sum."""
    total = sum(values)
    return [v / total for v in values]
